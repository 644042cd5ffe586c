"""Checks of the phases: preset, launch, schedule, and the switch into each.

render_launch resolves a phase once dataset and base exist. Here it is resolved with stand-ins for
both, to refuse at once whatever depends on the configuration alone. Checks that depend on the
length of an epoch are left to render_launch.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.layout import RunFolder
from zerotrain.config import optimizers
from zerotrain.config.problems import collect_errors
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.trackers import check_installed
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset, read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import ModelSizes
from zerotrain.state.position import TrainerState
from zerotrain.training.checkpointing.preflight import find_losses, state_slots

PRESETS = Path("config/launch")
STAND_IN = ModelSizes(10**9, 10**9, 10**7, "weight", 10**7, 10**3)
"""A stand-in model; its sizes determine bucket sizes and cause no refusal."""
FAR = 10**9
"""Steps beyond any real end, for ends that depend on the length of an epoch."""


def check_phases(run: RunConfig) -> list[PipelineError]:
    """List what is wrong with the phases, individually and in sequence."""
    known = run if _ends_are_known(run) else _with_far_ends(run)
    resolved: list[ResolvedPhase | None] = []
    problems = []
    for phase in run.phases:
        try:
            resolved.append(_resolve(known, phase.name))
        except PipelineError as error:
            problems.append(error)
            resolved.append(None)
        if artifact.is_published(RunFolder(run.run).phase(phase.name).checkpoint):
            continue  # already trained, maybe on another machine: nothing is needed here
        problems += collect_errors(
            lambda phase=phase: check_installed(phase.train.report_to),  # type: ignore[misc]
            partial(_check_bitsandbytes, phase.name, phase.train.optimizer),
            partial(_check_offload_path, phase.name, phase.launch.offload_path),
        )
    for before, after in pairwise(resolved):
        if before and after:
            problems += collect_errors(partial(_check_switch, before, after))
    return problems


def _ends_are_known(run: RunConfig) -> bool:
    """Return whether each phase's end is independent of the dataset and of a checkpoint."""
    epochs = any(phase.until.endswith("epochs") for phase in run.phases)
    return not epochs and run.resume_from_checkpoint is None


def _with_far_ends(run: RunConfig) -> RunConfig:
    """Return the run with ends beyond any save, warm-up or step of its phases."""
    phases = [
        phase.model_copy(
            update={
                "until": f"{(place + 1) * FAR} steps",
                # Momentum grows by decay_mom_rate each step; by such an end it would exceed any
                # bound.
                "train": phase.train.model_copy(
                    update={
                        "lr_scheduler_args": {
                            key: value
                            for key, value in phase.train.lr_scheduler_args.items()
                            if key != "decay_mom_rate"
                        }
                    }
                ),
            }
        )
        for place, phase in enumerate(run.phases)
    ]
    return run.model_copy(update={"phases": phases})


def _resolve(run: RunConfig, name: str) -> ResolvedPhase | None:
    """Resolve a phase with stand-ins; None for `auto`, which depends on the machine."""
    preset = _preset(run.phase(name).launch.preset)
    if preset.engine == "auto":
        return None
    sizes = STAND_IN if preset.engine == "deepspeed" else None
    return resolve_phase(LaunchSettings.of(run, name), preset, 1, sizes)


@cache  # phases and runs share them
def _preset(name: str) -> Preset:
    return read_preset(PRESETS / f"{name}.yaml")


def _check_bitsandbytes(phase: str, optimizer: str) -> None:
    if optimizers.find(optimizer)[0].name != "adamw8bit":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PipelineError(
            f"phase {phase}: optimizer {optimizer} needs bitsandbytes, which is not installed",
            hint="install it (`pip install bitsandbytes`); or optimizer: adamw, with launch: "
            "zero2_offload where its moments do not fit the GPU",
        )


def _check_offload_path(phase: str, path: str | None) -> None:
    """Check that a path is no file. Variables are expanded only on the training machine."""
    if path is None or "$" in path:
        return
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise PipelineError(
            f"phase {phase}: launch.offload_path: {path} is a file",
            hint="name a folder on a fast disk",
        )


def _check_switch(before: ResolvedPhase, after: ResolvedPhase) -> None:
    """Check that a switch loses no state but what the phase's `allow` names."""
    losses = find_losses(_position_after(before), state_slots(before), after)
    if refused := [text for name, text in losses.items() if name not in after.allow]:
        raise PipelineError(
            f"phase {after.phase}: {'; '.join(refused)} (after phase {before.phase})",
            hint=f"to continue without, write `allow: [{', '.join(losses)}]` into the phase "
            f"{after.phase}; to keep it, change the phase so that it fits the one before",
        )


def _position_after(phase: ResolvedPhase) -> TrainerState:
    """Return the position at a phase's end, with the fields that the next phase reads."""
    fp16 = phase.launch.fp16
    scaled = {"scale": fp16.loss_scale or 2.0**fp16.initial_scale_power}
    return TrainerState(
        run=phase.run,
        phase=phase.phase,
        step=phase.derived.until_step,
        samples=phase.derived.until_step * phase.train.global_batch_size,
        optimizer=phase.train.optimizer,
        optimizer_step=phase.derived.until_step,
        param_groups=[],
        lr_scheduler=phase.train.lr_scheduler,
        lr_scheduler_steps=phase.derived.lr_scheduler_steps,
        rng={},
        engine={},
        ran_on={},
        history=[],
        loss_scale=scaled if phase.launch.mixed_precision == "fp16" else None,
    )
