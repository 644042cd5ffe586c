"""The kernels of torch: compiled models, TF32, and equal bits from equal inputs on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase

UNLIMITED = 2**31


def compile_model(model: torch.nn.Module, phase: ResolvedPhase) -> None:
    """Compile the model's forward and backward passes with torch.compile, if the phase says so.

    In place: parameters keep their names. Code is compiled for each shape of images: one, or one
    of each bucket. Rows of text have many shapes, all covered by one compilation. So no step's
    numbers depend on the shapes of earlier steps, and a resume gives the same bits.

    Under full_determinism inductor times no kernels if the choice changes the numbers: every
    process and machine generates the same code, so its cache may be any folder, or empty.
    """
    if phase.launch.dynamo_backend == "no":
        return
    import torch._dynamo  # takes a second, which only a phase that compiles needs
    import torch._inductor.config

    torch._inductor.config.deterministic = phase.launch.full_determinism
    # Dynamo would stop compiling after 8 shapes, and a resume would reset that count.
    torch._dynamo.config.recompile_limit = UNLIMITED
    torch._dynamo.config.accumulated_recompile_limit = UNLIMITED
    _exclude_hooks(model)
    mode = {"mode": phase.launch.dynamo_mode} if phase.launch.dynamo_mode != "default" else {}
    text = phase.train.max_length is not None
    model.compile(backend=phase.launch.dynamo_backend, dynamic=text, **mode)


def _exclude_hooks(model: torch.nn.Module) -> None:
    """Exclude the modules' hooks from dynamo, since they change what it guards at each step.

    Those of ZeRO-3 fetch and release parameters: compiled with the model, they would make dynamo
    recompile every layer without end.
    """
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def allow_tf32(phase: ResolvedPhase, device: torch.device) -> str:
    """Let CUDA multiply float32 matrices in TF32, or not, as the phase says.

    Convolutions keep torch's default: TF32.

    Returns:
        A message for the user if allow_tf32 has no effect; "" otherwise.
    """
    torch.backends.cuda.matmul.allow_tf32 = phase.launch.allow_tf32
    if phase.launch.allow_tf32 and device.type != "cuda":
        return f"phase {phase.phase}: allow_tf32 has no effect on {device.type}, only on CUDA"
    if phase.launch.allow_tf32 and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"phase {phase.phase}: allow_tf32 has no effect on {name}, which has no TF32"
    return ""


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads it when it creates its first handle; torch refuses matrix products without it."""
LACKING = "does not have a deterministic implementation"
"""Part of torch's error for an operation without a deterministic kernel."""


@contextlib.contextmanager
def use_deterministic_kernels(phase: ResolvedPhase) -> Iterator[None]:
    """Make a GPU compute equal bits in this context, unless the phase turns full_determinism off.

    Several CUDA kernels sum in the order in which their threads happen to end. torch has
    deterministic ones for nearly all of them (docs/exactness.md names the flags and their cost). A
    CPU gives equal bits with equal thread counts anyway.

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
