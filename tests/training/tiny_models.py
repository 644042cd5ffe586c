"""Tiny models of the libraries' own classes, each with an input and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from tests.builders.models import make_unet
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from zerotrain.models.trainable import choose_trained
from zerotrain.training.engines import gradient_checkpointing as subject


@dataclass(frozen=True)
class TinyModel:
    """How to build a model and what it is to learn."""

    build: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, torch.device], torch.Tensor]
    targets: tuple[str, ...] = ("to_q", "to_v")

    def make(self, *, adapter: bool) -> torch.nn.Module:
        """The model, or one with an adapter that has an effect already; the same every time."""
        torch.manual_seed(0)
        model = self.build()
        if adapter:
            lora = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "target_modules": list(self.targets)}
            choose_trained(model, lora, [], seed=1)
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        return model.train()


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _unet() -> torch.nn.Module:
    return make_unet((9, 15), dropout=0.1)


def _unet_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    added = {"text_embeds": _normal(2, 6), "time_ids": torch.arange(12.0).view(2, 6)}
    return _square(
        model(
            _normal(2, 4, 8, 8).to(device, dtype),
            torch.tensor([3, 500], device=device),
            encoder_hidden_states=_normal(2, 5, 16).to(device, dtype),
            added_cond_kwargs={key: value.to(device, dtype) for key, value in added.items()},
            return_dict=False,
        )[0]
    )


def _sd3() -> torch.nn.Module:
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=3,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        caption_projection_dim=16, pooled_projection_dim=8, pos_embed_max_size=8,
    )  # fmt: skip


def _sd3_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return _square(
        model(
            hidden_states=_normal(2, 4, 8, 8).to(device, dtype),
            encoder_hidden_states=_normal(2, 5, 16).to(device, dtype),
            pooled_projections=_normal(2, 8).to(device, dtype),
            timestep=torch.tensor([3, 500], device=device),
            return_dict=False,
        )[0]
    )


def _qwen_image() -> torch.nn.Module:
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _qwen_image_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return _square(
        model(
            hidden_states=_normal(2, 16, 16).to(device, dtype),
            encoder_hidden_states=_normal(2, 5, 16).to(device, dtype),
            encoder_hidden_states_mask=torch.ones(2, 5, dtype=torch.long, device=device),
            timestep=torch.tensor([0.3, 0.5], device=device, dtype=dtype),
            img_shapes=[[(1, 4, 4)]] * 2,
            return_dict=False,
        )[0]
    )


def _flux() -> torch.nn.Module:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _flux_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return _square(
        model(
            hidden_states=_normal(2, 16, 4).to(device, dtype),
            encoder_hidden_states=_normal(2, 5, 16).to(device, dtype),
            pooled_projections=_normal(2, 8).to(device, dtype),
            timestep=torch.tensor([0.3, 0.5], device=device, dtype=dtype),
            img_ids=torch.zeros(16, 3, device=device),
            txt_ids=torch.zeros(5, 3, device=device),
            return_dict=False,
        )[0]
    )


def _qwen2() -> torch.nn.Module:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1,
            tie_word_embeddings=True,
        )
    )  # fmt: skip


def _bart() -> torch.nn.Module:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
            decoder_ffn_dim=24, max_position_embeddings=20, dropout=0.1,
        )
    )  # fmt: skip


def _text_loss(model: torch.nn.Module, device: torch.device) -> torch.Tensor:
    tokens = torch.arange(3, 31, device=device).view(2, 14)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss.float()


MODELS = {
    "unet": TinyModel(_unet, _unet_loss),
    "sd3": TinyModel(_sd3, _sd3_loss),
    "qwen_image": TinyModel(_qwen_image, _qwen_image_loss),
    "flux": TinyModel(_flux, _flux_loss),
    "qwen2": TinyModel(_qwen2, _text_loss, ("q_proj", "v_proj")),
    "bart": TinyModel(_bart, _text_loss, ("q_proj", "v_proj")),
}

WAYS = {
    "torch": subject.checkpoint_by_torch,
    "torch on cpu": subject.checkpoint_by_torch_on_cpu,
    "deepspeed": subject.checkpoint_by_deepspeed,
    "deepspeed on cpu": subject.checkpoint_by_deepspeed,
}
