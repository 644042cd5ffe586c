"""torch optimizers number their parameters; here the numbers get the model's names back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.foreign.checkpoint import ForeignCheckpoint, training_position
from zerotrain.foreign.consistency import group_values, read_number
from zerotrain.position import ADAM_SLOTS, MASTER

Weights = Mapping[str, torch.Tensor]
ORDER = "give the trained parameters in the order of the optimizer's param groups"


class TorchOptimizer:
    """The state_dict of a torch optimizer; an empty one where none was saved."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.state: dict[int, dict[str, Any]] = document.get("state", {})
        self.groups: list[dict[str, Any]] = document.get("param_groups", [])
        self.numbers: list[int] = [n for group in self.groups for n in group["params"]]
        self.keys = {key for entry in self.state.values() for key in entry} - {"step"}

    @property
    def step(self) -> int:
        """Its own count; 0 where it has not begun."""
        steps = [entry.get("step") for entry in self.state.values()]
        where = "the optimizer's state"
        return max((int(read_number(s, where, "step")) for s in steps if s is not None), default=0)

    @property
    def own_names(self) -> list[str] | None:
        """Its parameters' names in its order, where torch was given named parameters."""
        if not self.groups or not all("param_names" in group for group in self.groups):
            return None
        return [str(name) for group in self.groups for name in group["param_names"]]

    def find_names(self, weights: Weights) -> list[str] | None:
        """The parameters' names in its order, if that is certain.

        They are its own, where torch was given named parameters. Else shapes tell, where no two
        tensors share one: no order can, for safetensors files are sorted by name.
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
        """Refuse names of another number or whose tensors have other shapes than the moments."""
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


def find_ties(weights: Weights) -> dict[str, str]:
    """Second names of one tensor, to the first: torch.save keeps shared storage shared.

    Only for weights that are all held at once, whose addresses are therefore their own.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if owner != name and tensor.numel():
            ties[name] = owner
    return ties


@dataclass(frozen=True)
class Numbered:
    """Weights with names and an optimizer with numbers, until the model says who is who."""

    optimizer: TorchOptimizer
    name: Callable[[Sequence[str] | None, Sequence[str]], ForeignCheckpoint]
    """The checkpoint, given the names in the optimizer's order (None: not known) and the trained
    ones, both as the weights have them."""


def open_numbered(
    folder: Path,
    weights: Weights,
    optimizer: TorchOptimizer,
    parameter_names: Sequence[str] | None,
    *,
    step: int | None,
    samples: int,
    engine: dict[str, Any],
    loss_scale: dict[str, Any] | None,
    tied: Mapping[str, str] = MappingProxyType({}),
    lost: Sequence[str] = (),
) -> ForeignCheckpoint:
    """A checkpoint of named weights and a torch optimizer.

    Args:
        folder: For messages.
        weights: Every tensor by name, in any dtype, without second names; mapped, or read when
            asked for.
        optimizer: Its state; where names are not certain, it is left out, and `lost` says so.
        parameter_names: The trained parameters in the model's order, which is that of the numbers
            where there is one param group; the optimizer's own names, or unique shapes, come first.
        tied: Second names of tensors.
        step: Optimizer steps done, where the caller knows better than the optimizer.

    Raises:
        PipelineError: names that are not in the weights, or shapes that differ.
    """

    def check_given(given: Sequence[str]) -> None:
        missing = [name for name in given if name not in weights]
        if missing:
            raise PipelineError(
                f"{folder}: {missing[0]} and {len(missing) - 1} more of the given parameters are "
                f"not in its weights, whose names are like {next(iter(weights), 'none')}",
                hint="give the names as the weights' file has them",
            )

    def name(names: Sequence[str] | None, given: Sequence[str]) -> ForeignCheckpoint:
        check_given(given)
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        trained = list(given or names or floats)
        known = set(trained)
        name_of = dict(zip(optimizer.numbers, names or (), strict=False))
        number_of = {name: number for number, name in name_of.items() if name in known}
        adam = bool(number_of) and optimizer.keys.issuperset(ADAM_SLOTS)

        def pieces(name: str, slot: str) -> Iterable[torch.Tensor]:
            if slot == MASTER:
                return (weights[name],)
            entry = optimizer.state.get(number_of[name])
            return (entry[slot] if entry else torch.zeros(weights[name].shape),)

        if number_of:
            members = [
                [name_of[number] for number in group["params"] if name_of[number] in known]
                for group in optimizer.groups
            ]
        else:  # of one group it is known all the same who is in it
            members = [trained] if len(optimizer.groups) == 1 else []
        param_groups, unlike_adamw = named_groups(optimizer.groups, members)
        return ForeignCheckpoint(
            folder=folder,
            position=training_position(
                step=optimizer.step if step is None else step,
                samples=samples,
                optimizer="adamw" if adam else "",
                optimizer_step=optimizer.step if adam else 0,
                param_groups=[group for group in param_groups if group["parameters"]],
                engine=engine,
                loss_scale=loss_scale,
            ),
            shapes={name: list(weights[name].shape) for name in trained},
            slots=[MASTER, *(ADAM_SLOTS if adam else ())],
            pieces=pieces,
            frozen={n: list(t.shape) for n, t in weights.items() if n not in known},
            frozen_pieces=lambda name: (weights[name],),
            tied={alias: name for alias, name in tied.items() if name in known},
            lost=[*lost, *_lost(optimizer, weights, trained, number_of), *unlike_adamw],
            numbered=Numbered(optimizer, of_names),
        )

    of_names = name
    check_given(parameter_names or ())
    names = optimizer.find_names(weights)
    if not names and parameter_names and len(optimizer.groups) <= 1:
        # Of several groups the order of the model does not say who is in which.
        names = list(parameter_names)
    if names:
        optimizer.check(folder, names, weights)
    return name(names, names or parameter_names or ())


def _lost(
    optimizer: TorchOptimizer, weights: Weights, trained: list[str], number_of: dict[str, int]
) -> list[str]:
    """What is in the files and does not come along."""
    sentences = []
    if optimizer.state and not number_of:
        sentences.append(
            f"the optimizer's moments: its {len(optimizer.state)} parameters in "
            f"{len(optimizer.groups)} groups have numbers, the weights {len(weights)} names, and "
            "neither shapes nor param_groups tell which is which; `names` of "
            "resume_from_checkpoint does"
        )
    if unlike := sorted(map(str, optimizer.keys - set(ADAM_SLOTS))):
        sentences.append(f"the optimizer's {', '.join(unlike)}: only Adam's moments are kept")
    for name, number in number_of.items():
        if optimizer.state and number not in optimizer.state:  # torch begins with zeros, too
            sentences.append(f"{name} never had a gradient: its moments are zero")
    rounded = sorted({str(weights[name].dtype) for name in trained} - {"torch.float32"})
    if rounded:
        sentences.append(f"weights were saved as {', '.join(rounded)}: fp32 masters are not there")
    return sentences


def named_groups(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    where: Path | str = "the optimizer's state",
) -> tuple[list[dict[str, Any]], list[str]]:
    """Param groups with names in place of numbers, and sentences on what is not AdamW in them.

    Args:
        groups: A torch optimizer's.
        names: The parameters of each.
        where: Their file, for messages.

    Raises:
        PipelineError: as group_values.
    """
    found: list[dict[str, Any]] = []
    lost: list[str] = []
    for number, (group, parameters) in enumerate(zip(groups, names, strict=False)):
        kept = {"parameters": list(parameters), **group_values(group, number, where)}
        found.append(kept)
        if group.get("decoupled_weight_decay") is False and kept.get("weight_decay"):
            lost.append(
                f"param group {number}: Adam's weight decay {kept['weight_decay']} was part of the "
                "gradient; AdamW's is not"
            )
        if group.get("amsgrad"):
            lost.append(f"param group {number}: amsgrad's largest second moment")
    return found, lost
