"""A switch's change of the configuration: applied atomically, noted, and undone on its own.

The note is in the run's folder while a switch is in progress. A killed switch leaves its note, from
which the next one completes the switch or undoes its change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.documents import read_object, read_text
from zerotrain.artifact.whole_file import replace_file
from zerotrain.errors import PipelineError
from zerotrain.graph.switch.split import Split, split_phase, undo_split

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
