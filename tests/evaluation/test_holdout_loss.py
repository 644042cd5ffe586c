"""The held-out loss is a mean over learned tokens, or over samples where nothing else counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotrain.training.reporting.holdout_loss import (
    holdout_loss,
    perplexity,
    split_places,
    whole_example,
)


class Length:
    """An objective whose loss is the number of learned tokens of a sample."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"] != -100).sum(dim=1).float()


class Value:
    """An objective whose loss stands in the sample."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["latents"]


def measured(objective: Any, samples: list[dict[str, torch.Tensor]], batch_size: int) -> float:
    model, batches = torch.nn.Identity(), split_places(range(len(samples)), batch_size)
    return holdout_loss(model, objective, samples, torch.device("cpu"), batches)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_every_learned_token_counts_once_and_every_sample_of_images(batch_size):
    """Whatever stands in a batch together."""
    samples = [
        whole_example(torch.arange(5), torch.tensor([-100] * (5 - n) + [7] * n)) for n in (1, 2, 5)
    ]
    assert measured(Length(), samples, batch_size) == (1 + 4 + 25) / 8
    images = [{"latents": torch.tensor(value)} for value in (1.0, 2.0, 6.0)]
    assert measured(Value(), images, batch_size) == 3.0


def test_perplexity_of_what_is_too_large_is_infinite():
    """And no error."""
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == float("inf")
