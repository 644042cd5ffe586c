"""Output of an import as a commented configuration, and as a report."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain.artifact import create
from zerotrain.config.scalar import comment, key_lines, scalar
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import ImportedConfig, Note

ORDER = (
    "run", "seed", "family", "base", "revision", "resume_from_checkpoint", "prediction_type",
    "rescale_betas_zero_snr", "lora", "base_model_precision", "base_model_exclude_modules", "peft",
    "data", "cache", "train", "validation", "launch",
    "phases", "evaluate",
)  # fmt: skip
NEEDED = ("run", "base", "data", "phases")


def config_text(imported: ImportedConfig) -> str:
    """Format a configuration, or the source's part of it, with the origin of each value."""
    found = imported.nested()
    because = _reasons(imported.notes)
    lines = comment(f"Imported from {imported.source}, by `zerotrain launch import`.")
    if missing := [key for key in NEEDED if key not in found]:
        lines += [f"# A part of a configuration: {', '.join(missing)} it does not say."]
    lines += ["# All keys with their values: docs/configuration.md"]
    assert set(found) <= set(ORDER)
    for key in (key for key in ORDER if key in found):
        value = found[key]
        if key == "launch" and "preset" in value:
            value = {"preset": value["preset"], **value}
        lines += [""] * isinstance(value, dict | list) + key_lines(key, value, because)
    lines += _without_value(imported.notes)
    return "\n".join(lines) + "\n"


def _reasons(notes: list[Note]) -> dict[str, str]:
    """Return the origin of each value, by our key."""
    found: dict[str, list[str]] = {}
    for note in notes:
        if not note.ours:
            continue
        if note.value is None:
            text = note.reason if note.ours == "phases" else ""
        else:
            text = "" if note.outcome == "kept" else f"{note.outcome}: {note.reason}"
        # The source's only phase is the first of ours.
        found.setdefault(note.ours.replace("phases.", "phases.0."), []).append(text)
    return {ours: "; ".join(dict.fromkeys(t for t in texts if t)) for ours, texts in found.items()}


def _without_value(notes: list[Note]) -> list[str]:
    """List keys of the source that are not in the configuration."""
    lines: list[str] = []
    for heading, outcomes in (
        ("Skipped by you (--skip): the training may be another without it", ("skipped by you",)),
        ("Left to this run", ("default", "resolved")),
        ("Left out", ("left out",)),
        ("Without effect here", ("no-op",)),
    ):
        found = [n for n in notes if n.outcome in outcomes and n.value is None]
        if found:
            lines += ["", f"# {heading}:"]
        for note in found:
            lines += comment(f"{note.key}{_given(note)}: {note.reason}")
    return lines


def _given(note: Note) -> str:
    return "" if note.given is None else f" {scalar(note.given)}"


def report(notes: list[Note]) -> str:
    """Format a line for each key: its outcome, and the reason."""
    lines = []
    for note in notes:
        value = "" if note.value is None else f": {scalar(note.value)}"
        became = f" -> {note.ours}{value}" if note.ours else ""
        reason = f"  ({note.reason})" if note.reason else ""
        lines.append(f"{note.outcome:9} {note.key}{_given(note)}{became}{reason}")
    return "\n".join(lines)


def write_new(text: str, path: Path | None) -> None:
    """Print the text, or write it to a new file.

    Raises:
        PipelineError: the file exists, or cannot be written.
    """
    if path is None:
        print(text, end="")
        return
    try:
        create(path, text)
    except FileExistsError as error:
        raise PipelineError(
            f"{path} exists already", hint="name another file, or remove it"
        ) from error
    except FileNotFoundError as error:
        raise PipelineError(
            f"{path}: cannot be written: {error.strerror}", hint="name a file in a folder of yours"
        ) from error
    print(f"wrote {path}", file=sys.stderr)
