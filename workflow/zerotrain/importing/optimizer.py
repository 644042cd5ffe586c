"""The optimizer block, or what the program uses without one."""

from __future__ import annotations

import difflib
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.importing.draft import AUTO, Draft
from zerotrain.importing.program import RUN, Program

DEEPSPEED_NAMES = {
    name.casefold(): name.casefold()
    for name in (
        "AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",
        "MuAdamW", "MuSGD", "Lion", "Muon",
    )
}  # fmt: skip
REPLACED = {"cpuadam": "adamw", "fusedadam": "adamw"}
"""Implementations that DeepSpeed has no name for; zerotrain chooses among them itself."""

TORCH_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""torch.optim classes beside those that DeepSpeed has under the same name."""

ADAM = {"adamw", "adam", "onebitadam", "zerooneadam", "muadam", "muadamw"}
"""Those whose betas, epsilon and weight decay are our adam_ keys."""

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

TRAINER_NAMES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw": "adamw",
    "adamw_bf16": "adamw",
    "adagrad": "adagrad",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
}
"""Names by which trainers' own flags call them."""


def read_optimizer(flat: dict[str, Any], draft: Draft, program: Program) -> None:
    """Settle the optimizer and its values.

    Raises:
        PipelineError: an unknown name, with the nearest, or a value that no optimizer takes.
    """
    params = {name: value for name, value in flat.items() if name.startswith(PARAMS)}
    if "optimizer.type" not in flat:
        if params:
            raise PipelineError(
                "optimizer has params, but no type", hint="add type, as AdamW, or take it out"
            )
        _without_block(draft, program)
        return
    name = optimizer_name(flat["optimizer.type"])
    _note_name(flat, draft, name)
    name = draft.values["train.optimizer"]
    arguments: dict[str, Any] = {}
    for short in dict.fromkeys([*DEEPSPEED_HAS, *(key.removeprefix(PARAMS) for key in params)]):
        key = PARAMS + short
        if short == "adam_w_mode":
            continue
        if short in DEEPSPEED_HAS and (name in ADAM or short == "lr"):
            _adam_value(flat, draft, program, short)
        elif key in flat and flat[key] == AUTO:
            draft.say("resolved", key, AUTO, f"nothing fills it: {name}'s own")
        elif key in flat:
            arguments[short] = without_auto(flat[key])
            draft.say("kept", key, flat[key], "", "train.optimizer_args")
    if arguments:
        draft.values["train.optimizer_args"] = arguments


def optimizer_name(given: str) -> str:
    """Our name of an optimizer, whatever its case.

    Raises:
        PipelineError: no such optimizer.
    """
    folded = given.casefold().replace("-", "").replace("_", "")
    torch_names = {name.casefold(): name for name in TORCH_NAMES}
    known = {**DEEPSPEED_NAMES, **REPLACED, **torch_names}
    if folded in known:
        return known[folded]
    near = difflib.get_close_matches(folded, known, n=3, cutoff=0.5)
    names = ", ".join(known[name] for name in near) or ", ".join(DEEPSPEED_NAMES)
    raise PipelineError(
        f"optimizer.type: no optimizer is called {given!r}", hint=f"the nearest: {names}"
    )


def _note_name(flat: dict[str, Any], draft: Draft, name: str) -> None:
    given, ours = flat["optimizer.type"], "train.optimizer"
    mode = flat.get(PARAMS + "adam_w_mode")
    folded = given.casefold()
    if folded in REPLACED:
        draft.put(
            "changed", "optimizer.type", given, ours, name,
            f"{given} is an implementation of AdamW; zerotrain chooses by where the optimizer is",
        )  # fmt: skip
    elif name == "adam" and mode is not False:
        draft.put(
            "changed", "optimizer.type", given, ours, "adamw",
            "DeepSpeed's Adam decays weights as AdamW does unless adam_w_mode is false",
        )  # fmt: skip
    else:
        draft.keep("optimizer.type", given, ours, name)
    if PARAMS + "adam_w_mode" in flat:
        draft.say("kept", PARAMS + "adam_w_mode", mode, "part of the name", ours)


def _adam_value(flat: dict[str, Any], draft: Draft, program: Program, short: str) -> None:
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
    name = TRAINER_NAMES.get(str(given).casefold()) or optimizer_name(str(given))
    draft.default("train.optimizer", name, reason)
    for ours in (*OURS.values(), *BETAS):
        value, argument = program.value(ours), program.argument(ours)
        if value is None or (name not in ADAM and ours != "train.learning_rate"):
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
