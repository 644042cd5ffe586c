"""Loss on samples that training never saw, at fixed timesteps and with fixed noise.

Every phase is measured on the same numbers, so the values of two phases can be compared.
"""

from __future__ import annotations

import torch

from zerotrain.cache import Cache
from zerotrain.families import Batch, Objective
from zerotrain.training.draws import HOLDOUT_NOISE, generator

TIMESTEPS = 8
MOST_SAMPLES = 64
BATCH = 16


def holdout_loss(
    denoiser: torch.nn.Module, objective: Objective, cache: Cache, seed: int, device: torch.device
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
            batch = _batch(cache, pairs[start : start + BATCH], seed)
            losses.append(objective.loss(denoiser, batch.to(device), snr_gamma=None).double().cpu())
    return float(torch.cat(losses).mean())


def _batch(cache: Cache, pairs: list[tuple[int, int]], seed: int) -> Batch:
    entries = [cache.entries[i] for i, _ in pairs]
    latents = torch.stack([cache.latents(i) for i, _ in pairs])
    texts = [cache.text(i) for i, _ in pairs]
    noise = [
        generator(seed, HOLDOUT_NOISE, i, level).standard_normal(latents.shape[1:], dtype="float32")
        for i, level in pairs
    ]
    return Batch(
        latents=latents,
        text={name: torch.stack([text[name] for text in texts]) for name in texts[0]},
        original_size=torch.tensor([entry.original_size for entry in entries]),
        crop_top_left=torch.tensor([entry.crop_top_left for entry in entries]),
        target_size=torch.tensor([entry.target_size for entry in entries]),
        noise=torch.stack([torch.from_numpy(values) for values in noise]),
        uniform=torch.tensor([(level + 0.5) / TIMESTEPS for _, level in pairs]).double(),
    )
