"""Differences between operations of a GPU and a CPU in saved tensors and in types.

Traces use fake CPU tensors, since a torch build without GPU kernels cannot run autograd on fake GPU
tensors. Two things are then done as on a GPU: attention, and the operations that autocast runs in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FLOAT32 = frozenset(
    {
        functional.layer_norm,
        functional.group_norm,
        functional.softmax,
        functional.log_softmax,
        functional.interpolate,
        torch.softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.rsqrt,
        torch.reciprocal,
        torch.sum,
        torch.prod,
        torch.cumsum,
        torch.Tensor.softmax,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.rsqrt,
        torch.Tensor.reciprocal,
        torch.Tensor.sum,
        torch.Tensor.prod,
        torch.Tensor.cumsum,
        torch.Tensor.__pow__,
    }
)
"""Operations of the families that CUDA's autocast runs in float32 and the CPU's does not. Source:
https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""


class GpuOperations(TorchFunctionMode):
    """Function mode that runs attention and autocast's float32 operations like CUDA and ROCm.

    Attention uses the flash kernel for 16-bit types without a mask, else the memory-efficient one;
    both save their inputs, their output and a float32 number per row. These kernels recompute a
    dropout within attention from its seed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in FLOAT32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*_widen(args), **dict(zip(kwargs, _widen(kwargs.values()))))  # noqa: B905
        return func(*args, **kwargs)


def _widen(values: Any) -> list[Any]:
    """Return the values with 16-bit tensors in float32."""
    return [
        value.float()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        else value
        for value in values
    ]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention [B, H, T, D] of queries [B, H, T, D] over keys and values [B, G, S, D]."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (
            x.to(dtype) if x.is_floating_point() else x for x in (query, key, value)
        )
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    with torch.autocast("cpu", enabled=False):
        if attn_mask is None and query.dtype != torch.float32:
            output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return output
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # the kernel adds its mask
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
        return efficient
