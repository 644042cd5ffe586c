"""Linear layers with quantized frozen weights, for training an adapter next to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from zerotrain.config.adapters import is_excluded
from zerotrain.config.suggestions import nearest
from zerotrain.errors import PipelineError
from zerotrain.models.quantization import (
    Groups,
    Packed,
    Rows,
    Tables,
    dequantize_groups,
    dequantize_nf4,
    dequantize_rows,
    make_tables,
    quantize_groups,
    quantize_nf4,
    quantize_rows,
)


class Method(NamedTuple):
    """A quantization method."""

    fields: tuple[str, ...]
    """Names of a layer's buffers."""
    quantize: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    """Returns the buffers of a weight [out, in]; those of a meta tensor are on the meta device."""
    dequantize: Callable[[Sequence[torch.Tensor], torch.Size, torch.dtype], torch.Tensor]
    """Returns the weight in this shape and type."""


def _quantize_nf4(weight: torch.Tensor) -> list[torch.Tensor]:
    return [*quantize_nf4(weight), *make_tables(weight.device)]


def _dequantize_nf4(
    found: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    count = len(Packed._fields)
    return dequantize_nf4(Packed(*found[:count]), Tables(*found[count:]), shape, dtype)


def _groups(bits: int) -> Method:
    return Method(
        Groups._fields,
        partial(quantize_groups, bits=bits),
        lambda found, *what: dequantize_groups(Groups(*found), bits, *what),
    )


METHODS = {
    "nf4": Method((*Packed._fields, *Tables._fields), _quantize_nf4, _dequantize_nf4),
    "int8-quanto": Method(
        Rows._fields,
        quantize_rows,
        lambda found, *what: dequantize_rows(Rows(*found), *what),
    ),
    "int4-quanto": _groups(4),
    "int2-quanto": _groups(2),
}
"""The quantization method of each value of base_model_precision."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
FLOATS = {bits: dtype for dtype, bits in BITS.items()}


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer with a quantized weight.

    The weight is dequantized for each forward and backward pass, so that only the codes stay in
    memory. The layer computes in the type of its input, or of autocast; the bias stays a parameter.

    Floating-point buffers are stored as integers of the same bits: a cast of the whole model, such
    as DeepSpeed's to bf16, must not round them.
    """

    def __init__(
        self, layer: torch.nn.Linear, precision: str, device: torch.device | None = None
    ) -> None:
        """Quantize a layer.

        Args:
            layer: The layer; its bias is reused.
            precision: One of METHODS.
            device: Device to quantize and keep the codes on; by default the weight's.
        """
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        self.register_parameter("bias", layer.bias)
        self.precision = precision
        method = METHODS[precision]
        found = method.quantize(layer.weight.to(device))
        for name, value in zip(method.fields, found, strict=True):
            bits = value.view(BITS.get(value.dtype, value.dtype))
            self.register_buffer(name, bits, persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantized weight [out, in], computed at each access; DoRA reads it."""
        shape = self.out_features, self.in_features
        return _weight(self.precision, self.dtype, shape, *self._packed())

    @property
    def numel(self) -> int:
        """Number of weights, the bias excluded."""
        return self.out_features * self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes, with its tables."""
        return sum(one.nbytes for one in self._packed())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in]."""
        device = input.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        shape = self.out_features, self.in_features
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input.to(dtype), bias, self.precision, shape, *self._packed()
        )
        return product

    def _packed(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in METHODS[self.precision].fields]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Record the type of a cast of the model, which no buffer shows."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """input @ weight.T + bias; only the codes are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        precision: str,
        shape: tuple[int, int],
        *packed: torch.Tensor,
    ) -> torch.Tensor:
        ctx.precision, ctx.shape = precision, shape
        ctx.save_for_backward(*packed)
        return linear(input, _weight(precision, input.dtype, shape, *packed), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        packed = ctx.saved_tensors  # a recomputed block returns them only once
        weight = _weight(ctx.precision, gradient.dtype, ctx.shape, *packed)
        return (gradient @ weight, None, None, None, *(None for _ in packed))


def quantize_linear_layers(
    model: torch.nn.Module,
    precision: str,
    exclude: Sequence[str] = (),
    device: torch.device | None = None,
) -> list[str]:
    """Replace the model's linear layers by quantized ones, one after another.

    The head of a language model is not quantized: its weight may be the token embedding.

    Args:
        model: A denoiser or language model; meta tensors give buffers of the right sizes.
        precision: One of METHODS.
        exclude: Names of layers to keep; see is_excluded.
        device: Device to quantize and keep the codes on; by default the model's.

    Returns:
        The names of the layers that were replaced.

    Raises:
        PipelineError: no linear layer is left to quantize, or an entry of `exclude` names none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    }
    for entry in exclude:
        if not any(is_excluded(name, [entry]) for name in layers):
            ends = sorted({".".join(name.split(".")[-2:]) for name in layers})
            raise PipelineError(
                f"base_model_exclude_modules: no linear layer of {type(model).__name__} has a name "
                f"that ends in {entry!r}",
                hint="near names: " + ", ".join(nearest(entry, ends, most=4, cutoff=0.4) or ends),
            )
    chosen = [name for name in layers if not is_excluded(name, exclude)]
    if not chosen:
        raise PipelineError(
            f"base_model_precision: {type(model).__name__} has no linear layer to quantize",
            hint="remove base_model_precision, or entries of base_model_exclude_modules",
        )
    for name in chosen:
        model.set_submodule(name, QuantizedLinear(layers.pop(name), precision, device))
    return chosen


def quantized_layers(model: torch.nn.Module) -> list[QuantizedLinear]:
    """List the model's quantized layers."""
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def _weight(
    precision: str, dtype: torch.dtype, shape: tuple[int, int], *packed: torch.Tensor
) -> torch.Tensor:
    found = [one.view(FLOATS.get(one.dtype, one.dtype)) for one in packed]
    return METHODS[precision].dequantize(found, torch.Size(shape), dtype)
