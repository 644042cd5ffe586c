"""An external checkpoint, with the interface of zerotrain's checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.consistency import read_number, reading
from zerotrain.state.position import ADAM_SLOTS, TrainerState

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


Pieces = Callable[[str, str], Iterable[torch.Tensor]]
"""(parameter, slot) to the consecutive parts of the flattened parameter: views, not copies."""


@dataclass(frozen=True)
class NumberedWeights:
    """Named weights and a numbered optimizer, until the model determines the matching."""

    optimizer: TorchOptimizer
    name: Callable[[Sequence[str] | None, Sequence[str]], ExternalCheckpoint]
    """Builds the checkpoint from the names in the optimizer's order (None: unknown) and the
    trained names, both as the weights have them."""


@dataclass(frozen=True, kw_only=True)
class ExternalCheckpoint:
    """The interface of zerotrain.state.checkpoint.Checkpoint, plus what other programs store.

    Files stay mapped: a tensor is assembled on access, so a reader needs memory for one tensor, not
    for the model. No process may rewrite the folder in the meantime.
    """

    folder: Path
    position: TrainerState
    shapes: dict[str, list[int]]
    """Shapes of the trained parameters, in the order of the program that wrote them."""
    slots: list[str]
    """``master``, and Adam's ``exp_avg`` and ``exp_avg_sq`` if the checkpoint has them."""
    pieces: Pieces
    frozen: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of untrained tensors: frozen parameters (and buffers, if a file mixes both)."""
    frozen_pieces: Callable[[str], Iterable[torch.Tensor]] = lambda name: ()
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of trained parameters, mapped to the name in `names` that has the tensor."""
    lost: list[str] = field(default_factory=list)
    """Sentences for the user: contents of the folder that this reader omits."""
    adapter: Mapping[str, Any] | None = None
    """The settings in an adapter's files, under peft's names; None if it is not an adapter."""
    progress: str = ""
    """The step, and what says it; empty if the layout itself counts steps."""
    numbered: NumberedWeights | None = None
    """The torch optimizer, if its moments have numbers instead of names."""

    @property
    def names(self) -> list[str]:
        """List the trained parameters."""
        return list(self.shapes)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """Return the full float32 tensor of one trained parameter in one slot, for reading.

        If it is one piece of a file, return that piece, mapped; else assemble it.

        Raises:
            PipelineError: the files have more or fewer elements than the parameter's shape.
        """
        with reading(self.folder):
            pieces, size = list(self.pieces(name, slot)), torch.Size(self.shapes[name])
            if len(pieces) == 1 and pieces[0].dtype == torch.float32:
                only = pieces[0].detach()
                if only.is_contiguous() and only.numel() == size.numel():
                    return only.view(size)
            whole = torch.empty(size, dtype=torch.float32)
            self._fill(whole, pieces, f"{name} ({slot})")
            return whole

    def frozen_tensor(self, name: str) -> torch.Tensor:
        """Return the full tensor of one frozen parameter, in its dtype."""
        with reading(self.folder):
            pieces = list(self.frozen_pieces(name))
            whole = torch.empty(self.frozen[name], dtype=pieces[0].dtype)
            self._fill(whole, pieces, f"{name} (frozen)")
            return whole

    def _fill(self, whole: torch.Tensor, pieces: Iterable[torch.Tensor], what: str) -> None:
        flat, filled = whole.view(-1), 0
        for piece in pieces:
            if filled + piece.numel() <= flat.numel():
                flat[filled : filled + piece.numel()] = piece.detach().reshape(-1)
            filled += piece.numel()
        if filled != flat.numel():
            raise PipelineError(
                f"{self.folder}: {what} has {filled} elements, its shape {list(whole.shape)} needs "
                f"{flat.numel()}",
                hint="the checkpoint is damaged; use an older one",
            )


def external_state(
    *,
    step: int,
    samples: int,
    optimizer: str,
    optimizer_step: int,
    param_groups: list[dict[str, Any]],
    engine: dict[str, Any],
    loss_scale: dict[str, Any] | None,
) -> TrainerState:
    """Return the state of a training without a zerotrain run: no phase, no schedule, no seed."""
    return TrainerState(
        run="", phase="", step=step, samples=samples, optimizer=optimizer,
        optimizer_step=optimizer_step, param_groups=param_groups, lr_scheduler="",
        lr_scheduler_steps=0, rng={}, engine=engine, loss_scale=loss_scale, ran_on={},
        history=[],
    )  # fmt: skip
