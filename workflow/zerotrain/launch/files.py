"""The two files that launchers read: accelerate.yaml and deepspeed.json, without one "auto".

All of ZeRO stands in the DeepSpeed file; the accelerate file names it. Values in both places make
accelerate refuse the pair or ignore one of them. Nothing here names a device, so the same files run
on a GPU and, where there is none, on the CPU.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from zerotrain.launch.preset import Preset
from zerotrain.launch.resolved import ResolvedPhase

INITIAL_LOSS_SCALE = 65536.0
LOSS_SCALE_WINDOW = 2000
"""Steps without an overflow after which the fp16 loss scale doubles: torch's GradScaler's own."""


def accelerate_config(phase: ResolvedPhase, deepspeed_file: Path) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads, in the form `accelerate config` writes."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(phase),
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": phase.num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if phase.engine == "deepspeed":
        config["deepspeed_config"] = {
            "deepspeed_config_file": str(deepspeed_file),
            "zero3_init_flag": phase.zero3_init,
        }
    else:
        config["mixed_precision"] = phase.mixed_precision
    return config


def deepspeed_config(phase: ResolvedPhase, preset: Preset) -> dict[str, Any]:
    """What deepspeed.initialize reads. Optimizer and schedule are the program's, never the file's.

    gradient_clipping is always written: DeepSpeed's default is 1.0, and 0.0 means none.
    """
    return {
        "train_batch_size": phase.global_batch_size,
        "train_micro_batch_size_per_gpu": phase.micro_batch_size,
        "gradient_accumulation_steps": phase.gradient_accumulation_steps,
        "gradient_clipping": phase.max_grad_norm,
        "zero_optimization": _zero_optimization(phase, preset),
        "activation_checkpointing": {
            "partition_activations": phase.partition_activations,
            "cpu_checkpointing": phase.cpu_checkpointing,
            "contiguous_memory_optimization": phase.contiguous_memory_optimization,
        },
        "bf16": {"enabled": phase.mixed_precision == "bf16"},
        "fp16": _fp16() if phase.mixed_precision == "fp16" else {"enabled": False},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def _distributed_type(phase: ResolvedPhase) -> str:
    if phase.engine == "deepspeed":
        return "DEEPSPEED"
    return "MULTI_GPU" if phase.num_processes > 1 else "NO"


def _zero_optimization(phase: ResolvedPhase, preset: Preset) -> dict[str, Any]:
    """The preset's section, with the folder for what is swapped to NVMe."""
    return {
        key: {**value, "nvme_path": phase.offload_path}
        if isinstance(value, dict) and value.get("device") == "nvme"
        else value
        for key, value in preset.zero_optimization.items()
    }


def _fp16() -> dict[str, Any]:
    """Loss scaling as torch's GradScaler does it: a scale means the same in every engine."""
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": int(math.log2(INITIAL_LOSS_SCALE)),
        "loss_scale_window": LOSS_SCALE_WINDOW,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }


def write_launch_files(phase: ResolvedPhase, preset: Preset, into: Path, named: Path) -> None:
    """Write both files into the folder `into`; `named` is the folder they will be read from."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    (into / "accelerate.yaml").write_text(yaml.safe_dump(accelerate, sort_keys=False))
    if phase.engine == "deepspeed":
        text = json.dumps(deepspeed_config(phase, preset), indent=2)
        (into / "deepspeed.json").write_text(text + "\n")
