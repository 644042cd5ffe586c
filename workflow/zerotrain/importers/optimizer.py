"""The optimizer block, or the program's optimizer without one."""

from __future__ import annotations

from typing import Any

from zerotrain.config.optimizers import ENGINES_OWN, Optimizer, deepspeed_meaning, find
from zerotrain.errors import PipelineError
from zerotrain.importers.imported_config import AUTO, ImportedConfig
from zerotrain.importers.program import RUN, Program
from zerotrain.launch.keys import unknown_key

PARAMS = "optimizer.params."
OURS = {
    "lr": "train.learning_rate",
    "eps": "train.adam_epsilon",
    "weight_decay": "train.adam_weight_decay",
}
BETAS = ("train.adam_beta1", "train.adam_beta2")
DEEPSPEED_HAS: dict[str, Any] = {
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
    for short in dict.fromkeys([*DEEPSPEED_HAS, *(key.removeprefix(PARAMS) for key in params)]):
        key = PARAMS + short
        if short == "lr" or (short in DEEPSPEED_HAS and _is_ours(found, short)):
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
            known = [PARAMS + name for name in (*DEEPSPEED_HAS, *found.arguments)]
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
        stands = DEEPSPEED_HAS[short] if short == "betas" else [DEEPSPEED_HAS[short]]
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


def without_auto(value: Any) -> Any:
    """Return a block without "auto" entries, for which DeepSpeed uses its defaults."""
    if isinstance(value, dict):
        return {str(k): without_auto(v) for k, v in value.items() if v != AUTO}
    if isinstance(value, list):
        return [without_auto(v) for v in value if v != AUTO]
    return value
