"""The schedule of a phase in one form: what DeepSpeed names otherwise stands under our own keys."""

from __future__ import annotations

from typing import Any

from zerotrain.config import TrainConfig
from zerotrain.config.lr_scheduler_args import ARGUMENTS, OWN_KEYS
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.settings import Source
from zerotrain.optimizers import first_beta
from zerotrain.training.schedule import momentum

FOLLOWING = {
    "cycle_second_step_size": "cycle_first_step_size",
    "cycle_second_stair_count": "cycle_first_stair_count",
}
"""Arguments whose default is another argument."""


def with_own_keys(train: TrainConfig, sources: dict[str, tuple[Source, str]]) -> TrainConfig:
    """Move arguments that are keys of `train` under another name to these, and fill in the others.

    Afterwards learning_rate, lr_warmup_steps and lr_scheduler_steps say it alone, and
    lr_scheduler_args holds every other argument of the schedule. `sources` is brought up to date,
    with an entry `lr_scheduler_args.KEY` for each.
    """
    given = train.lr_scheduler_args
    found: dict[str, Any] = {}
    changes: dict[str, Any] = {"lr_scheduler_args": found}
    for key, field in ARGUMENTS[train.lr_scheduler].model_fields.items():
        own = OWN_KEYS.get(key)
        if own and key in given:
            changes[own], sources[own] = given[key], ("user", f"lr_scheduler_args.{key}")
        elif own:
            if sources[own][0] == "default" and field.default is not None:
                changes[own] = field.default
                sources[own] = ("default", f"{train.lr_scheduler}'s {key}, as DeepSpeed has it")
        elif key in given and given[key] is not None:
            found[key], sources[f"lr_scheduler_args.{key}"] = given[key], ("user", "")
        elif key in FOLLOWING:
            found[key] = found[FOLLOWING[key]]
            sources[f"lr_scheduler_args.{key}"] = ("derived", FOLLOWING[key])
        else:
            found[key], sources[f"lr_scheduler_args.{key}"] = field.default, ("default", "")
    return train.model_copy(update=changes)


def refuse_impossible_schedule(phase: ResolvedPhase) -> None:
    """Refuse a warm-up beyond the horizon, and a momentum that grows to 1 within the phase.

    Raises:
        PipelineError: naming the keys.
    """
    warmup, horizon = phase.lr_warmup_steps, phase.lr_scheduler_steps
    known = ARGUMENTS[phase.lr_scheduler].model_fields
    if warmup > horizon:
        keys = [key for key in ("warmup_num_steps", "total_num_steps") if key in known]
        names = "".join(f" (lr_scheduler_args.{key})" for key in keys[:1])
        ends = "".join(f" (lr_scheduler_args.{key})" for key in keys[1:])
        raise PipelineError(
            f"phase {phase.phase}: {warmup} steps of warm-up, but the schedule has {horizon}",
            hint=f"lower lr_warmup_steps{names} or raise lr_scheduler_steps{ends}",
        )
    beta1 = momentum(phase, phase.until_step - 1, horizon)
    if beta1 is not None and not first_beta(phase.optimizer, phase.optimizer_args):
        raise PipelineError(
            f"phase {phase.phase}: {phase.lr_scheduler} cycles the momentum, and optimizer "
            f"{phase.optimizer} has none",
            hint="set lr_scheduler_args.cycle_momentum to false, or choose an optimizer with one: "
            "adamw, or sgd with optimizer_args: {momentum: 0.9}",
        )
    if beta1 is not None and beta1 >= 1:
        raise PipelineError(
            f"phase {phase.phase}: lr_scheduler_args.decay_mom_rate "
            f"{phase.lr_scheduler_args['decay_mom_rate']:g} lets the first beta grow to {beta1:g} "
            f"by step {phase.until_step}, but it must stay below 1",
            hint="lower decay_mom_rate or cycle_max_mom, or raise decay_step_size",
        )
