"""Encoding: the keys of samples to tensors, in batches of one size, back in the keys' order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.cache.layout import LATENTS
from zerotrain.cache.reuse import Group
from zerotrain.cache.sample_keys import IMAGES_DTYPE, Located, SampleKeys
from zerotrain.cache.writer import Tensors
from zerotrain.data.buckets import Size, View, to_pixels
from zerotrain.data.dataset import ConditioningImage
from zerotrain.data.source import Source
from zerotrain.errors import PipelineError
from zerotrain.machine.device import device_bytes
from zerotrain.machine.ordered_pool import in_order
from zerotrain.machine.progress_bar import progress
from zerotrain.models.families import ConditionedEncoders, Encoders
from zerotrain.models.families.prompt_tokens import CHUNK, TRUNCATE

if TYPE_CHECKING:
    pass

BATCHES_AHEAD, BYTES_AHEAD = 4, 256 * 1024 * 1024
"""Batches of small images that are read while one is encoded, and their bytes; one of large images.
So images that take longer to read than others leave the encoder at work."""
PROMPTS_AT_A_TIME = 16
PROMPTS_WITH_IMAGES_AT_A_TIME = 1
"""A vision tower has many tokens per image: copies that fill a batch would be expensive."""


class Encoding(SampleKeys):
    """The keys and tensors of a dataset at one resolution with one base.

    Batches are always full, with the last one padded by copies of its last member: libraries choose
    other kernels for other batch sizes, but within a batch no sample changes another's bits. So a
    sample's tensors do not depend on the other samples. In their last bits they do depend on
    cache.batch_size, the number of threads, the device's model and versions of libraries, none of
    which is in the key.
    """

    _encoders: Encoders | None = None

    @cached_property
    def _gpu_bytes(self) -> int | None:
        return device_bytes(self.device)

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
            Group("latents", latents, self._latents, IMAGES_DTYPE, self._shown_image),
            Group(
                *("sets of conditioning images", conditioning, self._encoded_conditioning),
                *(IMAGES_DTYPE, lambda key: self._conditioning[key][0]),
            ),
            Group(
                *("captions", by_length, self._text, self.text_dtype),
                lambda key: repr(self._captions[key][0]),
            ),
        ]

    def _shown_image(self, key: str) -> str:
        sample, _, flipped = self._samples[key]
        return f"the mirror image of {sample.file}" if flipped else sample.file

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


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32, with 10 of float32's 23 mantissa bits, in convolutions and matrix products.

    cuDNN's convolutions use it by default on Ampere and later. The former settings are restored.
    """
    convolutions = torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cuda.matmul.allow_tf32 = products


T = TypeVar("T")

PIXELS_AT_A_TIME = 1024 * 1024
"""Pixels of a batch on a CPU."""
MOST_IMAGES_AT_A_TIME = 32
BYTES_PER_PIXEL = 4096
"""Memory of a GPU for a pixel of a batch: the encoder's widest layers hold 128 channels of fp32 at
full size, eight times."""
LEAST_IMAGES_ON_GPU = 2
IMAGES_IN_WINDOW = 1024
"""Images that are encoded before their latents are written, in the order of the keys. A window has
images of every size; at its end, a batch of each size is filled with copies."""


class Window(NamedTuple):
    """Keys that are encoded before any later one, in their order and grouped by size."""

    keys: list[str]
    by_size: list[str]


def batch_size(size: Size, gpu_bytes: int | None = None) -> int:
    """Return how many images are encoded at a time.

    On a GPU these are as many as half of its memory holds, a power of two; the other half is for
    weights. Memory in use does not count: the last bits depend on the number.

    Args:
        size: Width and height of the images.
        gpu_bytes: Memory of the GPU; None on a CPU.
    """
    pixels = size[0] * size[1]
    if gpu_bytes is None:
        return max(1, min(MOST_IMAGES_AT_A_TIME, PIXELS_AT_A_TIME // pixels))
    most = max(LEAST_IMAGES_ON_GPU, gpu_bytes // 2 // (BYTES_PER_PIXEL * pixels))
    return min(MOST_IMAGES_AT_A_TIME, 1 << (most.bit_length() - 1))


def split(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split items into batches; the last one may be smaller."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def filled(batch: Sequence[T], size: int) -> list[T]:
    """Fill a batch with copies of its last member."""
    return [*batch, *[batch[-1]] * (size - len(batch))]


def split_by_size(keys: Sequence[str], size: int, size_of: Callable[[str], Size]) -> list[Window]:
    """Split keys into windows.

    Args:
        keys: The keys.
        size: Members of a usual batch, of which a window has a whole number.
        size_of: Returns the size of a key's image.
    """
    length = -(-IMAGES_IN_WINDOW // size) * size
    return [Window(held, sorted(held, key=size_of)) for held in split(keys, length)]


def restore_order(
    windows: Iterable[Window], encode: Callable[[list[str]], Iterator[tuple[str, T]]]
) -> Iterator[T]:
    """Encode the keys of each window by size, and yield the results in the order of the keys.

    Args:
        windows: The windows.
        encode: Yields the results of keys that are grouped by size, with their keys.
    """
    for keys, by_size in windows:
        encoded = encode(by_size)
        found: dict[str, T] = {}
        for key in keys:
            while key not in found:
                found.update([next(encoded)])
            yield found.pop(key)
