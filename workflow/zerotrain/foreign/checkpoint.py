"""A checkpoint that another program made, read as zerotrain reads its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.position import TrainingPosition

if TYPE_CHECKING:
    from zerotrain.foreign.numbered import Numbered

Pieces = Callable[[str, str], Iterable[torch.Tensor]]
"""(parameter, slot) to the consecutive parts of the flattened parameter: views, not copies."""


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """What zerotrain.checkpoint.Checkpoint offers, and what its makers keep besides.

    Files stay mapped: a tensor is put together when it is asked for, so that the memory of a reader
    is one tensor, not the model. Nobody may rewrite the folder meanwhile.
    """

    folder: Path
    position: TrainingPosition
    shapes: dict[str, list[int]]
    """The trained parameters, in the order of their maker."""
    slots: list[str]
    """``master``, and Adam's ``exp_avg`` and ``exp_avg_sq`` where the checkpoint has them."""
    pieces: Pieces
    frozen: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of what was not trained: frozen parameters (and buffers, where a file mixes both)."""
    frozen_pieces: Callable[[str], Iterable[torch.Tensor]] = lambda name: ()
    tied: dict[str, str] = field(default_factory=dict)
    """Second names of trained parameters, and the name in `names` that holds the tensor."""
    lost: list[str] = field(default_factory=list)
    """Sentences for the user: what the folder holds and this reader leaves out."""
    adapter: Mapping[str, Any] | None = None
    """Of an adapter alone: what its files say of it, by peft's names."""
    numbered: Numbered | None = None
    """The torch optimizer whose moments have numbers in place of names, where it is one."""

    @property
    def names(self) -> list[str]:
        """The trained parameters."""
        return list(self.shapes)

    def tensor(self, name: str, slot: str) -> torch.Tensor:
        """The full float32 tensor of one trained parameter in one slot, for reading.

        Where it lies in one piece of a file it is that piece, mapped; else it is put together.

        Raises:
            PipelineError: the files hold more or fewer elements than the parameter's shape.
        """
        pieces, size = list(self.pieces(name, slot)), torch.Size(self.shapes[name])
        if len(pieces) == 1 and pieces[0].dtype == torch.float32:
            only = pieces[0].detach()
            if only.is_contiguous() and only.numel() == size.numel():
                return only.view(size)
        whole = torch.empty(size, dtype=torch.float32)
        self._fill(whole, pieces, f"{name} ({slot})")
        return whole

    def frozen_tensor(self, name: str) -> torch.Tensor:
        """The full tensor of one frozen parameter, in its own dtype."""
        pieces = list(self.frozen_pieces(name))
        whole = torch.empty(self.frozen[name], dtype=pieces[0].dtype)
        self._fill(whole, pieces, f"{name} (frozen)")
        return whole

    def _fill(self, whole: torch.Tensor, pieces: Iterable[torch.Tensor], what: str) -> None:
        flat, found = whole.view(-1), 0
        for piece in pieces:
            if found + piece.numel() <= flat.numel():
                flat[found : found + piece.numel()] = piece.detach().reshape(-1)
            found += piece.numel()
        if found != flat.numel():
            raise PipelineError(
                f"{self.folder}: {what} has {found} elements, its shape {list(whole.shape)} needs "
                f"{flat.numel()}",
                hint="the checkpoint is damaged; use an older one",
            )


def training_position(
    *,
    step: int,
    samples: int,
    optimizer: str,
    optimizer_step: int,
    param_groups: list[dict[str, Any]],
    engine: dict[str, Any],
    loss_scale: dict[str, Any] | None,
) -> TrainingPosition:
    """The position of a training that no run of zerotrain names: no phase, no schedule, no seed."""
    return TrainingPosition(
        run="", phase="", step=step, samples=samples, optimizer=optimizer,
        optimizer_step=optimizer_step, param_groups=param_groups, lr_scheduler="",
        lr_scheduler_steps=0, rng={}, engine=engine, loss_scale=loss_scale,
    )  # fmt: skip
