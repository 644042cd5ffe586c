"""Equal bits from equal inputs on a GPU, too. A CPU computes so with equal threads anyway.

Several of CUDA's kernels add up in the order in which their threads happen to end. torch has others
for nearly all of them (docs/exactness.md names the flags and their cost).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when its first handle is made; torch refuses to multiply without it."""
LACKING = "does not have a deterministic implementation"
"""What torch says of an operation for which there is no such kernel."""


@contextlib.contextmanager
def equal_bits(phase: ResolvedPhase) -> Iterator[None]:
    """Within, a GPU computes equal bits, unless the phase gives that up (full_determinism).

    Raises:
        PipelineError: the model needs an operation that cannot.
    """
    if phase.full_determinism and torch.cuda.is_available():
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        # Memory that nobody reads before it is written need not be filled.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Warning alone would leave memory-efficient attention as it is.
        torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if LACKING not in str(error):
            raise
        operation = str(error).partition(" ")[0]
        raise PipelineError(
            f"phase {phase.phase}: {operation} has no form on this GPU that gives equal bits each "
            "time",
            hint="set launch.full_determinism: false: it trains, and a resumed training may end in "
            "slightly other numbers than an undisturbed one",
        ) from error
