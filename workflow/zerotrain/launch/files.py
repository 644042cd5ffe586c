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
from zerotrain.optimizers import plain_adam


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
            "zero3_init_flag": False,
        }
    else:
        config["mixed_precision"] = phase.mixed_precision
    return config


def deepspeed_config(phase: ResolvedPhase, preset: Preset) -> dict[str, Any]:
    """What deepspeed.initialize reads. Optimizer and schedule are the program's, never the file's.

    gradient_clipping is always written: DeepSpeed's default is 1.0, and 0.0 means none.
    """
    config: dict[str, Any] = {
        "train_batch_size": phase.global_batch_size,
        "train_micro_batch_size_per_gpu": phase.micro_batch_size,
        "gradient_accumulation_steps": phase.gradient_accumulation_steps,
        "gradient_clipping": phase.max_grad_norm,
        "zero_optimization": _zero_optimization(phase, preset),
        "bf16": {"enabled": phase.mixed_precision == "bf16"},
        "fp16": {"enabled": False},
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    if phase.mixed_precision == "fp16":
        config["fp16"] = {"enabled": True, **phase.fp16}
    if not plain_adam(phase.optimizer, phase.optimizer_args):
        # It takes few other optimizers by itself, and none of them where one is offloaded.
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    return config


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


def write_launch_files(phase: ResolvedPhase, preset: Preset, into: Path, named: Path) -> None:
    """Write both files into the folder `into`; `named` is the folder they will be read from."""
    accelerate = accelerate_config(phase, named / "deepspeed.json")
    (into / "accelerate.yaml").write_text(yaml.safe_dump(accelerate, sort_keys=False))
    if phase.engine == "deepspeed":
        text = json.dumps(deepspeed_config(phase, preset), indent=2)
        (into / "deepspeed.json").write_text(text + "\n")
