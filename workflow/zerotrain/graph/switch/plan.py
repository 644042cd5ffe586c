"""The plan of `zerotrain switch`: what to cut where, the jobs that Snakemake would run, and former
switches, completed or killed ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import parse_yaml
from zerotrain.artifact.layout import CONFIGS, SETTINGS, RunFolder
from zerotrain.config.launch import LaunchConfig
from zerotrain.config.models import Phase
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.relaunch import Relaunch, launch_values, processes_of, share_batch
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import train_command
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.graph.options import SwitchOptions
from zerotrain.graph.switch.edit import Split, SwitchEdit, read_note, remove_note
from zerotrain.graph.switch.point import (
    check_only_ends_phase,
    choose_step,
    current_phase,
    holds_split,
    is_exported,
    launch_differences,
    made_under,
    phase_ends,
    phase_folder,
    unfinished_phase,
    view_phase,
)
from zerotrain.machine.output import print_message
from zerotrain.training.checkpointing.progress_folder import step_folder


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


PRESETS = CONFIGS / "launch"


@dataclass(frozen=True)
class Plan:
    """A feasible switch."""

    config: RunConfig
    phase: Phase
    edit: SwitchEdit
    targets: list[str]
    jobs: dict[str, int]


def plan_switch(config: RunConfig, text: str, file: Path, request: SwitchOptions) -> Plan:
    """Plan a user's request.

    Args:
        config: The run.
        text: Its configuration's text.
        file: The configuration's file.
        request: The request.

    Raises:
        PipelineError: there is nothing to cut, or it cannot be cut without loss.
    """
    phase, until = unfinished_phase(config, file)
    step = choose_step(config, phase, request.at, until, file)
    split = _split(config, phase, step, request)
    edit = SwitchEdit(file=file, former=text, split=split, until=until)
    return check_plan(config, phase, edit, _parse_split(edit.text, file, split))


def check_plan(config: RunConfig, phase: Phase, edit: SwitchEdit, switched: RunConfig) -> Plan:
    """Check what Snakemake would do with a run that has the edit."""
    targets = [
        f"{phase_folder(config, phase)}/{part}/manifest.json" for part in ("state", "weights")
    ]
    jobs = check_only_ends_phase(switched, edit.file, phase, targets)
    return Plan(config, phase, edit, targets, jobs)


def describe_new(plan: Plan) -> str:
    """Describe the launch of the new phase, and the state that it drops."""
    split = plan.edit.split
    values = {**split.launch, **split.following}
    preset, allowed = values.pop("preset", plan.phase.launch.preset), values.pop("allow", None)
    values.pop("offload_path", None)
    more = ", ".join(f"{key} {value}" for key, value in values.items())
    lost = "; fp16's loss scale is not carried on (allow: [loss_scale])" if allowed else ""
    return f"{preset}{' with ' * bool(more)}{more}{lost}"


def check_preset(preset: str) -> None:
    """Check that a launch preset exists.

    Raises:
        PipelineError: it does not; the hint lists the existing ones.
    """
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if preset not in known:
        raise PipelineError(
            f"--to {preset}: no such launch preset",
            hint=known_names(preset, known, f"presets in {PRESETS}"),
        )


def _split(config: RunConfig, phase: Phase, step: int, request: SwitchOptions) -> Split:
    """Return the edit. If the file has the new launch already, the phase gets its former one."""
    preset, wanted = request.to, relaunch_of(request)
    rolling = step_folder(phase_folder(config, phase) / "progress", step)
    launch, ended = launch_differences(rolling, phase)
    new = launch_values(phase, wanted)
    if preset in (None, phase.launch.preset) and not new and not launch and not ended:
        asked = ", ".join(f"{key} {value}" for key, value in wanted.flags().items())
        raise PipelineError(
            f"{config.run}/{phase.name} trains under {phase.launch.preset}"
            f"{' with ' * bool(asked)}{asked} already",
            hint="start it again, and it continues where it stopped; to switch something else, "
            "write it into the phase first",
        )
    if request.offload_path is not None:
        new["offload_path"] = request.offload_path
    return Split(
        phase=phase.name,
        step=step,
        name=request.name or _free_name(config, "-".join([phase.name, *_words(phase, request)])),
        launch=new if preset is None else {"preset": preset, **new},
        following=_following(config, phase, request, rolling),
        ended=ended,
        ended_launch=launch,
    )


def _words(phase: Phase, request: SwitchOptions) -> list[str]:
    """List the words of the request for a new phase's name."""
    wanted, words = relaunch_of(request), []
    if request.to is not None:
        words.append(request.to)
    if wanted.num_processes or wanted.machines:
        words.append(f"x{processes_of(phase, wanted)}")
    if wanted.mixed_precision:
        words.append("fp32" if wanted.mixed_precision == "no" else wanted.mixed_precision)
    return words


def _following(
    config: RunConfig, phase: Phase, request: SwitchOptions, checkpoint: Path
) -> dict[str, Any]:
    """Return the new phase's values other than its launch: accumulation, and `allow`."""
    former, wanted = made_under(checkpoint, phase), relaunch_of(request)
    found: dict[str, Any] = {}
    if wanted.num_processes or wanted.machines:
        own = {**vars(phase.train), **vars(phase.launch)}
        edited = former["gradient_accumulation_steps"] != own["gradient_accumulation_steps"]
        # A user who has changed the accumulation since knows what fits.
        fits = own if edited else former
        parts = fits["gradient_accumulation_steps"] * fits["num_processes"]
        accumulation = share_batch(
            phase.train.global_batch_size,
            processes_of(phase, wanted),
            max(1, fits["global_batch_size"] // parts),
            where=f"{config.run}/{phase.name}",
            machines=wanted.machines or phase.launch.machines,
        )
        if accumulation != phase.train.gradient_accumulation_steps:
            found["gradient_accumulation_steps"] = accumulation
    precision = wanted.mixed_precision or phase.launch.mixed_precision
    if former["mixed_precision"] == "fp16" != precision:
        found["allow"] = ["loss_scale"]
    return found


def _free_name(config: RunConfig, base: str) -> str:
    taken = {phase.name for phase in config.phases}
    name, count = base, 1
    while name in taken or _has_results(RunFolder(config.run).path / name):
        count += 1
        name = f"{base}-{count}"
    return name


def _has_results(folder: Path) -> bool:
    """Return whether a folder has more than the settings files of a plan."""
    return folder.is_dir() and any(one.name != SETTINGS for one in folder.iterdir())


def _parse_split(text: str, file: Path, split: Split) -> RunConfig:
    try:
        return parse_config(parse_yaml(text, file), str(file))
    except PipelineError as error:
        hint = f"{error.hint}; {file} is as it was"
        if "offload_path" in error.what and "offload_path" not in split.launch:
            hint = f"name the folder with --offload-path; {file} is as it was"
        raise PipelineError(f"with the new phase {split.name}, {error.what}", hint=hint) from error
