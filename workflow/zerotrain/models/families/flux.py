"""The Flux family: a transformer over packed latents, conditioned on CLIP's pooled text and on T5.

Black Forest Labs, "FLUX.1" (2024), https://github.com/black-forest-labs/flux; trained by flow
matching as in diffusers' examples/dreambooth/train_dreambooth_flux.py. `dev` is distilled to take
the guidance as an input, `schnell` takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from zerotrain.config.families import FAMILIES
from zerotrain.models.families.conditioning import (
    IMAGE_EMBEDDER,
    IMAGE_ENCODER,
    REDUX,
    read_pipeline,
    takes_control,
    takes_fill,
)
from zerotrain.models.families.flux_conditioning import (
    FILL,
    FILL_PIPELINE,
    ReduxEncoders,
    add_conditioning,
    encode_conditioning,
    image_places,
    load_redux,
)
from zerotrain.models.families.patches import (
    PackedFamily,
    PackedObjective,
    check_patches,
    pack,
    unpack,
)
from zerotrain.models.families.pipelines import (
    PipelineEncoders,
    latents_of,
    pipeline_class,
    prompt_length,
    sampling_dtype,
)
from zerotrain.models.families.small_models import (
    PIXELS_PER_LATENT,
    Arguments,
    SmallPipeline,
    SmallSpec,
    clip,
    t5,
)
from zerotrain.models.families.token_routing import routing

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig
    from zerotrain.models.families import Batch
    from zerotrain.models.families.flux_pipeline import ConditionedFluxPipeline

HEADS = {"nano": 4, "micro": 10}
LAYERS = {"nano": 2, "micro": 3}
"""Double-stream layers, and as many single-stream ones: 1.8 and 16.3 million parameters."""
FILL_GUIDANCE = 30.0
"""FluxFillPipeline's default guidance; FluxPipeline's is 3.5."""


class FluxEncoders(PipelineEncoders):
    """VAE and text encoders of a base model."""

    def __init__(
        self, base: Path, device: str, max_sequence_length: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__("FluxPipeline", base, device, dtype)
        pipeline = self.pipeline
        self.length = prompt_length(pipeline, pipeline.tokenizer_2, max_sequence_length, 512)
        self.fill = read_pipeline(base) == FILL_PIPELINE

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled [B, C, h, w]."""
        latents = latents_of(self.vae, pixels)
        check_patches(latents, pixels)
        return latents

    def encode_conditioning(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode pixels [B, n, 3, H, W] in [-1, 1] of conditioning images for Flux."""
        return encode_conditioning(self.encode_images, pixels, fill=self.fill)

    @torch.inference_mode()
    def encode_prompts(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Encode prompts: T5's `prompt_embeds` [B, T, D], CLIP's `pooled_prompt_embeds` [B, P]."""
        embeds, pooled, _ = self.prompt_pipeline.encode_prompt(
            list(prompts), max_sequence_length=self.length
        )
        return {
            "prompt_embeds": embeds.float().cpu(),
            "pooled_prompt_embeds": pooled.float().cpu(),
        }


class FluxObjective(PackedObjective):
    """Flow matching of a transformer that takes patches and their positions.

    Args:
        guidance: The guidance given to a distilled model; None for one that takes no guidance.
        control: Whether the transformer takes a control image; see flux_inputs.
    """

    def __init__(self, *arguments: Any, guidance: float | None, control: bool = False) -> None:
        super().__init__(*arguments)
        self._guidance = guidance
        self._control = control

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents, both [B, C, h, w], at timesteps [B].

        The conditioning images of a batch are added to the input, and cut from the output.
        """
        dtype, device = next(model.parameters()).dtype, noisy.device
        embeds = batch["prompt_embeds"].to(dtype)
        guidance = None
        if self._guidance is not None:
            guidance = torch.full((len(noisy),), self._guidance, device=device)
        own, places = pack(noisy).to(dtype), image_places(noisy).to(device, dtype)
        patches, places = add_conditioning(own, places, batch, control=self._control)
        velocity: torch.Tensor = model(
            hidden_states=patches,
            timestep=timesteps / 1000,
            guidance=guidance,
            pooled_projections=batch["pooled_prompt_embeds"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=places,
            joint_attention_kwargs=routing(batch),
            return_dict=False,
        )[0]
        return unpack(velocity[:, : own.shape[1]], noisy.shape)


def small_parts(spec: SmallSpec) -> dict[str, Arguments]:
    """Return the arguments of a small model's parts; its transformer takes no guidance.

    That of FLUX.1 Fill takes a latent of the masked image and the mask's pixels next to each noisy
    latent.
    """
    further = spec.channels + PIXELS_PER_LATENT**2 if spec.pipeline == FILL_PIPELINE else 0
    return {
        "text_encoder": clip(spec.tokenizers["tokenizer"], spec.width),
        "text_encoder_2": t5(spec.tokenizers["tokenizer_2"], spec.width),
        "transformer": {
            "in_channels": 4 * (spec.channels + further),
            "out_channels": 4 * spec.channels if further else None,
            "num_layers": LAYERS[spec.preset],
            "num_single_layers": LAYERS[spec.preset],
            "attention_head_dim": 32,
            "num_attention_heads": HEADS[spec.preset],
            "axes_dims_rope": (8, 12, 12),
            "joint_attention_dim": 2 * spec.width,
            "pooled_projection_dim": spec.width,
            "guidance_embeds": False,
        },
    }


def add_redux(spec: SmallSpec, out: Path) -> None:
    """Add small image encoders of FLUX.1 Redux to a folder: four tokens for 32 x 32 pixels."""
    from transformers import SiglipVisionConfig, SiglipVisionModel  # slow to import

    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    SiglipVisionModel(vision).save_pretrained(out / IMAGE_ENCODER)
    embedder = pipeline_class("ReduxImageEncoder")(vision.hidden_size, 2 * spec.width)
    embedder.save_pretrained(out / IMAGE_EMBEDDER)


class Flux(PackedFamily):
    """The family of Flux."""

    small = SmallPipeline(
        tokenizers={"tokenizer": "clip", "tokenizer_2": "t5"},
        parts=small_parts,
        scheduler="FlowMatchEulerDiscreteScheduler",
        schedule={"use_dynamic_shifting": True},
        add_parts=add_redux,
        extended=(REDUX,),
    )

    always_conditioned = True

    def load_encoders(
        self,
        base: Path,
        device: str,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> FluxEncoders | ReduxEncoders:
        """Load VAE and text encoders; the transformer stays on disk."""
        found = FluxEncoders(base, device, max_sequence_length, dtype)
        redux = load_redux(base, device, dtype)
        return found if redux is None else ReduxEncoders(found, redux)

    def flow_objective(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        settings: Mapping[str, Any] | None,
        config: Mapping[str, Any],
    ) -> FluxObjective:
        """Build the objective for a scheduler and the transformer's config.json."""
        given = dict(settings or {})
        guidance = given.pop("flux_guidance_value", 1.0)
        return FluxObjective(
            scheduler,
            given or None,
            guidance=guidance if config.get("guidance_embeds") else None,
            control=takes_control(config),
        )

    def shape_conditioning(
        self, config: Mapping[str, Any], latents: torch.Tensor, count: int
    ) -> dict[str, torch.Tensor]:
        """Return those of DiffusionFamily, or channels of each latent for FLUX.1 Fill."""
        if not takes_fill(config):
            return super().shape_conditioning(config, latents, count)
        batch, channels, *size = latents.shape
        return {FILL: torch.zeros(batch, config["in_channels"] // 4 - channels, *size)}

    def sampling_arguments(
        self, pipeline: Any, config: EvaluateConfig, max_sequence_length: int | None
    ) -> dict[str, Any]:
        """Return a distilled model's guidance, or another's guidance away from the empty prompt."""
        found = super().sampling_arguments(pipeline, config, max_sequence_length)
        transformer = pipeline.transformer.config
        if transformer.guidance_embeds:
            return {"guidance_scale": FILL_GUIDANCE, **found} if takes_fill(transformer) else found
        scale = found.pop("guidance_scale", None)
        if scale is not None and scale > 1:
            found |= {"true_cfg_scale": scale, "negative_prompt": ""}
        return found

    def pipeline_name(self, folder: Path) -> str:
        """Return the one pipeline for all kinds of Flux; see flux_pipeline."""
        return self.spec.pipeline

    def load_pipeline(self, folder: Path, device: str, **parts: Any) -> ConditionedFluxPipeline:
        """Load the pipeline of a folder of any kind of Flux; see DiffusionFamily."""
        made = self.conditioned_pipeline(super().load_pipeline(folder, device, **parts))
        made.redux = load_redux(folder, device, sampling_dtype(device))
        return made

    def conditioned_pipeline(self, pipeline: Any) -> ConditionedFluxPipeline:
        """Build the pipeline that takes encoded conditioning images, around the same parts."""
        from zerotrain.models.families.flux_pipeline import (
            ConditionedFluxPipeline,  # slow to import
        )

        return ConditionedFluxPipeline.around(pipeline)

    def conditioned_arguments(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        pixels: torch.Tensor,
        *,
        negative: str | None,
        max_sequence_length: int | None,
    ) -> dict[str, Any]:
        """Build the pipeline's arguments that replace prompts; see ConditionedSampling."""
        if pipeline.redux is not None:
            length = self.prompt_length(pipeline, max_sequence_length)
            found = pipeline.encode_redux(prompts, pixels, length)
            if negative is not None:
                without = pipeline.encode_redux([negative] * len(prompts), pixels, length)
                found |= {f"negative_{name}": tensor for name, tensor in without.items()}
            return found  # type: ignore[no-any-return]
        fill = takes_fill(pipeline.transformer.config)
        tensors = encode_conditioning(pipeline.encode_images, pixels, fill=fill)
        found = self.encoded_conditioning(pipeline, tensors, pixels.shape[-1])
        if negative is not None:
            found["negative_prompt"] = [negative] * len(prompts)
        return {"prompt": list(prompts), **found}

    def encoded_conditioning(
        self, pipeline: Any, tensors: Mapping[str, torch.Tensor], resolution: int
    ) -> dict[str, Any]:
        """Build the pipeline's arguments for encoded conditioning images."""
        return {"conditioning": tensors}


FAMILY = Flux(FAMILIES["flux"])
