"""What a step is: batch sizes, precision with fp16's loss scale, and the optimizer."""

from __future__ import annotations

import math
from typing import Any

from zerotrain.config.launch import Fp16Config
from zerotrain.config.optimizers import ENGINES_OWN, Optimizer, deepspeed_meaning, find
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.key_values import drop_dependents, without_auto
from zerotrain.importers.program import RUN, Part, Program, SurroundingSettings
from zerotrain.launch.keys import DEEPSPEED, unknown_key

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def read_batch(flat: dict[str, Any], result: ImportedConfig, context: SurroundingSettings) -> None:
    """Derive the four numbers as DeepSpeed does if one is missing.

    Raises:
        PipelineError: the numbers do not multiply out; the message names them.
    """
    program, world, micro_batch = context.program, context.processes, context.micro_batch
    train, micro, steps = (_given(flat, key) for key in (TRAIN, MICRO, STEPS))
    if program is RUN and train.value is None and (micro.value is None or steps.value is None):
        _leave_to_run(flat, result, micro, steps, world)
        return
    if micro_batch is not None:
        if micro.value not in (None, micro_batch):
            raise PipelineError(
                f"{MICRO} is {micro.value}, and {micro_batch} is given next to the file",
                hint="leave --micro-batch-size out",
            )
        micro = Part(micro_batch, "--micro-batch-size")
    derivable = train.value is not None and micro.value is not None
    if steps.value is None and not (derivable and world.value is not None and STEPS not in flat):
        steps = _of(program, "train.gradient_accumulation_steps", Part(1, "one, where none is set"))
    if world.value is None and derivable:
        world = Part(
            _quotient(train, micro, steps, world),
            f"{TRAIN} {train.value} / {micro.value} a process / {steps.value} accumulations",
        )
    elif world.value is None:
        world = Part(1, "one process, where nothing says how many")
    if steps.value is None:
        steps = Part(
            _quotient(train, micro, steps, world),
            f"{TRAIN} {train.value} / {micro.value} a process / {world.value} processes",
        )
    if micro.value is None and train.value is not None:
        micro = Part(_quotient(train, micro, steps, world))
    elif micro.value is None:
        unknown = "one sample, where only the script's data loader knows: see --micro-batch-size"
        micro = _of(program, "train.global_batch_size", Part(1, unknown))
    total = _product(micro, steps, world)
    if train.value not in (None, total):
        raise _inconsistent(train, micro, steps, world)
    _note(flat, result, micro, steps, world, total)


def _given(flat: dict[str, Any], key: str) -> Part:
    value = flat.get(key)
    if value in (None, AUTO):
        return Part(None)
    if value < 1:
        raise PipelineError(f"{key} is {value}", hint="give a whole number from 1 on")
    return Part(value, key)


def _of(program: Program, ours: str, otherwise: Part) -> Part:
    found = program.value(ours)
    if found is None:
        return otherwise
    if not isinstance(found[0], int) or found[0] < 1:
        raise PipelineError(f"{found[1]}: {found[0]!r}", hint="give a whole number from 1 on")
    return Part(*found)


def _product(*parts: Part) -> int:
    """Multiply the known parts."""
    return math.prod(part.value for part in parts if part.value is not None)


def _quotient(train: Part, micro: Part, steps: Part, world: Part) -> int:
    """Derive the unknown part."""
    whole, parts = train.value or 0, _product(micro, steps, world)
    if whole % parts:
        raise _inconsistent(train, micro, steps, world)
    return whole // parts


def _inconsistent(train: Part, micro: Part, steps: Part, world: Part) -> PipelineError:
    shown = [str(part.value) if part.value else "?" for part in (micro, steps, world)]
    return PipelineError(
        f"{TRAIN} {train.value} is not {shown[0]} (micro batch) x {shown[1]} (accumulation) x "
        f"{shown[2]} (processes): the known ones make {_product(micro, steps, world)}",
        hint="change one of them; the global batch is what an optimizer step sees",
    )


def _note(
    flat: dict[str, Any], result: ImportedConfig, micro: Part, steps: Part, world: Part, total: int
) -> None:
    product = f"{micro.value} a process x {steps.value} accumulated x {world.value} process"
    product += "es" if world.value != 1 else ""
    for key in (TRAIN, MICRO):
        if flat.get(key) == AUTO:
            reason = f"{product}; {micro.reason}" if micro.reason else product
            result.resolve(key, "train.global_batch_size", total, reason)
        elif key in flat:
            result.keep(key, flat[key], "train.global_batch_size", total, product)
    if TRAIN not in flat and MICRO not in flat:
        result.assume("train.global_batch_size", total, f"{product}; {micro.reason}")
    ours = "train.gradient_accumulation_steps"
    if flat.get(STEPS) == AUTO:
        result.resolve(STEPS, ours, steps.value, steps.reason)
    elif STEPS in flat:
        result.keep(STEPS, flat[STEPS], ours)
    else:
        result.assume(ours, steps.value, steps.reason)
    if "launch.num_processes" not in result.values:
        result.assume("launch.num_processes", world.value, world.reason)


def _leave_to_run(
    flat: dict[str, Any], result: ImportedConfig, micro: Part, steps: Part, world: Part
) -> None:
    """Leave the global batch to the run; the file may set the accumulation."""
    if steps.value is not None:
        result.keep(STEPS, steps.value, "train.gradient_accumulation_steps")
    for key in (TRAIN, MICRO, STEPS):
        if flat.get(key) == AUTO:
            result.note("resolved", key, AUTO, "the run's own train values")
    if micro.value is not None:
        raise PipelineError(
            f"{MICRO} is {micro.value}, but {STEPS} is left open",
            hint=f"write {STEPS} or {TRAIN} into the file, or let the run say all of them",
        )


PRECISION = "launch.mixed_precision"
PRECISIONS = ("bf16", "fp16", "no")
LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""Of fp16: DeepSpeed's defaults."""


def read_precision(
    flat: dict[str, Any], result: ImportedConfig, context: SurroundingSettings
) -> str:
    """Decide the precision; fp16.enabled and bf16.enabled of the file may be "auto".

    Raises:
        PipelineError: two places contradict each other, or there is neither a value nor a choice.
    """
    given, source = context.precision, context.precision_source
    otherwise, choose = context.precision_default, context.choose
    if given is not None and given not in PRECISIONS:
        raise PipelineError(
            f"{source}: mixed precision {given!r}", hint=f"give one of {', '.join(PRECISIONS)}"
        )
    switches = {kind: flat.get(f"{kind}.enabled") for kind in ("fp16", "bf16")}
    on = [kind for kind, value in switches.items() if value is True]
    if len(on) == 2:
        raise PipelineError(
            "fp16.enabled and bf16.enabled are both true", hint="turn one of them off"
        )
    if on and given not in (None, on[0]):
        raise PipelineError(
            f"{on[0]}.enabled is true, but {source} says {given}", hint="let both say the same"
        )
    if given in switches and switches[given] is False:
        raise PipelineError(
            f"{given}.enabled is false, but {source} says {given}", hint="let both say the same"
        )
    open_ = [f"{kind}.enabled" for kind, value in switches.items() if value == AUTO]
    precision = given or (on[0] if on else None)
    if precision is None and open_:
        what = " and ".join(open_) + (" are" if len(open_) > 1 else " is") + ' "auto"'
        if otherwise[0] != "no":
            precision, source = otherwise
        elif choose is not None:
            precision, source = choose()
        else:
            raise PipelineError(
                f"{what}, and nothing says which precision is meant",
                hint="set mixed_precision next to it: bf16, fp16 or no",
            )
    for kind, value in switches.items():
        key = f"{kind}.enabled"
        if value == AUTO:
            result.resolve(key, PRECISION, precision, source)
        elif value is not None:
            result.keep(key, value, PRECISION, precision or "no")
    if PRECISION not in result.values and given is not None:
        result.keep(source, given, PRECISION)
    elif PRECISION not in result.values:
        result.assume(PRECISION, *otherwise)
    return str(result.values[PRECISION])


def read_loss_scale(flat: dict[str, Any], result: ImportedConfig, precision: str) -> None:
    """Set the five keys of fp16's loss scale, with DeepSpeed's defaults for missing ones."""
    drop_dependents(flat, DEEPSPEED, result, fp16=precision == "fp16")
    for name in LOSS_SCALE if precision == "fp16" else ():
        key, ours = f"fp16.{name}", f"launch.fp16.{name}"
        value = flat.get(key)
        if value in (None, AUTO):
            value, reason = LOSS_SCALE[name], "DeepSpeed's own, where the file has none"
            if value != getattr(Fp16Config(), name):
                result.assume(ours, value, reason)
            if key in flat:
                result.note("resolved", key, AUTO, reason, ours)
        elif value == getattr(Fp16Config(), name):
            result.note("kept", key, value, "what the launch files say anyway", ours)
        else:
            result.keep(key, value, ours)


PARAMS = "optimizer.params."
OURS = {
    "lr": "train.learning_rate",
    "eps": "train.adam_epsilon",
    "weight_decay": "train.adam_weight_decay",
}
BETAS = ("train.adam_beta1", "train.adam_beta2")
ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
}
"""Defaults of DeepSpeed's Adam."""

TRAINER_NAMES = {
    "adamw_hf": "adamw",
    "adamw_bf16": "adamw",
    "adamw_torch_xla": "adamw",
    "torch.optim.adamw": "adamw",
    "torch.optim.adam": "adam",
    "bitsandbytes.optim.adamw8bit": "adamw8bit",
}
"""Names that only trainers' flags use."""


def read_optimizer(flat: dict[str, Any], result: ImportedConfig, program: Program) -> None:
    """Set the optimizer and its values.

    Raises:
        PipelineError: the name is unknown, with the nearest one, or it does not take a value.
    """
    params = {name: value for name, value in flat.items() if name.startswith(PARAMS)}
    if "optimizer.type" not in flat:
        if params:
            raise PipelineError(
                "optimizer has params, but no type", hint="add type, as AdamW, or take it out"
            )
        _without_block(result, program)
        return
    found = _note_name(flat, result)
    arguments: dict[str, Any] = {}
    for short in dict.fromkeys([*ADAM, *(key.removeprefix(PARAMS) for key in params)]):
        key = PARAMS + short
        if short == "lr" or (short in ADAM and _is_ours(found, short)):
            if key in flat or found.name in ("adamw", "adam"):
                _value(flat, result, program, short)
            elif short == "lr":
                raise PipelineError(f"{key} is missing", hint="say the learning rate there")
        elif key not in flat or short == "adam_w_mode":
            continue
        elif short in ENGINES_OWN:
            result.ignore(key, flat[key], "zerotrain chooses the implementation")
        elif flat[key] == AUTO:
            result.note("resolved", key, AUTO, f"nothing fills it: {found.title}'s own")
        elif short not in found.arguments:
            known = [PARAMS + name for name in (*ADAM, *found.arguments)]
            raise unknown_key(f"optimizer {found.title}", key, known)
        else:
            arguments[short] = without_auto(flat[key])
            result.note("kept", key, flat[key], "", "train.optimizer_args")
    if arguments:
        result.values["train.optimizer_args"] = arguments


def _is_ours(found: Optimizer, short: str) -> bool:
    """Return whether one of our keys sets it; otherwise it is an argument of the optimizer."""
    if short == "weight_decay":
        return found.weight_decay is not None
    return found.adam_keys


def _note_name(flat: dict[str, Any], result: ImportedConfig) -> Optimizer:
    given, ours = flat["optimizer.type"], "train.optimizer"
    mode = flat.get(PARAMS + "adam_w_mode")
    found, reason = _usable("optimizer.type", given, adam_w_mode=mode is not False)
    result.put("changed" if reason else "kept", "optimizer.type", given, ours, found.name, reason)
    if mode is not None:
        result.note("kept", PARAMS + "adam_w_mode", mode, "part of the name", ours)
    return found


def _usable(key: str, given: str, adam_w_mode: bool | None) -> tuple[Optimizer, str]:
    """Find the optimizer by its name in a DeepSpeed file or, without adam_w_mode, in a flag."""
    try:
        found, reason = (
            find(given) if adam_w_mode is None else deepspeed_meaning(given, adam_w_mode)
        )
    except ValueError as error:
        raise PipelineError(f"{key}: {error}", hint="choose one of those") from error
    if found.refused:
        raise PipelineError(
            f"{key}: {found.title}: {found.refused}",
            hint=f"the nearest that works: {found.instead}",
        )
    return found, reason


def _value(flat: dict[str, Any], result: ImportedConfig, program: Program, short: str) -> None:
    """Set lr, betas, eps or weight_decay: as given, or from the program, or DeepSpeed's default."""
    key = PARAMS + short
    given = flat.get(key)
    keys = BETAS if short == "betas" else (OURS[short],)
    if given is None or given == AUTO:
        stands = ADAM[short] if short == "betas" else [ADAM[short]]
        for ours, value in zip(keys, stands, strict=True):
            found = program.value(ours) if given == AUTO else None
            if given is None:
                result.assume(ours, value, "DeepSpeed's own, where params has none")
            elif found is not None:
                result.resolve(key, ours, found[0], found[1])
            elif program is RUN:
                result.note("resolved", key, AUTO, "the run's own", ours)
            else:
                result.resolve(key, ours, value, "only the script knows: DeepSpeed's own")
        return
    values = given if short == "betas" else [given]
    if len(values) != len(keys) or not all(_is_rate(value) for value in values):
        raise PipelineError(
            f"{key}: must be {'two numbers' if short == 'betas' else 'a number'} from 0 on "
            f"(found {given!r})",
            hint=f"give {key} such a value, or take it out of the file",
        )
    for ours, value in zip(keys, values, strict=True):
        result.keep(key, given, ours, value)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _without_block(result: ImportedConfig, program: Program) -> None:
    """Set the program's values if the file has no optimizer."""
    if program is RUN:
        return
    found = program.value("train.optimizer")
    if found is None and program.value("train.learning_rate") is None:
        result.note(
            "default", "optimizer", None,
            "only the script knows it and its learning rate: AdamW, with train.learning_rate",
        )  # fmt: skip
        return
    given, reason = found or ("adamw", f"{program.name} takes AdamW")
    folded = TRAINER_NAMES.get(str(given).casefold(), str(given))
    if program.name == "HF Trainer" and folded.casefold() == "adafactor":
        raise PipelineError(
            f"{program.argument('train.optimizer')}: HF Trainer's adafactor is transformers' own, "
            "whose steps are not scaled by the weights; zerotrain has torch's, whose steps are",
            hint="choose another optimizer, or set train.optimizer: adafactor and a learning rate "
            "for it in the imported file",
        )
    name = _usable("optimizer", folded, None)[0].name
    argument = program.argument("train.optimizer")
    if argument is None:
        result.assume("train.optimizer", name, reason)
    else:
        result.keep(argument, given, "train.optimizer", name)
    for ours in (*OURS.values(), *BETAS):
        if ours == "train.learning_rate" or find(name)[0].adam_keys or ours in program.fixed:
            program.put(ours, result)
    decay = program.value("train.adam_weight_decay")
    if program.name == "HF Trainer" and decay and decay[0]:
        reason = "HF Trainer decays neither norms nor biases"
        result.assume("train.no_decay_norm_bias", True, reason)
