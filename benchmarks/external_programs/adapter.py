"""LoRA trainings: diffusers' and peft's folders with an optimizer, and adapter files alone."""

from __future__ import annotations

import json
from typing import Any

import torch

from external_programs import CLIP, LAST_STEP, SAVED_STEP, Program
from external_programs.accelerate_plain import adamw
from external_programs.job import Job, run

MODULE = "adapter"
RANK, ALPHA = 4, 8.0
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
LORA = {"lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": TARGETS}}
ALONE = {**LORA, "allow": ["moments"]}
PROGRAMS = [
    Program(
        name="diffusers LoRA: pytorch_lora_weights.safetensors, optimizer.bin",
        module=MODULE,
        options={"save": "diffusers"},
        config=LORA,
    ),
    Program(
        name="peft LoRA: adapter_model.safetensors, optimizer.bin",
        module=MODULE,
        options={"save": "peft"},
        config=LORA,
    ),
    Program(
        name="accelerate, LoRA within the whole model",
        module=MODULE,
        options={"save": "whole"},
        config=LORA,
    ),
    Program(
        name="diffusers LoRA file alone",
        module=MODULE,
        options={"save": "diffusers", "alone": True},
        checkpoint=f"checkpoint-{SAVED_STEP}/pytorch_lora_weights.safetensors",
        config=ALONE,
        without_moments=True,
    ),
    Program(
        name="peft LoRA file alone",
        module=MODULE,
        options={"save": "peft", "alone": True},
        checkpoint=f"checkpoint-{SAVED_STEP}/adapter_model.safetensors",
        config=ALONE,
        without_moments=True,
    ),
    Program(
        name="kohya LoRA file alone",
        module=MODULE,
        options={"save": "kohya", "alone": True},
        checkpoint=f"checkpoint-{SAVED_STEP}/cat.safetensors",
        config=ALONE,
        without_moments=True,
    ),
]


def train(job: Job) -> None:
    """Train, save after SAVED_STEP, train on."""
    from accelerate import Accelerator
    from peft import LoraConfig

    accelerator = Accelerator(cpu=True)
    model: Any = job.load_model()
    model.requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    model.train()
    optimizer: Any = adamw([p for p in model.parameters() if p.requires_grad])
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
            save(accelerator, model, job)
            if job.options.get("alone"):
                trained = [p for p in model.parameters() if p.requires_grad]
                optimizer = accelerator.prepare(adamw(trained))


def save(accelerator: Any, model: Any, job: Job) -> None:
    """Save as the libraries do."""
    from diffusers import StableDiffusionXLPipeline
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder, kind = job.out / f"checkpoint-{SAVED_STEP}", job.options["save"]
    tensors = get_peft_model_state_dict(model)

    def write(models: list[Any], weights: list[Any], out: str) -> None:
        weights.clear()

    if kind != "whole":
        accelerator.register_save_state_pre_hook(write)
    if job.options.get("alone"):
        folder.mkdir()
    else:
        accelerator.save_state(str(folder))
    if kind == "diffusers":
        StableDiffusionXLPipeline.save_lora_weights(str(folder), unet_lora_layers=tensors)
    elif kind == "peft":
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = model.peft_config["default"].to_dict()
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    elif kind == "kohya":
        from diffusers.utils import convert_state_dict_to_kohya

        named = {f"unet.{name}": tensor for name, tensor in tensors.items()}
        kohya = {}
        for name, tensor in convert_state_dict_to_kohya(named).items():
            kohya[name] = torch.tensor(ALPHA) if name.endswith(".alpha") else tensor.contiguous()
        save_file(kohya, folder / "cat.safetensors")


if __name__ == "__main__":
    run(train)
