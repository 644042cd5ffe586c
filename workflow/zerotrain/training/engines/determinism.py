"""Equal bits from equal inputs on a GPU, too. A CPU gives them with equal thread counts anyway.

Several CUDA kernels sum in the order in which their threads happen to end. torch has deterministic
ones for nearly all of them (docs/exactness.md names the flags and their cost).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when it creates its first handle; torch refuses matrix products without it."""
LACKING = "does not have a deterministic implementation"
"""Part of torch's error for an operation without a deterministic kernel."""


@contextlib.contextmanager
def use_deterministic_kernels(phase: ResolvedPhase) -> Iterator[None]:
    """Make a GPU compute equal bits in this context, unless the phase turns full_determinism off.

    Raises:
        PipelineError: the model needs an operation without a deterministic kernel.
    """
    if phase.launch.full_determinism and torch.cuda.is_available():
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        # Memory that is written before it is read need not be filled.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # warn_only would leave memory-efficient attention nondeterministic.
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
