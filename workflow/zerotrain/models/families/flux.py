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
from zerotrain.models.families.conditioning import read_pipeline
from zerotrain.models.families.flow_matching import read_flow_scheduler
from zerotrain.models.families.flux_conditioning import FILL, FILL_PIPELINE, encode_conditioning
from zerotrain.models.families.flux_inputs import (
    add_conditioning,
    image_places,
    takes_control,
    takes_fill,
)
from zerotrain.models.families.flux_redux import ReduxEncoders, load_redux
from zerotrain.models.families.patches import (
    PackedFamily,
    PackedObjective,
    check_patches,
    pack,
    unpack,
)
from zerotrain.models.families.pipelines import PipelineEncoders, latents_of, prompt_length
from zerotrain.models.families.placement import sampling_dtype
from zerotrain.models.families.token_routing import routing
from zerotrain.models.pretrained import read_config

if TYPE_CHECKING:
    from zerotrain.config.models import EvaluateConfig
    from zerotrain.models.families import Batch
    from zerotrain.models.families.flux_pipeline import ConditionedFluxPipeline

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


class Flux(PackedFamily):
    """The family of Flux."""

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

    def objective(self, base: Path, settings: Mapping[str, Any] | None = None) -> FluxObjective:
        """Build the objective that the base's noise scheduler describes."""
        config = read_config(base / self.trained_part / "config.json")
        given = dict(settings or {})
        guidance = given.pop("flux_guidance_value", 1.0)
        return FluxObjective(
            read_flow_scheduler(base / "scheduler"),
            given or None,
            guidance=guidance if config.get("guidance_embeds") else None,
            control=takes_control(config),
        )

    def shape_objective(self, config: Mapping[str, Any]) -> FluxObjective:
        """Build the objective with a schedule that predictions do not depend on."""
        return FluxObjective(
            FlowMatchEulerDiscreteScheduler(),
            None,
            guidance=1.0 if config.get("guidance_embeds") else None,
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
