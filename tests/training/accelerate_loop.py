"""A training loop as other programs have it: accelerate, DeepSpeed or none, and save_state.

It sees the same batches as ours, so that a run that continues from it can be held to one that was
ours from the first step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs

from zerotrain.cache.reader import read_cache
from zerotrain.launch.files import read_run_yaml
from zerotrain.models.families.sdxl import FAMILY
from zerotrain.training.batches import Batches


class Pipeline(torch.nn.Module):
    """As DiffSynth-Studio wraps what it trains: every name begins with `pipe.dit.`."""

    def __init__(self, denoiser: torch.nn.Module) -> None:
        super().__init__()
        self.pipe = torch.nn.Module()
        self.pipe.dit = denoiser

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.pipe.dit(*arguments, **keywords)


def train(
    launch: Path, base: Path, cache: Path, out: Path, zero: dict[str, Any] | None, wrapped: bool
) -> None:
    """Train the phase's steps with a constant rate, then save_state.

    Args:
        launch: Launch folder of a phase of ours, for its values.
        base: Base model.
        cache: Cache.
        out: Folder for save_state.
        zero: DeepSpeed's zero_optimization; None trains without DeepSpeed and lets a save hook
            write the U-Net as diffusers' example scripts and SimpleTuner do.
        wrapped: Whether the U-Net is a part of a larger module.
    """
    phase = read_run_yaml(launch / "run.yaml")
    plugin = None
    if zero is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": phase.derived.micro_batch_size,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": phase.train.max_grad_norm,
                "zero_optimization": zero,
                "steps_per_print": 1_000_000,
            }
        )
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(
        cpu=zero is None, deepspeed_plugin=plugin, kwargs_handlers=[gloo] if zero else None
    )
    unet = FAMILY.load_model(base).train()
    model: torch.nn.Module = Pipeline(unet) if wrapped else unet
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.train.learning_rate,
        betas=(phase.train.adam_beta1, phase.train.adam_beta2),
        eps=phase.train.adam_epsilon, weight_decay=phase.train.adam_weight_decay,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(model, optimizer)
    objective, batches = (
        FAMILY.objective(base, phase.derived.objective),
        Batches(read_cache(cache), phase),
    )
    size = phase.train.global_batch_size
    for step in range(phase.derived.until_step):
        batch = batches.batch(step * size, size, accelerator.device)
        loss = objective.loss(model, batch).mean()
        accelerator.backward(loss)
        if zero is None:
            accelerator.clip_grad_norm_(model.parameters(), phase.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    if zero is None:
        accelerator.register_save_state_pre_hook(_save_as_diffusers)
    accelerator.save_state(str(out), safe_serialization=True)


def _save_as_diffusers(models: list[Any], weights: list[Any], folder: str) -> None:
    for model in models:
        model.save_pretrained(str(Path(folder) / "unet"))
        weights.pop()
