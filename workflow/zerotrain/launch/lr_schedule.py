"""Canonical form of a phase's schedule: DeepSpeed's names become our own keys."""

from __future__ import annotations

from typing import Any

from zerotrain.config.lr_scheduler import ARGUMENTS, OWN_KEYS
from zerotrain.config.optimizers import first_beta
from zerotrain.config.training import TrainConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase, Source
from zerotrain.launch.schedules import momentum

FOLLOWING = {
    "cycle_second_step_size": "cycle_first_step_size",
    "cycle_second_stair_count": "cycle_first_stair_count",
}
"""Arguments whose default is the value of another argument."""


def with_own_keys(train: TrainConfig, sources: dict[str, tuple[Source, str]]) -> TrainConfig:
    """Move arguments that duplicate keys of `train` to these keys, and fill in the others.

    Afterwards only learning_rate, lr_warmup_steps and lr_scheduler_steps have these values, and
    lr_scheduler_args has every other argument of the schedule. `sources` is updated, with an entry
    `lr_scheduler_args.KEY` for each.
    """
    given = train.lr_scheduler_args
    arguments: dict[str, Any] = {}
    changes: dict[str, Any] = {"lr_scheduler_args": arguments}
    for key, field in ARGUMENTS[train.lr_scheduler].model_fields.items():
        own = OWN_KEYS.get(key)
        if own and key in given:
            changes[own], sources[own] = given[key], ("user", f"lr_scheduler_args.{key}")
        elif own:
            if sources[own][0] == "default" and field.default is not None:
                changes[own] = field.default
                sources[own] = ("default", f"{train.lr_scheduler}'s {key}, as DeepSpeed has it")
        elif key in given and given[key] is not None:
            arguments[key], sources[f"lr_scheduler_args.{key}"] = given[key], ("user", "")
        elif key in FOLLOWING:
            arguments[key] = arguments[FOLLOWING[key]]
            sources[f"lr_scheduler_args.{key}"] = ("derived", FOLLOWING[key])
        else:
            arguments[key], sources[f"lr_scheduler_args.{key}"] = field.default, ("default", "")
    return train.model_copy(update=changes)


def check_schedule(phase: ResolvedPhase) -> None:
    """Refuse a warm-up beyond the horizon, and a cycled momentum that is impossible.

    Raises:
        PipelineError: the message names the keys.
    """
    warmup, horizon = phase.train.lr_warmup_steps, phase.derived.lr_scheduler_steps
    known = ARGUMENTS[phase.train.lr_scheduler].model_fields
    if warmup > horizon:
        keys = [key for key in ("warmup_num_steps", "total_num_steps") if key in known]
        names = "".join(f" (lr_scheduler_args.{key})" for key in keys[:1])
        ends = "".join(f" (lr_scheduler_args.{key})" for key in keys[1:])
        raise PipelineError(
            f"phase {phase.phase}: {warmup} steps of warm-up, but the schedule has {horizon}",
            hint=f"lower lr_warmup_steps{names} or raise lr_scheduler_steps{ends}",
        )
    decay = phase.train.lr_scheduler_args.get("num_decay_steps", 0)
    if phase.train.lr_scheduler_args.get("num_stable_steps") is None and warmup + decay > horizon:
        raise PipelineError(
            f"phase {phase.phase}: {warmup} steps of warm-up and {decay} of decay "
            f"(lr_scheduler_args.num_decay_steps), but the schedule has {horizon}",
            hint="lower lr_warmup_steps or num_decay_steps, or raise lr_scheduler_steps",
        )
    beta1 = momentum(phase.train, phase.derived.until_step - 1, horizon)
    if beta1 is not None and not first_beta(phase.train.optimizer, phase.train.optimizer_args):
        raise PipelineError(
            f"phase {phase.phase}: {phase.train.lr_scheduler} cycles the momentum, and optimizer "
            f"{phase.train.optimizer} has none",
            hint="set lr_scheduler_args.cycle_momentum to false, or choose an optimizer with one: "
            "adamw, or sgd with optimizer_args: {momentum: 0.9}",
        )
    if beta1 is not None and beta1 >= 1:
        raise PipelineError(
            f"phase {phase.phase}: lr_scheduler_args.decay_mom_rate "
            f"{phase.train.lr_scheduler_args['decay_mom_rate']:g} lets the first beta grow to "
            f"{beta1:g} by step {phase.derived.until_step}, but it must stay below 1",
            hint="lower decay_mom_rate or cycle_max_mom, or raise decay_step_size",
        )
