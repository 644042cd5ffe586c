"""Checks of a launch's settings for gradient checkpointing and for building the model."""

from __future__ import annotations

from zerotrain.config.launch import LaunchConfig
from zerotrain.errors import PipelineError
from zerotrain.launch.preset import Preset

NOTHING_SHARDED = (
    "DeepSpeed shards among the processes of model parallelism, of which there is one here: "
    "nothing is sharded"
)


def check_activations(
    phase: str, launch: LaunchConfig, preset: Preset, gradient_checkpointing: bool
) -> None:
    """Refuse settings without an effect or with an unintended one.

    Raises:
        PipelineError: a key of activation_checkpointing without gradient_checkpointing or without
            DeepSpeed, contiguous_memory_optimization, or zero3_init at another stage.
    """
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        if getattr(launch, key) and not gradient_checkpointing:
            raise PipelineError(
                f"phase {phase}: launch.{key} is about what gradient checkpointing keeps, but "
                "train.gradient_checkpointing is false",
                hint=f"set train.gradient_checkpointing: true, or remove launch.{key}",
            )
    if launch.contiguous_memory_optimization:
        raise PipelineError(
            f"phase {phase}: launch.contiguous_memory_optimization joins shards of "
            f"partition_activations that are all of one size. {NOTHING_SHARDED}, and blocks differ "
            "in size",
            hint="remove it; against fragmented GPU memory set the environment variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    if launch.partition_activations and preset.engine != "deepspeed":
        raise PipelineError(
            f"phase {phase}: launch.partition_activations is DeepSpeed's, but preset "
            f"{preset.name} is plain PyTorch",
            hint="remove it; cpu_checkpointing saves memory under every preset",
        )
    if launch.zero3_init and preset.zero_stage != 3:
        raise PipelineError(
            f"phase {phase}: launch.zero3_init builds the model in parts, but under preset "
            f"{preset.name} every process holds all of it",
            hint="remove it, or choose a preset of ZeRO stage 3",
        )
