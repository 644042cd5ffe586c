"""What a user may set for an optimizer in addition to its name: optimizer_args and the adam_ keys.

Checked by the table of zerotrain.config.optimizers, before anything is started and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.config.optimizers import ENGINES_OWN, Optimizer
from zerotrain.config.suggestions import did_you_mean


def read_optimizer_args(
    optimizer: Optimizer, found: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Check a phase's optimizer_args, and the keys of `train` that the user gave.

    Args:
        optimizer: The optimizer.
        found: optimizer_args.
        given: adam_beta1, adam_beta2, adam_epsilon and adam_weight_decay, where the user gave them.

    Returns:
        The class's own arguments, and the values that optimizer_args has for keys of `train`.

    Raises:
        ValueError: an argument that the optimizer does not have, a value of the wrong kind, a value
            given twice, or a key that means nothing to it.
    """
    title = optimizer.title
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if key in given and not optimizer.adam_keys:
            raise ValueError(f"{key} means nothing to {title}; {_known(optimizer)}")
    if given.get("adam_weight_decay") and optimizer.weight_decay is None:
        raise ValueError(f"adam_weight_decay: {title} has no weight decay")
    own: dict[str, Any] = {}
    moved: dict[str, float] = {}
    for key, value in found.items():
        if key == "weight_decay" and optimizer.weight_decay is not None:
            moved["adam_weight_decay"] = _value(title, key, value, 0.0)
        elif key not in optimizer.arguments:
            raise ValueError(_unknown(optimizer, key))
        elif key == "betas" and optimizer.adam_keys:
            moved["adam_beta1"], moved["adam_beta2"] = _value(title, key, value, (0.0, 0.0))
        elif key == "eps" and optimizer.adam_keys and "betas" in optimizer.arguments:
            moved["adam_epsilon"] = _value(title, key, value, 0.0)
        else:
            own[key] = _value(title, key, value, optimizer.arguments[key])
    if twice := sorted(moved.keys() & given.keys()):
        raise ValueError(f"{twice[0]} and optimizer_args give the same value; give one of them")
    return own, moved


def _known(optimizer: Optimizer) -> str:
    known = [
        *optimizer.arguments,
        *(["weight_decay"] if optimizer.weight_decay is not None else []),
    ]
    return f"its optimizer_args are {', '.join(known)}"


def _unknown(optimizer: Optimizer, key: str) -> str:
    called = f"optimizer_args.{key}"
    if key == "lr":
        return f"{called}: the rate is `learning_rate`"
    if key in ENGINES_OWN:
        return f"{called}: the engine chooses the implementation"
    hint = did_you_mean(key, optimizer.arguments) or _known(optimizer)
    return f"{called}: {optimizer.title} has no such argument; {hint}"


def _value(title: str, key: str, value: Any, like: Any) -> Any:
    """Convert the value to the kind of the default; text that is a number counts as one."""
    if isinstance(like, tuple):
        if isinstance(value, list | tuple) and len(value) == len(like):
            return [
                None if one is None and default is None else _value(title, key, one, default or 0.0)
                for one, default in zip(value, like, strict=True)
            ]
        expected = f"a list of {len(like)} numbers"
    elif isinstance(like, bool):
        if isinstance(value, bool):
            return value
        expected = "true or false"
    elif like is None:
        if isinstance(value, str):
            return value
        expected = "text"
    else:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        whole = isinstance(like, int)
        if not isinstance(value, bool) and abs(number) < float("inf"):
            if not whole:
                return number
            if number.is_integer():
                return int(number)
        expected = "a whole number" if whole else "a number"
    raise ValueError(f"optimizer_args.{key}: {title} requires {expected}, not {value!r}")
