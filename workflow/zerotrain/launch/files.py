"""The two files that launchers read: accelerate.yaml and deepspeed.json, without one "auto".

All of ZeRO stands in the DeepSpeed file; the accelerate file names it. Values in both places make
accelerate refuse the pair or ignore one of them. Nothing here names a device, so the same files run
on a GPU and, where there is none, on the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from zerotrain.launch.preset import Preset
from zerotrain.launch.resolved import ResolvedPhase


def accelerate_config(phase: ResolvedPhase, deepspeed_file: Path) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads, in the form `accelerate config` writes."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "DEEPSPEED" if phase.engine == "deepspeed" else "NO",
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
            "zero3_init_flag": False,
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
        "zero_optimization": preset.zero_optimization,
        "bf16": {"enabled": phase.mixed_precision == "bf16"},
        "fp16": {"enabled": False},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }


def write_launch_files(phase: ResolvedPhase, preset: Preset, into: Path, named: Path) -> None:
    """Write both files into the folder `into`; `named` is the folder they will be read from."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    (into / "accelerate.yaml").write_text(yaml.safe_dump(accelerate, sort_keys=False))
    if phase.engine == "deepspeed":
        text = json.dumps(deepspeed_config(phase, preset), indent=2)
        (into / "deepspeed.json").write_text(text + "\n")
