"""Batches: from positions in the run's endless sequence of samples to tensors."""

from __future__ import annotations

import torch

from zerotrain.cache import Cache, stacked
from zerotrain.families import Batch
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.training.draws import draw_sample


class Batches:
    """The training samples of a cache, drawn by position.

    Sample number p of a run is the same at every world size, batch size and resumption.
    """

    def __init__(self, cache: Cache, phase: ResolvedPhase) -> None:
        self._cache = cache
        self._phase = phase
        self._train = [i for i, entry in enumerate(cache.entries) if entry.split == "train"]
        self._shape = tuple(cache.sample(self._train[0])["latents"].shape)

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Samples number `first` to `first + size` of the run, on the device."""
        draws = [
            draw_sample(
                self._phase.seed,
                position,
                count=len(self._train),
                epoch_size=self._phase.epoch_size,
                shape=self._shape,
                caption_dropout=self._phase.caption_dropout_probability,
                noise_offset=self._phase.objective.get("noise_offset", 0.0),
            )
            for position in range(first, first + size)
        ]
        samples = [
            {
                **self._cache.sample(self._train[draw.index], captioned=not draw.drop_caption),
                "noise": torch.from_numpy(draw.noise),
                "uniform": torch.tensor(draw.uniform, dtype=torch.float64),
            }
            for draw in draws
        ]
        return stacked(samples, device)
