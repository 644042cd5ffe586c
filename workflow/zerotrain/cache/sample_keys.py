"""The keys of samples: which tensors a cache has of each, and what every key stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zerotrain.artifact import Artifact
from zerotrain.cache.keys import (
    Encoder,
    conditioning_key,
    latents_key,
    pixels_digest,
    text_key,
)
from zerotrain.cache.layout import Entry
from zerotrain.cache.mask_scaling import Masks
from zerotrain.cache.prompts import PromptKeys
from zerotrain.config.families.spec import Conditioning
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import View, other_views, square_view
from zerotrain.data.conditioning_file import read_conditioning_images
from zerotrain.data.crop import centre_crop
from zerotrain.data.dataset import ConditioningImage, Sample, caption_sha256
from zerotrain.data.folder import FolderSource
from zerotrain.data.open import open_source
from zerotrain.data.source import Source
from zerotrain.machine.device import device_type
from zerotrain.models.families.conditioning import read_pipeline

if TYPE_CHECKING:
    from zerotrain.models.families.diffusion import DiffusionFamily

IMAGES_DTYPE = "fp32"
"""Dtype of the autoencoders' computation, on every device."""


class Located(NamedTuple):
    """A conditioning image, its source, and the part of it that is encoded."""

    source: Source
    image: ConditioningImage
    view: View


class SampleKeys:
    """The keys of a dataset at one resolution with one base.

    Args:
        settings: The settings of cache_latents.
        pixels: Side of square images.
        family: The base's family.
        base: The base model.
        reads: How the base uses conditioning images; None if it uses none.
        device: Kind of the device that encodes; None for this machine's.
    """

    def __init__(
        self,
        settings: CacheSettings,
        pixels: int,
        family: DiffusionFamily,
        base: Artifact,
        *,
        reads: Conditioning | None = None,
        device: str | None = None,
    ) -> None:
        self.settings = settings
        self.pixels = pixels
        self.family = family
        self.base = base
        self.dtype = settings.cache.dtype
        self.long_captions = settings.long_captions
        self.device = device or device_type()
        # A GPU that fits a text encoder in 16 bits may be too small for it in 32 bits.
        self.text_dtype = "fp32" if self.device == "cpu" else self.dtype
        self.source = open_source(settings.data)
        self.masks = Masks(self.source, self.dtype)
        self._in_prompt = reads is not None and reads.in_prompt
        self._in_latents = reads is not None and reads.in_latents
        self._image_encoder = self._encoder(family.image_parts, IMAGES_DTYPE)
        self._text_encoder = self._encoder(family.spec.text_parts, self.text_dtype)
        described = (base.folder / "model_index.json").is_file()
        pipeline = read_pipeline(base.folder) if described else None
        self._conditioning_encoder = replace(self._image_encoder, pipeline=pipeline)
        if self._in_prompt:
            self._text_encoder = replace(self._text_encoder, pipeline=pipeline)
        self._samples: dict[str, tuple[Sample, View, bool]] = {}
        self._captions: dict[str, tuple[str, Sequence[Located]]] = {}
        self._conditioning: dict[str, tuple[str, Sequence[Located]]] = {}

    def entry(self, sample: Sample, view: View) -> Entry:
        """Return the entry for the index of a sample, of which the view is encoded."""
        flips = self.settings.data.part_of(sample.file).random_flip and sample.split == "train"
        others = other_views(sample, view, self.settings.data.aspect_buckets)
        masks = self.masks.keys(
            sample,
            [(one, self._latents_key(sample, one, flipped=False)) for one in (view, *others)],
        )
        images = self._located(sample, view)
        seen = images if self._in_prompt else ()
        in_latents = bool(images) and self._in_latents
        other_images = [self._located(sample, one) for one in others if in_latents]
        return Entry(
            file=sample.file,
            image_sha256=sample.image_sha256,
            caption_sha256=sample.caption_sha256,
            latents=self._latents_key(sample, view, flipped=False),
            text=self.text_key(sample.caption, seen),
            original_size=sample.size[::-1],
            crop_top_left=view.crop_top_left,
            target_size=view.size[::-1],
            split=sample.split,
            flipped=self._latents_key(sample, view, flipped=True) if flips else None,
            conditioning=self._conditioning_key(sample.file, images) if in_latents else None,
            conditioning_sha256=tuple(one.image.image_sha256 for one in images) or None,
            empty_text=self.text_key("", seen) if seen else None,
            repeats=sample.repeats,
            share=sample.share,
            is_regularisation_data=sample.is_regularisation_data,
            other_captions_sha256=tuple(map(caption_sha256, sample.other_captions)) or None,
            other_texts=tuple(self.text_key(one, seen) for one in sample.other_captions) or None,
            other_latents=self._latents_keys(sample, others, flipped=False),
            other_flipped=self._latents_keys(sample, others, flipped=True) if flips else None,
            loss_weight=sample.loss_weight,
            background=sample.background,
            mask_sha256=sample.mask_sha256,
            mask=next(iter(masks), None),
            other_masks=tuple(masks[1:]) or None,
            other_crops=tuple(number for one in others for number in one.crop_top_left) or None,
            other_conditioning=tuple(self._conditioning_key(sample.file, o) for o in other_images)
            or None,
        )

    def _located(self, sample: Sample, view: View) -> tuple[Located, ...]:
        """Return the conditioning images of a sample, cut as the view cuts the sample's image."""

        def same_part(image: ConditioningImage) -> View:
            if self.settings.data.aspect_buckets is None:
                return square_view(image.crop, self.pixels)
            return view.of_other(sample.original_size, image.original_size)

        return tuple(
            Located(self.source.conditioning_source(position), image, same_part(image))
            for position, image in enumerate(sample.conditioning)
        )

    def _conditioning_key(self, file: str, images: Sequence[Located]) -> str:
        key = conditioning_key(self._pixels_digest(images), self._conditioning_encoder)
        self._conditioning[key] = (file, images)
        return key

    def _pixels_digest(self, images: Sequence[Located]) -> str:
        return pixels_digest([(one.image.image_sha256, one.view) for one in images])

    def _latents_keys(
        self, sample: Sample, views: Iterable[View], *, flipped: bool
    ) -> tuple[str, ...] | None:
        return tuple(self._latents_key(sample, view, flipped=flipped) for view in views) or None

    def _latents_key(self, sample: Sample, view: View, *, flipped: bool) -> str:
        key = latents_key(
            sample.image_sha256,
            view,
            self._image_encoder,
            flipped=flipped,
            background=sample.background,
        )
        self._samples.setdefault(key, (sample, view, flipped))
        return key

    def text_key(self, caption: str, images: Sequence[Located] = ()) -> str:
        """Compute the key of a caption, with the conditioning images that the text encoder sees."""
        key = text_key(
            caption_sha256(caption),
            self._text_encoder,
            max_sequence_length=self.settings.cache.max_sequence_length,
            long_captions=self.long_captions,
            conditioning=self._pixels_digest(images) if images else None,
        )
        self._captions[key] = (caption, images)
        return key

    def prompt_keys(self, asked: str | ConditionedPrompt) -> PromptKeys:
        """Compute the keys of a validation prompt, with its conditioning images if it has any.

        Raises:
            PipelineError: one of these images is unreadable.
        """
        if isinstance(asked, str):
            return PromptKeys(self.text_key(asked), self.text_key(""))
        prompt, files = asked
        images = [self._located_file(file) for file in files]
        seen = images if self._in_prompt else ()
        return PromptKeys(
            self.text_key(prompt, seen),
            self.text_key("", seen),
            self._conditioning_key(f"the validation prompt {prompt!r}", images)
            if self._in_latents
            else None,
        )

    def _located_file(self, file: str) -> Located:
        path = Path(file).expanduser()
        [image] = read_conditioning_images([path], "validation.conditioning_images")
        source = FolderSource(self.settings.data, path.parent)
        sha256 = source.sha256(path.name)
        crop = centre_crop(image.size)
        return Located(
            source,
            ConditioningImage(path.name, sha256, image.size, crop),
            square_view(crop, self.pixels),
        )

    def _encoder(self, names: Sequence[str], computed: str) -> Encoder:
        found: dict[str, str] = self.base.content["parts"]
        parts = {name: found[name] for name in names if name in found}
        return Encoder(self.family.name, parts, computed, self.device, self.dtype)
