"""Options of an adapter that reach into the layers: the same training under every engine."""

from __future__ import annotations

import pytest
from tests.training.conftest import Training
from tests.training.matrix import deviation

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": None}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["use_dora", "use_rslora"])
def test_an_option_means_the_same_under_every_engine(training: Training, option: str) -> None:
    """DoRA reads the base's weights in each pass, which ZeRO-3 has taken apart."""
    lora = {**LORA, option: True}
    whole = training.run("whole", "torch", 4, lora=lora)
    assert deviation(whole, training.run("other", "torch", 4, lora=LORA)) > 1e-6
    for preset in ("zero2_offload", "zero3", "zero3_offload"):
        assert deviation(training.run(preset, preset, 4, lora=lora), whole) <= 1e-6
