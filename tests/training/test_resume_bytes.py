"""A resume reads what a process holds, and nothing of what the others hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.resume_bytes import count


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero2", "zero3"])
def test_each_of_four_processes_reads_its_own_share(
    server: Any, tmp_path: Path, preset: str
) -> None:
    """At most a fifth more than its masters, moments and average, which it takes over to the bit.

    Under plain PyTorch every process steps all parameters, so that all of them are its share.
    """
    found = count(server.Process, preset, 4, 256, 12, tmp_path)
    assert all(one["read"] <= 1.2 * one["share"] for one in found), found
