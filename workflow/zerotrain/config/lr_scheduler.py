"""Learning-rate schedules by name, and what contradicts one: train.lr_scheduler."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError, WithJsonSchema

from zerotrain.config.lr_scheduler_args import ARGUMENTS, LOWER_ENDS, OWN_KEYS
from zerotrain.config.section import Section
from zerotrain.config.suggestions import did_you_mean, nearest

MEASURING = ("reduce_lr_on_plateau", "greedy")
"""transformers' schedules that no step number determines."""


def scheduler_name(value: Any) -> Any:
    """Return the name as this module writes it.

    Raises:
        ValueError: no schedule has this name; the nearest ones are named.
    """
    if not isinstance(value, str):
        return value
    if value.lower() in MEASURING:
        raise ValueError(
            "this schedule follows a measured loss, and every schedule here is a function of the "
            "step alone, so that a switch keeps it; choose another one"
        )
    known = {name.lower(): name for name in ARGUMENTS}
    if value.lower() not in known:
        near = nearest(value, ARGUMENTS, most=3)
        names = near or list(ARGUMENTS)
        raise ValueError(f"no such schedule; {'the nearest are' if near else 'there are'} "
                         + ", ".join(names))  # fmt: skip
    return known[value.lower()]


SchedulerName = Annotated[
    str,
    BeforeValidator(scheduler_name),
    WithJsonSchema({"type": "string", "enum": list(ARGUMENTS)}),
]
"""A schedule's name, in any case."""


def read_arguments(name: str, given: Any) -> dict[str, Any]:
    """Return the given arguments of a schedule, checked and with their types.

    Raises:
        ValueError: a key or a value is wrong; the sentence names it.
    """
    if not isinstance(given, dict):
        raise ValueError("must be keys with values")
    known = ARGUMENTS[name]
    for key in given:
        if key not in known.model_fields:
            raise ValueError(f"schedule {name} has no argument {key!r}; {_known(known, str(key))}")
    try:
        return known.model_validate(given).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(name, d) for d in error.errors())) from error


def _known(known: type[Section], key: str) -> str:
    return did_you_mean(key, known.model_fields) or (
        f"it has {', '.join(known.model_fields) or 'none'}"
    )


def _explain(name: str, detail: Any) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return f"schedule {name}: {message}"
    key = detail["loc"][0]
    if detail["type"] == "missing":
        return f"schedule {name} needs {key}"
    return f"{key} {detail['input']!r}: {message[0].lower()}{message[1:]}"


def check_contradictions(name: str, values: dict[str, Any], given: set[str]) -> None:
    """Check a schedule's arguments against the keys of `train`.

    Args:
        name: The schedule.
        values: learning_rate, lr_warmup_steps, lr_warmup_ratio, lr_scheduler_steps, adam_beta1 and
            lr_scheduler_args.
        given: Those of them that the user has written.

    Raises:
        ValueError: a value is given twice and differently, or has no meaning with this schedule.
    """
    arguments = values["lr_scheduler_args"]
    for key in arguments.keys() & OWN_KEYS.keys():
        own = OWN_KEYS[key]
        if own in given and values[own] not in (None, arguments[key]):
            raise ValueError(
                f"lr_scheduler_args.{key} {arguments[key]:g} and {own} {values[own]:g} are one "
                "value: give it once"
            )
    _refuse_warmup(name, values, given)
    peak = next((arguments[k] for k in arguments if OWN_KEYS.get(k) == "learning_rate"),
                values["learning_rate"])  # fmt: skip
    fields = ARGUMENTS[name].model_fields
    for key in (key for key in LOWER_ENDS if key in fields):
        low = arguments.get(key, fields[key].default)
        if low is not None and low > peak:
            raise ValueError(f"lr_scheduler_args.{key} {low:g} is above the peak of {peak:g}")
    if name == "OneCycle" and arguments.get("cycle_momentum", True) and "adam_beta1" in given:
        raise ValueError(
            "schedule OneCycle sets adam_beta1 at every step, so adam_beta1 "
            f"{values['adam_beta1']:g} would never be used: remove it, or set "
            "lr_scheduler_args.cycle_momentum to false"
        )


def _refuse_warmup(name: str, values: dict[str, Any], given: set[str]) -> None:
    arguments, ratio = values["lr_scheduler_args"], values["lr_warmup_ratio"]
    if name in ("OneCycle", "LRRangeTest", "sine"):
        if values["lr_warmup_steps"] or ratio:
            key = "lr_warmup_ratio" if ratio else "lr_warmup_steps"
            own = ", which is lr_scheduler_args.half_period_steps here" if name == "sine" else ""
            raise ValueError(f"schedule {name} has no warm-up: remove {key}{own}")
    elif "warmup_num_steps" in ARGUMENTS[name].model_fields:
        if ratio is not None and "warmup_num_steps" in arguments:
            raise ValueError("give lr_scheduler_args.warmup_num_steps or lr_warmup_ratio, not both")
        if ratio == 0 or ("lr_warmup_steps" in given and values["lr_warmup_steps"] == 0):
            key = "lr_warmup_steps" if ratio is None else "lr_warmup_ratio"
            raise ValueError(f"schedule {name} begins with a warm-up: {key} must be above 0")
