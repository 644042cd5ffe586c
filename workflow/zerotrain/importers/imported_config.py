"""The result of an import: values of our keys, and a note on every source key."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, ParamSpec

from zerotrain.artifact import create
from zerotrain.config.scalar import comment, key_lines, scalar
from zerotrain.errors import PipelineError
from zerotrain.launch.keys import near_keys
from zerotrain.launch.resolved import nest_keys

AUTO = "auto"
MOST_SUGGESTIONS = 20
"""Problems of an import up to which near names are looked up."""
P = ParamSpec("P")
Outcome = Literal["kept", "changed", "resolved", "default", "no-op", "left out", "skipped by you"]


class ImportProblemsError(PipelineError):
    """Several errors of one import."""

    def __init__(self, where: str, problems: list[PipelineError]) -> None:
        lines = [f"\n  - {e.what.removeprefix(f'{where}: ')} ({e.hint})" for e in problems]
        super().__init__(
            f"{where}: {len(problems)} problems:" + "".join(lines),
            hint="correct them, or take keys out by `--skip KEY --skip KEY`; the report lists "
            "what was skipped",
        )
        self.problems = problems


@dataclass(frozen=True)
class Note:
    """The outcome of one key."""

    key: str
    """As in the file or the command line; our key if there was none."""
    given: Any
    """None if nothing was given."""
    outcome: Outcome
    ours: str
    """Our key; empty if none corresponds."""
    value: Any
    reason: str


@dataclass
class ImportedConfig:
    """The result of an import, which readers fill."""

    source: str = ""
    """The source, for a heading."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values by our keys, with sections joined by dots."""
    notes: list[Note] = field(default_factory=list)
    """Notes on the source's keys, in the order of reading."""
    before: ImportedConfig | None = None
    """The run that has to be trained first, for a script with two trainings."""
    shown: dict[str, str] = field(default_factory=dict)
    """Names that the user knows for keys that a reader constructed."""
    skip: frozenset[str] = frozenset()
    """Keys that the user excludes, as if the source did not have them (`--skip`)."""
    problems: list[PipelineError] = field(default_factory=list)
    """Everything that stops the import, in the order of reading."""
    seen: list[str] = field(default_factory=list)
    """Every key of the source, to suggest a name for a --skip that matches none."""

    def nested(self) -> dict[str, Any]:
        """Return the values in the structure of a configuration."""
        return nest(self.values)

    def is_skipped(self, key: str, given: Any) -> bool:
        """Return whether the user excludes the key, and note it."""
        self.seen.append(key)
        if key not in self.skip:
            return False
        self.note("skipped by you", key, given, "--skip: the result may differ from the source's")
        return True

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect an error of the block, so that the import finds further errors."""
        try:
            yield
        except PipelineError as error:
            self.problems.append(error)

    @property
    def has_few_problems(self) -> bool:
        """Return whether near names are still looked up, which takes long for thousands of keys."""
        return len(self.problems) < MOST_SUGGESTIONS

    def attempt(self, read: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a reader and collect its error, so that the import finds further errors."""
        with self.collect():
            read(*args, **kwargs)

    def raise_problems(self, where: str) -> None:
        """Raise all collected problems at once.

        Args:
            where: The source, for the heading of several problems.

        Raises:
            PipelineError: there are problems, or a --skip names a key that the source does not
                have.
        """
        if not self.problems:
            skipped = {note.key for note in self.notes if note.outcome == "skipped by you"}
            self.problems += [self._unused(name) for name in sorted(self.skip - skipped)]
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            raise ImportProblemsError(where, self.problems)

    def _unused(self, name: str) -> PipelineError:
        near = near_keys(name, self.seen)
        hint = f"did you mean {' or '.join(near)}?" if near else "leave that --skip out"
        return PipelineError(f"--skip {name}: the source has no such key", hint=hint)

    def put(
        self, outcome: Outcome, key: str, given: Any, ours: str, value: Any, reason: str
    ) -> None:
        """Set one of our keys.

        Raises:
            PipelineError: another key has set it to another value.
        """
        name = self.shown.get(key, key)
        if ours in self.values and self.values[ours] != value:
            before = next(n for n in reversed(self.notes) if n.ours == ours)
            raise PipelineError(
                f"{name} makes {ours} {value!r}, but {before.key} makes it {self.values[ours]!r}",
                hint="let both say the same, or take one of them out",
            )
        self.values[ours] = value
        self.notes.append(Note(name, given, outcome, ours, value, reason))

    def keep(self, key: str, given: Any, ours: str, value: Any = None, reason: str = "") -> None:
        """Adopt a value; `value` is given if our form differs."""
        self.put("kept", key, given, ours, given if value is None else value, reason)

    def resolve(self, key: str, ours: str, value: Any, reason: str) -> None:
        """Set the value of an "auto"."""
        self.put("resolved", key, AUTO, ours, value, reason)

    def assume(self, ours: str, value: Any, reason: str) -> None:
        """Set a value that the file does not give."""
        self.put("default", ours, None, ours, value, reason)

    def note(
        self,
        outcome: Outcome,
        key: str,
        given: Any,
        reason: str,
        ours: str = "",
        value: Any = None,
    ) -> None:
        """Note a key that sets none of our keys directly."""
        self.notes.append(Note(self.shown.get(key, key), given, outcome, ours, value, reason))

    def ignore(self, key: str, given: Any, reason: str) -> None:
        """Note a key that has no effect."""
        self.note("no-op", key, given, reason)

    def ignore_all(self, arguments: dict[str, Any], names: Iterable[str], reason: str) -> None:
        """Remove the arguments of these names that are given, which have no effect."""
        for name in names:
            if name in arguments:
                self.ignore(name, arguments.pop(name), reason)

    def drop(self, key: str, given: Any, reason: str) -> None:
        """Note a key that is not supported."""
        self.note("left out", key, given, reason)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Build sections from dotted keys; the only phase and numbered sources become lists."""
    found = nest_keys(values)
    if isinstance(sources := found.get("data", {}).get("sources"), dict):
        found["data"]["sources"] = [sources[number] for number in sorted(sources, key=int)]
    if "phases" in found:
        found["phases"] = [{"name": "train", **found["phases"]}]
    return found


LARGEST = "the largest of the datasets; others have a resolution of their own"


def source_names(given: Sequence[str]) -> list[str]:
    """Return a valid and different name for each source: that of its dataset or folder."""
    names: list[str] = []
    for one in given:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePath(one).name).strip("-_") or "images"
        count = sum(
            re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names
        )
        names.append(f"{name}-{count + 1}" if count else name)
    return names


def source_prefixes(names: Sequence[str], *, several: bool, result: ImportedConfig) -> list[str]:
    """Return the prefix of each source's keys, and set the names of several sources."""
    if not several:
        return ["data."]
    prefixes = [f"data.sources.{number}." for number in range(len(names))]
    for prefix, name in zip(prefixes, names, strict=True):
        result.assume(f"{prefix}name", name, "after its dataset")
    return prefixes


def put_resolutions(
    key: str, sides: Sequence[int], prefixes: Sequence[str], result: ImportedConfig
) -> None:
    """Set train.resolution to the largest of all sides, and that of each smaller source.

    Args:
        key: The source's key of a resolution.
        sides: The side of each source's square in pixels.
        prefixes: The prefixes of the sources' keys.
        result: Receives the resolutions.
    """
    most = max(sides)
    result.keep(key, most, "train.resolution", reason=LARGEST if len({*sides}) > 1 else "")
    for side, prefix in zip(sides, prefixes, strict=True):
        if side < most:
            result.keep(key, side, f"{prefix}resolution")


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
