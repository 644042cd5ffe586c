"""The scheduler block, or the program's schedule without one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from zerotrain.config.lr_scheduler import ARGUMENTS, OWN_KEYS
from zerotrain.config.suggestions import nearest
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig, Outcome
from zerotrain.importers.key_values import put_row, to_object
from zerotrain.importers.program import RUN, Program
from zerotrain.launch.keys import unknown_key

ONE_CYCLE_BETA2 = 0.99
"""deepspeed/runtime/lr_schedules.py: OneCycle's second beta, whatever the optimizer's setting."""
DEEPSPEED_NAMES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
FLAG_NAMES = (
    "constant", "constant_with_warmup", "linear", "cosine", "polynomial", "cosine_with_restarts",
)  # fmt: skip
"""Schedules with the same names in flags of diffusers' scripts, in HF Trainer and here."""
TRAINER_NAMES = (
    *FLAG_NAMES, "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)  # fmt: skip
"""Schedules of HF Trainer."""

PARAMS = "scheduler.params."
_WARMUP = {"warmup_min_lr": 0, "warmup_num_steps": 1000, "warmup_type": "log"}
DEEPSPEED_HAS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP,
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
"""DeepSpeed's defaults for missing parameters of a warm-up; those of the others are ours."""
PEAK = "train.learning_rate"
OURS = {short: f"train.{key}" for short, key in OWN_KEYS.items()}


def read_schedule(flat: dict[str, Any], result: ImportedConfig, program: Program) -> None:
    """Set the schedule.

    Raises:
        PipelineError: the name is unknown, with the nearest one, or the schedule is not supported.
    """
    params = {key.removeprefix(PARAMS): flat[key] for key in flat if key.startswith(PARAMS)}
    if "scheduler.type" not in flat:
        if params:
            raise PipelineError(
                "scheduler has params, but no type", hint="add type, as WarmupLR, or take it out"
            )
        _without_block(result, program)
        return
    name = _schedule_name(flat["scheduler.type"])
    result.keep("scheduler.type", flat["scheduler.type"], "train.lr_scheduler", name)
    for short, value in DEEPSPEED_HAS.get(name, {}).items():
        if short not in params:
            _put(result, short, None, value, "DeepSpeed's own, where params has none")
    _without_second_beta(result, name, params)
    for short, value in params.items():
        if short not in ARGUMENTS[name].model_fields:
            known = [PARAMS + own for own in ARGUMENTS[name].model_fields]
            raise unknown_key(f"schedule {name}", PARAMS + short, known)
        if value == AUTO:
            _resolve(result, program, short)
        elif OURS.get(short) == PEAK:
            _peak(result, short, value)
        else:
            if short in OURS and value < (short == "total_num_steps"):
                raise PipelineError(f"{PARAMS}{short} is {value}", hint="give steps from 1 on")
            _put(result, short, value, value, "")


def _without_second_beta(result: ImportedConfig, name: str, params: dict[str, Any]) -> None:
    """Report that OneCycle sets Adam's first beta at every step, and the second to 0.99."""
    if name != "OneCycle" or not params.get("cycle_momentum", True):
        return
    key, ours = "optimizer.params.betas", "train.adam_beta1"
    if ours in result.values:
        result.ignore(key, result.values.pop(ours), "OneCycle sets the first at every step")
    if result.values.get("train.optimizer", "adamw") in ("adam", "adamw"):
        given = result.values.pop("train.adam_beta2", None)
        reason = "DeepSpeed's OneCycle trains with this second beta where it moves the first"
        result.put("changed", key, given, "train.adam_beta2", ONE_CYCLE_BETA2, reason)


def _schedule_name(given: str) -> str:
    known = {name.casefold(): name for name in DEEPSPEED_NAMES}
    if given.casefold() in known:
        return known[given.casefold()]
    names = ", ".join(nearest(given, DEEPSPEED_NAMES, most=3, cutoff=0.5) or DEEPSPEED_NAMES)
    raise PipelineError(
        f"scheduler.type: no schedule is called {given!r}", hint=f"the nearest: {names}"
    )


def _put(result: ImportedConfig, short: str, given: Any, value: Any, reason: str) -> None:
    """Set one parameter of the schedule: steps are keys of ours, others its arguments."""
    outcome: Outcome = "default" if given is None else "resolved" if given == AUTO else "kept"
    if short in OURS:
        key = OURS[short] if given is None else PARAMS + short
        result.put(outcome, key, given, OURS[short], value, reason)
        return
    ours = "train.lr_scheduler_args"
    result.values.setdefault(ours, {})[short] = value
    text = f"{short} {value}: {reason}" if reason else ""
    result.note(outcome, PARAMS + short, given, text, ours, value)


def _peak(result: ImportedConfig, short: str, value: Any) -> None:
    """Set our learning rate to the peak of the schedule, whatever the optimizer's is."""
    key, before = PARAMS + short, result.values.get(PEAK, value)
    if not value > 0:
        raise PipelineError(f"{key} is {value!r}", hint="give a number above 0")
    if before == value:
        result.keep(key, value, PEAK)
    else:
        result.values[PEAK] = value
        never = f"the optimizer's {before:g} never holds"
        reason = f"the schedule sets every step's rate, so that {never}"
        result.put("changed", key, value, PEAK, value, reason)


def _resolve(result: ImportedConfig, program: Program, short: str) -> None:
    key = PARAMS + short
    steps = program.value("phases.until")
    total = steps[0] if steps is not None and isinstance(steps[0], int) and steps[0] > 0 else None
    if short == "warmup_min_lr":
        _put(result, short, AUTO, 0, f"{program.name} begins at 0")
    elif short == "warmup_num_steps" and total is None and (share := program.given("warmup_ratio")):
        reason = "warmup_ratio, of the steps that the epochs have"
        result.resolve(key, "train.lr_warmup_ratio", share, reason)
    elif short == "warmup_num_steps":
        warmup, reason = _warmup(program, total)
        if warmup is None:
            result.note("resolved", key, AUTO, "the run's own", OURS[short])
        else:
            _put(result, short, AUTO, max(1, warmup), reason)
    elif short == "total_num_steps" and total is not None:
        _put(result, short, AUTO, total, steps[1] if steps else "")
    elif short == "total_num_steps":
        result.note("resolved", key, AUTO, "the last phase's end", OURS[short])
    elif OURS.get(short) == PEAK:
        result.note("resolved", key, AUTO, "the learning rate itself", PEAK)
    else:
        result.note("resolved", key, AUTO, "nothing fills it: DeepSpeed's own")


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


def _without_block(result: ImportedConfig, program: Program) -> None:
    """Set the program's schedule if the file has no scheduler."""
    ours = "train.lr_scheduler"
    if program is RUN:
        return
    if ours in program.fixed:
        program.put(ours, result)
    elif program.name == "SimpleTuner":
        result.assume(ours, "WarmupLR", "SimpleTuner under DeepSpeed, where none is configured")
        names = "lr_end", "lr_power", "lr_num_cycles"
        result.ignore_all({**program.arguments}, names, "WarmupLR does not read it")
        _put(result, "warmup_min_lr", None, 0, "DeepSpeed's own")
        _put(result, "warmup_type", None, "log", "DeepSpeed's own")
        warmup, reason = program.value("train.lr_warmup_steps") or (0, "")
        reason = reason if warmup >= 2 else "DeepSpeed's least for SimpleTuner's lr_warmup_steps"
        result.assume("train.lr_warmup_steps", max(2, warmup), reason)
        if program.given("lr_scheduler") is not None:
            result.ignore(
                "lr_scheduler", program.given("lr_scheduler"),
                "SimpleTuner does not use it under DeepSpeed; train.lr_scheduler would be it",
            )  # fmt: skip
    elif program.name == "DiffSynth-Studio":
        result.put(
            "changed", ours, None, ours, "constant",
            "DiffSynth-Studio's ConstantLR, without its first five steps at a third of the rate",
        )  # fmt: skip
    elif program.value(ours) is not None:
        flag_schedule(result, program)
    else:
        result.assume(ours, "constant", "accelerate adds none, and only the script knows its own")


def flag_schedule(result: ImportedConfig, program: Program) -> None:
    """Set a schedule that flags name.

    Raises:
        PipelineError: zerotrain does not have the schedule.
    """
    if program.name == "SimpleTuner":
        _simpletuner(result, program)
        return
    given, reason = program.value("train.lr_scheduler") or ("constant", "")
    names, name = TRAINER_NAMES if program.name == "HF Trainer" else FLAG_NAMES, str(given)
    if name not in names:
        raise PipelineError(
            f"lr_scheduler {given!r} is not one of zerotrain's",
            hint=f"choose one of {', '.join([*names, *DEEPSPEED_NAMES])}",
        )
    flag = program.argument("train.lr_scheduler")
    if flag is not None:
        reason = ""
        if program.name == "HF Trainer":
            reason = "also where a guide says WarmupDecayLR: a file without one leaves it to this"
        result.keep(flag, given, "train.lr_scheduler", name, reason)
    else:
        if not program.known and program.name == "HF Trainer":
            reason += "; openMind's guide calls it WarmupDecayLR, which is this line without a log"
        result.assume("train.lr_scheduler", name, reason)
    _flag_arguments(result, program)
    ratio = program.given("warmup_ratio")
    if ratio:
        result.keep("warmup_ratio", ratio, "train.lr_warmup_ratio")
        if program.given("warmup_steps"):
            raise PipelineError(
                "warmup_steps and warmup_ratio are both given", hint="take one of them out"
            )
    elif ratio is not None:
        result.ignore("warmup_ratio", ratio, "no warm-up")
    warmup = program.value("train.lr_warmup_steps")
    if not ratio and given != "constant" and warmup is not None and warmup[0]:
        argument = program.argument("train.lr_warmup_steps")
        if argument is not None:
            result.keep(argument, warmup[0], "train.lr_warmup_steps", int(warmup[0]))
        else:
            result.assume("train.lr_warmup_steps", *warmup)


def note_stretched_schedule(result: ImportedConfig) -> None:
    """Report that the train_text_to_image scripts run a schedule over another number of steps.

    They multiply its steps by the accumulation steps; accelerate steps it only at updates, once for
    each process (accelerate/scheduler.py, AcceleratedScheduler.step).
    """
    name = result.values.get("train.lr_scheduler")
    steps = Fraction(
        result.values.get("train.gradient_accumulation_steps", 1),
        result.values.get("launch.num_processes", 1),
    )
    warmup = result.values.get("train.lr_warmup_steps")
    constant = name == "constant" or (name == "constant_with_warmup" and not warmup)
    if steps != 1 and not constant:
        reason = (
            "warm-up and decay are counted in updates here; the script takes "
            f"{float(steps):g} times as many as it says (gradient_accumulation_steps / processes)"
        )
        result.note("changed", "lr_scheduler", name, reason, "train.lr_scheduler", name)


def _flag_arguments(result: ImportedConfig, program: Program) -> None:
    """Set HF Trainer's lr_scheduler_kwargs, whose names are the same as ours."""
    flag = "lr_scheduler_kwargs"
    if (text := program.given(flag)) is not None and not to_object(flag, text):
        result.ignore(flag, text, "empty")
    elif text is not None:
        put_row(program.table[flag], text, result)


def _simpletuner(result: ImportedConfig, program: Program) -> None:
    """Set SimpleTuner's schedules, two of which are waves with the warm-up as half a period.

    Source: simpletuner/helpers/training/custom_schedule.py, get_lr_scheduler.
    """
    given, reason = program.value("train.lr_scheduler") or ("constant_with_warmup", "")
    warmup, _ = program.value("train.lr_warmup_steps") or (0, "")
    given_end = program.given("lr_end")
    half, end = warmup or 1000, 4e-7 if given_end is None else given_end
    used, arguments, name = {"lr_warmup_steps"}, {}, str(given)
    if name == "sine":
        arguments = {"half_period_steps": half, "lr_end": end}
        used |= {"lr_end"}
    elif name == "cosine":
        steps = program.given("max_train_steps")
        if not steps:
            raise PipelineError(
                "lr_scheduler: SimpleTuner's cosine falls for lr_warmup_steps and rises again; "
                "here its waves are counted in the whole of the training",
                hint="say max_train_steps",
            )
        name, used = "cosine_with_min_lr", used | {"lr_end"}
        arguments = {"min_lr": end, "num_cycles": steps / (2 * half)}
    elif name == "polynomial":
        power = program.given("lr_power")
        arguments = {"lr_end": end, "power": 0.8 if power is None else power}
        used |= {"lr_end", "lr_power"}
    elif name not in ("constant", "constant_with_warmup", "linear"):
        raise PipelineError(
            f"lr_scheduler: SimpleTuner's {name} is not one of zerotrain's",
            hint="choose constant, constant_with_warmup, linear, polynomial, cosine or sine",
        )
    if program.given("lr_scheduler") is None:
        result.assume("train.lr_scheduler", name, reason)
    else:
        result.keep("lr_scheduler", given, "train.lr_scheduler", name)
    if arguments:
        result.values["train.lr_scheduler_args"] = arguments
        result.note("default", "train.lr_scheduler_args", None, "as SimpleTuner computes it",
                  "train.lr_scheduler_args", arguments)  # fmt: skip
    if warmup and name in ("constant_with_warmup", "linear", "polynomial"):
        result.assume("train.lr_warmup_steps", warmup, "SimpleTuner's lr_warmup_steps")
    for key in ("lr_warmup_steps", "lr_end", "lr_power", "lr_num_cycles"):
        value = program.given(key)
        if value is not None and key in used and (arguments or warmup):
            result.note("kept", key, value, "", "train.lr_scheduler")
        elif value is not None:
            result.ignore(key, value, f"{given} does not read it")
