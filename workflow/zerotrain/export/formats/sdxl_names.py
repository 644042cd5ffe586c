"""SDXL's tensors by their names in the original (LDM, sgm) single file.

The inverse of convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint, convert_ldm_clip_checkpoint
and convert_open_clip_checkpoint in diffusers.loaders.single_file_utils, whose tables are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

UNET = "model.diffusion_model."
VAE = "first_stage_model."
CLIP = "conditioner.embedders.0.transformer.text_model."
OPEN_CLIP = "conditioner.embedders.1.model."

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
TEXT_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
TEXT_TOP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}


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
        place, part, layer, rest = _parts(name)
        if place == "mid_block":
            # The original numbers resnet, attention and resnet in one list.
            start = f"middle_block.{2 * layer if part == 'resnets' else 1}"
        elif part == "downsamplers":
            return f"input_blocks.{(_block(place) + 1) * step}.0.op.{rest.split('.')[-1]}"
        elif part == "upsamplers":
            above = 2 if attends[_block(place)] else 1
            return f"output_blocks.{(_block(place) + 1) * step - 1}.{above}.{rest}"
        else:
            first = 1 if place.startswith("down") else 0
            side = "input_blocks" if first else "output_blocks"
            number = first + _block(place) * step + layer
            start = f"{side}.{number}.{0 if part == 'resnets' else 1}"
        return f"{start}.{_rename(rest, RESNET) if part == 'resnets' else rest}"

    return name_of


def vae_names(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the function that gives an autoencoder's tensor its original name, without prefix."""
    top: dict[str, str] = DIFFUSERS_TO_LDM_MAPPING["vae"]
    last = len(config["up_block_types"]) - 1

    def name_of(name: str) -> str:
        if name in top:
            return top[name]
        side, name = name.split(".", 1)
        place, part, layer, rest = _parts(name)
        if part == "attentions":
            return f"{side}.mid.attn_{layer + 1}.{_rename(rest, VAE_ATTENTION)}"
        rest = rest.replace("conv_shortcut", "nin_shortcut")
        if place == "mid_block":
            return f"{side}.mid.block_{layer + 1}.{rest}"
        down = place.startswith("down")
        start = f"{side}.down.{_block(place)}" if down else f"{side}.up.{last - _block(place)}"
        if part == "resnets":
            return f"{start}.block.{layer}.{rest}"
        return f"{start}.{'downsample' if down else 'upsample'}.{rest}"

    return name_of


def open_clip_name(name: str) -> str:
    """Return the original name of a tensor of the second text encoder, except q, k and v."""
    if name in TEXT_TOP:
        return TEXT_TOP[name]
    number, rest = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore[union-attr]
    return f"transformer.resblocks.{number}.{_rename(rest, TEXT_LAYER)}"


def _parts(name: str) -> tuple[str, str, int, str]:
    """Split `down_blocks.1.resnets.0.conv1.weight` into block, kind, number and the rest."""
    match = re.fullmatch(r"(mid_block|\w+_blocks\.\d+)\.(\w+)\.(\d+)\.(.+)", name)
    assert match, name
    return match[1], match[2], int(match[3]), match[4]


def _block(place: str) -> int:
    return int(place.split(".")[1])


def _rename(name: str, table: Mapping[str, str]) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{table[layer]}.{kind}"
