"""Under zero3_init the model is built in parts, and training is the same to the bit."""

from __future__ import annotations

import pytest

LORA = {"rank": 3, "alpha": 4.0, "dropout": 0.0, "target_modules": ["to_q", "to_v"]}


@pytest.mark.slow
def test_zero3_init_gives_the_same_bits(training):
    """Losses and every tensor of the checkpoint, also of a phase that continues from a state."""
    preset = "zero3_offload"
    changes = {
        "lora": LORA, "frozen_parameters": ["to_q.lora_A"], "gradient_checkpointing": True,
    }  # fmt: skip
    for name, own in (("whole", {}), ("parts", {"zero3_init": True})):
        first, second = f"{name}-1", f"{name}-2"
        training.run(first, preset, 2, **changes, **own)
        state = training.export_state(first, 2)
        training.run(second, preset, 4, state=state, **changes, **own)
    assert training.losses("parts-2") == training.losses("whole-2")
    assert training.hashes("parts-1", 2) == training.hashes("whole-1", 2)
    assert training.hashes("parts-2", 4) == training.hashes("whole-2", 4)
