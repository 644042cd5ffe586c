"""What `zerotrain switch` finds of a switch before it: one that is done, or one that was killed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from zerotrain import graph
from zerotrain.config import RunConfig, read_config
from zerotrain.errors import PipelineError
from zerotrain.switch_checks import holds_split
from zerotrain.switch_edit import SwitchEdit, read_note, remove_note
from zerotrain.switch_point import (
    current_phase,
    is_exported,
    made_otherwise,
    phase_ends,
    phase_folder,
)
from zerotrain.training.progress_folder import saved_steps, step_folder


@dataclass(frozen=True)
class Request:
    """What a user asks for; see `switch`."""

    preset: str
    at: str = "last"
    name: str | None = None
    offload_path: str | None = None

    def is_met_by(self, step: int, name: str, launch: object) -> bool:
        """Whether a switch at a step, to a phase of this name and launch, is what is asked for."""
        values = launch if isinstance(launch, dict) else vars(launch)
        return (
            values["preset"] == self.preset
            and self.at in ("last", str(step))
            and self.name in (None, name)
            and self.offload_path in (None, values.get("offload_path"))
        )


def take_over_killed(request: Request, file: Path, folder: Path) -> SwitchEdit | None:
    """Find the switch that was killed after its edit, if it is the one that is asked for.

    Another one is undone.

    Raises:
        PipelineError: it cannot be undone.
    """
    edit = find_killed(folder)
    if edit is None:
        remove_note(folder)
        return None
    split = edit.split
    if edit.file == file and request.is_met_by(split.step, split.name, split.launch):
        _say(f"{file}: a {name_switch(edit)} was killed before its end; it is completed")
        return edit
    said = edit.undo()
    if holds_split(read_config(edit.file), split):
        raise PipelineError(
            f"a {name_switch(edit)} was killed before its end, and cannot be undone: {said}",
            hint="undo it by hand, or complete it with the command that was killed",
        )
    _say(f"a {name_switch(edit)} was killed before its end; it is undone: {said}")
    remove_note(folder)
    return None


def find_killed(folder: Path) -> SwitchEdit | None:
    """Find the switch whose edit is made and whose export is not."""
    edit = read_note(folder)
    if edit is None or not edit.file.is_file():
        return None
    config, split = read_config(edit.file), edit.split
    if not holds_split(config, split):
        return None
    return None if is_exported(config, config.phase(split.phase), split.step) else edit


def name_switch(edit: SwitchEdit) -> str:
    """Name a switch in a message."""
    return f"`zerotrain switch` to {edit.split.launch['preset']}"


def find_done(config: RunConfig, file: Path, request: Request) -> str | None:
    """Find out whether the switch that is asked for is done: what to say, else None."""
    phase, until = current_phase(config)
    before = config.phase_before(phase.name)
    if before is None:
        return None
    end = dict((one.name, end) for one, end in phase_ends(config))[before.name]
    steps = saved_steps(progress := phase_folder(config, phase) / "progress")
    if (
        not request.is_met_by(end, phase.name, phase.launch)
        or not is_exported(config, before, end)
        or (steps and any(made_otherwise(step_folder(progress, steps[-1]), phase)))
    ):
        return None
    done = f"done already: {before.name} ended at step {end}, {phase.name}"
    if is_exported(config, phase, until):
        return f"{done} ended at step {until} under {request.preset}; the run is finished"
    return f"{done} continues to {until} under {request.preset}. Next: {graph.train_command(file)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
