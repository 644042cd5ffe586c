"""accelerate without DeepSpeed: `prepare`, a loop, `save_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from external_programs import BETAS, CLIP, DECAY, EPSILON, LAST_STEP, RATE, SAVED_STEP, Program
from external_programs.job import Job, run

MODULE = "accelerate_plain"
PROGRAMS = [
    Program(name="accelerate save_state, one group", module=MODULE),
]


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = job.load_model()
    values = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
    optimizer: Any = torch.optim.AdamW(model.parameters(), **values)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for step in range(LAST_STEP):
        loss = job.loss(wrapped, job.batch(step))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        job.record_loss(float(loss))
        if step + 1 in (SAVED_STEP, LAST_STEP):
            job.record(step + 1, model, optimizer.optimizer)
        if step + 1 == SAVED_STEP:
            save(accelerator, job.out / f"checkpoint-{SAVED_STEP}")


def save(accelerator: Any, folder: Path) -> None:
    """What every user of accelerate calls."""
    accelerator.save_state(str(folder))


if __name__ == "__main__":
    run(train)
