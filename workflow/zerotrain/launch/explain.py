"""The values of a rendered launch for people: all of them (`zerotrain launch explain`), or some."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from zerotrain.artifact.layout import RESULTS
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.launch.resolved import FILES, ResolvedPhase

Row = tuple[str, str, str, str]
"""Name, value, source, reason."""
TITLES = {"accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json"}
LAUNCH_FACTS = (
    *("preset", "engine", "zero_stage", "offload_optimizer", "num_processes"),
    *("num_cpu_threads_per_process", "mixed_precision", "start_step", "until_step"),
    *(
        "resolution",
        "max_length",
        "packing",
        "global_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    *("optimizer", "learning_rate", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps"),
    *("lr_scheduler_steps", "objective", "caption_dropout_probability", "long_captions"),
)


def explain(place: str, sources: tuple[str, ...] = (), width: int = 100) -> list[str]:
    """Return the lines that explain a launch.

    Args:
        place: RUN/PHASE, a launch folder or a run.yaml.
        sources: Only values from these sources: user, derived, default; empty for all.
        width: Columns of the terminal.

    Raises:
        PipelineError: no launch has been rendered there.
    """
    phase = read_run_yaml(_run_yaml(place))
    lines: list[str] = []
    for title, entries in _sections(phase):
        rows = [row for row in entries if not sources or row[2] in sources]
        if not rows:
            continue
        name_width = max(len(row[0]) for row in rows)
        value_width = min(max(len(row[1]) for row in rows), 24)
        lines += ["", title]
        for name, value, source, reason in rows:
            head = f"  {name:<{name_width}}  {value:<{value_width}}  {source:<7}  "
            indent = " " * (name_width + value_width + 15)
            lines += textwrap.wrap(
                head + reason,
                width=max(width, len(indent) + 30),
                subsequent_indent=indent,
                drop_whitespace=True,
                break_on_hyphens=False,
            )
    return lines[1:]


def _run_yaml(place: str) -> Path:
    path = Path(place)
    if path.is_file():
        return path
    folders = [path, RESULTS / path / "launch", path / "launch"]
    file = next((f / "run.yaml" for f in folders if (f / "run.yaml").is_file()), None)
    if file is None:
        rendered = sorted(RESULTS.glob("*/*/launch/run.yaml"))
        names = ["/".join(p.parts[-4:-2]) for p in rendered]
        raise PipelineError(
            f"{place}: no launch has been rendered there",
            hint="`snakemake --cores all launch` renders those of a run; "
            + known_names(place, names, "rendered here"),
        )
    return file


def _sections(phase: ResolvedPhase) -> Iterator[tuple[str, list[Row]]]:
    """Yield title and rows of the phase's own values, and of each launch file."""
    rows: dict[str, list[Row]] = {"": [], **{file: [] for file in FILES}}
    for name, value, source, reason in phase.explain():
        first, _, rest = name.partition(".")
        file = first if first in FILES and rest else ""
        number = isinstance(value, int) and not isinstance(value, bool)
        shown = f"{value:,}" if number else str(value)
        rows[file].append((rest if file else name, shown, source, reason))
    for file, section in rows.items():
        yield TITLES.get(file, f"{phase.run}/{phase.phase}"), section


def launch_facts(path: Path) -> list[tuple[str, str, str]]:
    """Return name, value and source of each fact of a run.yaml; empty if the file is missing."""
    if not path.is_file():
        return []
    phase = read_run_yaml(path)
    return [
        (name, str(value), f"{source}: {reason}" if reason else source)
        for name, value, source, reason in phase.explain()
        if name.partition(".")[0] in LAUNCH_FACTS and value != {}
    ]
