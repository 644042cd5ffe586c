"""Checks of `zerotrain switch`: that it only ends a phase, at the right step."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import MANIFEST
from zerotrain.artifact.documents import read_record
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.recipe import format_differences
from zerotrain.config.models import Phase
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns, snakemake
from zerotrain.graph.artifacts import training_of
from zerotrain.graph.checks import check_launches
from zerotrain.graph.switch.point import phase_folder, view_phase
from zerotrain.graph.switch.split import Split
from zerotrain.launch.files import read_run_yaml
from zerotrain.run.phase import Position
from zerotrain.training.checkpointing import conditions, set_aside
from zerotrain.training.checkpointing.preflight import Inputs

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
