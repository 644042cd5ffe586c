"""`lora.fused_layers`: the adapter that one fused layer has, held to peft on real fused layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tests.builders.images import publish_nano
from tests.formats.conftest import published

from zerotrain.config.adapters import stack_of
from zerotrain.export.command import convert
from zerotrain.export.formats.original import flux_slot
from zerotrain.models.families.flux import FAMILY
from zerotrain.models.families.lora import add_adapter, save_adapter
from zerotrain.models.sizes import model_sizes
from zerotrain.models.trainable import trained_parameters

TARGETS = (
    *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "to_out.0"),
    *("ff.net.2", "norm.linear"),
)
LORA: dict[str, Any] = {
    "rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": TARGETS, "fused_layers": True,
}  # fmt: skip
STACKS = {
    "transformer_blocks": {
        "img_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    },
    "single_transformer_blocks": {
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    },
}
"""The fused layers of the reference, and the layers that they are made of."""


class Rows(torch.nn.Module):
    """Some rows of what a block's fused layer gives."""

    def __init__(self, block: torch.nn.Module, name: str, rows: slice) -> None:
        super().__init__()
        self.fused = lambda: getattr(block, name)  # peft replaces the layer; this is no child
        self.rows = rows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fused()(hidden)[..., self.rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano Flux."""
    return publish_nano("flux", tmp_path_factory.mktemp("fused") / "base")


def adapted(base: Path, **changes: Any) -> torch.nn.Module:
    """The transformer with an adapter."""
    model = FAMILY.load_model(base)
    add_adapter(model, seed=0, **(LORA | changes))
    return model


def reference(base: Path) -> Any:
    """The transformer with real fused layers, under peft's own adapter.

    Returns:
        The model, and the places of its parameters: of ours, the name there and the rows.
    """
    model = FAMILY.load_model(base)
    places: dict[str, tuple[str, slice]] = {}
    for blocks, stacks in STACKS.items():
        for number, block in enumerate(getattr(model, blocks)):
            for name, layers in stacks.items():
                parts = [block.get_submodule(layer) for layer in layers]
                heights = [part.out_features for part in parts]
                fused = torch.nn.Linear(parts[0].in_features, sum(heights))
                fused.weight.data = torch.cat([part.weight.data for part in parts])
                fused.bias.data = torch.cat([part.bias.data for part in parts])
                block.register_module(name, fused)
                start = 0
                for layer, height in zip(layers, heights, strict=True):
                    owner, _, last = layer.rpartition(".")
                    rows = slice(start, start + height)
                    setattr(block.get_submodule(owner), last, Rows(block, name, rows))
                    prefix = f"{blocks}.{number}"
                    places[f"{prefix}.{layer}"] = f"{prefix}.{name}", rows
                    start += height
    targets = ["img_qkv", "txt_qkv", "linear1", "to_out.0", "ff.net.2", "norm.linear"]
    model.add_adapter(LoraConfig(r=3, lora_alpha=6.0, target_modules=targets))
    return model, places


def there(name: str, places: dict[str, tuple[str, slice]]) -> tuple[str, slice]:
    """Where the reference has a parameter of ours."""
    layer, _, rest = name.partition(".lora_")
    fused, rows = places.get(layer, (layer, slice(None)))
    return f"{fused}.lora_{rest}", rows if rest.startswith("B") else slice(None)


def train(model: Any, steps: int) -> list[float]:
    """AdamW steps on fixed batches, clipped at a norm that each gradient exceeds; the norms.

    In float64: one product of a fused layer and several of its parts round differently, and AdamW
    makes a step of the same size of the smallest gradient.
    """
    source, norms = torch.Generator().manual_seed(3), []
    model.double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    config = model.config
    for _ in range(steps):
        draw = lambda *shape: torch.randn(*shape, generator=source).double()  # noqa: E731
        found = model(
            hidden_states=draw(2, 4, config.in_channels),
            encoder_hidden_states=draw(2, 5, config.joint_attention_dim),
            pooled_projections=draw(2, config.pooled_projection_dim),
            timestep=torch.tensor([0.3, 0.8]).double(),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(5, 3),
            return_dict=False,
        )[0]
        (found - draw(*found.shape)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1e-3)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_three_steps_are_those_of_peft_on_a_fused_layer(base):
    """Every factor within 1e-9 and the norms of the gradients: that of a shared one counts once."""
    ours, (theirs, places) = adapted(base), reference(base)
    own, other = trained_parameters(ours), trained_parameters(theirs)
    start = {name: p.detach().clone() for name, p in own.items()}
    for name, parameter in own.items():
        place, rows = there(name, places)
        other[place].data[rows] = parameter.data
    norms = train(ours, 3), train(theirs, 3)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert {there(name, places)[0] for name in own} == other.keys()
    assert sum(p.numel() for p in own.values()) == sum(p.numel() for p in other.values())
    for name, parameter in own.items():
        place, rows = there(name, places)
        assert (parameter - other[place][rows]).abs().max() <= 1e-9, name
        assert (parameter - start[name]).abs().max() > 1e-3, name


def test_the_first_values_are_drawn_as_for_the_fused_layer(base):
    """peft's bound of A is that of what a layer reads, which a stack reads once; B is zero."""
    for name, parameter in trained_parameters(adapted(base)).items():
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
        else:
            assert not parameter.any()


def test_stacks_are_the_layers_that_the_original_files_have_as_one(base):
    """Of every linear layer of a Flux, by the table of its original names."""
    model = FAMILY.empty_model(base)
    stacks: dict[str, set[str]] = {}
    places: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            stacks.setdefault(stack_of(name), set()).add(name)
            places.setdefault(flux_slot(f"{name}.weight").name, set()).add(name)
    assert sorted(map(sorted, stacks.values())) == sorted(map(sorted, places.values()))
    assert max(map(len, stacks.values())) == 4


def test_a_shared_factor_is_counted_once_by_the_planner(base):
    """model_sizes reads names and shapes alone; the adapter itself has as many."""
    model = FAMILY.empty_model(base)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    counted = model_sizes(shapes, LORA).trained
    assert counted == sum(p.numel() for p in trained_parameters(adapted(base)).values())
    assert counted < model_sizes(shapes, {**LORA, "fused_layers": False}).trained


def test_kohyas_file_has_one_lora_of_the_rank_for_a_stack(base, tmp_path):
    """Not a block-diagonal one of three times the rank; `convert` has diffusers read it back."""
    stack = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"]
    settings = {"rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": stack}
    model = FAMILY.load_model(base)
    add_adapter(model, seed=0, fused_layers=True, **settings)
    source = torch.Generator().manual_seed(1)
    first = model.get_parameter(f"{stack[0]}.lora_A.default.weight")
    tensors = {f"{layer}.lora_A.default.weight": first for layer in stack}
    for layer in stack:
        second = model.get_parameter(f"{layer}.lora_B.default.weight")
        tensors[f"{layer}.lora_B.default.weight"] = torch.randn(second.shape, generator=source)
    save_adapter(
        FAMILY, base, {n: list(t.shape) for n, t in tensors.items()}, tensors.__getitem__,
        settings, dtype=torch.float32, out=tmp_path / "adapter",
    )  # fmt: skip
    weights = published(base, tmp_path / "weights", tmp_path / "adapter", "flux")
    convert(weights, "kohya", tmp_path / "out")
    found = load_file(tmp_path / "out" / "lora.safetensors")
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    assert found.keys() == {f"{name}.{e}" for e in ("alpha", "lora_down.weight", "lora_up.weight")}
    assert found[f"{name}.alpha"] == 6.0
    assert torch.equal(found[f"{name}.lora_down.weight"], first)
    seconds = [tensors[f"{layer}.lora_B.default.weight"] for layer in stack]
    assert torch.equal(found[f"{name}.lora_up.weight"], torch.cat(seconds))
