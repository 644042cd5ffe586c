"""Batches: tensors for positions in the run's endless sequence of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from zerotrain.cache import Cache, Entry, Row, TokenCache, stacked
from zerotrain.cache.reader import ON_HOST
from zerotrain.config.token_routes import kept_tokens
from zerotrain.config.training import TokenRoute
from zerotrain.data.draws import draw_place, draw_routes, draw_sample
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.families import Batch

HOST = torch.device("cpu")


class Batches:
    """The training samples of a cache, drawn by position.

    Sample number p of a run is the same for every world size and batch size, and after a resume.

    Args:
        cache: The cache to draw from.
        phase: The resolved phase.
        image_tokens: Counts the tokens that the model makes of latents [B, C, h, w], for
            tread_config.
    """

    def __init__(
        self,
        cache: Cache | TokenCache,
        phase: ResolvedPhase,
        image_tokens: Callable[[torch.Tensor], int] | None = None,
    ) -> None:
        self._cache = cache
        self._phase = phase
        self._image_tokens = image_tokens
        entries: Sequence[Entry | Row] = cache.entries
        self._train = [i for i, entry in enumerate(entries) if entry.split == "train"]

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Return samples `first` to `first + size` of the run, on the device; see `placed`."""
        return move_to_device(self.read(first, size), device)

    def read(self, first: int, size: int) -> Batch:
        """Return the same batch in host memory.

        Any thread may call this: it uses no shared random generator and computes only in the
        calling thread.
        """
        return stacked([self._sample(p) for p in range(first, first + size)], HOST)

    def _sample(self, position: int) -> dict[str, torch.Tensor]:
        if isinstance(self._cache, TokenCache):
            return self._row(self._cache, position)
        return self._image(self._cache, position)

    def name(self, position: int) -> str:
        """Return the name that a user knows a sample by: its file, or its row in the cache."""
        _, place = draw_place(self._phase.seed, position, self._phase.derived.epoch_size)
        number = self._train[place % len(self._train)]
        entry = self._cache.entries[number]
        return entry.file if isinstance(entry, Entry) else f"row {number} of the cache"

    def _row(self, cache: TokenCache, position: int) -> dict[str, torch.Tensor]:
        _, place = draw_place(self._phase.seed, position, self._phase.derived.epoch_size)
        return cache.sample(self._train[place % len(self._train)])

    def _image(self, cache: Cache, position: int) -> dict[str, torch.Tensor]:
        draw = draw_sample(
            self._phase.seed,
            position,
            count=len(self._train),
            epoch_size=self._phase.derived.epoch_size,
            shape=self._shape,
            caption_dropout=self._phase.train.caption_dropout_probability or 0.0,
            noise_offset=self._phase.derived.objective.get("noise_offset", 0.0),
            random_flip=cache.entries[self._train[0]].flipped is not None,
        )
        number = self._train[draw.index]
        sample = {
            **cache.sample(number, captioned=not draw.drop_caption, flipped=draw.flip),
            "noise": torch.from_numpy(draw.noise),
            "uniform": torch.tensor(draw.uniform, dtype=torch.float64),
        }
        if self._phase.train.tread_config is not None:
            sample["route"] = self._routes(self._phase.train.tread_config.routes, position, sample)
        return sample

    def _routes(
        self,
        routes: Sequence[TokenRoute],
        position: int,
        sample: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the order of a sample's tokens for each route (models.families.token_routing)."""
        assert self._image_tokens
        tokens = self._image_tokens(sample["latents"][None])
        if (others := sample.get("conditioning_latents")) is not None:  # they follow the image's
            tokens += len(others) * self._image_tokens(others)
        orders = draw_routes(
            self._phase.seed,
            position,
            epoch_size=self._phase.derived.epoch_size,
            kept=[kept_tokens(tokens, route.selection_ratio) for route in routes],
            tokens=tokens,
        )
        return torch.from_numpy(orders)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self._cache.sample(self._train[0])["latents"].shape)


def move_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a host batch on the device.

    ON_HOST moves to CUDA GPUs only: they have float64. If it stayed on the host, each timestep's
    copy would wait for the GPU; a copy from pinned memory does not.
    """
    if device.type == "cuda":
        return {n: t.pin_memory().to(device, non_blocking=True) for n, t in batch.items()}
    return {name: one if name in ON_HOST else one.to(device) for name, one in batch.items()}
