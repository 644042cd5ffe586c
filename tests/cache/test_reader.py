"""Batches of what a cache holds."""

from __future__ import annotations

import torch

from zerotrain.cache import stacked

CPU = torch.device("cpu")


def test_samples_of_one_shape_are_stacked_as_they_are() -> None:
    samples = [{"latents": torch.ones(2, 3) * i, "uniform": torch.tensor(0.5 * i)} for i in (1, 2)]
    batch = stacked(samples, CPU)
    assert batch.keys() == {"latents", "uniform"}
    assert batch["latents"].shape == (2, 2, 3)
    assert torch.equal(batch["uniform"], torch.tensor([0.5, 1.0]))


def test_captions_of_their_own_lengths_are_filled_up_under_a_mask() -> None:
    """The mask is true where a tensor is the sample's own."""
    captions = [torch.full((length, 4), float(length)) for length in (1, 3, 2)]
    batch = stacked([{"prompt_embeds": caption} for caption in captions], CPU)
    assert batch["prompt_embeds"].shape == (3, 3, 4)
    mask = batch["prompt_embeds_mask"]
    assert mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    for row, caption in enumerate(captions):
        assert torch.equal(batch["prompt_embeds"][row][mask[row]], caption)
        assert not batch["prompt_embeds"][row][~mask[row]].any()
