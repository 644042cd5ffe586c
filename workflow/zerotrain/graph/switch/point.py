"""The point where `zerotrain switch` cuts: the unfinished phase and a saved step of it.

And the checks that the switch only ends the phase there.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import PositiveInt
from typing_extensions import TypedDict

from zerotrain import artifact
from zerotrain.artifact import MANIFEST
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import DataFolder, RunFolder
from zerotrain.artifact.recipe import format_differences
from zerotrain.config.models import Phase
from zerotrain.config.read import read_config
from zerotrain.config.relaunch import processes_before
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import train_command
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns, snakemake
from zerotrain.graph.artifacts import training_of
from zerotrain.graph.checks import check_launches
from zerotrain.graph.switch.edit import Split
from zerotrain.launch.files import read_run_yaml
from zerotrain.machine.output import print_message
from zerotrain.run.phase import PhaseView, Position
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing import conditions, set_aside
from zerotrain.training.checkpointing.preflight import Inputs
from zerotrain.training.checkpointing.progress_folder import saved_steps, step_folder


class Engine(TypedDict, total=False):
    """The values of a checkpoint's training that a switch compares."""

    preset: str
    num_processes: PositiveInt
    world_size: PositiveInt
    mixed_precision: str
    global_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt


class TrainedPosition(Position):
    """What a switch reads of a rolling checkpoint."""

    engine: Engine


def phase_ends(config: RunConfig) -> list[tuple[Phase, int]]:
    """List the phases of a run with their end steps."""
    from zerotrain.launch.resolve import phase_spans

    epochs = any(phase.until.endswith("epochs") for phase in config.phases)
    size = _epoch_size(config) if epochs else 1
    spans = phase_spans(config.phases, size, origin_of(config))
    return [(phase, spans[phase.name][1]) for phase in config.phases]


def unfinished_phase(config: RunConfig, file: Path) -> tuple[Phase, int]:
    """Find the unfinished phase that trains now or trained last, and the step of its end.

    Raises:
        PipelineError: every phase is finished.
    """
    found, until = current_phase(config)
    if _is_finished(config, found, until):
        raise PipelineError(
            f"{file}: the run {config.run} is finished: {found.name} ended at step {until}",
            hint=f"append a phase with a later end to {file}, and "
            f"`{train_command(file)}` trains its steps alone:\n"
            f"    - name: more\n      until: {until + max(1, until // 2)}\n      launch: PRESET",
        )
    return found, until


def current_phase(config: RunConfig) -> tuple[Phase, int]:
    """Find the unfinished phase as `unfinished_phase` does; in a finished run the last phase."""
    ends = phase_ends(config)
    unfinished = [(phase, until) for phase, until in ends if not _is_finished(config, phase, until)]
    started = [
        (phase, until)
        for phase, until in unfinished
        if (view := view_phase(config, phase)).steps or view.trainer
    ]
    return (started or unfinished or ends[-1:])[0]


def is_exported(config: RunConfig, phase: Phase, until: int) -> bool:
    """Return whether a phase is finished, and its weights and its state are published."""
    return view_phase(config, phase).is_exported and _is_finished(config, phase, until)


def _is_finished(config: RunConfig, phase: Phase, until: int) -> bool:
    return view_phase(config, phase).end == until


def _epoch_size(config: RunConfig) -> int:
    """Count the samples in an epoch: images of the dataset, or rows of a text family's cache."""
    from zerotrain.data.dataset import read_dataset

    data = DataFolder(config.data_name)
    if not config.is_text:
        return read_dataset(data.path, verify=False).epoch_size
    cache = data.cache(config.cache_size(config.phases[0]))
    return int(artifact.read(cache, "cache", verify=False).content["epoch_size"])


def choose_step(config: RunConfig, phase: Phase, at: str, until: int, file: Path) -> int:
    """Choose the saved step at which the phase ends; its checkpoint is complete.

    Args:
        config: The run.
        phase: The phase to cut.
        at: "last" or a step.
        until: The step of the phase's current end.
        file: The configuration file, for messages.

    Raises:
        PipelineError: no step or not this step is saved, or the phase is trained to its end.
    """
    from zerotrain.state.checkpoint import Checkpoint

    view = view_phase(config, phase)
    progress, named = view.places.progress, f"{config.run}/{phase.name}"
    steps = [step for step in view.steps if step <= until]
    saved = ", ".join(map(str, steps))
    if not steps:
        aside = any(saved_steps(folder) for folder in progress.parent.glob("progress.stale-*"))
        raise PipelineError(
            f"{named}: nothing has been saved that could be cut off",
            hint=f"change its `launch:` in {file} and start again with "
            f"`{train_command(file)}`: nothing is lost"
            + (f"; `zerotrain progress accept {named}` takes set-aside progress back" * aside),
        )
    if at != "last" and (not at.isdecimal() or int(at) not in steps):
        raise PipelineError(
            f"--at {at}: no such step is saved of {named}", hint=f"saved: {saved}; or `last`"
        )
    for step in reversed(steps) if at == "last" else [int(at)]:
        try:
            Checkpoint(step_folder(progress, step))
        except PipelineError as error:
            if at != "last":
                raise PipelineError(error.what, hint=f"choose another; saved: {saved}") from error
            print_message(f"{error.what}; the checkpoint before it is taken")
            continue
        if step == until:
            earlier = f", or cut it earlier: --at {steps[-2]}" if steps[1:] else ""
            raise PipelineError(
                f"{named} is trained to its end, step {until}; it is not published yet",
                hint=_handle_later_checkpoints(step_folder(progress, step), phase, file) + earlier,
            )
        return step
    raise PipelineError(
        f"{named}: no checkpoint is whole",
        hint=f"restore one of them from a copy; to restart the phase, move {progress} away and "
        f"change its `launch:` in {file}",
    )


def _handle_later_checkpoints(checkpoint: Path, phase: Phase, file: Path) -> str:
    """Describe how to continue with another launch from a checkpoint at the phase's end."""
    launch, train = launch_differences(checkpoint, phase)
    if launch or train:
        # Training refuses to publish it under a launch that it was not trained with.
        former = ", ".join(f"{key}: {value}" for key, value in {**launch, **train}.items())
        return (
            f"it was trained under another launch than it has now: write the former one back in "
            f"{file} ({former}), and append a phase with a later end under the new one"
        )
    return (
        f"`{train_command(file)}` publishes it; to continue after it with another "
        f"launch, append a phase to {file}"
    )


def launch_differences(checkpoint: Path, phase: Phase) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint's values that the phase has changed since.

    Returns:
        The differing values of its `launch`, and of its training.
    """
    engine = _engine(checkpoint)
    keys = ("preset", "num_processes", "mixed_precision")
    # The planner's choice counts as the phase's.
    own = keys[1:] if phase.launch.preset == "auto" else keys
    launch = _differing(engine, phase.launch, own)
    train = _differing(engine, phase.train, ("global_batch_size", "gradient_accumulation_steps"))
    if "num_processes" in launch:
        launch |= processes_before(phase, launch.pop("num_processes"))
    return launch, train


def made_under(checkpoint: Path, phase: Phase) -> dict[str, Any]:
    """Return the values that a checkpoint was made with, else the phase's."""
    return {**vars(phase.train), **vars(phase.launch), **_engine(checkpoint)}


def _engine(checkpoint: Path) -> dict[str, Any]:
    engine = read_record(checkpoint / "checkpoint.json", TrainedPosition)["engine"]
    if "world_size" in engine:
        engine["num_processes"] = engine["world_size"]
    return {**engine}


def _differing(engine: dict[str, Any], section: object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: engine[key] for key in keys if key in engine and engine[key] != getattr(section, key)
    }


def view_phase(config: RunConfig, phase: Phase) -> PhaseView:
    """Return a phase as far as it has come."""
    return PhaseView(phase_folder(config, phase))


def phase_folder(config: RunConfig, phase: Phase) -> Path:
    """Return the folder of a phase's results."""
    return RunFolder(config.run).phase(phase.name).path


def origin_of(config: RunConfig) -> tuple[int, int]:
    """Return the step and samples at which a run begins: those of an imported state, if any."""
    if not config.resume_from_checkpoint:
        return 0, 0
    state = artifact.read(RunFolder(config.run).imported_state, "state", verify=False)
    position = read_position(state, "state.json")
    return position.step, position.samples


PUBLISHING = ("render_launch", "train_phase", "export_weights")
"""The rules that a cut runs, once each; other jobs mean that inputs have changed."""


def check_only_ends_phase(
    switched: RunConfig, file: Path, phase: Phase, targets: list[str]
) -> dict[str, int]:
    """Check that Snakemake would only end the phase, as its inputs may have changed.

    Args:
        switched: The run with the switch.
        file: Its file.
        phase: The phase to end.
        targets: The files that end it.

    Returns:
        The jobs that end the phase, by rule.

    Raises:
        PipelineError: a phase cannot be launched so, or other jobs would run; the message names
            them.
    """
    check_launches(file, switched)
    jobs = reruns.count_jobs({str(file): switched}, targets)
    other = sorted(rule for rule, count in jobs.items() if rule not in PUBLISHING or count > 1)
    if other:
        inputs = [f"{folder}/{MANIFEST}" for folder in _trained_from(switched, phase).values()]
        raise PipelineError(
            f"{file}: what {phase.name} depends on has changed since it was trained: "
            f"{', '.join(other)} would run first; {file} is as it was",
            hint="undo the change; or bring it up to date with "
            f"`{snakemake.command(file, inputs)}` (first with -n, which shows the reasons) and "
            "call this again",
        )
    return jobs


def read_present(config: RunConfig, phase: Phase) -> Inputs:
    """Read a phase's launch and the inputs that it is trained from, unverified."""
    parents = {
        name: artifact.read(folder, "state" if name == "start" else name, verify=False)
        for name, folder in _trained_from(config, phase).items()
    }
    launch = phase_folder(config, phase) / "launch" / "run.yaml"
    return Inputs(read_run_yaml(launch), parents)


def _trained_from(config: RunConfig, phase: Phase) -> dict[str, Path]:
    """Return the folders that a phase is trained from, except its launch."""
    found = training_of(config, phase).inputs
    return {name: folder for name, folder in found.items() if name != "launch"}


def check_same_launch(config: RunConfig, phase: Phase) -> None:
    """Check that train_phase would not set the progress aside and train from the start.

    Raises:
        PipelineError: values differ; the message names them.
    """
    progress = phase_folder(config, phase) / "progress"
    if set_aside.read_recorded(progress, sys.maxsize) is None:
        return  # no checkpoint can be read
    present = read_present(config, phase)
    found = set_aside.read_recorded(progress, present.phase.derived.until_step)
    if set_aside.is_accepted(progress, present.trains) or found is None:
        return
    changed = conditions.changes(found[1], present.trains)
    if changed:
        raise PipelineError(
            f"{progress}: was trained with other values than {phase.name} has now "
            f"({format_differences(changed)}), so training would restart",
            hint="undo the change; or continue from these checkpoints in spite of it with --accept",
        )


def holds_split(config: RunConfig, split: Split) -> bool:
    """Return whether a configuration has a switch: the phase that ends, then the new one."""
    for ended, following in pairwise(config.phases):
        if (ended.name, ended.until) == (split.phase, f"{split.step} steps"):
            preset = following.launch.preset
            return (following.name, preset) == (split.name, split.launch.get("preset", preset))
    return False


def check_switched(file: Path, split: Split) -> None:
    """Check the result of a switch: its configuration, and the artifacts exported at its step.

    Raises:
        PipelineError: they differ; the message names what is there instead.
    """
    config = read_config(file)
    folder = RunFolder(config.run).phase(split.phase).path
    again = f"run the same command again; what {folder} holds is kept"
    if not holds_split(config, split):
        found = ", ".join(f"{one.name} until {one.until}" for one in config.phases)
        raise PipelineError(
            f"{file}: was edited during the switch and has lost it: its phases are {found}",
            hint=again,
        )
    end = view_phase(config, config.phase(split.phase)).end
    if end != split.step:
        raise PipelineError(
            f"{folder}/checkpoint: ends at step {end}; the switch was to end it at {split.step}",
            hint=again,
        )
    # The exported best step may be earlier than the end of the phase.
    trained = read_record(folder / "checkpoint/checkpoint.json", Position)["step"]
    state = artifact.read(folder / "state", "state", verify=False)
    weights = artifact.read(folder / "weights", "weights", verify=False)
    steps = {
        state.folder: read_record(state.path("state.json"), Position)["step"],
        weights.folder: weights.content["step"],
    }
    for part, step in steps.items():
        if step != trained:
            raise PipelineError(
                f"{part}: is of step {step}; the checkpoint that was to be exported is of step "
                f"{trained}",
                hint=again,
            )
