"""accelerate with DeepSpeed inside: its save_state has a tag folder of DeepSpeed's engine."""

from __future__ import annotations

import os
import socket
from typing import Any

from external_programs import BATCH, CLIP, LAST_STEP, SAVED_STEP, Program
from external_programs.accelerate_plain import adamw
from external_programs.deepspeed_engine import STAGE3, record
from external_programs.job import Job, run
from zerotrain.machine import compiled_ops

MODULE = "accelerate_deepspeed"
PROGRAMS = [
    Program(
        name=f"accelerate with DeepSpeed stage {zero['stage']}",
        module=MODULE,
        options={"zero": zero},
        environment=compiled_ops.environment(),
    )
    for zero in ({"stage": 2}, STAGE3)
]


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP, "zero_optimization": job.options["zero"],
        "steps_per_print": 1_000_000,
    }  # fmt: skip
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model: Any = job.load_model()
    engine, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    for step in range(LAST_STEP):
        loss = job.loss(engine, job.batch(step, accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.record_loss(float(loss))
        if step + 1 in (SAVED_STEP, LAST_STEP):
            record(job, step + 1, engine, model)
        if step + 1 == SAVED_STEP:
            accelerator.save_state(str(job.out / f"checkpoint-{SAVED_STEP}"))


if __name__ == "__main__":
    run(train)
