"""Families under the engines: from images to weights that the family's own pipeline loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tests.training.conftest import trained_model
from tests.training.inputs import LORA, answer_samples, image_values
from tests.training.matrix import deviation

from zerotrain.models.families import load_family

CHAIN = ("torch", "zero2_offload", "zero3_offload")
STEPS = 2
"""Of each phase of the chain."""
CASES = [("sdxl", True), ("sd3", False), ("flux", True), ("qwen_image", False)]
"""Each family once, with an adapter or without."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_families_switch_and_export_what_their_pipelines_load(
    family, adapter, image_inputs, image_training
):
    """After each engine the real pipeline answers as the trained model does."""
    inputs = image_inputs(family)
    training = image_training(family)
    shape = {
        **image_values(family),
        "lr_scheduler_steps": STEPS * len(CHAIN),
        **({"lora": LORA} if adapter else {}),
    }
    whole = training.run("whole", "torch", STEPS * len(CHAIN), **shape)
    found = load_family(family)
    state, losses = None, []
    seen = [
        answer_samples(family, inputs, inputs / "base", found.load_model(inputs / "base").eval())
    ]
    for number, preset in enumerate(CHAIN, start=1):
        losses = training.run(preset, preset, STEPS * number, state=state, **shape)
        rolling, lora = training.rolling(preset, STEPS * number), LORA if adapter else None
        weights, state = training.export(preset, STEPS * number, family, lora=lora)
        trained = trained_model(family, inputs / "base", rolling, lora)
        answers = answer_samples(family, inputs, inputs / "base", trained)
        by_pipeline = answer_samples(family, inputs, weights, _of_pipeline(found, weights, adapter))
        print(f"{family} {preset}: outputs differ by {(answers - by_pipeline).abs().max():.1e}")
        assert torch.equal(answers, by_pipeline)
        assert all((answers - others).abs().max() > 1e-5 for others in seen)
        seen.append(answers)
    apart = deviation(losses, whole)
    print(f"{family}: largest relative deviation {apart:.1e}")
    assert apart <= 1e-6


def _of_pipeline(family: Any, weights: Path, adapter: bool) -> torch.nn.Module:
    """The denoiser as a user of diffusers gets it."""
    pipeline = getattr(diffusers, family.spec.pipeline).from_pretrained(weights)
    if adapter:
        pipeline.load_lora_weights(weights)
    denoiser: torch.nn.Module = getattr(pipeline, family.trained_part)
    return denoiser
