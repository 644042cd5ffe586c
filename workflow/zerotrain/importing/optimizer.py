"""The optimizer block, or what the program uses without one."""

from __future__ import annotations

from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.draft import AUTO, Draft
from zerotrain.importing.keys import unknown_key
from zerotrain.importing.program import RUN, Program
from zerotrain.optimizers import ENGINES_OWN, Optimizer, deepspeed_meaning, find

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
"""What DeepSpeed's Adam takes where a parameter is absent."""

TRAINER_NAMES = {"adamw_hf": "adamw", "adamw_bf16": "adamw", "adamw_torch_xla": "adamw"}
"""Names that trainers' flags alone have."""


def read_optimizer(flat: dict[str, Any], draft: Draft, program: Program) -> None:
    """Settle the optimizer and its values.

    Raises:
        PipelineError: an unknown name, with the nearest, or a value that it does not take.
    """
    params = {name: value for name, value in flat.items() if name.startswith(PARAMS)}
    if "optimizer.type" not in flat:
        if params:
            raise PipelineError(
                "optimizer has params, but no type", hint="add type, as AdamW, or take it out"
            )
        _without_block(draft, program)
        return
    found = _note_name(flat, draft)
    arguments: dict[str, Any] = {}
    for short in dict.fromkeys([*DEEPSPEED_HAS, *(key.removeprefix(PARAMS) for key in params)]):
        key = PARAMS + short
        if short == "lr" or (short in DEEPSPEED_HAS and _is_ours(found, short)):
            if key in flat or found.name in ("adamw", "adam"):
                _value(flat, draft, program, short)
            elif short == "lr":
                raise PipelineError(f"{key} is missing", hint="say the learning rate there")
        elif key not in flat or short == "adam_w_mode":
            continue
        elif short in ENGINES_OWN:
            draft.ignore(key, flat[key], "zerotrain chooses the implementation")
        elif flat[key] == AUTO:
            draft.say("resolved", key, AUTO, f"nothing fills it: {found.title}'s own")
        elif short not in found.arguments:
            known = [PARAMS + name for name in (*DEEPSPEED_HAS, *found.arguments)]
            raise unknown_key(f"optimizer {found.title}", key, known)
        else:
            arguments[short] = without_auto(flat[key])
            draft.say("kept", key, flat[key], "", "train.optimizer_args")
    if arguments:
        draft.values["train.optimizer_args"] = arguments


def _is_ours(found: Optimizer, short: str) -> bool:
    """Whether one of our own keys says it; else it is an argument of the optimizer."""
    if short == "weight_decay":
        return found.weight_decay is not None
    return found.adam_keys


def _note_name(flat: dict[str, Any], draft: Draft) -> Optimizer:
    given, ours = flat["optimizer.type"], "train.optimizer"
    mode = flat.get(PARAMS + "adam_w_mode")
    found, reason = _usable("optimizer.type", given, adam_w_mode=mode is not False)
    draft.put("changed" if reason else "kept", "optimizer.type", given, ours, found.name, reason)
    if mode is not None:
        draft.say("kept", PARAMS + "adam_w_mode", mode, "part of the name", ours)
    return found


def _usable(key: str, given: str, adam_w_mode: bool | None) -> tuple[Optimizer, str]:
    """The optimizer that a name means, in a DeepSpeed file or, without adam_w_mode, in a flag.

    Raises:
        PipelineError: no such optimizer, or none that can be trained with here.
    """
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


def _value(flat: dict[str, Any], draft: Draft, program: Program, short: str) -> None:
    """lr, betas, eps or weight_decay: as given, as the program fills it, or as DeepSpeed has it."""
    key = PARAMS + short
    given = flat.get(key)
    keys = BETAS if short == "betas" else (OURS[short],)
    if given is None or given == AUTO:
        stands = DEEPSPEED_HAS[short] if short == "betas" else [DEEPSPEED_HAS[short]]
        for ours, value in zip(keys, stands, strict=True):
            found = program.value(ours) if given == AUTO else None
            if given is None:
                draft.default(ours, value, "DeepSpeed's own, where params has none")
            elif found is not None:
                draft.resolve(key, ours, found[0], found[1])
            elif program is RUN:
                draft.say("resolved", key, AUTO, "the run's own", ours)
            else:
                draft.resolve(key, ours, value, "only the script knows: DeepSpeed's own")
        return
    values = given if short == "betas" else [given]
    if len(values) != len(keys) or not all(_is_rate(value) for value in values):
        raise PipelineError(
            f"{key}: must be {'two numbers' if short == 'betas' else 'a number'} from 0 on "
            f"(found {given!r})",
            hint=f"change {key}",
        )
    for ours, value in zip(keys, values, strict=True):
        draft.keep(key, given, ours, value)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _without_block(draft: Draft, program: Program) -> None:
    """What a program uses where the file has no optimizer."""
    if program is RUN:
        return
    found = program.value("train.optimizer")
    if found is None and program.value("train.learning_rate") is None:
        draft.say(
            "default", "optimizer", None,
            "only the script knows it and its learning rate: AdamW, with train.learning_rate",
        )  # fmt: skip
        return
    given, reason = found or ("adamw", f"{program.name} takes AdamW")
    folded = TRAINER_NAMES.get(str(given).casefold(), str(given))
    name = _usable("optimizer", folded, None)[0].name
    argument = program.argument("train.optimizer")
    if argument is None:
        draft.default("train.optimizer", name, reason)
    else:
        draft.keep(argument, given, "train.optimizer", name)
    for ours in (*OURS.values(), *BETAS):
        value, argument = program.value(ours), program.argument(ours)
        if value is None or (name not in ("adam", "adamw") and ours != "train.learning_rate"):
            continue
        if argument is None:
            draft.default(ours, *value)
        else:
            draft.keep(argument, value[0], ours)


def without_auto(value: Any) -> Any:
    """A block without the entries that are "auto": those keep what DeepSpeed has by itself."""
    if isinstance(value, dict):
        return {str(k): without_auto(v) for k, v in value.items() if v != AUTO}
    if isinstance(value, list):
        return [without_auto(v) for v in value if v != AUTO]
    return value
