"""Reading of a cache: tensors of a sample by its position, directly from the mapped files."""

from __future__ import annotations

import array
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.columns import Columns
from zerotrain.artifact.documents import DocumentError, read_entries
from zerotrain.artifact.leftovers import hold
from zerotrain.artifact.tensor_file import TYPES
from zerotrain.cache.layout import (
    CONDITIONING,
    INDEX,
    KIND,
    LATENTS,
    MASK,
    MASKS,
    TEXT,
    TOKENS,
    Entry,
    Row,
    Series,
    key_of,
    read_index,
    read_token_index,
    shard_file,
    shard_number,
    tensor_name,
)
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.models.families import Batch

FILLERS = {"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0}
"""Padding values of token rows. Tokens that are masked, or after all learned ones, can be any;
position 0 begins a separate example, which no token attends to."""
ON_HOST = ("uniform",)
"""float64 tensors, which not every device supports; values computed from them go to the device."""
WEIGHT = "loss_weight"
"""float32 in a batch, if any sample of the cache has another weight than 1."""
SIZES = ("original_size", "crop_top_left", "target_size")
OTHERS = {
    LATENTS: "other_latents",
    "flipped": "other_flipped",
    TEXT: "other_texts",
    "mask": "other_masks",
    CONDITIONING: "other_conditioning",
}
"""Fields of an entry with the keys of a sample's other variants."""


class Shards:
    """The open shards of a cache, by their series and numbers."""

    def __init__(self, found: Artifact) -> None:
        self._artifact = found
        self._open: dict[tuple[str, int], MappedShard] = {}

    def tensors(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a key: views of the mapped file."""
        number = shard_number(key, series.count)
        shard = self._open.get((name, number))
        if shard is None:
            path = self._artifact.path(shard_file(name, number, series.count))
            shard = self._open[name, number] = MappedShard(path, series.tensors)
        return shard.tensors(key)


class Cache:
    """A published image cache, open for reading. Pages are loaded on first access."""

    def __init__(self, found: Artifact) -> None:
        self._index = read_index(found.folder)
        self.artifact = found
        self.held: IO[str] | None = None
        """Open while the cache is read, so that nothing is removed from its folder."""
        self.entries = Columns.of(Entry, self._index.entries)
        """Samples of both splits, in the dataset's order; each is built when it is asked for."""
        self.resolution = self._index.resolution
        self.repeats = self._index.repeats
        """How often an epoch sees each sample of the train split."""
        self._shards = Shards(found)
        self._sizes = [(name, self.entries.numbers(name)) for name in SIZES]
        self._read = {one.name: self.entries.column(one.name) for one in fields(Entry)}
        self._is_weighted = bool((self.entries.numbers("loss_weight") != 1).any())

    def sample(
        self,
        i: int,
        *,
        captioned: bool = True,
        flipped: bool = False,
        caption: int = 0,
        view: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of sample `i` for a Batch, without the leading dimension.

        Stored ones are views of the mapped files, in the cache's dtype; `stacked` converts them.
        If the text encoder sees conditioning images, the empty caption is the sample's.

        Args:
            i: Its position in `entries`.
            captioned: Whether to use its caption's embeddings, or those of the empty caption.
            flipped: Whether to use its mirror image, which the cache must have.
            caption: Which of its captions to use.
            view: Which part of its image to use.
        """
        latents = self._variant("flipped" if flipped else LATENTS, i, view)
        text = self._variant(TEXT, i, caption) if captioned else self._read["empty_text"](i)
        text = text or self._index.empty_text
        assert latents is not None
        assert text is not None
        sizes = {name: torch.from_numpy(found[i].astype(np.int64)) for name, found in self._sizes}
        if view:
            crop = self._read["other_crops"](i)[2 * view - 2 : 2 * view]
            sizes["crop_top_left"] = torch.tensor(crop)
        weight = {WEIGHT: torch.tensor(self._read[WEIGHT](i))} if self._is_weighted else {}
        return {
            **self._shards.tensors(LATENTS, self._index.latents, latents),
            **self._shards.tensors(TEXT, self._index.text, text),
            **self._conditioning(i, view),
            **sizes,
            **self._mask(i, view, latents, flipped=flipped),
            **weight,
        }

    def variants(self, i: int) -> tuple[int, int]:
        """Return the numbers of captions and of parts of the image of which a turn draws one."""
        captions, views = (self._read[OTHERS[name]](i) or () for name in (TEXT, LATENTS))
        return 1 + len(captions), 1 + len(views)

    def _variant(self, name: str, i: int, number: int) -> Any:
        """Return the key of one variant of a sample."""
        return self._read[OTHERS[name]](i)[number - 1] if number else self._read[name](i)

    def _mask(self, i: int, view: int, latents: str, *, flipped: bool) -> dict[str, torch.Tensor]:
        """Return how much each latent counts, if any sample of the cache has a mask."""
        if self._index.masks is None:
            return {}
        if self._read["mask"](i) is None:
            found = self._shards.tensors(LATENTS, self._index.latents, latents)[LATENTS]
            return {MASK: torch.ones(1, *found.shape[-2:])}
        key = self._variant("mask", i, view)
        # In a batch it is next to the ones of samples without a mask.
        mask = self._shards.tensors(MASKS, self._index.masks, key)[MASK].float()
        return {MASK: mask.flip(-1) if flipped else mask}

    def latents_shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of the latents of sample `i`: C, h and w."""
        found = self._shards.tensors(LATENTS, self._index.latents, self._read[LATENTS](i))
        return tuple(found[LATENTS].shape)

    def is_mirrored(self, i: int) -> bool:
        """Return whether the mirror image of sample `i` is stored, too."""
        return self._read["flipped"](i) is not None

    def _conditioning(self, i: int, view: int) -> dict[str, torch.Tensor]:
        if self._index.conditioning is None or self._read[CONDITIONING](i) is None:
            return {}
        key = self._variant(CONDITIONING, i, view)
        return self._shards.tensors(CONDITIONING, self._index.conditioning, key)


class TokenCache:
    """A published text cache, open for reading."""

    def __init__(self, found: Artifact) -> None:
        self._index = read_token_index(found.folder)
        self.artifact = found
        self.held: IO[str] | None = None
        self.entries = Columns.of(Row, self._index.rows)
        """Rows of both splits; if they are packed, training rows come first."""
        self.repeats = self._index.repeats
        """How often an epoch sees each row of the train split."""
        self._shards = Shards(found)

    def sample(self, i: int) -> dict[str, torch.Tensor]:
        """Read the tensors of row `i` for a Batch, without the leading dimension."""
        held = [
            self._shards.tensors(TOKENS, self._index.tokens, key) for key in self.entries[i].keys
        ]
        row = {name: torch.cat([one[name] for one in held]).long() for name in held[0]}
        if not self._index.packing:
            return {**row, "attention_mask": torch.ones_like(row["input_ids"])}
        places = [torch.arange(len(one["input_ids"])) for one in held]
        return {**row, "position_ids": torch.cat(places)}


def read_cache(folder: Path, *, verify: bool = True) -> Cache | TokenCache:
    """Open a cache folder.

    Args:
        folder: The cache, as published by cache_latents.
        verify: Whether to compare every file with its sha256 first.

    Raises:
        PipelineError: it is missing, unfinished or of another format, or a file differs.
    """
    found = artifact.read(folder, KIND, verify=verify)
    kind = TokenCache if found.content.get("modality") == "text" else Cache
    try:
        cache = kind(found)
    except (OSError, ValueError) as error:
        raise _unreadable(found, error) from error
    if verify:
        cache.entries.check()
    cache.held = hold(folder)
    return cache


def stacked(
    samples: Sequence[dict[str, torch.Tensor]], device: torch.device, *, pinned: bool = False
) -> Batch:
    """Stack samples to a batch on a device, except for ON_HOST; 16-bit floats become float32.

    Token rows are padded to the longest. If other tensors of one name differ in length, they are
    padded with zeros, and `<name>_mask`, bool [B, T], is true for the original elements.

    Args:
        samples: The samples, as Cache.sample returns them.
        device: Where the batch is to be.
        pinned: Whether to stack in page-locked memory, from which a CUDA GPU copies on its own.
            torch reuses such memory when the copy is done.
    """
    batch = {}
    for name in samples[0]:
        tensors = [sample[name] for sample in samples]
        if len({tensor.shape for tensor in tensors}) == 1:
            batch[name] = _together(tensors, pinned=pinned)
            if name not in ON_HOST:
                batch[name] = batch[name].to(device)
            continue
        filler = FILLERS.get(name, 0)
        batch[name] = _together(tensors, filler, pinned=pinned).to(device)
        if name not in FILLERS:
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            places = torch.arange(int(lengths.max()))
            batch[f"{name}_mask"] = (places < lengths[:, None]).to(device)
    return batch


def _together(
    tensors: Sequence[torch.Tensor], filler: int = 0, *, pinned: bool = False
) -> torch.Tensor:
    """Stack tensors of one dtype, with shorter ones padded at the end; 16-bit floats as float32.

    numpy copies them in the calling thread only: torch would start a second team of threads next to
    the one that computes.
    """
    brain = tensors[0].dtype == torch.bfloat16
    arrays = [(one.view(torch.uint16) if brain else one).numpy() for one in tensors]
    longest = max((one.shape for one in arrays), key=lambda shape: shape[:1])
    dtype = torch.float32 if brain or tensors[0].dtype == torch.float16 else tensors[0].dtype
    found = _empty((len(arrays), *longest), dtype, pinned=pinned)
    whole = found.numpy()
    if any(one.shape != longest for one in arrays):
        whole[...] = filler
    for number, one in enumerate(arrays):
        place = whole[number, : len(one)] if one.ndim else whole[number : number + 1]
        if brain:  # a float32 whose lower half is zero
            bits = place.view(np.uint32)
            bits[...] = one
            bits <<= 16
        else:
            place[...] = one
    return found


def _empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Allocate a tensor on the host, by numpy if it is not pinned: in huge pages if it is large."""
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    one = torch.empty(1, dtype=dtype).numpy()
    return torch.from_numpy(np.empty_like(one, shape=shape))


def _unreadable(found: Artifact, error: Exception) -> PipelineError:
    return PipelineError(
        f"{found.folder / INDEX}: cannot be read ({error})",
        hint=f"remove {found.folder} and run snakemake again",
    )


PREFIX = 16
"""Hexadecimal digits of a key that identify it within a shard: 64 bits."""

AGAIN = "remove the folder of the cache and run snakemake again"
Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class MappedShard:
    """A safetensors file of one series; pages are loaded on first access.

    The tensors are views: nothing is copied before a batch is made. safetensors' own reader takes
    12 us for a view, and a few hundred bytes for each tensor of an open file; this one takes 2 us,
    and 12 bytes for each tensor and 8 for its key. With millions of samples, every process has
    thousands of open shards.

    Args:
        path: The file.
        tensors: Names of the tensors of each key.

    Raises:
        FileError: the file is missing.
        DocumentError: it is no such file, or has other tensors.
    """

    def __init__(self, path: Path, tensors: Sequence[str]) -> None:
        try:
            self._read(path, tensors)
        except (TypeError, LookupError, AttributeError, OverflowError, ValueError) as error:
            if isinstance(error, DocumentError):
                raise
            why = f"its header is damaged ({type(error).__name__}: {error})"
            raise DocumentError(path, why, hint=AGAIN) from error

    def _read(self, path: Path, tensors: Sequence[str]) -> None:
        header, base = read_entries(path)
        size = path.stat().st_size
        header.pop("__metadata__", None)
        keys = sorted({key_of(name) for name in header})
        self._path = path
        self._keys = array.array("Q", (_prefix(key) for key in keys))
        if len({*self._keys}) < len(keys):
            raise ValueError(f"{path}: two keys have the same {PREFIX} digits")
        self._starts: dict[str, array.array[int]] = {}
        self._kinds: dict[str, array.array[int]] = {}
        known: dict[Kind, int] = {}
        for tensor in tensors:
            found = [header[tensor_name(key, tensor)] for key in keys]
            starts = array.array("Q", (base + one["data_offsets"][0] for one in found))
            kinds = array.array("I", (known.setdefault(_kind(one), len(known)) for one in found))
            self._starts[tensor], self._kinds[tensor] = starts, kinds
            for key, one, start in zip(keys, found, starts, strict=True):
                if not _is_whole(one, start) or base + one["data_offsets"][1] > size:
                    raise ValueError(f"{path}: {tensor} of {key} has other bytes than its shape")
        file_bytes = torch.from_file(str(path), size=size, dtype=torch.uint8)
        self._known = [
            (_elements(file_bytes, dtype), shape, torch.empty(shape, device="meta").stride())
            for dtype, shape in known
        ]

    def tensors(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a key, as views.

        Raises:
            DocumentError: the shard does not have the key.
        """
        prefix = _prefix(key)
        row = bisect_left(self._keys, prefix)
        if row == len(self._keys) or self._keys[row] != prefix:
            raise DocumentError(self._path, f"has no {key}", hint=AGAIN)
        return {tensor: self._view(tensor, row) for tensor in self._starts}

    def _view(self, tensor: str, row: int) -> torch.Tensor:
        # One call into torch: each takes microseconds, and there are some for every sample.
        elements, shape, strides = self._known[self._kinds[tensor][row]]
        start = self._starts[tensor][row] // elements.itemsize
        return elements.as_strided(shape, strides, start)


def _prefix(key: str) -> int:
    return int(key[:PREFIX], 16)


def _kind(found: dict[str, Any]) -> Kind:
    return TYPES[found["dtype"]], tuple(found["shape"])


def _is_whole(found: dict[str, Any], start: int) -> bool:
    """Return whether a tensor's bytes are those of its shape, and begin with an element."""
    first, end = found["data_offsets"]
    itemsize = TYPES[found["dtype"]].itemsize
    return bool(end - first == math.prod(found["shape"]) * itemsize and start % itemsize == 0)


def _elements(file_bytes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a file as elements of a type, from its first byte, without a rest that fills none."""
    return file_bytes[: len(file_bytes) // dtype.itemsize * dtype.itemsize].view(dtype)
