"""run.yaml: a resolved phase, a line for each value with its source and the reason.

Written by render_launch, read by training; training reads no other configuration. It is written
line by line, since a YAML library takes most of the time of rendering a sweep of many runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from zerotrain.launch.resolved import FILES, ResolvedPhase
from zerotrain.launch.settings import Source, nested


def write_run_yaml(phase: ResolvedPhase, path: Path) -> None:
    """Write each value with its source, in the order of the class."""
    lines: list[str] = []
    for item in fields(phase):
        value = getattr(phase, item.name)
        if item.name in FILES:
            lines += [f"{item.name}:", *_file(phase, item.name, value, "  ")] if value else []
        elif item.name != "sources":
            lines.append(f"{item.name}: {_entry(phase, item.name, value)}")
    path.write_text("\n".join(lines) + "\n")


def read_run_yaml(path: Path) -> ResolvedPhase:
    """Read what write_run_yaml wrote."""
    document = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Source, str]] = {}
    for name, entry in document.items():
        found = dict(_entries(entry, f"{name}.")) if name in FILES else {name: entry}
        sources |= {key: (e["source"], e.get("reason", "")) for key, e in found.items()}
        values[name] = entry.get("value")
        if name in FILES:
            values[name] = nested({k.partition(".")[2]: e["value"] for k, e in found.items()})
    return ResolvedPhase(**values, sources=sources)


def _file(phase: ResolvedPhase, prefix: str, section: Mapping[str, Any], indent: str) -> list[str]:
    """The lines of a nested file."""
    lines: list[str] = []
    for key, value in section.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_file(phase, f"{prefix}.{key}", value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_entry(phase, f'{prefix}.{key}', value)}")
    return lines


def _entry(phase: ResolvedPhase, key: str, value: Any) -> str:
    source, reason = phase.sources.get(key, ("default", ""))
    why = f", reason: {_flow(reason)}" if reason else ""
    return f"{{value: {_flow(value)}, source: {source}{why}}}"


def _flow(value: Any) -> str:
    """A value in one line, as YAML 1.1 and 1.2 read it alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        # YAML 1.1 takes 1e-05 for text.
        mantissa, sign, exponent = repr(value).partition("e")
        return (mantissa if "." in mantissa or not sign else f"{mantissa}.0") + sign + exponent
    return json.dumps(value, ensure_ascii=False)


def _entries(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a nested file, by dotted key."""
    for key, value in section.items():
        if "source" in value and value.keys() <= {"value", "source", "reason"}:
            yield f"{prefix}{key}", value
        else:
            yield from _entries(value, f"{prefix}{key}.")
