"""Small models of the real classes, and what a real step of one keeps and takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zerotrain.launch.planner import trace_store
from zerotrain.launch.planner.activations import Forward
from zerotrain.launch.planner.architecture import (
    Architecture,
    Part,
    find_architecture,
    read_shipped,
)
from zerotrain.launch.planner.memory import Memory, Storages
from zerotrain.launch.planner.passes import tensors_of
from zerotrain.launch.planner.shape import Shape


def shipped_models(*more: str) -> list[Any]:
    """Family and base of each model of config/models, and what else a test takes, as parameters.

    `make test-soak` alone has those that are not the first of their family.
    """
    seen: set[str] = set()
    found = []
    for known in read_shipped():
        marks = [pytest.mark.soak] * (known.family in seen)
        found.append(pytest.param(known.family, known.source.split(", ")[0], *more, marks=marks))
        seen.add(known.family)
    return found


SDXL = {
    "sample_size": 16,
    "block_out_channels": (32, 64, 96),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (2, 4, 6),
    "cross_attention_dim": 48,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 32 + 6 * 8,
    "norm_num_groups": 16,
    "in_channels": 4,
}
SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 24,
    "pos_embed_max_size": 32,
}
QWEN_IMAGE = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": False,
}
FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 24,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
QWEN2 = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
BART = {
    "vocab_size": 203,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.0,
}
T5 = {
    "vocab_size": 203,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 3,
    "dropout_rate": 0.1,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def _small(family: str, library: str, name: str, config: dict[str, object]) -> Architecture:
    part = "unet" if family == "sdxl" else "model" if family.endswith("lm") else "transformer"
    return Architecture(family, name, {part: Part(library, name, config)})


SMALL = {
    "nano": find_architecture("sdxl", "nano"),
    "sdxl": _small("sdxl", "diffusers", "UNet2DConditionModel", SDXL),
    "sd3": _small("sd3", "diffusers", "SD3Transformer2DModel", SD3),
    "qwen_image": _small("qwen_image", "diffusers", "QwenImageTransformer2DModel", QWEN_IMAGE),
    "flux": _small("flux", "diffusers", "FluxTransformer2DModel", FLUX),
    "qwen2": _small("causal_lm", "transformers", "Qwen2ForCausalLM", QWEN2),
    "bart": _small("seq2seq_lm", "transformers", "BartForConditionalGeneration", BART),
    "t5": _small("seq2seq_lm", "transformers", "T5ForConditionalGeneration", T5),
}
SHAPES = {name: Shape(2, resolution=128, tokens=24) for name in SMALL}


@dataclass(frozen=True)
class Step:
    """What a real forward and backward pass took, in bytes and operations."""

    saved: int
    peak: int
    forward_flops: int
    backward_flops: int


def real_step(
    module: torch.nn.Module,
    architecture: Architecture,
    shape: Shape,
    dtype: torch.dtype,
    *,
    autocast: bool = False,
    checkpointing: bool = False,
) -> Step:
    """Run a step of a model with weights on CPU.

    Saved are the storages that autograd's hooks see, and with checkpointing those that a
    checkpointed block's keyword arguments hold besides.
    """
    module = module.to(dtype).train()
    saved = Storages()
    own = {x.untyped_storage()._cdata for x in tensors_of(module)}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved.add(storage)
        return tensor

    def checkpoint(function, *args):
        keywords = function.keywords if isinstance(function, partial) else {}
        for leaf in tree_leaves((args, keywords)):  # autograd sees tensors alone, not tuples
            if isinstance(leaf, torch.Tensor):
                save(leaf)
        call = function if isinstance(function, partial) else function.__call__
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False)

    if checkpointing:
        module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    if autocast:
        module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)

    def drop(parameter):
        parameter.grad = None

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)
    memory = Memory()
    memory.ignore(tensors_of(module))
    loss = Forward(architecture).loss_of(module, shape)
    with memory:
        with saved_tensors_hooks(save, lambda x: x):
            found = loss()
        nbytes = saved.nbytes
        flops, memory.flops = memory.flops, 0
        found.backward()
    return Step(nbytes, memory.highest, flops, memory.flops)


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the traces of these tests."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True, scope="module")
def own_store(plans: Path) -> Iterator[None]:
    """Traces of these tests, and no other's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_store, "folder", lambda: plans)
        yield
