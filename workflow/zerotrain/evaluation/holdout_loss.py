"""Loss on samples that training never saw, at fixed timesteps and with fixed noise.

Every phase is measured on the same numbers, so the values of two phases can be compared: in one
type of the weights (float32 on a CPU, bfloat16 on a GPU), and with one flux_guidance_value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerotrain.cache import Cache, stacked
from zerotrain.families import Objective
from zerotrain.training.draws import HOLDOUT_NOISE, generator

TIMESTEPS = 8
MOST_SAMPLES = 64


def holdout_samples(cache: Cache) -> list[int]:
    """Places of the held-out samples in a cache, at most MOST_SAMPLES of them.

    Those whose images' digests come first are taken, a random choice that stays.
    """
    held_out = [i for i, entry in enumerate(cache.entries) if entry.split == "holdout"]
    return sorted(held_out, key=lambda i: (cache.entries[i].image_sha256, i))[:MOST_SAMPLES]


def holdout_loss(
    model: torch.nn.Module,
    objective: Objective,
    cache: Cache,
    samples: Sequence[int],
    seed: int,
    device: torch.device,
    batch_size: int,
) -> float:
    """Mean loss, without min-SNR weights, over samples and TIMESTEPS levels of noise."""
    pairs = [(i, level) for level in range(TIMESTEPS) for i in samples]
    losses = []
    with torch.inference_mode():
        for start in range(0, len(pairs), batch_size):
            found = [_sample(cache, *pair, seed) for pair in pairs[start : start + batch_size]]
            batch = stacked(found, device)
            losses.append(objective.loss(model, batch).double().cpu())
    return float(torch.cat(losses).mean())


def _sample(cache: Cache, i: int, level: int, seed: int) -> dict[str, torch.Tensor]:
    found = cache.sample(i)
    shape = tuple(found["latents"].shape)
    noise = generator(seed, HOLDOUT_NOISE, i, level).standard_normal(shape, dtype="float32")
    uniform = torch.tensor((level + 0.5) / TIMESTEPS, dtype=torch.float64)
    return {**found, "noise": torch.from_numpy(noise), "uniform": uniform}
