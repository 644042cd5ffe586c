"""What makes the same step faster on some machines: torch.compile, and TF32."""

from __future__ import annotations

import torch

from zerotrain.launch.resolved import ResolvedPhase


def compile_model(model: torch.nn.Module, phase: ResolvedPhase) -> None:
    """Let torch.compile compile the model's forward and backward passes, if the phase says so.

    In place: the names of its parameters stay as they are. Images have one shape, for which the
    code is made; rows of text have many, for all of which it is made at once. So no step's numbers
    depend on the shapes of the steps before, and a resume ends in the same bits.
    """
    if phase.dynamo_backend == "no":
        return
    mode = {"mode": phase.dynamo_mode} if phase.dynamo_mode != "default" else {}
    text = phase.max_length is not None
    model.compile(backend=phase.dynamo_backend, dynamic=text, **mode)


def allow_tf32(phase: ResolvedPhase, device: torch.device) -> str:
    """Let CUDA multiply float32 matrices in TF32, or not, as the phase says.

    Convolutions are as torch has them: in TF32.

    Returns:
        What to tell a user who asked for it in vain; "" otherwise.
    """
    torch.backends.cuda.matmul.allow_tf32 = phase.allow_tf32
    if phase.allow_tf32 and device.type != "cuda":
        return f"phase {phase.phase}: allow_tf32 has no effect on {device.type}, only on CUDA"
    if phase.allow_tf32 and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"phase {phase.phase}: allow_tf32 has no effect on {name}, which has no TF32"
    return ""
