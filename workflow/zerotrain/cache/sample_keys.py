"""The keys of samples: which tensors a cache has of each, and what every key stands for.

A key is a digest of the user's choices that decide the numbers of a tensor. Code and versions of
libraries are not part of it, so an upgrade does not change it. They are recorded instead, and
compared by their results (`record`, `reuse`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerotrain.artifact import Artifact, digest
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.cache.layout import LATENTS, MASK, Entry
from zerotrain.cache.record import PromptKeys
from zerotrain.cache.reuse import Group
from zerotrain.cache.writer import StoredShards, Tensors
from zerotrain.config.families import Conditioning
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import View, centre_crop, other_views, square_view
from zerotrain.data.conditioning import read_conditioning_images, read_mask
from zerotrain.data.dataset import ConditioningImage, Sample, caption_sha256
from zerotrain.data.folder import FolderSource
from zerotrain.data.open import open_source
from zerotrain.data.source import Source
from zerotrain.machine.device import device_type
from zerotrain.models.families.conditioning import read_pipeline

if TYPE_CHECKING:
    from zerotrain.data.buckets import View
    from zerotrain.data.dataset import Sample
    from zerotrain.data.source import Source
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


COMPUTED = "fp32"
"""Dtype of the means of a mask's pixels."""


class Masks:
    """The loss masks of a dataset at one resolution.

    Args:
        source: The source of the images.
        dtype: Dtype of the stored tensors.
    """

    def __init__(self, source: Source, dtype: str) -> None:
        self._source = source
        self._dtype = FLOAT_TYPES[dtype]
        self._known: dict[str, tuple[Sample, View, str]] = {}

    def keys(self, sample: Sample, views: Iterable[tuple[View, str]]) -> list[str]:
        """Return the keys of the masks of a sample's views, each with the key of its latents.

        A sample without a mask has none.
        """
        if sample.mask_sha256 is None:
            return []
        found = []
        for view, latents in views:
            found.append(mask_key(sample.mask_sha256, latents))
            self._known[found[-1]] = (sample, view, latents)
        return found

    def scaled(self, keys: Sequence[str], stored: StoredShards) -> Iterator[Tensors]:
        """Scale the mask of each key to its latents.

        Args:
            keys: Keys that were returned by keys().
            stored: The cache's content, which has the mask or the latents of each key.

        Raises:
            PipelineError: a mask changed since prepare_dataset.
        """
        for key in keys:
            sample, view, latents = self._known[key]
            like = stored.tensors(key)[MASK] if key in stored else stored.tensors(latents)[LATENTS]
            height, width = like.shape[-2:]
            mask = torch.from_numpy(read_mask(self._source, sample, view, (width, height)))
            yield {MASK: mask.to(self._dtype).contiguous()}

    def group(self, keys: Sequence[str], stored: StoredShards) -> Group:
        """Return what is compared of stored masks after an upgrade."""
        return Group(
            *("loss masks", keys, lambda chosen: self.scaled(chosen, stored)),
            *(COMPUTED, lambda key: self._known[key][0].file),
        )


FORMAT = 2
"""Part of every key: increase it when equal keys would have different numbers."""


@dataclass(frozen=True)
class Encoder:
    """The properties of an encoder that decide its tensors.

    Args:
        family: Decides the computation and its scale.
        parts: Digests of the model's parts that compute.
        computed: Dtype of the computation.
        device: Kind of device that computes: kinds differ in more than the last bits.
        dtype: Dtype of the stored tensors.
        pipeline: The base's class, if it decides how prompts and conditioning images are read.
    """

    family: str
    parts: Mapping[str, str]
    computed: str
    device: str
    dtype: str
    pipeline: str | None = None


def latents_key(
    image_sha256: str,
    view: View,
    encoder: Encoder,
    *,
    flipped: bool = False,
    background: str | None = None,
) -> str:
    """Compute the key of an image's latents.

    Args:
        image_sha256: Digest of the image.
        view: The encoded part of the image, and its size in pixels.
        encoder: The image encoder.
        flipped: Whether the mirror image is encoded.
        background: The colour behind transparent pixels, if there are any and it is not white.
    """
    cut = view.box, view.size
    return digest(["latents", FORMAT, image_sha256, *cut, asdict(encoder), flipped, background])


def mask_key(mask_sha256: str, latents: str) -> str:
    """Compute the key of a loss mask.

    Args:
        mask_sha256: Digest of the file with the mask.
        latents: Key of the latents, in whose shape it is stored.
    """
    return digest(["mask", FORMAT, mask_sha256, latents])


def conditioning_key(pixels: str, encoder: Encoder) -> str:
    """Compute the key of a sample's encoded conditioning images.

    Args:
        pixels: The result of pixels_digest.
        encoder: The image encoder.
    """
    return digest(["conditioning", FORMAT, pixels, asdict(encoder)])


def pixels_digest(images: Sequence[tuple[str, View]]) -> str:
    """Compute the digest of everything that the pixels of conditioning images depend on.

    Args:
        images: Digest and encoded part of each image, in order; all parts are of one size.
    """
    [size] = {view.size for _, view in images}
    return digest([[(sha256, view.box) for sha256, view in images], size])


def text_key(
    caption_sha256: str,
    encoder: Encoder,
    *,
    max_sequence_length: int | None,
    long_captions: str = "truncate",
    conditioning: str | None = None,
) -> str:
    """Compute the key of a caption's embeddings.

    Args:
        caption_sha256: Digest of the caption.
        encoder: The text encoder.
        max_sequence_length: The configuration's value; None: the family's.
        long_captions: The configuration's value.
        conditioning: The result of pixels_digest, if the text encoder sees conditioning images.
    """
    what = [caption_sha256, asdict(encoder), max_sequence_length, long_captions, conditioning]
    return digest(["text", FORMAT, *what])


def tokens_key(sha256: str, max_length: int, *, family: str, parts: Mapping[str, str]) -> str:
    """Compute the key of a conversation's tokens.

    Args:
        sha256: Digest of the conversation.
        max_length: Number of tokens at which conversations are truncated.
        family: Decides which tokens are read and learned.
        parts: Digests of the tokenizer's files.
    """
    return digest(["tokens", FORMAT, sha256, max_length, family, dict(parts)])
