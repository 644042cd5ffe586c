"""Quantized linear layers: which they are, what they compute, and what they keep."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.nn import Linear

from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.models.quantized_linear import (
    METHODS,
    QuantizedLinear,
    quantize_linear_layers,
    quantized_layers,
)


def layers(
    precision: str = "nf4", out: int = 48, size: int = 64, *, bias: bool = True
) -> tuple[QuantizedLinear, Linear]:
    """A quantized layer, and a plain one of the dequantized weight."""
    torch.manual_seed(4)
    plain = Linear(size, out, bias=bias).requires_grad_(False)
    packed = QuantizedLinear(plain, precision)
    method = METHODS[precision]
    plain.weight.data = method.dequantize(
        method.quantize(plain.weight), plain.weight.shape, torch.float32
    )
    return packed, plain


@pytest.mark.parametrize("precision", METHODS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_it_computes_with_the_dequantized_weight(
    cast: torch.dtype | None, bias: bool, precision: str
) -> None:
    """Output and gradient are the bits of a plain layer of that weight, also under autocast."""
    found = []
    for layer in layers(precision, bias=bias):
        torch.manual_seed(5)
        given = torch.randn(2, 3, 64, requires_grad=True)
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            out = layer(given)
        out.float().square().sum().backward()
        found.append((out.detach(), given.grad))
    (out, gradient), (plain_out, plain_gradient) = found
    assert out.dtype == (cast or torch.float32)
    assert torch.equal(out, plain_out)
    assert torch.equal(gradient, plain_gradient)


@pytest.mark.parametrize("precision", METHODS)
def test_the_graph_keeps_codes_alone(precision: str) -> None:
    """Saved for the backward pass: no tensor of the weight's size in floating point."""
    layer, _ = layers(precision, out=96, size=128)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layer(torch.randn(2, 128, requires_grad=True))
    assert not any(one.is_floating_point() for one in saved)
    assert sum(one.nbytes for one in saved) == layer.nbytes < 96 * 128 * 2


@pytest.mark.parametrize("precision", METHODS)
def test_a_cast_of_the_model_rounds_no_scale(precision: str) -> None:
    """DeepSpeed casts all that is of a floating type; `weight` follows the cast."""
    layer, plain = layers(precision)
    cast = torch.nn.Sequential(layer).bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, plain.weight.bfloat16())
    cast.float()
    assert torch.equal(layer.weight, plain.weight)
    assert not layer.state_dict().keys() - {"bias"}


class Model(torch.nn.Module):
    """Blocks, and a head that shares its weight with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleDict(
            {"to_q": Linear(64, 64), "proj": torch.nn.Sequential(Linear(64, 64))}
        ) for _ in range(2))  # fmt: skip
        self.head = Linear(64, 8, bias=False)
        self.head.weight = self.table.weight

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_all_linear_layers_but_the_head_and_the_excluded_ones() -> None:
    """An excluded name is the end of a layer's name at whole components."""
    model = Model()
    assert quantize_linear_layers(model, "nf4", ["proj.0"]) == ["blocks.0.to_q", "blocks.1.to_q"]
    assert len(quantized_layers(model)) == 2
    assert type(model.head) is Linear
    assert {n for n, _ in model.named_parameters()} == {
        "table.weight",
        *(f"blocks.{i}.{name}" for i in range(2) for name in ("to_q.bias", "proj.0.weight",
                                                              "proj.0.bias")),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (["to_k"], "no linear layer of Model has a name that ends in 'to_k'"),
        (["to_q", "proj.0"], "Model has no linear layer to quantize"),
    ],
)
def test_exclusions_that_cannot_be_meant_are_refused(exclude: list[str], said: str) -> None:
    """A name of no layer, or of all."""
    with pytest.raises(PipelineError, match=said):
        quantize_linear_layers(Model(), "nf4", exclude)


@pytest.mark.parametrize("precision", METHODS)
def test_a_layer_without_bytes_has_the_sizes_of_a_real_one(precision: str) -> None:
    """The planner counts them."""
    sizes = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            layer = QuantizedLinear(Linear(130, 33), precision)
        sizes.append({n: (b.dtype, b.shape) for n, b in layer.named_buffers()})
    assert sizes[0] == sizes[1]


def test_a_whole_name_is_excluded_alone() -> None:
    """Flux has a proj_out of its own, and one in each single block."""
    model = torch.nn.ModuleDict({"proj": Linear(8, 8), "block": torch.nn.ModuleDict({
        "proj": Linear(8, 8)})})  # fmt: skip
    assert quantize_linear_layers(model, "int8-quanto", ["^proj"]) == ["block.proj"]


def test_the_configuration_has_the_methods() -> None:
    """Of base_model_precision; `no_change` quantizes nothing."""
    field = RunConfig.model_fields["base_model_precision"]
    assert set(get_args(field.annotation)) == {"no_change", *METHODS}
