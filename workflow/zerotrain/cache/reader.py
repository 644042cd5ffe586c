"""Reading a cache: tensors of a sample by its position, straight from the mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.cache.layout import (
    INDEX,
    KIND,
    LATENTS,
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
    from zerotrain.families import Batch

FILLERS = {"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0}
"""What rows of tokens are filled up with. A token that is masked, or that comes after all that is
learned, may be any; position 0 begins an example of its own, which nothing sees."""
ON_HOST = ("uniform",)
"""float64, which not every device has: what is made of it goes to the device."""
SIZES = ("original_size", "crop_top_left", "target_size")
HELD = 2**14
"""Keys whose tensors are not looked up again. A view takes some hundred bytes, its pages none."""


class Shards:
    """The open shards of a cache, by their names."""

    def __init__(self, found: Artifact) -> None:
        self._artifact = found
        self._open: dict[str, Any] = {}
        self._held: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def tensors(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        """The tensors of a key, as they are stored: views of the mapped file."""
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
    """A published cache of images, open for reading. Pages are read when they are first touched."""

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

    def sample(self, i: int, *, captioned: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of sample `i`, without a leading dimension; see zerotrain.families.Batch.

        Args:
            i: Its position among `entries`.
            captioned: Whether with its caption's embeddings, or those of the empty caption.
        """
        entry = self.entries[i]
        return {
            **self._tensors(LATENTS, self._index.latents, entry.latents),
            **self._tensors(
                TEXT, self._index.text, entry.text if captioned else self._index.empty_text
            ),
            **{name: torch.tensor(getattr(entry, name)) for name in SIZES},
        }

    def _tensors(self, name: str, series: Series, key: str) -> dict[str, torch.Tensor]:
        found = self._shards.tensors(name, series, key)
        return {tensor: value.float() for tensor, value in found.items()}


class TokenCache:
    """A published cache of text, open for reading."""

    def __init__(self, found: Artifact) -> None:
        try:
            self._index = read_token_index(found.folder)
        except (OSError, ValueError) as error:
            raise _unreadable(found, error) from error
        self.artifact = found
        self.entries: tuple[Row, ...] = self._index.rows
        """Rows of both splits: those that are trained first where they are packed."""
        self.repeats = self._index.repeats
        """How often an epoch sees each row of the train split."""
        self._shards = Shards(found)

    def sample(self, i: int) -> dict[str, torch.Tensor]:
        """The tensors of row `i`, without a leading dimension; see zerotrain.families.Batch."""
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
        folder: The cache, as cache_latents published it.
        verify: Whether to compare every file with its sha256 first.

    Raises:
        PipelineError: it is missing, unfinished, of another format, or a file differs.
    """
    found = artifact.read(folder, KIND, verify=verify)
    return TokenCache(found) if found.content.get("modality") == "text" else Cache(found)


def stacked(samples: Sequence[dict[str, torch.Tensor]], device: torch.device) -> Batch:
    """A batch of samples on a device, but for ON_HOST.

    Rows of tokens are filled up to the longest. Where other tensors of one name differ in length,
    zeros fill them up, and `<name>_mask`, bool [B, T], is true where they are their own.
    """
    batch = {}
    for name in samples[0]:
        tensors = [sample[name] for sample in samples]
        if len({tensor.shape for tensor in tensors}) == 1:
            batch[name] = torch.stack(tensors)
            if name not in ON_HOST:
                batch[name] = batch[name].to(device)
            continue
        filler = FILLERS.get(name, 0)
        batch[name] = pad_sequence(tensors, batch_first=True, padding_value=filler).to(device)
        if name not in FILLERS:
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            places = torch.arange(int(lengths.max()))
            batch[f"{name}_mask"] = (places < lengths[:, None]).to(device)
    return batch


def _unreadable(found: Artifact, error: Exception) -> PipelineError:
    return PipelineError(
        f"{found.folder / INDEX}: cannot be read ({error})",
        hint=f"remove {found.folder} and run snakemake again",
    )
