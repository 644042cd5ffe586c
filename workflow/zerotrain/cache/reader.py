"""Reading of a cache: tensors of a sample by its position, directly from the mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.cache.layout import (
    CONDITIONING,
    INDEX,
    KIND,
    LATENTS,
    MASK,
    MASKS,
    TEXT,
    Entry,
    Series,
    read_index,
    shard_file,
    shard_number,
    tensor_name,
)
from zerotrain.cache.token_layout import TOKENS, Row, read_token_index
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
HELD = 2**14
"""Number of keys whose tensors are kept. A view takes a few hundred bytes, its pages none."""


class Shards:
    """The open shards of a cache, by their names."""

    def __init__(self, found: Artifact) -> None:
        self._artifact = found
        self._open: dict[str, Any] = {}
        self._held: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def tensors(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a key: views of the mapped file."""
        held = self._held.get((name, key))
        if held is None:
            if len(self._held) == HELD:
                self._held.clear()
            held = self._held[name, key] = self._read(name, series, key)
        return held

    def _read(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        file = shard_file(name, shard_number(key, series.count), series.count)
        shard = self._open.get(file)
        if shard is None:
            shard = safe_open(self._artifact.path(file), framework="pt")
            self._open[file] = shard
        return {tensor: shard.get_tensor(tensor_name(key, tensor)) for tensor in series.tensors}


class Cache:
    """A published image cache, open for reading. Pages are loaded on first access."""

    def __init__(self, found: Artifact) -> None:
        try:
            self._index = read_index(found.folder)
        except (OSError, ValueError) as error:
            raise _unreadable(found, error) from error
        self.artifact = found
        self.entries: tuple[Entry, ...] = self._index.entries
        """Samples of both splits, in the dataset's order."""
        self.resolution = self._index.resolution
        self.repeats = self._index.repeats
        """How often an epoch sees each sample of the train split."""
        self._shards = Shards(found)
        self._is_weighted = any(entry.loss_weight != 1 for entry in self.entries)

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

        If the text encoder sees conditioning images, the empty caption is the sample's.

        Args:
            i: Its position in `entries`.
            captioned: Whether to use its caption's embeddings, or those of the empty caption.
            flipped: Whether to use its mirror image, which the cache must have.
            caption: Which of its captions to use.
            view: Which part of its image to use.
        """
        entry = self.entries[i]
        if flipped:
            latents = (entry.flipped, *(entry.other_flipped or ()))[view]
        else:
            latents = (entry.latents, *(entry.other_latents or ()))[view]
        texts = (entry.text, *(entry.other_texts or ()))
        text = texts[caption] if captioned else entry.empty_text or self._index.empty_text
        assert latents is not None
        assert text is not None
        return {
            **self._tensors(LATENTS, self._index.latents, latents),
            **self._tensors(TEXT, self._index.text, text),
            **self._conditioning(entry),
            **{name: torch.tensor(size) for name, size in _sizes(entry, view).items()},
            **self._mask(entry, view, latents, flipped=flipped),
            **({WEIGHT: torch.tensor(entry.loss_weight)} if self._is_weighted else {}),
        }

    def _mask(
        self, entry: Entry, view: int, latents: str, *, flipped: bool
    ) -> dict[str, torch.Tensor]:
        """Return how much each latent counts, if any sample of the cache has a mask."""
        if self._index.masks is None:
            return {}
        key = (entry.mask, *(entry.other_masks or ()))[view] if entry.mask else None
        if key is None:
            found = self._shards.tensors(LATENTS, self._index.latents, latents)[LATENTS]
            return {MASK: torch.ones(1, *found.shape[-2:])}
        mask = self._tensors(MASKS, self._index.masks, key)[MASK]
        return {MASK: mask.flip(-1) if flipped else mask}

    def latents_shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of the latents of sample `i`: C, h and w."""
        found = self._shards.tensors(LATENTS, self._index.latents, self.entries[i].latents)
        return tuple(found[LATENTS].shape)

    def _conditioning(self, entry: Entry) -> dict[str, torch.Tensor]:
        if self._index.conditioning is None or entry.conditioning is None:
            return {}
        return self._tensors(CONDITIONING, self._index.conditioning, entry.conditioning)

    def _tensors(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        found = self._shards.tensors(name, series, key)
        return {tensor: value.float() for tensor, value in found.items()}


class TokenCache:
    """A published text cache, open for reading."""

    def __init__(self, found: Artifact) -> None:
        try:
            self._index = read_token_index(found.folder)
        except (OSError, ValueError) as error:
            raise _unreadable(found, error) from error
        self.artifact = found
        self.entries: tuple[Row, ...] = self._index.rows
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
    return TokenCache(found) if found.content.get("modality") == "text" else Cache(found)


def stacked(samples: Sequence[dict[str, torch.Tensor]], device: torch.device) -> Batch:
    """Stack samples to a batch on a device, except for ON_HOST.

    Token rows are padded to the longest. If other tensors of one name differ in length, they are
    padded with zeros, and `<name>_mask`, bool [B, T], is true for the original elements.
    """
    batch = {}
    for name in samples[0]:
        tensors = [sample[name] for sample in samples]
        if len({tensor.shape for tensor in tensors}) == 1:
            batch[name] = _together(tensors)
            if name not in ON_HOST:
                batch[name] = batch[name].to(device)
            continue
        filler = FILLERS.get(name, 0)
        batch[name] = _together(tensors, filler).to(device)
        if name not in FILLERS:
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            places = torch.arange(int(lengths.max()))
            batch[f"{name}_mask"] = (places < lengths[:, None]).to(device)
    return batch


def _together(tensors: Sequence[torch.Tensor], filler: int = 0) -> torch.Tensor:
    """Stack tensors of one dtype, with shorter ones padded at the end.

    numpy copies them in the calling thread only: torch would start a second team of threads next to
    the one that computes.
    """
    bits = torch.int16 if tensors[0].dtype == torch.bfloat16 else tensors[0].dtype
    arrays = [tensor.view(bits).numpy() for tensor in tensors]
    longest = max((array.shape for array in arrays), key=lambda shape: shape[:1])
    whole = np.full((len(arrays), *longest), filler, arrays[0].dtype)
    for number, array in enumerate(arrays):
        if array.ndim:
            whole[number, : len(array)] = array
        else:
            whole[number] = array
    return torch.from_numpy(whole).view(tensors[0].dtype)


def _sizes(entry: Entry, view: int) -> dict[str, tuple[int, ...]]:
    """Return the sizes of one part of a sample's image."""
    sizes = {name: getattr(entry, name) for name in SIZES}
    if view:
        assert entry.other_crops
        sizes["crop_top_left"] = entry.other_crops[2 * view - 2 : 2 * view]
    return sizes


def _unreadable(found: Artifact, error: Exception) -> PipelineError:
    return PipelineError(
        f"{found.folder / INDEX}: cannot be read ({error})",
        hint=f"remove {found.folder} and run snakemake again",
    )
