"""The page of a run: plain HTML that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrain.evaluation.answers import Answer

STYLE = """
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
code { font-family: ui-monospace, monospace; font-size: .9em; }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
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
"""What the page calls the metrics it knows, in its order; others follow under their own names."""
PARTS_OF_A_PEAK = ("_begin_bytes", "_end_minus_begin_bytes", "_peak_minus_begin_bytes")
"""Ends of names that metrics.json alone has: the page shows the peak of each work."""


@dataclass(frozen=True)
class PhaseFacts:
    """What the page shows of a phase."""

    name: str
    metrics: dict[str, Any]
    grid: bytes | None
    """PNG; None of text."""
    answers: Sequence[Answer]
    """Of text: none of images."""
    loss: bytes
    """PNG: the run up to the end of this phase."""
    learning_rate: bytes
    """PNG: the same run."""
    launch: list[tuple[str, str, str]]
    """Name, value and source."""
    weights: Path
    seq2seq: bool = False


def render_page(run: str, summary: Sequence[tuple[str, str]], phases: Sequence[PhaseFacts]) -> str:
    """The whole page."""
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in summary)
    body = [
        f"<h1>{escape(run)}</h1>",
        f'<p class="soft">{facts}</p>',
        _compared(phases),
        "<h3>Training loss</h3>",
        _image(phases[-1].loss, "Training loss over the steps of all phases"),
        "<h3>Learning rate</h3>",
        _image(phases[-1].learning_rate, "Learning rate over the steps of all phases"),
        *(_phase(phase) for phase in phases),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run)} · zerotrain</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def shown(name: str, value: Any) -> str:
    """A metric with its unit, as a person reads it."""
    if name == "exact_match" or name.endswith("_accuracy"):
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return f"{value / 1024**3:.2f} GiB" if value else "none"
    if name.endswith("_seconds"):
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _worth_a_row(name: str, value: Any) -> bool:
    return not name.endswith(PARTS_OF_A_PEAK) and not (name.endswith("_seconds") and not value)


def _compared(phases: Sequence[PhaseFacts]) -> str:
    """Metrics, a column for each phase."""
    metrics = [item for phase in phases for item in phase.metrics.items()]
    found = dict.fromkeys(name for name, value in metrics if _worth_a_row(name, value))
    names = [*(name for name in LABELS if name in found), *sorted(found.keys() - LABELS.keys())]
    rows = [
        [
            LABELS.get(name, name),
            *(shown(name, p.metrics[name]) if name in p.metrics else "" for p in phases),
        ]
        for name in names
    ]
    head = ["", *(f"phase {phase.name}" for phase in phases)]
    return f'<div class="wide">{_table(rows, head, numbers=True)}</div>'


def _phase(phase: PhaseFacts) -> str:
    launch = (
        f'<details><summary>Launch</summary><div class="wide">'
        f"{_table(phase.launch, ['', 'value', 'from'])}</div></details>"
        if phase.launch
        else ""
    )
    return "\n".join(
        [
            f"<h2>Phase {escape(phase.name)}</h2>",
            _made(phase),
            "<h3>Weights</h3>",
            f"<p><code>{escape(str(phase.weights))}</code></p>",
            f"<pre>{escape(_how_to_load(phase))}</pre>",
            launch,
        ]
    )


def _made(phase: PhaseFacts) -> str:
    """The grid of images, or the first answers beside what was expected; mistakes come first."""
    if phase.grid is not None:
        return _image(phase.grid, f"Samples of phase {phase.name}, a row for each prompt")
    wrong = [a for a in phase.answers if a.expected not in (None, a.generated)]
    right = [a for a in phase.answers if a.expected in (None, a.generated)]
    rows = [(a.prompt, a.expected or "", a.generated) for a in [*wrong, *right][:MOST_ANSWERS]]
    return f'<div class="wide">{_table(rows, ["prompt", "expected", "generated"])}</div>'


def _how_to_load(phase: PhaseFacts) -> str:
    if phase.grid is not None:
        return (
            "from diffusers import DiffusionPipeline\n\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{phase.weights.as_posix()}")'
        )
    kind = "ForSeq2SeqLM" if phase.seq2seq else "ForCausalLM"
    return (
        f"from transformers import AutoModel{kind}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{phase.weights.as_posix()}")\n'
        f'model = AutoModel{kind}.from_pretrained("{phase.weights.as_posix()}")'
    )


def _image(png: bytes, text: str) -> str:
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def _table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, numbers: bool = False
) -> str:
    kind = ' class="number"' if numbers else ""
    lines = ["<table>"]
    if head:
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</table>"])
