"""The model families: one module here for each, with all that is asked of it before torch.

What a family computes is in zerotrain.models.families, in a module of the same name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ROOT = "."
"""The trained part of a model whose files are in its folder itself, as transformers has them."""
LOSS = ("loss_type", "huber_c", "huber_schedule")
FLOW_MATCHING = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "flow_shift", *LOSS)
"""Keys of config.objective for families of flow matching."""


@dataclass(frozen=True)
class Conditioning:
    """A base model's use of the conditioning images of a sample.

    Attributes:
        least: Minimum of images per sample; 0 if the base trains without them, too.
        most: Maximum of images per sample, equal to `least`; None for any number.
        in_prompt: Whether the embeddings of a caption depend on them, too.
        in_latents: Whether the denoiser reads them as latents.
    """

    least: int
    most: int | None
    in_prompt: bool = False
    in_latents: bool = True

    def takes(self, count: int) -> bool:
        """Return whether a sample may have this number of images."""
        return self.least <= count and (self.most is None or count <= self.most)

    def describe(self) -> str:
        """Return the number of images that it takes in words, as a minimum or exactly."""
        if self.most is None:
            return f"at least {name_count(self.least)}"
        return name_count(self.most)


def name_count(count: int) -> str:
    """Return a number of conditioning images in words."""
    return f"{count} conditioning image{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Prompt:
    """The length of a prompt that cache.max_sequence_length sets.

    Attributes:
        tokenizer: The part whose tokens it counts.
        default: The pipeline's own.
        most: The pipeline's limit.
    """

    tokenizer: str
    default: int
    most: int


@dataclass(frozen=True)
class Titles:
    """The names of a family in other programs.

    Attributes:
        architecture: Of its first model, by https://github.com/Stability-AI/ModelSpec.
        implementation: The repository of its code, likewise.
        base_version: kohya's ss_base_model_version.
        network: The module of sd-scripts or musubi-tuner that trains its LoRA.
        variants: Other names of `architecture` by the key of the denoiser's config.json that tells
            them apart, the first that is set (`key`), or is not (`not key`).
    """

    architecture: str
    implementation: str
    base_version: str
    network: str
    variants: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """A kind of model.

    Attributes:
        name: The value of `family`.
        modality: What it makes.
        example: A base of config/models.
        trained_part: The part that training changes; of a language model its folder itself.
        parts: Sub-folders of a base in diffusers' layout; only ROOT in transformers'.
        classes: The class of each part with weights, which model_index.json must name.
        optional_parts: Those of `parts` that a base may lack, all of them together.
        extra_parts: Further sub-folders of some bases, with their classes; model_index.json does
            not name them. A base that has the first of them has all.
        extra_pipeline: The pipeline's class of a base with `extra_parts`.
        text_parts: The parts that text embeddings depend on.
        encoder_decoder: Whether a language model reads a source before it answers.
        pipeline: The class of diffusers that samples.
        objective: Keys of config.objective that mean something to it.
        weighting_scheme: Of flow matching, where nothing else is set.
        pixels: Whether its presets can take pixels as latents (vae: identity).
        chunks: Whether captions of any length can be encoded in chunks (long_captions).
        clip_tokens: Whether the denoiser reads the tokens of a CLIP (`text_encoder`).
        prompt: The length of its captions; None if they have a fixed one.
        conditioning: How its bases use conditioning images, by the pipeline's class.
        conditioned_preset: The pipeline of its small models if samples have conditioning images.
        noise_schedule: Whether prediction_type, zero terminal SNR and the sampler can be chosen.
        token_routing: Whether tokens can pass layers by (tread_config).
        no_gradient: Regular expression of parameters that no loss depends on, as the model is made.
        patch: Latents on a side of a patch; None if config.json has it (patch_size).
        packed: Whether config.json counts the channels of a patch, not those of a latent.
        channels: The keys of config.json that count them, the first that is set.
        text_width: The key of config.json that has the width of a caption's embeddings.
        sized_presets: Whether its presets take images of one size, that of the first phase.
        fused_layers: Whether layers of its original files are several here (lora.fused_layers).
        loading: Arguments that its pipeline is loaded with.
        negative_prompt: Whether its pipeline needs one for guidance.
        titles: Its names in other programs.
    """

    name: str
    modality: Literal["image", "text"] = "image"
    example: str
    trained_part: str = "transformer"
    parts: tuple[str, ...]
    classes: Mapping[str, str]
    optional_parts: tuple[str, ...] = ()
    extra_parts: Mapping[str, str] = field(default_factory=dict)
    extra_pipeline: str = ""
    text_parts: tuple[str, ...] = ()
    encoder_decoder: bool = False
    pipeline: str = ""
    objective: tuple[str, ...] = ()
    weighting_scheme: str = "none"
    pixels: bool = False
    chunks: bool = False
    clip_tokens: bool = False
    prompt: Prompt | None = None
    conditioning: Mapping[str, Conditioning] = field(default_factory=dict)
    conditioned_preset: str = ""
    noise_schedule: bool = False
    token_routing: bool = False
    no_gradient: str = ""
    patch: int | None = None
    packed: bool = False
    channels: tuple[str, ...] = ("in_channels",)
    text_width: str = "joint_attention_dim"
    sized_presets: bool = False
    fused_layers: bool = False
    loading: Mapping[str, Any] = field(default_factory=dict)
    negative_prompt: bool = False
    titles: Titles | None = None

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Return the channels of the latents that a denoiser with this config.json takes."""
        found: int = next(filter(None, map(config.get, self.channels)))
        return found // 4 if self.packed else found

    @property
    def trained_name(self) -> str:
        """The name of the trained part in plans and in config/models."""
        return "model" if self.trained_part == ROOT else self.trained_part


PRESETS = ("nano", "micro")
"""Small models of the real classes that `base` may name; `micro` has ten times the parameters."""
DEFAULT = "sdxl"
"""The family of a configuration that names none."""
CONDITIONS = ("flux_guidance_value",)
"""Keys of config.objective that the model receives; the others say how it is trained."""


def _read_specs() -> dict[str, FamilySpec]:
    names = (found.name for found in pkgutil.iter_modules(__path__))
    specs = [importlib.import_module(f"{__name__}.{name}").SPEC for name in names]
    return {spec.name: spec for spec in sorted(specs, key=_place)}


def _place(spec: FamilySpec) -> tuple[str, bool, str]:
    return spec.modality, spec.name != DEFAULT, spec.name


FAMILIES: Mapping[str, FamilySpec] = _read_specs()
"""Those that a configuration may name: of images, then of text."""
LANGUAGE_MODELS = tuple(name for name, spec in FAMILIES.items() if spec.modality == "text")
"""Those of text; the others are of images."""
