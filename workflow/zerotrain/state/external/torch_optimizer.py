"""The state of a torch optimizer, with numbered parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.consistency import read_number
from zerotrain.state.position import ADAM_SLOTS

Weights = Mapping[str, torch.Tensor]
ORDER = "give the trained parameters in the order of the optimizer's param groups"


class TorchOptimizer:
    """The state_dict of a torch optimizer; empty if none was saved."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.state: dict[int, dict[str, Any]] = document.get("state", {})
        self.groups: list[dict[str, Any]] = document.get("param_groups", [])
        self.numbers: list[int] = [n for group in self.groups for n in group["params"]]
        self.keys = {key for entry in self.state.values() for key in entry} - {"step"}

    @property
    def step(self) -> int:
        """Return the optimizer's step count; 0 if it has not started."""
        steps = [entry.get("step") for entry in self.state.values()]
        where = "the optimizer's state"
        return max((int(read_number(s, where, "step")) for s in steps if s is not None), default=0)

    @property
    def own_names(self) -> list[str] | None:
        """Return its parameters' names in its order, if torch was given named parameters."""
        if not self.groups or not all("param_names" in group for group in self.groups):
            return None
        return [str(name) for group in self.groups for name in group["param_names"]]

    def find_names(self, weights: Weights) -> list[str] | None:
        """Return the parameters' names in its order, if they are certain.

        They are the optimizer's own names if torch was given named parameters. Otherwise shapes
        determine them, if no two tensors share one; order cannot, as safetensors files are sorted
        by name.
        """
        own = self.own_names
        if own and all(name in weights for name in own):
            return own
        shapes = {n: tuple(e["exp_avg"].shape) for n, e in self.state.items() if "exp_avg" in e}
        named: dict[tuple[int, ...], list[str]] = {}
        for name, tensor in weights.items():
            named.setdefault(tuple(tensor.shape), []).append(name)
        unique = max(Counter(shapes.values()).values(), default=1) == 1
        if not self.numbers or set(shapes) != set(self.numbers) or not unique:
            return None
        if any(len(named.get(shape, ())) != 1 for shape in shapes.values()):
            return None
        return [named[shapes[number]][0] for number in self.numbers]

    def check(self, folder: Path, names: Sequence[str], weights: Weights) -> None:
        """Check that names and moments are equal in number and shapes."""
        if self.numbers and len(names) != len(self.numbers):
            raise PipelineError(
                f"{folder}: the optimizer has {len(self.numbers)} parameters, {len(names)} names "
                "were given",
                hint=ORDER,
            )
        for name, number in zip(names, self.numbers, strict=False):
            expected = weights[name].shape
            for slot in ADAM_SLOTS:
                moment = self.state.get(number, {}).get(slot)
                if moment is not None and moment.shape != expected:
                    raise PipelineError(
                        f"{folder}: {name} has shape {list(expected)}, {slot} of the optimizer's "
                        f"parameter {number} has {list(moment.shape)}",
                        hint=ORDER,
                    )
