"""A switch's change of the configuration: applied atomically, noted, and undone on its own.

The note is in the run's folder while a switch is in progress. A killed switch leaves its note, from
which the next one completes the switch or undoes its change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact.documents import parse_yaml, read_object, read_text
from zerotrain.artifact.whole_file import replace_file
from zerotrain.config.read import ZERO_KEYS
from zerotrain.config.scalar import PATH, scalar
from zerotrain.config.text import ConfigText
from zerotrain.errors import PipelineError

Values = Mapping[str, Any]
TEXT = "the configuration"
"""What messages call a text that is parsed to see what it means."""
ALONE = (
    "offload_path", "offload_optimizer", "offload_param", "device_memory", "host_memory",
    "zero3_init",
)  # fmt: skip
"""Launch values that go with one preset and not to another."""
NOT_INHERITED = ("allow",)
"""Values of a phase that mean the switch into it."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A phase ends at a step, and a new one directly after it continues to the former end."""

    phase: str
    """The phase to cut."""
    step: int
    """Its new `until`."""
    name: str
    """The new phase's name. It takes over all that is not set here from the phase that is cut."""
    launch: Values
    """Launch values of the new phase that differ."""
    following: Values = field(default_factory=dict)
    """Values to write into the new phase next to its launch: training values, and `allow`."""
    ended: Values = field(default_factory=dict)
    """Training values to write into the phase that is cut: those it was trained with."""
    ended_launch: Values = field(default_factory=dict)
    """And launch values."""


def split_phase(text: str, split: Split) -> str:
    """Split a phase in a configuration file's text.

    The new phase is written in the style of the one that is cut, block or flow; every other
    character stays.

    Raises:
        PipelineError: the phase is written in a way (as an alias, say) that only a person can edit.
    """
    try:
        found = ConfigText(text, TEXT)
        values = _split_values(found.values, split)
        return found.copy_phase(_place(found.values, split)).update(values).text
    except (LookupError, StopIteration, TypeError, PipelineError) as error:
        raise PipelineError(
            f"phase {split.phase} is written in a way that no program should cut",
            hint=f"do it by hand: give {split.phase} `until: {split.step}`, and write a phase "
            f"{split.name} after it with the former `until`, {_by_hand(split)} "
            f"and the other values of {split.phase}",
        ) from error


def undo_split(former: str, text: str, now: str, split: Split) -> str | None:
    """Undo a split in a configuration's text that has been edited since.

    Args:
        former: The text before the split.
        text: The text after it.
        now: The text after the edits.
        split: What was split.

    Returns:
        The text with the edits and without the split; None where both changed the same lines, or
        the result would mean something else.
    """
    undone = _merge(text, former, now)
    if undone is None:
        return None
    try:
        same = _split_values(parse_yaml(undone, TEXT), split) == parse_yaml(now, TEXT)
    except (LookupError, StopIteration, TypeError, ValueError):
        return None
    return undone if same else None


def _keys_dropped_by_preset(former: Any, changes: Values) -> tuple[str, ...]:
    """Return the keys of a former launch that another preset or precision drops.

    Args:
        former: The former preset; None where the phase names none.
        changes: Launch values of the new phase.
    """
    left = ("fp16",) if changes.get("mixed_precision", "fp16") != "fp16" else ()
    preset = changes.get("preset", former)
    if preset == former:
        return left
    if preset == "torch":
        return (*left, *ALONE, *ZERO_KEYS)
    offloads = str(preset).endswith("_offload")
    return (*left, *ALONE) if offloads else (*left, *ALONE, "bf16_optimizer_states")


def _by_hand(split: Split) -> str:
    """Write the new phase's own values as a person writes them."""
    launch = split.launch.get("preset") if set(split.launch) == {"preset"} else dict(split.launch)
    values = {**({"launch": launch} if launch else {}), **split.following}
    return ", ".join(f"`{key}: {scalar(value, PATH)}`" for key, value in values.items())


def _place(raw: Any, split: Split) -> int:
    return next(i for i, phase in enumerate(raw["phases"]) if phase["name"] == split.phase)


def _split_values(raw: Any, split: Split) -> Any:
    """Split a phase in a configuration's values: what the edited text has to mean."""
    phases, place = raw["phases"], _place(raw, split)
    phase = phases[place]
    values = {**split.ended, "until": split.step}
    if split.ended_launch:
        values["launch"] = _launch_values(phase.get("launch"), split.ended_launch)
    new = {key: value for key, value in values.items() if key not in phase}
    ended: dict[str, Any] = {}
    for key, value in phase.items():
        ended |= new if key == "until" else {}  # new values come before it
        ended[key] = values.get(key, value)
    following = {key: value for key, value in phase.items() if key not in NOT_INHERITED}
    following["name"] = split.name
    if "launch" in phase or split.launch:
        following["launch"] = _launch_values(phase.get("launch"), split.launch)
    following.update(split.following)
    return {**raw, "phases": [*phases[:place], ended, following, *phases[place + 1 :]]}


def _launch_values(launch: Any, changes: Values) -> Any:
    former = dict(launch) if isinstance(launch, dict) else {"preset": launch} if launch else {}
    left = _keys_dropped_by_preset(former.get("preset"), changes)
    found = {**{key: value for key, value in former.items() if key not in left}, **changes}
    return found if isinstance(launch, dict) or set(found) != {"preset"} else found["preset"]


def _merge(base: str, one: str, other: str) -> str | None:
    """Apply the changes of lines from a text to each of two others; None where they overlap."""
    lines = base.splitlines(keepends=True)
    changes = sorted(
        {*_changed_lines(lines, one), *_changed_lines(lines, other)}, key=lambda change: change[:2]
    )
    for (start, stop, _), (following, end, _) in pairwise(changes):
        if following < stop or (start, stop) == (following, end):
            return None
    for start, stop, new in reversed(changes):
        lines[start:stop] = new
    return "".join(lines)


def _changed_lines(lines: Sequence[str], text: str) -> list[tuple[int, int, tuple[str, ...]]]:
    new = text.splitlines(keepends=True)
    codes = SequenceMatcher(None, lines, new, autojunk=False).get_opcodes()
    return [(a, b, tuple(new[c:d])) for tag, a, b, c, d in codes if tag != "equal"]


NOTE = "switch.json"


@dataclass(frozen=True, kw_only=True)
class SwitchEdit:
    """The change of one configuration file."""

    file: Path
    former: str
    """Its text before the change."""
    split: Split
    until: int
    """The step at which the phase was to end."""

    @property
    def text(self) -> str:
        """Return the text after the change.

        Raises:
            PipelineError: the phase is written in a form that only a person can edit.
        """
        return split_phase(self.former, self.split)

    def apply(self, folder: Path) -> bool:
        """Write the note to a folder, and apply the change.

        Returns:
            Whether it was applied; False if the file has been saved since its text was read.
        """
        values = {**asdict(self), "file": str(self.file)}
        artifact.write_json(folder / f"{NOTE}.new", values)
        (folder / f"{NOTE}.new").replace(folder / NOTE)
        return replace_file(self.file, self.former.encode(), self.text.encode())

    def undo(self) -> str:
        """Undo the change if it was applied, but no later edits.

        Returns:
            The file's state, as the end of a sentence.
        """
        file, split = self.file, self.split
        while True:
            try:
                now = read_text(file, follow_links=True)
                if now == self.former:
                    return f"{file} is as it was"
                undone = undo_split(self.former, self.text, now, split)
                if now == self.text:
                    undone = self.former
                if undone is None:
                    break
                if replace_file(file, now.encode(), undone.encode()):
                    kept = f"{file} is as it was"
                    return kept if undone == self.former else f"{kept}, with what was edited since"
            except (OSError, PipelineError) as error:
                why = error.what if isinstance(error, PipelineError) else f"{file}: {error}"
                return f"{file} could not be restored ({why}): {self._lies_there()}"
        if split.name not in now:
            return f"{file} was edited since, and is left as it is"
        return f"{file} was edited since, and is left as it is: {self._lies_there()}"

    def _lies_there(self) -> str:
        phase, name = self.split.phase, self.split.name
        return (
            f"it has the switch; to undo it, remove the phase {name}, and give {phase} the lines "
            f"that it had:\n{self._former_lines()}"
        )

    def _former_lines(self) -> str:
        lines = self.text.splitlines()
        return "\n".join(f"    {line}" for line in self.former.splitlines() if line not in lines)


def read_note(folder: Path) -> SwitchEdit | None:
    """Read the note of an unfinished switch; None if it is missing or incomplete."""
    try:
        found = read_object(folder / NOTE)
        own = {"file": Path(found["file"]), "split": Split(**found["split"])}
        return SwitchEdit(**{**found, **own})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def remove_note(folder: Path) -> None:
    """Remove the note of a switch that has ended."""
    (folder / NOTE).unlink(missing_ok=True)
