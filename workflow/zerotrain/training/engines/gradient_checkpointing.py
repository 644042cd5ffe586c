"""Gradient checkpointing: a block's activations are recomputed instead of kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016),
https://arxiv.org/abs/1604.06174. Models of diffusers and of transformers call one of the functions
below around each of their blocks; only a block's inputs are kept.
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
    """Make the model recompute its blocks as the phase says; its engine must be built.

    The DeepSpeed engine uses DeepSpeed's function if parameters are offloaded to host memory or a
    disk, and for cpu_checkpointing, which copies while the GPU computes.
    """
    if not phase.train.gradient_checkpointing:
        return
    chosen = checkpoint_by_torch_on_cpu if phase.launch.cpu_checkpointing else checkpoint_by_torch
    if phase.derived.engine == "deepspeed" and (
        phase.derived.offload_param != "none" or phase.launch.cpu_checkpointing
    ):
        from deepspeed import checkpointing
        from deepspeed.accelerator import get_accelerator

        # On a CPU the inputs are in host memory, and DeepSpeed 0.19 would lose them in the copy.
        asynchronous = not get_accelerator().is_synchronized_device()
        checkpointing.configure(
            None, checkpoint_in_cpu=phase.launch.cpu_checkpointing and asynchronous
        )
        chosen = checkpoint_by_deepspeed
    # The same method in both libraries; transformers has no public one that takes a function.
    model._set_gradient_checkpointing(  # type: ignore[operator]
        enable=True, gradient_checkpointing_func=chosen
    )


def checkpoint_by_torch(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block and keep its inputs where they are."""
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


def checkpoint_by_torch_on_cpu(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block and keep positional tensors in host memory, page-locked under CUDA.

    Keyword arguments (masks, rotary embeddings) stay on the device: the blocks share them.
    """
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint_by_torch(block, *args, **kwargs)


def checkpoint_by_deepspeed(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block and keep its inputs as deepspeed.checkpointing is configured.

    DeepSpeed's function takes and returns flat tensors: those in tuples or in bound keyword
    arguments would be outside of the graph. It restores the block's random numbers; autocast is
    restored here.
    """
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    from deepspeed import checkpointing

    if isinstance(block, partial):  # transformers binds the keyword arguments
        args, kwargs = (*block.args, *args), {**block.keywords, **kwargs}
        block = block.func
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = _alias_tensors([leaves[place] for place in places])
    for place in places:
        leaves[place] = None  # else `run` would keep tensors that DeepSpeed moves away
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
        # An input that is returned as it is would be emptied with the inputs.
        return tuple(o.view_as(o) if any(o is i for i in inputs) else o for o in outputs)

    outputs = checkpointing.checkpoint(run, *tensors)
    assert output_form is not None
    return tree_unflatten(outputs if isinstance(outputs, tuple) else [outputs], output_form)


def _alias_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors over the same memory, at least one of which requires a gradient.

    DeepSpeed empties the tensors that it moves to host memory, but others use them, too: skip
    connections, the embedding of the timestep. It also excludes a block from the graph, with all
    that is trained inside, if no input requires a gradient: LoRA's first block.
    """
    aliases: list[torch.Tensor] = [_Alias.apply(t) for t in tensors]  # type: ignore[no-untyped-call]
    if not any(tensor.requires_grad for tensor in aliases):
        next(tensor for tensor in aliases if tensor.is_floating_point()).requires_grad_()
    return aliases


class _Alias(torch.autograd.Function):
    """The same values in the same memory, but not a view, which would keep that memory alive."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
