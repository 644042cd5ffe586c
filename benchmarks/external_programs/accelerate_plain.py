"""accelerate without DeepSpeed: `prepare`, a loop, `save_state`; and the same files by torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from external_programs import BETAS, CLIP, DECAY, EPSILON, LAST_STEP, RATE, SAVED_STEP, Program
from external_programs.job import Job, run

MODULE = "accelerate_plain"
ATTENTION_RATE = 5e-4
FROZEN = "time_embedding"
GROUPS = [{"parameters": ["attentions"], "learning_rate": ATTENTION_RATE}]
PROGRAMS = [
    Program(name="accelerate save_state, one group", module=MODULE),
    Program(
        name="accelerate, two groups of own rates",
        module=MODULE,
        options={"groups": "attention"},
        config={"train": {"param_groups": GROUPS}},
    ),
    Program(
        name="accelerate, decay and no decay",
        module=MODULE,
        options={"groups": "decay"},
        config={"train": {"no_decay_norm_bias": True}},
    ),
    Program(
        name="accelerate, frozen parameters in the optimizer",
        module=MODULE,
        options={"frozen": FROZEN},
        config={"frozen_parameters": [FROZEN]},
    ),
    Program(
        name="accelerate, frozen parameters, decay and no decay",
        module=MODULE,
        options={"frozen": FROZEN, "groups": "decay"},
        config={"frozen_parameters": [FROZEN], "train": {"no_decay_norm_bias": True}},
    ),
    Program(
        name="accelerate, groups that `names: module` explains",
        module=MODULE,
        options={"groups": "halves"},
        resume={"names": "module"},
    ),
    Program(
        name="diffusers script: unet/ and optimizer.bin",
        module=MODULE,
        options={"save": "hook"},
    ),
    Program(
        name="SimpleTuner: unet/, training_state.json",
        module=MODULE,
        options={"save": "hook", "training_state": True},
        checkpoint="latest",
    ),
    Program(
        name="torch: sharded safetensors, optimizer.pt",
        module=MODULE,
        options={"save": "torch"},
    ),
    Program(
        name="accelerate, pickled weights",
        module=MODULE,
        options={"save": "pickle"},
    ),
    Program(
        name="weights alone: a safetensors file",
        module=MODULE,
        options={"save": "file"},
        checkpoint=f"step-{SAVED_STEP}.safetensors",
        config={"allow": ["moments"]},
        without_moments=True,
    ),
]


def parameters_of(model: torch.nn.Module, options: Any) -> Any:
    """Return the parameters in the groups that the options name."""
    named = list(model.named_parameters())
    kind = options.get("groups")
    if kind == "attention":
        return [
            {"params": [p for n, p in named if "attentions" not in n]},
            {"params": [p for n, p in named if "attentions" in n], "lr": ATTENTION_RATE},
        ]
    if kind == "decay":
        return [
            {"params": [p for _, p in named if p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
    if kind == "halves":
        half = len(named) // 2
        return [{"params": [p for _, p in part]} for part in (named[:half], named[half:])]
    return model.parameters()


def adamw(parameters: Any) -> torch.optim.AdamW:
    """AdamW with the common values."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = job.load_model()
    if frozen := job.options.get("frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    optimizer: Any = adamw(parameters_of(model, job.options))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(LAST_STEP):
        loss = job.loss(wrapped, job.batch(step))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.record_loss(float(loss))
        if step + 1 in (SAVED_STEP, LAST_STEP):
            job.record(step + 1, model, optimizer.optimizer)
        if step + 1 == SAVED_STEP:
            save(accelerator, model, optimizer, job)
            if job.options.get("save") == "file":
                optimizer = accelerator.prepare(adamw(model.parameters()))


def save(accelerator: Any, model: Any, optimizer: Any, job: Job) -> None:
    """Save in the layout that the options name."""
    from safetensors.torch import save_file

    folder, kind = job.out / f"checkpoint-{SAVED_STEP}", job.options.get("save")
    if job.options.get("training_state"):
        folder = job.out / "latest"
    if kind == "hook":  # as diffusers' example scripts have it

        def write(models: list[Any], weights: list[Any], out: str) -> None:
            for one in models:
                one.save_pretrained(str(Path(out) / "unet"))
                weights.pop()

        accelerator.register_save_state_pre_hook(write)
        accelerator.save_state(str(folder))
    elif kind == "torch":
        folder.mkdir()
        model.save_pretrained(folder, max_shard_size="3MB")
        torch.save(optimizer.optimizer.state_dict(), folder / "optimizer.pt")
    elif kind == "file":
        save_file(model.state_dict(), job.out / f"step-{SAVED_STEP}.safetensors")
    else:
        accelerator.save_state(str(folder), safe_serialization=kind != "pickle")
    if job.options.get("training_state"):
        (folder / "training_state.json").write_text(json.dumps({"global_step": SAVED_STEP}))


if __name__ == "__main__":
    run(train)
