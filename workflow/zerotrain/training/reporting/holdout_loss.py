"""Loss on held-out samples: the same computation for evaluations and trainings.

Images are measured at fixed timesteps with fixed noise, text over every learned token. Every phase
uses the same numbers, so the values of two phases are comparable, and so are those measured during
a training, if weight type and flux_guidance_value are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch

from zerotrain.cache.reader import Cache, TokenCache, stacked
from zerotrain.config.families import CONDITIONS
from zerotrain.data.draws import HOLDOUT_NOISE, generator
from zerotrain.models.families import Objective
from zerotrain.models.families.tokens import IGNORED

TIMESTEPS = 8
MOST_SAMPLES = 64
"""Largest number of held-out images."""


class HeldOutImages:
    """Held-out samples of a cache, each at TIMESTEPS noise levels.

    At most `most` samples are used, those with the lowest image digests: a random but stable
    choice.
    """

    def __init__(self, cache: Cache, seed: int, most: int = MOST_SAMPLES) -> None:
        held_out = cache.entries.places("split", "holdout").tolist()
        sha256 = cache.entries.column("image_sha256")
        taken = sorted(held_out, key=lambda i: (sha256(i), i))[:most]
        self._cache, self._seed = cache, seed
        self._sizes = cache.entries.column("target_size")
        pairs = [(i, level) for level in range(TIMESTEPS) for i in taken]
        self._pairs = sorted(pairs, key=self._size)

    def __len__(self) -> int:
        return len(self._pairs)

    def batches(self, size: int) -> list[range]:
        """Split the forward passes into batches of images of one size, at most `size` in each."""
        found, start = [], 0
        for _, pairs in groupby(self._pairs, key=self._size):
            end = start + len([*pairs])
            found += split_places(range(start, end), size)
            start = end
        return found

    def _size(self, pair: tuple[int, int]) -> tuple[int, int]:
        size: tuple[int, int] = self._sizes(pair[0])
        return size

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        i, level = self._pairs[place]
        sample = self._cache.sample(i)
        shape = tuple(sample["latents"].shape)
        draw = generator(self._seed, HOLDOUT_NOISE, i, level)
        uniform = torch.tensor((level + 0.5) / TIMESTEPS, dtype=torch.float64)
        noise = torch.from_numpy(draw.standard_normal(shape, dtype="float32"))
        return {**sample, "noise": noise, "uniform": uniform}


class HeldOutText:
    """Held-out examples of a text cache; at most `most`, chosen in the same way."""

    def __init__(self, cache: TokenCache, most: int) -> None:
        held_out = cache.entries.places("split", "holdout").tolist()
        sha256 = cache.entries.column("sha256")
        self._taken = sorted(held_out, key=lambda i: (sha256(i), i))[:most]
        self._cache = cache

    def __len__(self) -> int:
        return len(self._taken)

    def batches(self, size: int) -> list[range]:
        """Split the examples into batches of at most `size`."""
        return split_places(range(len(self)), size)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        example = self._cache.sample(self._taken[place])
        return whole_example(example["input_ids"], example["labels"])


HeldOut: TypeAlias = HeldOutImages | HeldOutText | Sequence[dict[str, torch.Tensor]]
"""A sample for each pass, without a batch dimension; see zerotrain.models.families.Batch."""


def whole_example(input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a text example, int64 [T] each, that has a row to itself."""
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": torch.ones_like(input_ids),
    }


def conditions(objective: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the objective's keys that are conditions of the model; no others are used here."""
    return {key: objective[key] for key in objective if key in CONDITIONS} or None


def holdout_loss(
    model: torch.nn.Module,
    objective: Objective,
    held_out: HeldOut,
    device: torch.device,
    batches: Sequence[range],
) -> float:
    """Return the mean loss over all batches, at least one; text is averaged over learned tokens."""
    measured = [batch_losses(model, objective, held_out, device, places) for places in batches]
    return mean_loss(measured)


def split_places(places: range, size: int) -> list[range]:
    """Split places into batches of at most `size`."""
    return [places[start : start + size] for start in range(0, len(places), size)]


@torch.no_grad()
def batch_losses(
    model: torch.nn.Module,
    objective: Objective,
    held_out: HeldOut,
    device: torch.device,
    places: range,
) -> torch.Tensor:
    """Return the loss and the weight of each sample of one batch: float64 [2, B] on the CPU."""
    batch = stacked([held_out[place] for place in places], device)
    losses = objective.loss(model, batch).double()
    learned = (batch["labels"] != IGNORED).sum(dim=1) if "labels" in batch else len(losses) * [1]
    counts = torch.as_tensor(learned, dtype=torch.float64, device=losses.device)
    return torch.stack([losses, counts]).cpu()


def mean_loss(measured: Sequence[torch.Tensor]) -> float:
    """Return the mean over the results of batch_losses for all batches, in order."""
    losses, counts = torch.cat(list(measured), dim=1)
    return float((losses * counts).sum() / counts.sum())


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean cross entropy per token; infinite if too large."""
    return math.exp(loss) if loss < math.log(1.7e308) else math.inf
