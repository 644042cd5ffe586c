"""The files of a launch: accelerate.yaml and deepspeed.json, without an "auto", and run.yaml.

The DeepSpeed file has all ZeRO settings; the accelerate file names it. With values in both files
accelerate refuses them or ignores one. No value names a device, so the same files run on a GPU and,
without one, on the CPU. A phase on several machines also has a script that starts a launcher on
each of them.

run.yaml is a resolved phase, with a line for each value, its source and the reason. render_launch
writes it; training reads no other configuration. It is written line by line, since a YAML library
would take most of the time of rendering a sweep of many runs. A damaged file is recognised by the
types of its values. For people, `zerotrain launch explain` shows its values.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from zerotrain.artifact.documents import DocumentError, read_yaml
from zerotrain.artifact.layout import RESULTS, rebuild_hint
from zerotrain.config.scalar import scalar
from zerotrain.config.section import Section
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import FILES, OWNERS, SECTIONS, Derived, ResolvedPhase, nest_keys
from zerotrain.machine.regular_file import write_text


def accelerate_config(phase: ResolvedPhase, deepspeed_file: Path) -> dict[str, Any]:
    """Return the config for `accelerate launch --config_file`, in `accelerate config`'s form."""
    config = dict(phase.derived.accelerate)
    if phase.derived.engine == "deepspeed":
        inside = config.get("deepspeed_config", {})
        config["deepspeed_config"] = {"deepspeed_config_file": str(deepspeed_file), **inside}
    return config


def accelerate_text(phase: ResolvedPhase, deepspeed_file: Path) -> str:
    """Return the text of accelerate.yaml."""
    config = accelerate_config(phase, deepspeed_file)
    text: str = yaml.dump(config, Dumper=yaml.CSafeDumper, sort_keys=False)
    return text


SRUN = "srun.sh"


def srun_script(phase: ResolvedPhase) -> str:
    """Return a script that runs its command once on each machine of a Slurm job.

    --cpu-bind=none: a launcher's processes share all CPUs of the job on its machine, while Slurm
    would bind a task to one. --kill-on-bad-exit: a launcher that fails ends the others, which would
    wait for it.
    """
    machines = phase.launch.machines
    several = f"--nodes={machines} --ntasks={machines} --ntasks-per-node=1"
    return (
        "#!/bin/sh\n"
        "# Starts a launcher on each machine of the job; `zerotrain train_phase` calls it.\n"
        f"exec srun {several} \\\n"
        '    --export=ALL --cpu-bind=none --kill-on-bad-exit=1 --unbuffered "$@"\n'
    )


def write_launch_files(phase: ResolvedPhase, into: Path, named: Path) -> None:
    """Write the files into the folder `into`; they will be read from the folder `named`."""
    write_text(into / "accelerate.yaml", accelerate_text(phase, named / "deepspeed.json"))
    if phase.derived.engine == "deepspeed":
        write_text(into / "deepspeed.json", json.dumps(phase.derived.deepspeed, indent=2) + "\n")
    if phase.launch.machines > 1:
        write_text(into / SRUN, srun_script(phase))


DAMAGE = (ValueError, TypeError, KeyError, AttributeError)
"""What reading raises where a value of another type is in some place."""


def write_run_yaml(phase: ResolvedPhase, path: Path) -> None:
    """Write each value with its source, in the order of the phase's keys."""
    lines: list[str] = []
    before: list[str] = []
    for name, value, source, reason in phase.explain():
        *sections, key = name.split(".")
        same = next(
            (n for n, (a, b) in enumerate(zip(sections, before, strict=False)) if a != b),
            min(len(sections), len(before)),
        )
        lines += [f"{'  ' * n}{scalar(sections[n])}:" for n in range(same, len(sections))]
        why = f", reason: {scalar(reason)}" if reason else ""
        entry = f"{{value: {scalar(value)}, source: {source}{why}}}"
        lines.append(f"{'  ' * len(sections)}{scalar(key)}: {entry}")
        before = sections
    write_text(path, "\n".join(lines) + "\n")


def read_run_yaml(path: Path) -> ResolvedPhase:
    """Read a file of write_run_yaml.

    Raises:
        FileError: it is missing, or no file.
        PipelineError: it is another file, or damaged.
    """
    try:
        entries = dict(_entries(read_yaml(path, version="1.1")))
        values = nest_keys({name: entry["value"] for name, entry in entries.items()})
        check_types(values)
        phase = ResolvedPhase.from_values(
            values, {name: (e["source"], e.get("reason", "")) for name, e in entries.items()}
        )
        phase.values()  # no key is missing
        return phase
    except DAMAGE as error:
        why = error.why if isinstance(error, DocumentError) else str(error)
        first = why.strip().partition("\n")[0]
        raise PipelineError(
            f"{path}: is damaged, or written by another version ({first or type(error).__name__})",
            hint=rebuild_hint(path.parent),
        ) from error


def _entries(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries by dotted name."""
    for key, value in section.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} is no text")
        if "source" in value and value.keys() <= {"value", "source", "reason"}:
            yield f"{prefix}{key}", value
        else:
            yield from _entries(value, f"{prefix}{key}.")


def check_types(values: Mapping[str, Any]) -> None:
    """Check that each value has the type of its key; unknown keys are not looked at.

    Raises:
        ValueError: a value is of another type; the message names its key.
    """
    for key, value in values.items():
        if key not in OWNERS:
            continue
        try:
            _type_of(key).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key}: {error.errors()[0]['msg']}") from error


@cache
def _type_of(key: str) -> TypeAdapter[Any]:
    """Return the type of a key's value. A key of a section may not apply, and then it is None."""
    owner = OWNERS[key]
    if owner not in SECTIONS:
        return TypeAdapter(get_type_hints(Derived if owner else ResolvedPhase)[key])
    annotation: Any = SECTIONS[owner].model_fields[key].annotation
    if any(issubclass(kind, Section) for kind in _classes(annotation)):
        return TypeAdapter(Any)  # the section itself validates it
    return TypeAdapter(annotation | None)


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the classes that an annotation names."""
    if isinstance(annotation, type):
        yield annotation
    for one in get_args(annotation):
        yield from _classes(one)


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
