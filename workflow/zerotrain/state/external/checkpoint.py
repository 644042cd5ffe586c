"""An external checkpoint, with the interface of zerotrain's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.consistency import reading
from zerotrain.state.external.torch_optimizer import TorchOptimizer
from zerotrain.state.position import TrainerState

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
