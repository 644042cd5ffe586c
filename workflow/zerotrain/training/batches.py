"""Batches: from positions in the run's endless sequence of samples to tensors."""

from __future__ import annotations

import torch

from zerotrain.cache import Cache
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
        self._empty = cache.empty_text()
        self._shape = tuple(cache.latents(self._train[0]).shape)

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
            )
            for position in range(first, first + size)
        ]
        indices = [self._train[draw.index] for draw in draws]
        entries = [self._cache.entries[index] for index in indices]
        texts = [
            self._empty if draw.drop_caption else self._cache.text(index)
            for draw, index in zip(draws, indices, strict=True)
        ]
        return Batch(
            latents=torch.stack([self._cache.latents(index) for index in indices]).float(),
            text={name: torch.stack([text[name] for text in texts]).float() for name in texts[0]},
            original_size=torch.tensor([entry.original_size for entry in entries]),
            crop_top_left=torch.tensor([entry.crop_top_left for entry in entries]),
            target_size=torch.tensor([entry.target_size for entry in entries]),
            noise=torch.stack([torch.from_numpy(draw.noise) for draw in draws]),
            uniform=torch.tensor([draw.uniform for draw in draws], dtype=torch.float64),
        ).to(device)
