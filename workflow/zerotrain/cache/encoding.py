"""How samples become keys, and keys become tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch

from zerotrain.artifact import Artifact
from zerotrain.cache.keys import latents_key, text_key
from zerotrain.cache.layout import LATENTS, Entry
from zerotrain.cache.writer import Tensors
from zerotrain.config import RunConfig
from zerotrain.data.crop import crop_and_resize, to_pixels
from zerotrain.data.dataset import Sample, caption_sha256
from zerotrain.data.source import open_source
from zerotrain.errors import PipelineError
from zerotrain.families import Encoders, ImageFamily
from zerotrain.machine.device import device_type
from zerotrain.progress import progress
from zerotrain.sources import code_digest
from zerotrain.workers import in_order

T = TypeVar("T")

PIXELS_AT_A_TIME = 1024 * 1024
MOST_IMAGES_AT_A_TIME = 32
PROMPTS_AT_A_TIME = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Encoding:
    """The keys and tensors of a dataset at one resolution under one base model.

    Batches are always full, the last one filled up with copies of its last member: libraries choose
    other kernels for other batch sizes, but within a batch no sample changes another's bits. So a
    sample's tensors do not depend on what is encoded beside it. They do depend, in the last bits,
    on cache.batch_size, the number of threads and the device, none of which is in the key.
    """

    def __init__(self, config: RunConfig, pixels: int, family: ImageFamily, base: Artifact) -> None:
        self.config = config
        self.pixels = pixels
        self.family = family
        self.base = base
        self.dtype = config.cache.dtype
        # A GPU that holds a text encoder in 16 bits may be too small for it in 32.
        self._text_dtype = "fp32" if device_type() == "cpu" else self.dtype
        self.source = open_source(config.data)
        pixel_modules = (*self.source.pixel_modules, "zerotrain.data.crop")
        self._image_code = code_digest(*pixel_modules, *family.encoding_code)
        self._text_code = code_digest(*family.encoding_code)
        self._samples: dict[str, Sample] = {}
        self._captions: dict[str, str] = {}
        self._encoders: Encoders | None = None

    def entry(self, sample: Sample) -> Entry:
        """A sample as the index lists it."""
        key = latents_key(
            sample.image_sha256,
            sample.crop,
            self.pixels,
            parts=self._parts(self.family.image_parts),
            dtype=self.dtype,
            code=self._image_code,
        )
        self._samples.setdefault(key, sample)
        left, top, side = sample.crop
        return Entry(
            file=sample.file,
            image_sha256=sample.image_sha256,
            caption_sha256=sample.caption_sha256,
            latents=key,
            text=self.text_key(sample.caption),
            original_size=sample.size[::-1],
            crop_top_left=(round(top * self.pixels / side), round(left * self.pixels / side)),
            target_size=(self.pixels, self.pixels),
            split=sample.split,
        )

    def text_key(self, caption: str) -> str:
        """The key of a caption."""
        key = text_key(
            caption_sha256(caption),
            parts=self._parts(self.family.text_parts),
            dtype=self.dtype,
            code=self._text_code,
            encoder_dtype=self._text_dtype,
            max_sequence_length=self.config.cache.max_sequence_length,
        )
        self._captions[key] = caption
        return key

    def latents(self, keys: Sequence[str]) -> Iterator[Tensors]:
        """The latents of each key that entry() gave.

        Raises:
            PipelineError: an image changed since prepare_dataset, or its latents are not finite.
        """
        return progress(self._latents(keys), len(keys), "encoding images", "image")

    def text(self, keys: Sequence[str]) -> Iterator[Tensors]:
        """The embeddings of each key that text_key() or entry() gave.

        Raises:
            PipelineError: an embedding is not finite.
        """
        return progress(self._text(keys), len(keys), "encoding captions", "caption")

    def _latents(self, keys: Sequence[str]) -> Iterator[Tensors]:
        most = max(1, min(MOST_IMAGES_AT_A_TIME, PIXELS_AT_A_TIME // self.pixels**2))
        size = self.config.cache.batch_size or most
        pixels = in_order(self._pixels, keys, self.config.data.num_workers)
        for batch, held in zip(_batches(pixels, size), _batches(keys, size), strict=True):
            encoded = self.encoders.encode_images(torch.stack(_filled(batch, size)))
            for row, key in enumerate(held):
                yield {LATENTS: self._finished(encoded[row], self._samples[key].file)}

    def _text(self, keys: Sequence[str]) -> Iterator[Tensors]:
        captions = [self._captions[key] for key in keys]
        for batch in _batches(captions, PROMPTS_AT_A_TIME):
            encoded = self.encoders.encode_prompts(_filled(batch, PROMPTS_AT_A_TIME))
            for row, caption in enumerate(batch):
                yield {
                    name: self._finished(tensor[row], f"caption {caption!r}")
                    for name, tensor in encoded.items()
                }

    @property
    def encoders(self) -> Encoders:
        """VAE and text encoders, loaded when first needed, on the GPU if there is one."""
        if self._encoders is None:
            threads = self.config.launch.num_cpu_threads_per_process or os.cpu_count() or 1
            torch.set_num_threads(threads)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
            self._encoders = self.family.load_encoders(
                self.base.folder,
                device_type(),
                self.config.cache.max_sequence_length,
                DTYPES[self._text_dtype],
            )
        return self._encoders

    def _parts(self, names: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = self.base.content["parts"]
        return {name: found[name] for name in names if name in found}

    def _pixels(self, key: str) -> torch.Tensor:
        sample = self._samples[key]
        image = self.source.image_of(sample.file, sample.image_sha256)
        return torch.from_numpy(to_pixels(crop_and_resize(image, sample.crop, self.pixels)))

    def _finished(self, tensor: torch.Tensor, whose: str) -> torch.Tensor:
        stored = tensor.detach().to("cpu", DTYPES[self.dtype], copy=True).contiguous()
        if not torch.isfinite(stored).all():
            raise PipelineError(
                f"{whose}: encoded to infinite or undefined numbers, stored as {self.dtype}",
                hint="fp16 ends at 65504: set cache.dtype to bf16 or fp32; else the base is broken",
            )
        return stored


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _filled(batch: Sequence[T], size: int) -> list[T]:
    return [*batch, *[batch[-1]] * (size - len(batch))]
