"""Gradient checkpointing: a block's activations are computed again instead of kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016),
https://arxiv.org/abs/1604.06174. Models of diffusers and of transformers call a function of ours
around each of their blocks; what is kept of a block is its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerotrain.launch.resolved import ResolvedPhase

Block = Callable[..., Any]
"""A module, or a method with its keyword arguments bound."""


def enable_gradient_checkpointing(model: torch.nn.Module, phase: ResolvedPhase) -> None:
    """Let the model recompute its blocks as the phase says; its engine has been built.

    DeepSpeed's interface is taken where parameters wait in host memory or on a disk, and for
    cpu_checkpointing, which copies while the GPU computes.
    """
    if not phase.gradient_checkpointing:
        return
    chosen = checkpoint_by_torch_on_cpu if phase.cpu_checkpointing else checkpoint_by_torch
    if phase.engine == "deepspeed" and (phase.offload_param != "none" or phase.cpu_checkpointing):
        from deepspeed import checkpointing
        from deepspeed.accelerator import get_accelerator

        # On a CPU they are in host memory, and DeepSpeed 0.19 would lose them on their way there.
        elsewhere = not get_accelerator().is_synchronized_device()
        checkpointing.configure(None, checkpoint_in_cpu=phase.cpu_checkpointing and elsewhere)
        chosen = checkpoint_by_deepspeed
    # The same method in both libraries; transformers has no public one that takes a function.
    model._set_gradient_checkpointing(  # type: ignore[operator]
        enable=True, gradient_checkpointing_func=chosen
    )


def checkpoint_by_torch(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Keep the inputs where they are."""
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


def checkpoint_by_torch_on_cpu(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Keep positional tensors in host memory, page-locked where there is a GPU.

    Keyword arguments (masks, rotary embeddings) stay: the blocks share them.
    """
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint_by_torch(block, *args, **kwargs)


def checkpoint_by_deepspeed(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Keep the inputs as deepspeed.checkpointing has been configured to.

    Its function gets flat tensors and gives them: those in tuples or in bound keyword arguments
    would be outside of the graph. It draws the block's random numbers again; autocast is restored
    here.
    """
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    from deepspeed import checkpointing

    if isinstance(block, partial):  # transformers binds the keyword arguments
        args, kwargs = (*block.args, *args), {**block.keywords, **kwargs}
        block = block.func
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = _expendable([leaves[place] for place in places])
    for place in places:
        leaves[place] = None  # else `run` would keep what DeepSpeed moves away
    device = tensors[0].device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    output_form: TreeSpec | None = None

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        nonlocal output_form
        filled = leaves.copy()
        for place, tensor in zip(places, inputs, strict=True):
            filled[place] = tensor
        own_args, own_kwargs = tree_unflatten(filled, form)
        with torch.autocast(device, dtype, enabled):
            outputs, output_form = tree_flatten(block(*own_args, **own_kwargs))
        # An input that is given back would be emptied with the inputs.
        return tuple(o.view_as(o) if any(o is i for i in inputs) else o for o in outputs)

    outputs = checkpointing.checkpoint(run, *tensors)
    assert output_form is not None
    return tree_unflatten(outputs if isinstance(outputs, tuple) else [outputs], output_form)


def _expendable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors over the same memory, of which one at least requires a gradient.

    DeepSpeed empties the tensors whose content it moves elsewhere, but others use them, too: skip
    connections, the embedding of the timestep. And it leaves a block of which no input requires a
    gradient out of the graph, with all that is trained inside: LoRA's first block.
    """
    found: list[torch.Tensor] = [_Alias.apply(t) for t in tensors]  # type: ignore[no-untyped-call]
    if not any(tensor.requires_grad for tensor in found):
        next(tensor for tensor in found if tensor.is_floating_point()).requires_grad_()
    return found


class _Alias(torch.autograd.Function):
    """The same values in the same memory; no view, which would keep that memory alive."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
