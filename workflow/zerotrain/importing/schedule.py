"""The scheduler block, or what the program uses without one."""

from __future__ import annotations

import difflib
import math
from fractions import Fraction
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.draft import AUTO, Draft, Outcome
from zerotrain.importing.keys import unknown_key
from zerotrain.importing.program import RUN, Program

ONE_CYCLE_BETA2 = 0.99
"""deepspeed/runtime/lr_schedules.py: OneCycle, whatever the optimizer was given."""
DEEPSPEED_NAMES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
TRAINER_NAMES = {
    "constant": "constant",
    "constant_with_warmup": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "polynomial": "polynomial",
    "cosine_with_restarts": "cosine_with_restarts",
}
"""Names by which trainers' flags call them."""

PARAMS = "scheduler.params."
DEEPSPEED_HAS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_min_lr": 0, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {},
    "LRRangeTest": {},
}
"""What DeepSpeed takes where a parameter is absent."""

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
TAKES: dict[str, tuple[str, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
    ),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size",
        "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count",
        "decay_step_size", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
        "lr_range_test_staircase",
    ),
}  # fmt: skip
"""The parameters of each."""

OURS = {"warmup_num_steps": "train.lr_warmup_steps", "total_num_steps": "train.lr_scheduler_steps"}
PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Rates that are our learning rate under another name."""


def read_schedule(flat: dict[str, Any], draft: Draft, program: Program) -> None:
    """Settle the schedule.

    Raises:
        PipelineError: an unknown name, with the nearest, or a schedule that is not ours.
    """
    params = {key.removeprefix(PARAMS): flat[key] for key in flat if key.startswith(PARAMS)}
    if "scheduler.type" not in flat:
        if params:
            raise PipelineError(
                "scheduler has params, but no type", hint="add type, as WarmupLR, or take it out"
            )
        _without_block(draft, program)
        return
    name = _schedule_name(flat["scheduler.type"])
    draft.keep("scheduler.type", flat["scheduler.type"], "train.lr_scheduler", name)
    for short, value in DEEPSPEED_HAS[name].items():
        if short not in params:
            _put(draft, short, None, value, "DeepSpeed's own, where params has none")
    _without_second_beta(draft, name, params)
    for short, value in params.items():
        if short not in TAKES[name]:
            known = [PARAMS + own for own in TAKES[name]]
            raise unknown_key(f"schedule {name}", PARAMS + short, known)
        if value == AUTO:
            _resolve(draft, program, short)
        elif short in PEAKS:
            _peak(draft, short, value)
        else:
            if short in OURS and value < (short == "total_num_steps"):
                raise PipelineError(f"{PARAMS}{short} is {value}", hint="give steps from 1 on")
            _put(draft, short, value, value, "")


def _without_second_beta(draft: Draft, name: str, params: dict[str, Any]) -> None:
    """OneCycle sets Adam's first beta at every step, and the second to 0.99 without a word."""
    if name != "OneCycle" or not params.get("cycle_momentum", True):
        return
    key, ours = "optimizer.params.betas", "train.adam_beta1"
    if ours in draft.values:
        draft.ignore(key, draft.values.pop(ours), "OneCycle sets the first at every step")
    if draft.values.get("train.optimizer", "adamw") in ("adam", "adamw"):
        given = draft.values.pop("train.adam_beta2", None)
        reason = "DeepSpeed's OneCycle trains with this second beta where it moves the first"
        draft.put("changed", key, given, "train.adam_beta2", ONE_CYCLE_BETA2, reason)


def _schedule_name(given: str) -> str:
    known = {name.casefold(): name for name in DEEPSPEED_NAMES}
    if given.casefold() in known:
        return known[given.casefold()]
    near = difflib.get_close_matches(given.casefold(), known, n=3, cutoff=0.5)
    names = ", ".join(known[name] for name in near) or ", ".join(DEEPSPEED_NAMES)
    raise PipelineError(
        f"scheduler.type: no schedule is called {given!r}", hint=f"the nearest: {names}"
    )


def _put(draft: Draft, short: str, given: Any, value: Any, reason: str) -> None:
    """One parameter of the schedule: steps are keys of ours, the rest are its arguments."""
    key = PARAMS + short
    if short in OURS:
        if given is None:
            draft.default(OURS[short], value, reason)
        else:
            draft.put(
                "resolved" if given == AUTO else "kept", key, given, OURS[short], value, reason
            )
        return
    arguments = draft.values.setdefault("train.lr_scheduler_args", {})
    arguments[short] = value
    outcome: Outcome = "default" if given is None else "resolved" if given == AUTO else "kept"
    said = f"{short} {value}: {reason}" if reason else ""
    draft.say(outcome, key, given, said, "train.lr_scheduler_args", value)


def _peak(draft: Draft, short: str, value: Any) -> None:
    """The rate that the schedule is measured by is our learning rate, whatever the optimizer's."""
    key, ours = f"{PARAMS}{short}", "train.learning_rate"
    if not value > 0:
        raise PipelineError(f"{key} is {value!r}", hint="give a number above 0")
    if draft.values.get(ours, value) == value:
        draft.keep(key, value, ours)
    else:
        before = draft.values[ours]
        draft.values[ours] = value
        draft.put(
            "changed", key, value, ours, value,
            f"the schedule sets every step's rate, so that the optimizer's {before:g} never holds",
        )  # fmt: skip


def _resolve(draft: Draft, program: Program, short: str) -> None:
    key = PARAMS + short
    steps = program.value("phases.until")
    total = steps[0] if steps is not None and isinstance(steps[0], int) and steps[0] > 0 else None
    if short == "warmup_min_lr":
        _put(draft, short, AUTO, 0, f"{program.name} begins at 0")
    elif short == "warmup_num_steps":
        warmup, reason = _warmup(program, total)
        if warmup is None:
            draft.say("resolved", key, AUTO, "the run's own", OURS[short])
        else:
            _put(draft, short, AUTO, max(1, warmup), reason)
    elif short == "total_num_steps" and total is not None:
        _put(draft, short, AUTO, total, steps[1] if steps else "")
    elif short == "total_num_steps":
        draft.say("resolved", key, AUTO, "the last phase's end", OURS[short])
    elif short in PEAKS:
        draft.say("resolved", key, AUTO, "the learning rate itself", "train.learning_rate")
    else:
        draft.say("resolved", key, AUTO, "nothing fills it: DeepSpeed's own")


def _warmup(program: Program, total: int | None) -> tuple[int | None, str]:
    ratio = program.given("warmup_ratio")
    if ratio and total is not None:
        return math.ceil(Fraction(str(ratio)) * total), f"warmup_ratio {ratio:g} of {total} steps"
    if program is RUN:
        return None, ""
    found = program.value("train.lr_warmup_steps")
    if found is None:
        return 1, "only the script knows: one step"
    return int(found[0]), found[1]


def _without_block(draft: Draft, program: Program) -> None:
    """What a program uses where the file has no scheduler."""
    ours = "train.lr_scheduler"
    if program is RUN:
        return
    if ours in program.fixed:
        draft.default(ours, program.fixed[ours], f"in the code of {program.name}")
    elif program.name == "SimpleTuner":
        draft.default(ours, "WarmupLR", "SimpleTuner under DeepSpeed, where none is configured")
        _put(draft, "warmup_min_lr", None, 0, "DeepSpeed's own")
        _put(draft, "warmup_type", None, "log", "DeepSpeed's own")
        warmup = program.value("train.lr_warmup_steps")
        if warmup is not None:
            draft.default("train.lr_warmup_steps", *warmup)
        if program.given("lr_scheduler") is not None:
            draft.ignore(
                "lr_scheduler", program.given("lr_scheduler"),
                "SimpleTuner does not use it under DeepSpeed; train.lr_scheduler would be it",
            )  # fmt: skip
    elif program.name == "DiffSynth-Studio":
        draft.default(
            ours, "constant",
            "DiffSynth-Studio's ConstantLR, without its first five steps at a third of the rate",
        )  # fmt: skip
    elif program.value(ours) is not None:
        flag_schedule(draft, program)
    else:
        draft.default(ours, "constant", "accelerate adds none, and only the script knows its own")


def flag_schedule(draft: Draft, program: Program) -> None:
    """A schedule that flags name.

    Raises:
        PipelineError: zerotrain does not have it.
    """
    given, reason = program.value("train.lr_scheduler") or ("constant", "")
    name = TRAINER_NAMES.get(str(given))
    if name is None:
        raise PipelineError(
            f"lr_scheduler {given!r} is not one of zerotrain's",
            hint=f"choose one of {', '.join([*TRAINER_NAMES, *DEEPSPEED_NAMES])}",
        )
    flag = next(key.name for key in program.table.values() if key.ours == "train.lr_scheduler")
    if program.given(flag) is not None:
        reason = ""
        if program.name == "HF Trainer":
            reason = "also where a guide says WarmupDecayLR: a file without one leaves it to this"
        draft.keep(flag, given, "train.lr_scheduler", name, reason)
    else:
        if not program.known and program.name == "HF Trainer":
            reason += "; openMind's guide calls it WarmupDecayLR, which is this line without a log"
        draft.default("train.lr_scheduler", name, reason)
    ratio = program.given("warmup_ratio")
    if ratio:
        draft.keep("warmup_ratio", ratio, "train.lr_warmup_ratio")
        if program.given("warmup_steps"):
            raise PipelineError(
                "warmup_steps and warmup_ratio are both given", hint="take one of them out"
            )
    elif ratio is not None:
        draft.ignore("warmup_ratio", ratio, "no warm-up")
    if not ratio and given != "constant":
        warmup = program.value("train.lr_warmup_steps")
        if warmup is not None and warmup[0]:
            named = program.given("lr_warmup_steps") or program.given("warmup_steps")
            if named:
                name = "warmup_steps" if program.given("warmup_steps") else "lr_warmup_steps"
                draft.keep(name, named, "train.lr_warmup_steps", int(named))
            else:
                draft.default("train.lr_warmup_steps", *warmup)
