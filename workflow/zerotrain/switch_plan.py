"""The plan of `zerotrain switch`: what to cut where, and what Snakemake would do for it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from zerotrain.config import Phase, RunConfig, parse_config
from zerotrain.config.edit import Split
from zerotrain.config.find import CONFIGS
from zerotrain.errors import PipelineError
from zerotrain.switch_before import Request
from zerotrain.switch_checks import refuse_other_jobs
from zerotrain.switch_edit import SwitchEdit
from zerotrain.switch_point import (
    RESULTS,
    choose_step,
    made_otherwise,
    phase_folder,
    unfinished_phase,
)
from zerotrain.training.progress_folder import step_folder

PRESETS = CONFIGS / "launch"


@dataclass(frozen=True)
class Plan:
    """A switch that can be made."""

    config: RunConfig
    phase: Phase
    edit: SwitchEdit
    targets: list[str]
    jobs: dict[str, int]


def plan_switch(config: RunConfig, text: str, file: Path, folder: Path, request: Request) -> Plan:
    """Plan what a user asks for.

    Args:
        config: The run.
        text: Its configuration's text.
        file: The configuration's file.
        folder: Where the switch may write meanwhile.
        request: What is asked for.

    Raises:
        PipelineError: nothing to cut, or it cannot be cut without loss.
    """
    phase, until = unfinished_phase(config, file)
    step = choose_step(config, phase, request.at, until, file)
    split = _split(config, phase, step, request)
    edit = SwitchEdit(file=file, former=text, split=split, until=until)
    _check_split(edit.text.encode(), file, split)
    return check_plan(config, phase, edit, edit.text, folder)


def check_plan(config: RunConfig, phase: Phase, edit: SwitchEdit, text: str, folder: Path) -> Plan:
    """Check what Snakemake would do with a configuration that has the edit."""
    targets = [
        f"{phase_folder(config, phase)}/{part}/manifest.json" for part in ("state", "weights")
    ]
    jobs = refuse_other_jobs(text, edit.file, config, phase, targets, folder)
    return Plan(config, phase, edit, targets, jobs)


def check_preset(preset: str) -> None:
    """Check that there is a launch preset.

    Raises:
        PipelineError: there is not; the message has those that are.
    """
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if preset not in known:
        near = difflib.get_close_matches(preset, known, n=1)
        raise PipelineError(
            f"--to {preset}: no such launch preset",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"presets in {PRESETS}: {', '.join(known) or 'none'}",
        )


def _split(config: RunConfig, phase: Phase, step: int, request: Request) -> Split:
    """What to edit. Where the file already has the new launch, the phase gets its own back."""
    preset, offload_path = request.preset, request.offload_path
    rolling = step_folder(phase_folder(config, phase) / "progress", step)
    launch, ended = made_otherwise(rolling, phase)
    if phase.launch.preset == preset and not launch and not ended:
        raise PipelineError(
            f"{config.run}/{phase.name} trains under {preset} already",
            hint="start it again, and it continues where it stopped; to switch something else, "
            "write it into the phase first",
        )
    path = {} if offload_path is None else {"offload_path": offload_path}
    return Split(
        phase=phase.name,
        step=step,
        name=request.name or _free_name(config, f"{phase.name}-{preset}"),
        launch={"preset": preset, **path},
        ended=ended,
        ended_launch=launch,
    )


def _free_name(config: RunConfig, base: str) -> str:
    taken = {phase.name for phase in config.phases}
    name, count = base, 1
    while name in taken or (RESULTS / config.run / name).exists():
        count += 1
        name = f"{base}-{count}"
    return name


def _check_split(text: bytes, file: Path, split: Split) -> None:
    try:
        parse_config(YAML(typ="safe").load(text.decode()), str(file))
    except PipelineError as error:
        hint = f"{error.hint}; {file} is as it was"
        if "offload_path" in error.what and "offload_path" not in split.launch:
            hint = f"name the folder with --offload-path; {file} is as it was"
        raise PipelineError(f"with the new phase {split.name}, {error.what}", hint=hint) from error
