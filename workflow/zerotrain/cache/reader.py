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
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.families import Batch

SIZES = ("original_size", "crop_top_left", "target_size")


class Cache:
    """A published cache, open for reading. Pages are read when they are first touched."""

    def __init__(self, found: Artifact) -> None:
        try:
            self._index = read_index(found.folder)
        except (OSError, ValueError) as error:
            raise PipelineError(
                f"{found.folder / INDEX}: cannot be read ({error})",
                hint=f"remove {found.folder} and run snakemake again",
            ) from error
        self.artifact = found
        self.entries: tuple[Entry, ...] = self._index.entries
        """Samples of both splits, in the dataset's order."""
        self.resolution = self._index.resolution
        self.repeats = self._index.repeats
        """How often an epoch sees each sample of the train split."""
        self._open: dict[str, Any] = {}

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
        file = shard_file(name, shard_number(key, series.count), series.count)
        shard = self._open.get(file)
        if shard is None:
            shard = safe_open(self.artifact.path(file), framework="pt")
            self._open[file] = shard
        return {
            tensor: shard.get_tensor(tensor_name(key, tensor)).float() for tensor in series.tensors
        }


def read_cache(folder: Path, *, verify: bool = True) -> Cache:
    """Open a cache folder.

    Args:
        folder: The cache, as cache_latents published it.
        verify: Whether to compare every file with its sha256 first.

    Raises:
        PipelineError: it is missing, unfinished, of another format, or a file differs.
    """
    return Cache(artifact.read(folder, KIND, verify=verify))


def stacked(samples: Sequence[dict[str, torch.Tensor]], device: torch.device) -> Batch:
    """A batch of samples on a device.

    Where tensors of one name differ in length, zeros fill them up to the longest, and
    `<name>_mask`, bool [B, T], is true where they are their own.
    """
    batch = {}
    for name in samples[0]:
        tensors = [sample[name] for sample in samples]
        if len({tensor.shape for tensor in tensors}) == 1:
            batch[name] = torch.stack(tensors).to(device)
            continue
        lengths = torch.tensor([len(tensor) for tensor in tensors])
        places = torch.arange(int(lengths.max()))
        batch[name] = pad_sequence(tensors, batch_first=True).to(device)
        batch[f"{name}_mask"] = (places < lengths[:, None]).to(device)
    return batch
