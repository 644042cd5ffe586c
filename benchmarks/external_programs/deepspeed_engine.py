"""DeepSpeed's own engine: `initialize`, a loop, `save_checkpoint`, and universal checkpoints."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from external_programs import (
    BATCH,
    BETAS,
    CLIP,
    DECAY,
    EPSILON,
    LAST_STEP,
    RATE,
    SAVED_STEP,
    Program,
)
from external_programs.job import Job, run
from zerotrain.machine import compiled_ops

MODULE = "deepspeed_engine"
TAG = f"global_step{SAVED_STEP}"
UNIVERSAL = f"{TAG}_universal"
CPU = {"device": "cpu"}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
PARTITIONED = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 30_001,
}  # fmt: skip
"""Without these a small model stays whole on every process, in one sub-group."""
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
BIASES = {"parameters": ["bias$"], "learning_rate": RATE / 2, "adam_weight_decay": 0.0}


def _program(name: str, zero: dict[str, Any], preset: str, **more: Any) -> Program:
    options = {"zero": zero, **more.pop("options", {})}
    checkpoint = more.pop("checkpoint", "saved")
    return Program(
        name=f"DeepSpeed {name}", module=MODULE, options=options, checkpoint=checkpoint,
        preset=preset, environment=compiled_ops.environment(), **more,
    )  # fmt: skip


STAGE3 = {"stage": 3, **PARTITIONED}
GROUPS: dict[str, Any] = {
    "options": {"groups": True},
    "config": {"train": {"param_groups": [BIASES]}},
}
PROGRAMS = [
    _program("stage 1, one process", {"stage": 1}, "torch"),
    _program("stage 2, two processes", {"stage": 2}, "zero2", processes=2),
    _program("stage 2, CPU offload", {"stage": 2, "offload_optimizer": CPU}, "zero2_offload"),
    _program("stage 2, two param groups", {"stage": 2}, "zero2", **GROUPS),
    _program("stage 2, LoRA", {"stage": 2}, "torch", options={"lora": True}, config={"lora": LORA}),
    _program("stage 3, one process", STAGE3, "zero3"),
    _program("stage 3, two param groups, two processes", STAGE3, "torch", processes=2, **GROUPS),
    _program("stage 3, both offloads", {**STAGE3, **BOTH}, "zero3_offload"),
    _program(
        "stage 2 to universal, two processes", {"stage": 2}, "torch", processes=2,
        checkpoint=UNIVERSAL, options={"universal": True, **GROUPS["options"]},
        config=GROUPS["config"],
    ),
    _program(
        "stage 3 to universal", STAGE3, "zero3", checkpoint=UNIVERSAL, options={"universal": True}
    ),
]  # fmt: skip


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if "RANK" not in os.environ:  # torchrun sets them for several processes
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model: Any = job.load_model()
    if job.options.get("lora"):
        from peft import LoraConfig

        model.requires_grad_(False)
        model.add_adapter(
            LoraConfig(
                r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=LORA["target_modules"]
            )
        )
    zero = job.options["zero"]
    make: Any = DeepSpeedCPUAdam if "offload_optimizer" in zero else torch.optim.AdamW
    values = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // job.world,
        "gradient_clipping": CLIP, "zero_optimization": zero, "steps_per_print": 1_000_000,
        **({"bf16": {"enabled": True}} if job.options.get("bf16") else {}),
    }  # fmt: skip
    optimizer = make(param_groups(model, bool(job.options.get("groups"))), **values)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(LAST_STEP):
        loss = job.loss(engine, job.batch(step, engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        deepspeed.comm.all_reduce(mean)
        job.record_loss(float(mean) / job.world)
        if step + 1 in (SAVED_STEP, LAST_STEP):
            record(job, step + 1, engine, model)
        if step + 1 == SAVED_STEP:
            engine.save_checkpoint(str(job.out / "saved"))
            if job.options.get("universal") and job.rank == 0:
                convert(job.out / "saved" / TAG, job.out / UNIVERSAL)


def param_groups(model: torch.nn.Module, split: bool) -> list[dict[str, Any]]:
    """One group, or one with decay and one of the biases, at half the rate and without."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not split:
        return [{"params": [p for _, p in trained]}]
    biases = [p for name, p in trained if name.endswith("bias")]
    rest = [p for name, p in trained if not name.endswith("bias")]
    return [{"params": rest}, {"params": biases, "weight_decay": 0.0, "lr": RATE / 2}]


def record(job: Job, step: int, engine: Any, model: torch.nn.Module) -> None:
    """Note what the engine holds, as DeepSpeed's public functions gather it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        # With several groups DeepSpeed links the optimizer's slots of the first alone.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()

    def read(name: str, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        held = {s: safe_get_full_optimizer_state(parameter, s) for s in ("exp_avg", "exp_avg_sq")}
        return {"master": safe_get_full_fp32_param(parameter), **held}

    job.record(step, model, read=read)


def convert(source: Path, target: Path) -> None:
    """Convert as `ds_to_universal.py --inject_missing_state` does."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


if __name__ == "__main__":
    run(train)
