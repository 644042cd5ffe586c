"""Methods of peft under the engines: one training over two switches, and what peft loads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.builders.adapters import LAYER_METHODS
from tests.training.conftest import Training, trained_model
from tests.training.matrix import deviation

from zerotrain.config.adapters import METHODS
from zerotrain.models.families import load_family

CHAIN = ("torch", "zero2_offload", "zero3_offload")
STEPS = 2
"""Of each phase of the chain."""
SAMPLE = ("LOHA", "LOKR", "OFT", "IA3")
"""Methods that CI trains; `make test-soak` has the others."""


def chain(
    training: Training, family: str, adapter: dict[str, Any], **shape: Any
) -> tuple[Path, Any]:
    """Train in three phases under three engines, as one phase would; all methods but LoHa without
    the middle one, which flattens parameters as stage 3 does.

    Returns:
        The weights they lead to, and the trained model without an export.
    """
    changes = {"family": family, "peft": adapter, "lr_scheduler_steps": 20, **shape}
    presets = CHAIN if adapter["peft_type"] == "LOHA" else CHAIN[::2]
    whole = training.run("whole", "torch", STEPS * len(presets), **changes)
    state, losses = None, []
    for number, preset in enumerate(presets, start=1):
        losses = training.run(preset, preset, STEPS * number, state=state, **changes)
        rolling = training.rolling(preset, STEPS * number)
        weights, state = training.export(preset, STEPS * number, family, peft=adapter)
    apart = deviation(losses, whole)
    print(f"{family} {adapter['peft_type']}: largest relative deviation {apart:.1e}")
    assert apart <= 2e-6
    return weights, trained_model(family, training.base, rolling, adapter)


def test_every_method_is_tried() -> None:
    assert LAYER_METHODS.keys() == METHODS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.soak) for one in LAYER_METHODS],
)
def test_a_method_of_layers_switches_and_is_what_peft_loads(training, name):
    """peft's own reading answers as the trained model does, and merged."""
    weights, model = chain(training, "sdxl", {"peft_type": name, **LAYER_METHODS[name]})
    family: Any = load_family("sdxl")
    base = family.load_model(training.base).eval()
    trained = answers(model)
    assert (trained - answers(base)).abs().max() > 1e-6
    loaded = peft.PeftModel.from_pretrained(base, weights / "adapter").eval()
    assert torch.equal(answers(loaded), trained)
    merged = answers(loaded.merge_and_unload())
    assert (merged - trained).abs().max() <= 2e-5


@torch.no_grad()
def answers(unet: Any) -> torch.Tensor:
    """The tiny U-Net's answer to fixed inputs."""
    source = torch.Generator().manual_seed(2)
    return unet(
        torch.randn(2, 4, 8, 8, generator=source),
        torch.tensor([10, 700]),
        encoder_hidden_states=torch.randn(2, 5, 16, generator=source),
        added_cond_kwargs={
            "text_embeds": torch.randn(2, 6, generator=source),
            "time_ids": torch.full((2, 6), 16.0),
        },
        return_dict=False,
    )[0]
