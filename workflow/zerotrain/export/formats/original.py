"""Tensors in the original layouts: the slot of each, and joined tensors.

In SD3's and Flux's original files, query, key and value are one layer, and layers that output shift
and scale output the shift first. Their names are in original.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

from zerotrain.export.formats.tensors import LazyTensor
from zerotrain.export.formats.weights import ExportedWeights

NAMES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
SDXL: dict[str, dict[str, str]] = NAMES["sdxl"]
UNET = "model.diffusion_model."
VAE = "first_stage_model."
CLIP = "conditioner.embedders.0.transformer.text_model."
OPEN_CLIP = "conditioner.embedders.1.model."
"""Prefixes in SDXL's file."""


@dataclass(frozen=True)
class TensorSlot:
    """The slot of a diffusers tensor in the original layout."""

    name: str
    part: int = 0
    """Its number among the tensors whose rows are joined to one there."""
    swapped: bool = False
    """Whether the halves of its rows are swapped."""

    def of(self, kind: str, block: str = "") -> TensorSlot:
        """Return the slot of a layer's weight or bias, within a block or none."""
        return TensorSlot(f"{block}{self.name}.{kind}", self.part, self.swapped)


def _read_slots(names: Mapping[str, str | list[str]]) -> dict[str, TensorSlot]:
    """Return the slots of layers by their names in diffusers, from a table of NAMES."""
    return {
        layer: TensorSlot(name, part, swapped=layer == "norm_out.linear")
        for name, layers in names.items()
        for part, layer in enumerate([layers] if isinstance(layers, str) else layers)
    }


SD3_TOP = _read_slots(NAMES["output"] | NAMES["sd3"]["top"])
SD3_BLOCK = _read_slots(NAMES["sd3"]["block"])
FLUX_TOP = _read_slots(NAMES["output"] | NAMES["flux"]["top"])
FLUX_DOUBLE = _read_slots(NAMES["flux"]["double"])
FLUX_SINGLE = _read_slots(NAMES["flux"]["single"])


def sd3_slots(config: Mapping[str, Any]) -> Callable[[str], TensorSlot]:
    """Return the function that returns the slot of a tensor of SD3's transformer, without prefix.

    Args:
        config: The transformer's config.json.
    """
    last = f"transformer_blocks.{config['num_layers'] - 1}.norm1_context.linear"

    def slot_of(name: str) -> TensorSlot:
        if name == "pos_embed.pos_embed":
            return TensorSlot("pos_embed")
        layer, _, kind = name.rpartition(".")
        if layer in SD3_TOP:
            return SD3_TOP[layer].of(kind)
        _, number, rest = _block(layer)
        slot = SD3_BLOCK[rest].of(kind, f"joint_blocks.{number}.")
        # The last block's text is not used further: its norm outputs only shift and scale.
        return TensorSlot(slot.name, swapped=True) if layer == last else slot

    return slot_of


def flux_slot(name: str) -> TensorSlot:
    """Return the slot of a tensor of Flux's transformer."""
    layer, _, kind = name.rpartition(".")
    if layer in FLUX_TOP:
        return FLUX_TOP[layer].of(kind)
    blocks, number, rest = _block(layer)
    single = blocks.startswith("single")
    table, own = (FLUX_SINGLE, "single_blocks") if single else (FLUX_DOUBLE, "double_blocks")
    kind = "scale" if rest.startswith("attn.norm") else kind
    return table[rest].of(kind, f"{own}.{number}.")


def _block(layer: str) -> tuple[str, str, str]:
    """Split `transformer_blocks.0.attn.to_q` into blocks, number and the rest."""
    match = re.fullmatch(r"(\w+_blocks)\.(\d+)\.(.+)", layer)
    assert match, layer
    return match[1], match[2], match[3]


def unet_names(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the function that gives a U-Net tensor its original name, without prefix.

    Args:
        config: The U-Net's config.json.
    """
    tables = DIFFUSERS_TO_LDM_MAPPING["unet"]
    top: dict[str, str] = tables["layers"] | tables["addition_embed_type"]
    step = config["layers_per_block"] + 1
    attends = [kind.startswith("CrossAttn") for kind in config["up_block_types"]]

    def name_of(name: str) -> str:
        if name in top:
            return top[name]
        place, part, layer, rest = _split_name(name)
        if place == "mid_block":
            # The original numbers resnet, attention and resnet in one list.
            start = f"middle_block.{2 * layer if part == 'resnets' else 1}"
        elif part == "downsamplers":
            return f"input_blocks.{(_number(place) + 1) * step}.0.op.{rest.split('.')[-1]}"
        elif part == "upsamplers":
            above = 2 if attends[_number(place)] else 1
            return f"output_blocks.{(_number(place) + 1) * step - 1}.{above}.{rest}"
        else:
            first = 1 if place.startswith("down") else 0
            side = "input_blocks" if first else "output_blocks"
            number = first + _number(place) * step + layer
            start = f"{side}.{number}.{0 if part == 'resnets' else 1}"
        return f"{start}.{_rename(rest, NAMES['sdxl']['resnet']) if part == 'resnets' else rest}"

    return name_of


def vae_names(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the function that gives an autoencoder's tensor its original name, without prefix."""
    top: dict[str, str] = DIFFUSERS_TO_LDM_MAPPING["vae"]
    last = len(config["up_block_types"]) - 1

    def name_of(name: str) -> str:
        if name in top:
            return top[name]
        side, name = name.split(".", 1)
        place, part, layer, rest = _split_name(name)
        if part == "attentions":
            return f"{side}.mid.attn_{layer + 1}.{_rename(rest, NAMES['sdxl']['vae_attention'])}"
        rest = rest.replace("conv_shortcut", "nin_shortcut")
        if place == "mid_block":
            return f"{side}.mid.block_{layer + 1}.{rest}"
        down = place.startswith("down")
        start = f"{side}.down.{_number(place)}" if down else f"{side}.up.{last - _number(place)}"
        if part == "resnets":
            return f"{start}.block.{layer}.{rest}"
        return f"{start}.{'downsample' if down else 'upsample'}.{rest}"

    return name_of


def open_clip_name(name: str) -> str:
    """Return the original name of a tensor of the second text encoder, except q, k and v."""
    if name in SDXL["text_top"]:
        return SDXL["text_top"][name]
    number, rest = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore[union-attr]
    return f"transformer.resblocks.{number}.{_rename(rest, NAMES['sdxl']['text_layer'])}"


def _split_name(name: str) -> tuple[str, str, int, str]:
    """Split `down_blocks.1.resnets.0.conv1.weight` into block, kind, number and the rest."""
    match = re.fullmatch(r"(mid_block|\w+_blocks\.\d+)\.(\w+)\.(\d+)\.(.+)", name)
    assert match, name
    return match[1], match[2], int(match[3]), match[4]


def _number(place: str) -> int:
    return int(place.split(".")[1])


def _rename(name: str, table: Mapping[str, str]) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{table[layer]}.{kind}"


Slots = Callable[[str], TensorSlot]
"""Returns the slot of a tensor by its name in diffusers."""


def _sdxl(config: Mapping[str, Any]) -> Slots:
    name_of = unet_names(config)
    return lambda name: TensorSlot(name_of(name))


SLOTS: Mapping[str, Callable[[Mapping[str, Any]], Slots]] = {
    "sdxl": _sdxl,
    "sd3": sd3_slots,
    "flux": lambda config: flux_slot,
    # diffusers uses the original's names.
    "qwen_image": lambda config: TensorSlot,
}
"""Families with known original names: functions that return them for a denoiser's config.json."""
FLUX_WIDTH = 3072
"""Width at which diffusers splits Flux's joined tensors, whatever the model's."""


def to_original_layout(tensors: Mapping[str, LazyTensor], slot_of: Slots) -> dict[str, LazyTensor]:
    """Return a denoiser's tensors under their original names, without a prefix."""
    joined: dict[str, dict[int, LazyTensor]] = {}
    for name, stored in tensors.items():
        slot = slot_of(name)
        parts = joined.setdefault(slot.name, {})
        parts[slot.part] = swap_halves(stored) if slot.swapped else stored
    return {
        name: rows_of([parts[number] for number in sorted(parts)]) for name, parts in joined.items()
    }


def layers_by_slot(names: Iterable[str], slot_of: Slots) -> dict[str, tuple[str, ...]]:
    """Group the layers with a weight by their original name, in the order of its rows."""
    parts: dict[str, dict[int, str]] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and (slot := slot_of(name)).name.endswith(".weight"):
            parts.setdefault(slot.name.removesuffix(".weight"), {})[slot.part] = layer
    return {slot: tuple(parts[slot][n] for n in sorted(parts[slot])) for slot in parts}


def rows_of(parts: list[LazyTensor]) -> LazyTensor:
    """Join the rows of several tensors."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))


def swap_halves(stored: LazyTensor) -> LazyTensor:
    """Return a tensor with the second half of its rows first."""

    def read() -> torch.Tensor:
        first, second = stored.read().chunk(2)
        return torch.cat([second, first])

    return LazyTensor(stored.dtype, stored.shape, read)


def flux_width(weights: ExportedWeights) -> int:
    """Return the width of a Flux's layers."""
    config = weights.config(weights.part)
    width: int = config["num_attention_heads"] * config["attention_head_dim"]
    return width
