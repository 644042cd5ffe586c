"""Loss on samples that training never saw: one computation for evaluations and for trainings.

Of images at fixed timesteps and with fixed noise, of text over every learned token. Every phase is
measured on the same numbers, so the values of two phases can be compared, and so can those that a
training finds meanwhile: in one type of the weights and with one flux_guidance_value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from zerotrain.cache import Cache, TokenCache, stacked
from zerotrain.families import CONDITIONS, Objective
from zerotrain.families.tokens import IGNORED
from zerotrain.training.draws import HOLDOUT_NOISE, generator

TIMESTEPS = 8
MOST_SAMPLES = 64
"""Of images."""


class HeldOut(Protocol):
    """Samples to measure, without a leading dimension; see zerotrain.families.Batch."""

    def __len__(self) -> int:
        """How many forward passes of one sample there are."""

    def __getitem__(self, place: int, /) -> dict[str, torch.Tensor]:
        """One of them."""


class HeldOutImages:
    """The held-out samples of a cache, each at TIMESTEPS levels of noise.

    At most so many are taken: those whose images' digests come first, a random choice that stays.
    """

    def __init__(self, cache: Cache, seed: int, most: int = MOST_SAMPLES) -> None:
        entries = cache.entries
        held_out = [i for i, entry in enumerate(entries) if entry.split == "holdout"]
        taken = sorted(held_out, key=lambda i: (entries[i].image_sha256, i))[:most]
        self._cache, self._seed = cache, seed
        self._pairs = [(i, level) for level in range(TIMESTEPS) for i in taken]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        i, level = self._pairs[place]
        found = self._cache.sample(i)
        shape = tuple(found["latents"].shape)
        draw = generator(self._seed, HOLDOUT_NOISE, i, level)
        uniform = torch.tensor((level + 0.5) / TIMESTEPS, dtype=torch.float64)
        noise = torch.from_numpy(draw.standard_normal(shape, dtype="float32"))
        return {**found, "noise": noise, "uniform": uniform}


class HeldOutText:
    """The held-out examples of a cache of text; at most so many, chosen in the same way."""

    def __init__(self, cache: TokenCache, most: int) -> None:
        rows = cache.entries
        held_out = [i for i, row in enumerate(rows) if row.split == "holdout"]
        self._taken = sorted(held_out, key=lambda i: (rows[i].sha256, i))[:most]
        self._cache = cache

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        found = self._cache.sample(self._taken[place])
        return whole_example(found["input_ids"], found["labels"])


def whole_example(input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """An example of text, int64 [T] each, that stands in a row of its own."""
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": torch.ones_like(input_ids),
    }


def conditions(objective: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a phase's objective what the model is told: a measure takes nothing else of it."""
    return {key: objective[key] for key in objective if key in CONDITIONS} or None


def holdout_loss(
    model: torch.nn.Module,
    objective: Objective,
    held_out: HeldOut,
    device: torch.device,
    batch_size: int,
) -> float:
    """Mean loss over samples, of text over their learned tokens; there is at least one."""
    batches = count_batches(held_out, batch_size)
    measured = [
        batch_losses(model, objective, held_out, device, batch_size, number)
        for number in range(batches)
    ]
    return mean_loss(measured)


def count_batches(held_out: HeldOut, batch_size: int) -> int:
    """How many batches the samples make."""
    return -(-len(held_out) // batch_size)


@torch.no_grad()
def batch_losses(
    model: torch.nn.Module,
    objective: Objective,
    held_out: HeldOut,
    device: torch.device,
    batch_size: int,
    number: int,
) -> torch.Tensor:
    """The loss of each sample of one batch, and how much it counts: float64 [2, B] on the CPU."""
    first = number * batch_size
    places = range(first, min(first + batch_size, len(held_out)))
    batch = stacked([held_out[place] for place in places], device)
    losses = objective.loss(model, batch).double()
    learned = (batch["labels"] != IGNORED).sum(dim=1) if "labels" in batch else len(losses) * [1]
    counts = torch.as_tensor(learned, dtype=torch.float64, device=losses.device)
    return torch.stack([losses, counts]).cpu()


def mean_loss(measured: Sequence[torch.Tensor]) -> float:
    """The mean of what batch_losses gave for all batches, in their order."""
    losses, counts = torch.cat(list(measured), dim=1)
    return float((losses * counts).sum() / counts.sum())


def perplexity(loss: float) -> float:
    """Of a mean cross entropy per token; infinite where it is too large for a float."""
    return math.exp(loss) if loss < math.log(1.7e308) else math.inf
