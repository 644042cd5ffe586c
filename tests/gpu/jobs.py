"""What a process of a GPU test does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def can_compute(device: str) -> None:
    """End with an error if this process cannot compute on a device."""
    import torch

    assert float(torch.ones(4, device=device).sum()) == 4.0


def train(arguments: list[str], environment: Mapping[str, str], kill: Any = None) -> None:
    """Train a phase."""
    from zerotrain.training import rank

    os.environ.update(environment)
    if kill:
        kill.arm()
    rank.main(arguments)


def train_with_attention(arguments: list[str], backend: str) -> None:
    """Train a phase whose attention may be computed by one of torch's kernels alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from zerotrain.training import rank

    with sdpa_kernel([getattr(SDPBackend, backend)]):
        rank.main(arguments)


def train_measured(arguments: list[str], answers: Any) -> None:
    """Train a phase; the most memory that its tensors and torch's allocator have taken."""
    import torch

    from zerotrain.training import rank

    # The report of a training counts from its first step; a plan has the set-up before it, too.
    vars(torch.cuda)["reset_peak_memory_stats"] = lambda device=None: None
    rank.main(arguments)
    if torch.cuda.is_available():
        answers.put((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    else:
        answers.put((0, 0))
