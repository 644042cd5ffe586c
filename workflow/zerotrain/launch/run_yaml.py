"""run.yaml: a resolved phase, with a line for each value, its source and the reason.

render_launch writes it; training reads no other configuration. It is written line by line, since a
YAML library would take most of the time of rendering a sweep of many runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from zerotrain.artifact.rebuilding import rebuild_hint
from zerotrain.config.scalar import scalar
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.settings import nest_keys
from zerotrain.launch.value_types import check_types

DAMAGE = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
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
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_run_yaml(path: Path) -> ResolvedPhase:
    """Read a file of write_run_yaml.

    Raises:
        PipelineError: it is another file, or damaged.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    try:
        entries = dict(_entries(_load(content.decode("utf-8"))))
        values = nest_keys({name: entry["value"] for name, entry in entries.items()})
        check_types(values)
        phase = ResolvedPhase.from_values(
            values, {name: (e["source"], e.get("reason", "")) for name, e in entries.items()}
        )
        phase.values()  # no key is missing
        return phase
    except DAMAGE as error:
        first = str(error).strip().partition("\n")[0]
        raise PipelineError(
            f"{path}: is damaged, or written by another version ({first or type(error).__name__})",
            hint=rebuild_hint(path.parent),
        ) from error


def _load(text: str) -> Any:
    """Parse a file without aliases, of which a short one can name a document of any size."""
    loader = yaml.CSafeLoader
    if "&" in text and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, loader)):
        raise ValueError("it has YAML aliases")
    return yaml.load(text, loader)


def _entries(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries by dotted name."""
    for key, value in section.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} is no text")
        if "source" in value and value.keys() <= {"value", "source", "reason"}:
            yield f"{prefix}{key}", value
        else:
            yield from _entries(value, f"{prefix}{key}.")
