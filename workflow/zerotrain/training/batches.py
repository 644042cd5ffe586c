"""Batches: from positions in the run's endless sequence of samples to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from zerotrain.cache import Cache, Entry, Row, TokenCache, stacked
from zerotrain.families import Batch
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.draws import draw_place, draw_sample

HOST = torch.device("cpu")


class Batches:
    """The training samples of a cache, drawn by position.

    Sample number p of a run is the same at every world size, batch size and resumption.
    """

    def __init__(self, cache: Cache | TokenCache, phase: ResolvedPhase) -> None:
        self._cache = cache
        self._phase = phase
        entries: Sequence[Entry | Row] = cache.entries
        self._train = [i for i, entry in enumerate(entries) if entry.split == "train"]
        self._prepared: tuple[range, Batch] | None = None

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Samples number `first` to `first + size` of the run, on the device."""
        self.prepare(first, size)
        assert self._prepared
        (_, batch), self._prepared = self._prepared, None
        return {name: _placed(tensor, device) for name, tensor in batch.items()}

    def prepare(self, first: int, size: int) -> None:
        """Read and draw these samples in the host's memory, unless it has been done."""
        positions = range(first, first + size)
        if self._prepared is None or self._prepared[0] != positions:
            self._prepared = positions, stacked([self._sample(p) for p in positions], HOST)

    def _sample(self, position: int) -> dict[str, torch.Tensor]:
        if isinstance(self._cache, TokenCache):
            return self._row(self._cache, position)
        return self._image(self._cache, position)

    def name(self, position: int) -> str:
        """What a user knows a sample of the run by: its file, or its row in the cache."""
        _, place = draw_place(self._phase.seed, position, self._phase.epoch_size)
        number = self._train[place % len(self._train)]
        entry = self._cache.entries[number]
        return entry.file if isinstance(entry, Entry) else f"row {number} of the cache"

    def _row(self, cache: TokenCache, position: int) -> dict[str, torch.Tensor]:
        _, place = draw_place(self._phase.seed, position, self._phase.epoch_size)
        return cache.sample(self._train[place % len(self._train)])

    def _image(self, cache: Cache, position: int) -> dict[str, torch.Tensor]:
        draw = draw_sample(
            self._phase.seed,
            position,
            count=len(self._train),
            epoch_size=self._phase.epoch_size,
            shape=self._shape,
            caption_dropout=self._phase.caption_dropout_probability or 0.0,
            noise_offset=self._phase.objective.get("noise_offset", 0.0),
        )
        return {
            **cache.sample(self._train[draw.index], captioned=not draw.drop_caption),
            "noise": torch.from_numpy(draw.noise),
            "uniform": torch.tensor(draw.uniform, dtype=torch.float64),
        }

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._cache.sample(self._train[0])["latents"].shape)


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host's tensor on the device. A copy out of pinned memory does not wait for what a GPU
    computes."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
