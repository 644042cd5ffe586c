"""Loss on samples that training never saw, at fixed timesteps and with fixed noise.

Every phase is measured on the same numbers, so the values of two phases can be compared.
"""

from __future__ import annotations

import torch

from zerotrain.cache import Cache, stacked
from zerotrain.families import Objective
from zerotrain.training.draws import HOLDOUT_NOISE, generator

TIMESTEPS = 8
MOST_SAMPLES = 64
BATCH = 16


def holdout_loss(
    model: torch.nn.Module, objective: Objective, cache: Cache, seed: int, device: torch.device
) -> float | None:
    """Mean loss, without min-SNR weights, over held-out samples and TIMESTEPS levels of noise.

    At most MOST_SAMPLES samples are taken: those whose images' digests come first, a random choice
    that stays.

    Returns:
        The loss, or None if the dataset holds nothing out.
    """
    held_out = [i for i, entry in enumerate(cache.entries) if entry.split == "holdout"]
    chosen = sorted(held_out, key=lambda i: (cache.entries[i].image_sha256, i))[:MOST_SAMPLES]
    if not chosen:
        return None
    pairs = [(i, level) for level in range(TIMESTEPS) for i in chosen]
    losses = []
    with torch.inference_mode():
        for start in range(0, len(pairs), BATCH):
            samples = [_sample(cache, *pair, seed) for pair in pairs[start : start + BATCH]]
            batch = stacked(samples, device)
            losses.append(objective.loss(model, batch).double().cpu())
    return float(torch.cat(losses).mean())


def _sample(cache: Cache, i: int, level: int, seed: int) -> dict[str, torch.Tensor]:
    found = cache.sample(i)
    shape = tuple(found["latents"].shape)
    noise = generator(seed, HOLDOUT_NOISE, i, level).standard_normal(shape, dtype="float32")
    uniform = torch.tensor((level + 0.5) / TIMESTEPS, dtype=torch.float64)
    return {**found, "noise": torch.from_numpy(noise), "uniform": uniform}
