"""Options of adapters under every engine."""

from __future__ import annotations

import pytest
from tests.training.conftest import Training
from tests.training.inputs import LORA
from tests.training.matrix import deviation


@pytest.mark.slow
def test_dora_means_the_same_under_every_engine(training: Training) -> None:
    """DoRA reads the base's weights in each pass, which ZeRO-3 has taken apart."""
    plain = {**LORA, "target_modules": None}
    lora = {**plain, "use_dora": True}
    whole = training.run("whole", "torch", 4, lora=lora)
    assert deviation(whole, training.run("other", "torch", 4, lora=plain)) > 1e-6
    for preset in ("zero2_offload", "zero3", "zero3_offload"):
        assert deviation(training.run(preset, preset, 4, lora=lora), whole) <= 1e-6
