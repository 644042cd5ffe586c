"""SD3's and Flux's tensors by their names in the original files.

The inverse of convert_sd3_transformer_checkpoint_to_diffusers and its counterpart for Flux in
diffusers.loaders.single_file_utils: in the original, query, key and value are one layer, and layers
that output shift and scale output the shift first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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


def _fused_slot(name: str, *layers: str) -> dict[str, TensorSlot]:
    return {layer: TensorSlot(name, part) for part, layer in enumerate(layers)}


def _plain_slot(names: Mapping[str, str]) -> dict[str, TensorSlot]:
    return {layer: TensorSlot(name) for layer, name in names.items()}


OUTPUT = {
    "norm_out.linear": TensorSlot("final_layer.adaLN_modulation.1", swapped=True),
    "proj_out": TensorSlot("final_layer.linear"),
}
SD3_TOP = OUTPUT | _plain_slot(
    {
        "pos_embed.proj": "x_embedder.proj",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "context_embedder": "context_embedder",
    }
)
SD3_BLOCK = {
    **_fused_slot("x_block.attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
    **_fused_slot("x_block.attn2.qkv", "attn2.to_q", "attn2.to_k", "attn2.to_v"),
    **_fused_slot(
        "context_block.attn.qkv", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
    ),
    **_plain_slot(
        {
            "norm1.linear": "x_block.adaLN_modulation.1",
            "norm1_context.linear": "context_block.adaLN_modulation.1",
            "attn.norm_q": "x_block.attn.ln_q",
            "attn.norm_k": "x_block.attn.ln_k",
            "attn.norm_added_q": "context_block.attn.ln_q",
            "attn.norm_added_k": "context_block.attn.ln_k",
            "attn.to_out.0": "x_block.attn.proj",
            "attn.to_add_out": "context_block.attn.proj",
            "attn2.norm_q": "x_block.attn2.ln_q",
            "attn2.norm_k": "x_block.attn2.ln_k",
            "attn2.to_out.0": "x_block.attn2.proj",
            "ff.net.0.proj": "x_block.mlp.fc1",
            "ff.net.2": "x_block.mlp.fc2",
            "ff_context.net.0.proj": "context_block.mlp.fc1",
            "ff_context.net.2": "context_block.mlp.fc2",
        }
    ),
}
FLUX_TOP = OUTPUT | _plain_slot(
    {
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "context_embedder": "txt_in",
        "x_embedder": "img_in",
    }
)
FLUX_DOUBLE = {
    **_fused_slot("img_attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
    **_fused_slot("txt_attn.qkv", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    **_plain_slot(
        {
            "norm1.linear": "img_mod.lin",
            "norm1_context.linear": "txt_mod.lin",
            "attn.norm_q": "img_attn.norm.query_norm",
            "attn.norm_k": "img_attn.norm.key_norm",
            "attn.norm_added_q": "txt_attn.norm.query_norm",
            "attn.norm_added_k": "txt_attn.norm.key_norm",
            "attn.to_out.0": "img_attn.proj",
            "attn.to_add_out": "txt_attn.proj",
            "ff.net.0.proj": "img_mlp.0",
            "ff.net.2": "img_mlp.2",
            "ff_context.net.0.proj": "txt_mlp.0",
            "ff_context.net.2": "txt_mlp.2",
        }
    ),
}
FLUX_SINGLE = {
    **_fused_slot("linear1", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    **_plain_slot(
        {
            "norm.linear": "modulation.lin",
            "attn.norm_q": "norm.query_norm",
            "attn.norm_k": "norm.key_norm",
            "proj_out": "linear2",
        }
    ),
}


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
