"""The command that a refusal to continue under another launch names."""

from __future__ import annotations

import pytest
from tests.builders.phases import make_tiny_phase

from zerotrain.training.checkpointing.preflight import switch_command


@pytest.mark.parametrize(
    ("differing", "options"),
    [
        ({"zero_stage", "engine"}, "--to zero2"),
        ({"num_processes"}, "--num-processes 4"),
        ({"mixed_precision", "num_processes"}, "--num-processes 4 --mixed-precision bf16"),
        ({"offload_param", "num_processes"}, "--to zero2 --num-processes 4"),
        ({"global_batch_size"}, "--to zero2"),
        ({"global_batch_size", "mixed_precision"}, "--mixed-precision bf16"),
    ],
)
def test_each_difference_has_its_option(differing: set[str], options: str) -> None:
    """Nothing that is the same is named."""
    phase = make_tiny_phase("a", "zero2", 5).with_values(num_processes=4, mixed_precision="bf16")
    assert switch_command(phase, differing) == f"zerotrain switch tiny {options}"
