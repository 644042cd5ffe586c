"""Former switches: completed or killed ones."""

from __future__ import annotations

from pathlib import Path

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.read import read_config
from zerotrain.config.relaunch import Relaunch
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import train_command
from zerotrain.errors import PipelineError
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch.checks import holds_split
from zerotrain.graph.switch.edit import SwitchEdit, read_note, remove_note
from zerotrain.graph.switch.point import (
    current_phase,
    is_exported,
    launch_differences,
    phase_ends,
    view_phase,
)
from zerotrain.machine.output import print_message


def relaunch_of(request: SwitchOptions) -> Relaunch:
    """Return the part of a request that concerns the launch's processes and precision."""
    return Relaunch(
        num_processes=request.num_processes,
        machines=request.machines,
        mixed_precision=request.mixed_precision,
    )


def is_met(request: SwitchOptions, step: int, name: str, launch: LaunchConfig) -> bool:
    """Return whether a switch at this step, to a phase of this name and launch, meets a request."""
    flags = relaunch_of(request).flags()
    own = {"preset": request.to, "offload_path": request.offload_path, **flags}
    return (
        all(value in (None, getattr(launch, key)) for key, value in own.items())
        and request.at in ("last", str(step))
        and request.name in (None, name)
    )


def take_over_killed(request: SwitchOptions, file: Path, folder: Path) -> SwitchEdit | None:
    """Return the switch that was killed after its edit, if it is the requested one.

    Undo it otherwise.

    Raises:
        PipelineError: it cannot be undone.
    """
    edit = find_killed(folder)
    if edit is None:
        remove_note(folder)
        return None
    split = edit.split
    launch = read_config(edit.file).phase(split.name).launch
    if edit.file == file and is_met(request, split.step, split.name, launch):
        print_message(f"{file}: a {name_switch(edit)} was killed before its end; it is completed")
        return edit
    undone = edit.undo()
    if holds_split(read_config(edit.file), split):
        raise PipelineError(
            f"a {name_switch(edit)} was killed before its end, and cannot be undone: {undone}",
            hint="undo it by hand, or complete it with the command that was killed",
        )
    print_message(f"a {name_switch(edit)} was killed before its end; it is undone: {undone}")
    remove_note(folder)
    return None


def find_killed(folder: Path) -> SwitchEdit | None:
    """Find the switch that was edited but not exported."""
    edit = read_note(folder)
    if edit is None or not edit.file.is_file():
        return None
    config, split = read_config(edit.file), edit.split
    if not holds_split(config, split):
        return None
    return None if is_exported(config, config.phase(split.phase), split.step) else edit


def name_switch(edit: SwitchEdit) -> str:
    """Name a switch in a message."""
    launch = edit.split.launch
    words = [launch["preset"]] if "preset" in launch else []
    words += [f"{key} {value}" for key, value in launch.items() if key != "preset"]
    return f"`zerotrain switch` to {', '.join(words) or edit.split.name}"


def find_done(config: RunConfig, file: Path, request: SwitchOptions) -> str | None:
    """Describe the requested switch if it is done; else return None."""
    phase, until = current_phase(config)
    before = config.phase_before(phase.name)
    if before is None:
        return None
    end = dict((one.name, end) for one, end in phase_ends(config))[before.name]
    view = view_phase(config, phase)
    if (
        not is_met(request, end, phase.name, phase.launch)
        or not is_exported(config, before, end)
        or (view.newest_rolling and any(launch_differences(view.newest_rolling, phase)))
    ):
        return None
    done = f"done already: {before.name} ended at step {end}, {phase.name}"
    if is_exported(config, phase, until):
        return f"{done} ended at step {until} under {phase.launch.preset}; the run is finished"
    under = phase.launch.preset
    return f"{done} continues to {until} under {under}. Next: {train_command(file)}"
