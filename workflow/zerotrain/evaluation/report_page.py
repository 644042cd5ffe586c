"""The page of a run: plain HTML that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

if TYPE_CHECKING:
    from zerotrain.data.figures import Section
    from zerotrain.evaluation.results import Answer
    from zerotrain.state.ran_on import RanOn

PAGE = """\
{% macro table(rows, head=(), numbers=False) %}
<div class="wide"><table>
{% if head %}
<tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% endif %}
{% for row in rows %}
<tr><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td{% if numbers %} class="number"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% endmacro %}
{% macro image(png, text) -%}
<img alt="{{ text }}" src="data:image/png;base64,{{ png | base64 }}">
{%- endmacro %}
{% macro figures(rows, text) -%}
<div class="samples">
{% for prompt, row in rows %}
<figure><figcaption>{{ prompt or "(empty prompt)" }}</figcaption>
{{- image(row, text) }}</figure>
{% endfor %}
</div>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ run }} · zerotrain</title>
<style>
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5d6673; --line: #d9dde3;
  --paper: #ffffff; --panel: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4b1; --line: #363c45;
  --paper: #15181c; --panel: #1e2228; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .75rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .5rem 0; }
.soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem 1.5rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
img { display: block; max-width: 100%; height: auto; border: 1px solid var(--line);
  border-radius: 4px; background: #ffffff; }
pre { margin: .5rem 0; padding: .75rem 1rem; overflow-x: auto; background: var(--panel);
  border-radius: 4px; font-size: .85rem; }
.samples { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
figure { margin: 0; max-width: 100%; }
figcaption { margin-bottom: .25rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
</style>
</head>
<body>
<h1>{{ run }}</h1>
<p class="soft">
{%- for name, value in summary %}{{ name }} {{ value }}{{ " · " if not loop.last }}{% endfor %}</p>
{% for phase in phases | reverse %}
<h2>Phase {{ phase.name }}</h2>
{% if phase.samples %}
{% if phase.conditioned %}
<p class="soft">Conditioning images are on the left.</p>
{% endif %}
{{ figures(phase.samples, "Samples of phase " + phase.name) -}}
{% for size, rows in phase.other_sizes.items() %}
<h3>{{ size }}</h3>
{{ figures(rows, "Samples of phase " + phase.name + ", " + size) -}}
{% endfor %}
{% else %}
{{ table(phase.first_answers(), ["prompt", "expected", "generated"]) -}}
{% endif %}
<h3>Weights</h3>
<p><code>{{ phase.weights }}</code></p>
<pre>{{ phase.loading }}</pre>
{% endfor %}
<h2>Curves</h2>
<h3>Training loss</h3>
{{ image(phases[-1].loss, "Training loss over the steps of all phases") }}
<h3>Learning rate</h3>
{{ image(phases[-1].learning_rate, "Learning rate over the steps of all phases") }}
{% if data %}
<h2>Data</h2>
{% if sheet %}
{{ image(sheet, "Samples of the dataset with their captions") }}
{% endif %}
{% for section in data %}
<h3>{{ section.title }}</h3>
{{ table(section.rows) -}}
{% endfor %}
{% endif %}
<h2>Figures</h2>
{{ table(metrics, compared, numbers=True) -}}
{% if exact %}
<h3>Exactness</h3>
{{ table(exact, ["phase", "steps that are exact"]) -}}
{% endif %}
{% if changes %}
<h3>Changed while it trained</h3>
{{ table(changes, ["phase", "after step", "what", "before", "after"]) -}}
{% endif %}
{% for phase in phases if phase.launch %}
<details><summary>Launch of phase {{ phase.name }}</summary>
{{- table(phase.launch, ["", "value", "from"]) }}</details>
{% endfor %}
{% for phase in phases if phase.ran_on and phase.ran_on.rows() %}
<details><summary>What phase {{ phase.name }} ran on</summary>
{{- table(phase.ran_on.rows()) }}</details>
{% endfor %}
</body>
</html>
"""
MOST_ANSWERS = 50
LABELS = {
    "exact_match": "answers that are exactly right",
    "perplexity": "held-out perplexity",
    "prompt_accuracy": "prompt accuracy",
    "judge_accuracy": "accuracy of the judge itself",
    "val_loss": "held-out loss",
    "train_loss": "training loss",
    "step": "steps",
    "samples": "samples seen",
    "train_seconds": "training time",
    "data_seconds": "of it: samples",
    "forward_seconds": "of it: forward",
    "backward_seconds": "of it: backward",
    "optimizer_seconds": "of it: optimizer",
    "validation_seconds": "of it: validation",
    "save_seconds": "of it: checkpoints",
    "other_seconds": "of it: the rest",
    "peak_host_bytes": "peak host memory",
    "peak_device_bytes": "peak GPU memory",
    "train_host_total_peak_bytes": "host memory of the training, all processes",
    "train_device_total_peak_bytes": "GPU memory of the training, its tensors",
    "eval_host_total_peak_bytes": "host memory of the evaluation",
    "eval_device_total_peak_bytes": "GPU memory of the evaluation, its tensors",
}
"""Labels of known metrics, in the page's order; others follow under their own names."""
SQUARED = "held-out loss (mean squared error)"
"""The held-out loss of image models, whatever loss_type was trained."""
PARTS_OF_A_PEAK = ("_begin_bytes", "_end_minus_begin_bytes", "_peak_minus_begin_bytes")
"""Ends of names that only metrics.json has: the page shows the peak of each task."""


@dataclass(frozen=True)
class PhaseFacts:
    """The facts on a phase that the page shows."""

    name: str
    metrics: dict[str, Any]
    samples: Sequence[tuple[str, bytes]]
    """For images: each prompt with a PNG of its row of images."""
    answers: Sequence[Answer]
    """For text; empty for images."""
    loss: bytes
    """PNG of the run up to the end of this phase."""
    learning_rate: bytes
    """PNG of the same run."""
    launch: list[tuple[str, str, str]]
    """Name, value and source."""
    weights: Path
    loading: str
    """Python code that loads the weights."""
    other_sizes: Mapping[str, Sequence[tuple[str, bytes]]] = field(default_factory=dict)
    """The same for each of evaluate.sizes, such as 1216x832."""
    conditioned: bool = False
    """Whether the rows of samples start with conditioning images."""
    ran_on: RanOn | None = None
    """What its last steps ran on; None if its checkpoint is gone."""

    def first_answers(self) -> list[tuple[str, str, str]]:
        """Return prompts with the expected and the generated answers, wrong ones first."""
        wrong = [a for a in self.answers if a.expected not in (None, a.generated)]
        right = [a for a in self.answers if a.expected in (None, a.generated)]
        first = [*wrong, *right][:MOST_ANSWERS]
        return [(a.prompt, a.expected or "", a.generated) for a in first]


def render_page(
    run: str,
    summary: Sequence[tuple[str, str]],
    phases: Sequence[PhaseFacts],
    data: Sequence[Section] = (),
    sheet: bytes | None = None,
) -> str:
    """Return the whole page: samples of the last phase first, then curves, then metrics."""
    templates = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    templates.filters["base64"] = lambda png: b64encode(png).decode()
    return templates.from_string(PAGE).render(
        run=run,
        summary=summary,
        phases=phases,
        data=data,
        sheet=sheet,
        metrics=_compared(phases),
        compared=["", *(f"phase {phase.name}" for phase in phases)],
        exact=[(phase.name, phase.ran_on.exact) for phase in phases if phase.ran_on],
        changes=_changes(phases),
    )


def format_metric(name: str, value: Any) -> str:
    """Format a metric with its unit for people."""
    if name == "exact_match" or name.endswith("_accuracy"):
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return f"{value / 1024**3:.2f} GiB" if value else "none"
    if name.endswith("_seconds"):
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _worth_a_row(name: str, value: Any) -> bool:
    """Return whether the page shows a metric; without a GPU, no GPU memory was used."""
    if name.endswith(PARTS_OF_A_PEAK):
        return False
    return bool(value) or not name.endswith(("_seconds", "_bytes"))


def _compared(phases: Sequence[PhaseFacts]) -> list[list[str]]:
    """Return the table of metrics, with a column for each phase."""
    metrics = [item for phase in phases for item in phase.metrics.items()]
    found = dict.fromkeys(name for name, value in metrics if _worth_a_row(name, value))
    names = [*(name for name in LABELS if name in found), *sorted(found.keys() - LABELS.keys())]
    # A language model also has its perplexity.
    labels = LABELS if "perplexity" in found else LABELS | {"val_loss": SQUARED}
    return [
        [
            labels.get(name, name),
            *(format_metric(name, p.metrics[name]) if name in p.metrics else "" for p in phases),
        ]
        for name in names
    ]


def _changes(phases: Sequence[PhaseFacts]) -> list[tuple[str, ...]]:
    """Return every change of what a phase ran on, with the phase that continued after it."""
    changes: list[tuple[str, ...]] = []
    before = -1
    for phase in phases:
        if one := phase.ran_on:
            found = [c for c in one.changes if before <= c.step < one.step]
            changes += [(phase.name, f"{c.step:,}", c.what, *c.values) for c in found]
            before = one.step
    return changes
