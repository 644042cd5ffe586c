"""Mapping of another program's parameters to the model's: by their names, or by their order.

torch saves an optimizer's parameters as numbers, group by group. Within each group trainers follow
the model's order, so only the groups have to be determined: from the run's param_groups, from
shapes that occur in one group only, or from the splits that trainers commonly use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.checkpoint import ExternalCheckpoint
from zerotrain.state.position import ADAM_SLOTS

if TYPE_CHECKING:
    from zerotrain.state.external.checkpoint import TorchOptimizer

HINT = "base, lora and frozen_parameters have to describe the model of the checkpoint"


def fit(
    checkpoint: ExternalCheckpoint,
    trained: Mapping[str, list[int]],
    base: Callable[[str], torch.Tensor | None],
    *,
    order: ModelOrder | None = None,
) -> ExternalCheckpoint:
    """Give the checkpoint the names of the model that is to be trained.

    Trainers wrap the model, which adds a prefix to names (`module.`, `pipe.dit.`, `_orig_mod.`);
    and torch's optimizers number the parameters, in the model's order.

    Args:
        checkpoint: The result of open_external.
        trained: Shapes of the model's trained parameters, in the model's order.
        base: Returns the base model's tensor by name, or None.
        order: How the numbers of a torch optimizer map to parameters; default: to the trained
            parameters, in the model's order.

    Raises:
        PipelineError: a trained parameter is missing from the checkpoint, was not trained in it, or
            has another shape; or a frozen parameter differs from the base's.
    """
    prefix = find_prefix({*checkpoint.shapes, *checkpoint.frozen, *checkpoint.tied}, trained)

    def name_in_file(name: str) -> str:
        # Tied parameters have one name here and may have another in the checkpoint.
        return tied.get(prefix + name, prefix + name)

    tied = checkpoint.tied
    if checkpoint.numbered is not None:
        optimizer, order = checkpoint.numbered.optimizer, order or ModelOrder(module=trained)
        names = None
        if optimizer.keys.issuperset(ADAM_SLOTS):
            order = replace(order, names=order.names or optimizer.own_names)
            names = find_order(optimizer, trained, order.without_prefix(prefix), checkpoint.folder)
        checkpoint = checkpoint.numbered.name(
            names and [name_in_file(name) for name in names], list(map(name_in_file, trained))
        )
    own = {name_in_file(name): name for name in trained}
    for theirs, name in own.items():
        if checkpoint.shapes.get(theirs) != trained[name]:
            raise PipelineError(
                f"{checkpoint.folder}: {theirs} has shape "
                f"{checkpoint.shapes.get(theirs, 'none: it was not trained there')}, the model's "
                f"{name} {trained[name]}",
                hint=HINT,
            )
    if surplus := [name for name in checkpoint.shapes if name not in own]:
        raise PipelineError(
            f"{checkpoint.folder}: {surplus[0]} and {len(surplus) - 1} more parameters were "
            "trained there, and are not here",
            hint=HINT,
        )
    unknown = _check_frozen(checkpoint, prefix, base)
    name_of = {name: theirs for theirs, name in own.items()}
    pieces = checkpoint.pieces
    return replace(
        checkpoint,
        shapes=dict(trained),
        pieces=lambda name, slot: pieces(name_of[name], slot),
        lost=[*checkpoint.lost, *unknown],
        position=replace(
            checkpoint.position,
            param_groups=[_rename(g, own) for g in checkpoint.position.param_groups],
        ),
    )


def find_prefix(names: Iterable[str], trained: Mapping[str, list[int]]) -> str:
    """Find the prefix of the model's names in the checkpoint."""
    known = set(names)
    first = next(iter(trained))
    for name in sorted(known, key=len):
        prefix = name.removesuffix(first)
        if name.endswith(first) and all(prefix + other in known for other in trained):
            return prefix
    missing = next((name for name in trained if name not in known), first)
    raise PipelineError(
        f"the checkpoint has no parameter {missing}; it has {', '.join(sorted(known)[:3])}, ...",
        hint=HINT,
    )


def _check_frozen(
    checkpoint: ExternalCheckpoint, prefix: str, base: Callable[[str], torch.Tensor | None]
) -> list[str]:
    """Check that the base has the frozen values of the checkpoint; name what it does not have."""
    unknown = []
    for there in checkpoint.frozen:
        # An adapter wraps its layers.
        name = there.removeprefix(prefix).replace(".base_layer.", ".")
        expected = base(name)
        if expected is None:
            unknown.append(there)
            continue
        tensor = checkpoint.frozen_tensor(there)
        if not torch.equal(expected.to(tensor.dtype), tensor):
            raise PipelineError(
                f"{checkpoint.folder}: {there} was frozen there, with other values than the base's "
                f"{name}",
                hint="name the base that this training began with",
            )
    if not unknown:
        return []
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return [f"{unknown[0]}{more}: not trained here, and not in the base"]


def _rename(group: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    return {**group, "parameters": [own[n] for n in group["parameters"] if n in own]}


GROUPS_HINT = (
    "give `names` of resume_from_checkpoint: a file with a name a line, in the optimizer's order"
)
SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
MODULE = "module"
"""Placeholder for names in the module's order."""


@dataclass(frozen=True)
class Members:
    """The parameters of a group in the model's order, and values that identify the group."""

    names: list[str]
    values: Mapping[str, float] = field(default_factory=dict)


Split = Callable[[list[str]], list[Members]]


@dataclass(frozen=True, kw_only=True)
class ModelOrder:
    """Known facts about the model that the optimizer belonged to."""

    module: Mapping[str, list[int]]
    """Shapes of all parameters, including frozen ones, in the module's order."""
    split: Split | None = None
    """Sorts names into the run's param groups."""
    names: Sequence[str] | None = None
    """The optimizer's parameters in its order, if the user gives them; only MODULE: the module's
    order, whatever the groups."""
    no_decay: Sequence[str] = ()
    """Parameters that HF's Trainer excludes from weight decay."""

    def without_prefix(self, prefix: str) -> ModelOrder:
        """Return the order with the model's names where the checkpoint's names were given."""
        if not prefix or not self.names:
            return self
        own = (n if n in self.module else n.removeprefix(prefix) for n in self.names)
        return replace(self, names=list(own))


def find_order(
    optimizer: TorchOptimizer, trained: Mapping[str, list[int]], order: ModelOrder, folder: Path
) -> list[str] | None:
    """Find the names of the optimizer's parameters in its order; None if they are ambiguous.

    Args:
        optimizer: Its numbers, groups and state.
        trained: Shapes of the trained parameters, in the model's order.
        order: Known facts about the model.
        folder: For messages.

    Raises:
        PipelineError: the optimizer belongs to another model, or the given names do not fit it.
    """
    return _Search(optimizer, trained, order, folder).run()


def undecayed_names(model: torch.nn.Module) -> list[str]:
    """Return the names that HF's Trainer excludes from weight decay (get_decay_parameter_names)."""
    norms = {
        parameter
        for module in model.modules()
        if isinstance(module, torch.nn.LayerNorm)
        for parameter in module.parameters()
    }
    return [n for n, p in model.named_parameters() if p in norms or SPARED.search(n.lower())]


class _Search:
    """The search for assignments of the optimizer's groups to a known split."""

    def __init__(
        self,
        optimizer: TorchOptimizer,
        trained: Mapping[str, list[int]],
        order: ModelOrder,
        folder: Path,
    ) -> None:
        self._optimizer, self._order, self._folder = optimizer, order, folder
        self._trained = trained
        self._shape_of = {
            number: list(entry[ADAM_SLOTS[0]].shape)
            for number, entry in optimizer.state.items()
            if ADAM_SLOTS[0] in entry
        }
        # Numbers of frozen parameters have no state: the optimizer then has the whole module.
        self._held = trained if len(optimizer.numbers) == len(trained) else order.module
        self._groups: list[list[int]] = [list(g["params"]) for g in optimizer.groups]

    def run(self) -> list[str] | None:
        if self._order.names is not None and list(self._order.names) != [MODULE]:
            return self._check_names(list(self._order.names))
        self._check_model()
        if self._order.names is not None:
            return self._check_names(list(self._held))
        if self._order.split is not None:
            own = self._order.split(list(self._held))
            if arrangements := self._arrangements(own, with_values=True):
                return arrangements[0] if len(arrangements) == 1 else None
            if arrangements := self._arrangements(own):
                return arrangements[0] if len(arrangements) == 1 else None
        if by_shape := self._by_shape():
            return by_shape
        fitting = [one for split in self._conventions() for one in self._arrangements(split)]
        return fitting[0] if fitting and all(one == fitting[0] for one in fitting) else None

    def _check_names(self, names: list[str]) -> list[str]:
        count = len(self._optimizer.numbers)
        where = f"{self._folder}: names"
        for name, times in Counter(names).items():
            if name not in self._order.module:
                raise PipelineError(
                    f"{where} has {name}, no parameter of the model",
                    hint=f"its names are like {next(iter(self._trained))}",
                )
            if times > 1:
                raise PipelineError(f"{where} has {name} twice", hint="remove one of the lines")
        if len(names) != count:
            raise PipelineError(
                f"{self._folder}: the optimizer has {count} parameters, {len(names)} names were "
                "given",
                hint=GROUPS_HINT,
            )
        for name, number in zip(names, self._optimizer.numbers, strict=True):
            shape = self._shape_of.get(number)
            if shape is not None and shape != self._order.module[name]:
                raise PipelineError(
                    f"{self._folder}: {name} has shape {self._order.module[name]}, exp_avg of the "
                    f"optimizer's parameter {number} has {shape}",
                    hint=GROUPS_HINT,
                )
        self._check_trained(dict(zip(self._optimizer.numbers, names, strict=True)))
        return names

    def _check_trained(self, name_of: Mapping[int, str]) -> None:
        for number in self._shape_of:
            if name_of[number] not in self._trained:
                raise PipelineError(
                    f"{self._folder}: {name_of[number]} was trained there, and is frozen here",
                    hint="frozen_parameters and trainable_parameters decide what is trained",
                )

    def _check_model(self) -> None:
        """Check that the optimizer's counts and shapes match this model."""
        count = len(self._optimizer.numbers)
        if count != len(self._held):
            frozen = len(self._order.module) - len(self._trained)
            raise PipelineError(
                f"{self._folder}: the optimizer has {count} parameters, this run trains "
                f"{len(self._trained)} and leaves {frozen} of the model frozen",
                hint="base, lora and frozen_parameters have to describe what was trained there; "
                f"or {GROUPS_HINT}",
            )
        free = Counter(tuple(shape) for shape in self._trained.values())
        for number, shape in self._shape_of.items():
            free[tuple(shape)] -= 1
            if free[tuple(shape)] < 0:
                there = sum(list(shape) == one for one in self._shape_of.values())
                here = sum(list(shape) == one for one in self._trained.values())
                raise PipelineError(
                    f"{self._folder}: the optimizer's parameter {number} has shape {shape}, as "
                    f"{here} of the parameters have that this run trains and {there} there",
                    hint="its file is another training's, or base, lora and frozen_parameters do "
                    "not describe what was trained there",
                )

    def _fits(self, numbers: Sequence[int], names: Sequence[str]) -> bool:
        return len(numbers) == len(names) and all(
            number not in self._shape_of
            or (name in self._trained and self._shape_of[number] == self._held[name])
            for number, name in zip(numbers, names, strict=True)
        )

    def _arrangements(
        self, split: Sequence[Members], *, with_values: bool = False
    ) -> list[list[str]]:
        """Find up to two ways in which the groups of a split can match the optimizer's."""
        filled = [members for members in split if members.names]
        if with_values and not any(members.values for members in filled):
            return []
        if len(filled) != sum(bool(group) for group in self._groups):
            return []

        def fill(number: int, left: list[Members]) -> Iterator[list[str]]:
            if number == len(self._groups):
                yield []
                return
            numbers = self._groups[number]
            if not numbers:
                yield from fill(number + 1, left)
                return
            for index, members in enumerate(left):
                if with_values and not self._same_values(number, members):
                    continue
                if self._fits(numbers, members.names):
                    for rest in fill(number + 1, left[:index] + left[index + 1 :]):
                        yield [*members.names, *rest]

        return list(islice(fill(0, filled), 2))

    def _same_values(self, number: int, members: Members) -> bool:
        group = self._optimizer.groups[number]
        there: dict[str, Any] = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        return all(there.get(key) == value for key, value in members.values.items())

    def _by_shape(self) -> list[str] | None:
        """Return the order if no shape is in two groups: each group follows the model's order."""
        if len(self._shape_of) != len(self._held):
            return None
        names: dict[int, str] = {}
        owner: dict[tuple[int, ...], int] = {}
        left: dict[tuple[int, ...], list[str]] = {}
        for name, shape in self._held.items():
            left.setdefault(tuple(shape), []).append(name)
        for index, group in enumerate(self._groups):
            for number in group:
                key = tuple(self._shape_of[number])
                if owner.setdefault(key, index) != index:
                    return None
                names[number] = left[key].pop(0)
        return [names[number] for number in self._optimizer.numbers]

    def _conventions(self) -> Iterator[list[Members]]:
        """Yield the common splits of parameters by trainers, applied to the optimizer's names."""
        names = list(self._held)
        yield [Members(names)]
        spared = set(self._order.no_decay)
        for is_spared in (
            lambda name: name in spared,
            lambda name: len(self._held[name]) < 2,
            lambda name: name.endswith("bias"),
            lambda name: re.search(r"bias|LayerNorm\.weight", name) is not None,
        ):
            yield [
                Members([name for name in names if not is_spared(name)]),
                Members([name for name in names if is_spared(name)]),
            ]
