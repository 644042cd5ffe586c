"""A traced model as the planner has it, made up of a few layers: no torch builds it."""

from __future__ import annotations

from zerotrain.launch.planner.architecture import find_architecture
from zerotrain.launch.planner.trace_store import Activations, ModelShapes, TracedModel

GIB = 2**30


def traced_model(batch: int = 1, layers: int = 1000) -> TracedModel:
    """Return a model of 1.6 M parameters a layer, of which a sample takes 4 GiB of activations."""
    shapes = {f"blocks.{n}.weight": (1280, 1280) for n in range(layers)}
    shapes |= {f"blocks.{n}.bias": (1280,) for n in range(layers)}
    activations = Activations(
        saved=4 * GIB * batch, peak=5 * GIB * batch, checkpointed=GIB * batch,
        peak_checkpointed=2 * GIB * batch, on_device=GIB // 2 * batch, on_host=GIB // 2 * batch,
        peak_on_host=GIB * batch, blocks=layers, batch=batch, forward_flops=6 * 10**12 * batch,
        backward_flops=12 * 10**12 * batch, recomputed_flops=6 * 10**12 * batch,
    )  # fmt: skip
    base = find_architecture("sdxl", "stabilityai/stable-diffusion-xl-base-1.0")
    model = ModelShapes(base, shapes, tuple(shapes))
    return TracedModel(model, {"torch": activations, "deepspeed": activations})
