"""Encoding: samples to keys, and keys to tensors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from zerotrain.artifact import Artifact
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.cache.batching import batch_size, filled, restore_order, split, split_by_size
from zerotrain.cache.code import IMAGES, TEXTS, code_digests
from zerotrain.cache.keys import (
    Encoder,
    conditioning_key,
    latents_key,
    pixels_digest,
    text_key,
)
from zerotrain.cache.layout import LATENTS, Entry
from zerotrain.cache.mask_scaling import Masks
from zerotrain.cache.precision import full_precision
from zerotrain.cache.prompts import PromptKeys
from zerotrain.cache.reuse import Group
from zerotrain.cache.writer import Tensors
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import Size, View, other_views, square_view
from zerotrain.data.conditioning_file import read_conditioning_images
from zerotrain.data.crop import centre_crop, to_pixels
from zerotrain.data.dataset import ConditioningImage, Sample, caption_sha256
from zerotrain.data.folder import FolderSource
from zerotrain.data.open import open_source
from zerotrain.data.source import Source
from zerotrain.errors import PipelineError
from zerotrain.machine.device import device_bytes, device_type
from zerotrain.machine.ordered_pool import in_order
from zerotrain.machine.progress_bar import progress
from zerotrain.models.families import ConditionedEncoders, Encoders
from zerotrain.models.families.conditioning import Conditioning, read_pipeline
from zerotrain.models.families.prompt_tokens import CHUNK, TRUNCATE

if TYPE_CHECKING:
    from zerotrain.models.families.diffusion import DiffusionFamily

IMAGES_DTYPE = "fp32"
"""Dtype of the autoencoders' computation, on every device."""
BATCHES_AHEAD, BYTES_AHEAD = 4, 256 * 1024 * 1024
"""Batches of small images that are read while one is encoded, and their bytes; one of large images.
So images that take longer to read than others leave the encoder at work."""
PROMPTS_AT_A_TIME = 16
PROMPTS_WITH_IMAGES_AT_A_TIME = 1
"""A vision tower has many tokens per image: copies that fill a batch would be expensive."""


class Located(NamedTuple):
    """A conditioning image, its source, and the part of it that is encoded."""

    source: Source
    image: ConditioningImage
    view: View


class Encoding:
    """The keys and tensors of a dataset at one resolution with one base.

    Batches are always full, with the last one padded by copies of its last member: libraries choose
    other kernels for other batch sizes, but within a batch no sample changes another's bits. So a
    sample's tensors do not depend on the other samples. In their last bits they do depend on
    cache.batch_size, the number of threads, the device's model and versions of libraries, none of
    which is in the key.

    Args:
        settings: The settings of cache_latents.
        pixels: Side of square images.
        family: The base's family.
        base: The base model.
        reads: How the base uses conditioning images; None if it uses none.
        device: Kind of the device in the keys; None for this machine's, which alone can encode.
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
        self._in_prompt = reads is not None and reads.in_prompt
        self.code = code_digests(self.source, family, reads, masks=settings.data.has_masks)
        """Digest of the code of each group, by its name; not part of the keys."""
        self._image_encoder = self._encoder(family.image_parts, IMAGES_DTYPE)
        self._text_encoder = self._encoder(family.text_parts, self.text_dtype)
        described = (base.folder / "model_index.json").is_file()
        pipeline = read_pipeline(base.folder) if described else None
        self._conditioning_encoder = replace(self._image_encoder, pipeline=pipeline)
        if self._in_prompt:
            self._text_encoder = replace(self._text_encoder, pipeline=pipeline)
        self._in_latents = reads is not None and reads.in_latents
        self._samples: dict[str, tuple[Sample, View, bool]] = {}
        self._captions: dict[str, tuple[str, Sequence[Located]]] = {}
        self._conditioning: dict[str, tuple[str, Sequence[Located]]] = {}
        self.masks = Masks(self.source, self.dtype)
        self._encoders: Encoders | None = None
        self._gpu_bytes = None if device else device_bytes(self.device)

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

    def latents(self, keys: Sequence[str]) -> Iterator[Tensors]:
        """Encode the latents of each key returned by entry().

        Raises:
            PipelineError: an image changed since prepare_dataset, or its latents are not finite.
        """
        return progress(self._latents(keys), len(keys), "encoding images", "image")

    def conditioning(self, keys: Sequence[str]) -> Iterator[Tensors]:
        """Encode the conditioning images of each key returned by entry().

        Raises:
            PipelineError: an image changed since prepare_dataset, or a result is not finite.
        """
        found = self._encoded_conditioning(keys)
        return progress(found, len(keys), "encoding conditioning images", "sample")

    def text(self, keys: Sequence[str]) -> Iterator[Tensors]:
        """Encode the caption of each key returned by text_key() or entry().

        Raises:
            PipelineError: an embedding is not finite.
        """
        return progress(self._text(keys), len(keys), "encoding captions", "caption")

    def _latents(self, keys: Sequence[str]) -> Iterator[Tensors]:
        square = self._batch_size((self.pixels, self.pixels))
        windows = split_by_size(keys, square, self._view_size)
        # One pool for all windows and sizes: the next batches are read while one is encoded.
        batches: deque[torch.Tensor] = deque()
        sizes = {self._view_size(key) for key in keys}
        read = in_order(
            lambda place: self._read_into(*place),
            self._places([window.by_size for window in windows], batches),
            self.settings.data.num_workers,
            # A batch of any size, and beyond it as many images as are few bytes in every size.
            ahead=max(
                max(map(self._batch_size, sizes), default=0),
                min(map(self._images_ahead, sizes), default=0),
            ),
        )
        with closing(read):
            for found in restore_order(
                windows, lambda chosen: self._encoded_images(chosen, read, batches)
            ):
                yield {LATENTS: found}

    def _images_ahead(self, size: Size) -> int:
        batch = self._batch_size(size)
        return max(batch, min(BATCHES_AHEAD * batch, BYTES_AHEAD // (12 * size[0] * size[1])))

    def _places(
        self, windows: Iterable[Sequence[str]], batches: deque[torch.Tensor]
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Give each image its row of a batch [n, 3, H, W] of one size, which is added to `batches`.

        The threads that read fill the rows, so no batch is stacked while the encoder waits.
        """
        for keys in windows:
            for (width, height), group in groupby(keys, key=self._view_size):
                size = self._batch_size((width, height))
                for held in split(group, size):
                    batches.append(torch.empty(size, 3, height, width))
                    yield from zip(held, batches[-1].numpy(), strict=False)

    def _read_into(self, key: str, row: NDArray[np.float32]) -> None:
        row[...] = self._pixels(key).numpy()

    def _encoded_images(
        self, keys: Sequence[str], read: Iterator[None], batches: deque[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Encode the batches of `keys`, which are grouped by size, when their images are read."""
        for view_size, group in groupby(keys, key=self._view_size):
            for held in split(group, self._batch_size(view_size)):
                for _ in held:
                    next(read)
                batch = batches.popleft()
                batch[len(held) :] = batch[len(held) - 1]
                with full_precision():
                    encoded = self.encoders.encode_images(batch)
                for row, key in enumerate(held):
                    yield key, self._finished(encoded[row], self._samples[key][0].file)

    def _view_size(self, key: str) -> Size:
        return self._samples[key][1].size

    def _encoded_conditioning(self, keys: Sequence[str]) -> Iterator[Tensors]:
        if not keys:
            return
        windows = split_by_size(keys, self._sets_at_a_time(keys[0]), self._conditioning_size)
        read = in_order(
            lambda key: self._stack(self._conditioning[key][1]),
            chain.from_iterable(window.by_size for window in windows),
            self.settings.data.num_workers,
            ahead=max(map(self._sets_at_a_time, keys)),
        )
        with closing(read):
            yield from restore_order(windows, lambda chosen: self._encoded_sets(chosen, read))

    def _encoded_sets(
        self, keys: Sequence[str], read: Iterator[torch.Tensor]
    ) -> Iterator[tuple[str, Tensors]]:
        """Encode sets of conditioning images, grouped by size, of which `read` gives the pixels."""
        for _, group in groupby(keys, key=self._conditioning_size):
            of_size = [*group]
            size = self._sets_at_a_time(of_size[0])
            for held in split(of_size, size):
                stacked = torch.stack(filled([next(read) for _ in held], size))
                with full_precision():
                    encoded = self._conditioned_encoders.encode_conditioning(stacked)
                for row, key in enumerate(held):
                    whose = f"conditioning images of {self._conditioning[key][0]}"
                    yield (
                        key,
                        {name: self._finished(one[row], whose) for name, one in encoded.items()},
                    )

    def _conditioning_size(self, key: str) -> Size:
        return self._conditioning[key][1][0].view.size

    def _sets_at_a_time(self, key: str) -> int:
        """Return how many sets of conditioning images of a key's size are encoded at a time."""
        images = len(self._conditioning[key][1])
        return max(1, self._batch_size(self._conditioning_size(key)) // images)

    def _batch_size(self, size: Size) -> int:
        return self.settings.cache.batch_size or batch_size(size, self._gpu_bytes)

    def _text(self, keys: Sequence[str]) -> Iterator[Tensors]:
        size = PROMPTS_WITH_IMAGES_AT_A_TIME if self._in_prompt else PROMPTS_AT_A_TIME
        for batch in split([self._captions[key] for key in keys], size):
            prompts = filled([caption for caption, _ in batch], size)
            if self._in_prompt:
                pixels = torch.stack(filled([self._stack(images) for _, images in batch], size))
                with full_precision():
                    encoded = self._conditioned_encoders.encode_prompts(prompts, pixels)
            else:
                with full_precision():
                    encoded = self.encoders.encode_prompts(prompts)
            for row, (caption, _) in enumerate(batch):
                yield {
                    name: self._finished(tensor[row], f"caption {caption!r}")
                    for name, tensor in encoded.items()
                }

    @property
    def _conditioned_encoders(self) -> ConditionedEncoders:
        return cast(ConditionedEncoders, self.encoders)

    @property
    def encoders(self) -> Encoders:
        """Return the VAE and text encoders, loaded at first use, on the GPU if there is one."""
        if self._encoders is None:
            threads = self.settings.num_cpu_threads_per_process or os.cpu_count() or 1
            torch.set_num_threads(threads)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
            self._encoders = self.family.load_encoders(
                self.base.folder,
                self.device,
                self.settings.cache.max_sequence_length,
                FLOAT_TYPES[self.text_dtype],
                **({} if self.long_captions == TRUNCATE else {"long_captions": CHUNK}),
            )
        return self._encoders

    def groups(
        self,
        latents: Sequence[str],
        conditioning: Sequence[str],
        texts: Collection[str],
        tokens: Mapping[str, int],
    ) -> list[Group]:
        """Group the keys of each series, for comparison with a cache's content.

        Args:
            latents: Keys in the dataset's order.
            conditioning: Keys of conditioning images, in the same order.
            texts: Keys in any order: the shortest, the longest and some between are compared.
            tokens: Numbers of tokens of captions, if some are too long.
        """

        def length(key: str) -> tuple[int, int, str]:
            caption = self._captions[key][0]
            return tokens.get(caption, 0), len(caption), key

        by_length = sorted(texts, key=length)
        return [
            Group(IMAGES, "latents", latents, self._latents, IMAGES_DTYPE, self._shown_image),
            Group(
                *(IMAGES, "sets of conditioning images", conditioning, self._encoded_conditioning),
                *(IMAGES_DTYPE, lambda key: self._conditioning[key][0]),
            ),
            Group(
                *(TEXTS, "captions", by_length, self._text, self.text_dtype),
                lambda key: repr(self._captions[key][0]),
            ),
        ]

    def _shown_image(self, key: str) -> str:
        sample, _, flipped = self._samples[key]
        return f"the mirror image of {sample.file}" if flipped else sample.file

    def _encoder(self, names: Sequence[str], computed: str) -> Encoder:
        found: dict[str, str] = self.base.content["parts"]
        parts = {name: found[name] for name in names if name in found}
        return Encoder(self.family.name, parts, computed, self.device, self.dtype)

    def _pixels(self, key: str) -> torch.Tensor:
        sample, view, flipped = self._samples[key]
        image = self.source.image_of(sample.file, sample.image_sha256, sample.background)
        pixels = torch.from_numpy(to_pixels(view.cut(image)))
        return pixels.flip(-1) if flipped else pixels

    def _stack(self, images: Sequence[Located]) -> torch.Tensor:
        """Read the pixels [n, 3, H, W] of conditioning images."""
        return torch.stack([self._part(*one) for one in images])

    def _part(self, source: Source, listed: ConditioningImage, view: View) -> torch.Tensor:
        image = source.image_of(listed.file, listed.image_sha256)
        return torch.from_numpy(to_pixels(view.cut(image)))

    def _finished(self, tensor: torch.Tensor, whose: str) -> torch.Tensor:
        stored = tensor.detach().to("cpu", FLOAT_TYPES[self.dtype], copy=True).contiguous()
        if not torch.isfinite(stored).all():
            raise PipelineError(
                f"{whose}: encoded to infinite or undefined numbers, stored as {self.dtype}",
                hint="fp16 ends at 65504: set cache.dtype to bf16 or fp32; else the base is broken",
            )
        return stored
