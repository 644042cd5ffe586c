"""Training loops written by hand, which benchmarks/step.py compares with ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SAMPLES, BATCH = 64, 8
"""Of an epoch, and of a step over all processes."""
RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0


class Loop:
    """A model and its data in memory; each loop by hand adds its step."""

    def __init__(self, inputs: Path) -> None:
        import torch
        from diffusers import DDPMScheduler

        from zerotrain.cache.reader import read_cache
        from zerotrain.models.families.sdxl import FAMILY

        cache = read_cache(inputs / "cache", verify=False)
        samples = [cache.sample(i) for i in range(len(cache.entries))]
        self.data = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        self.data["time_ids"] = torch.cat(
            [self.data.pop(n) for n in ("original_size", "crop_top_left", "target_size")], dim=1
        ).float()
        self.micro_batch = BATCH // int(os.environ["WORLD_SIZE"])
        self.unet = FAMILY.load_model(inputs / "base").train()
        self.scheduler = DDPMScheduler()

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches in a new order each epoch, without an end."""
        import torch

        while True:
            for part in torch.split(torch.randperm(SAMPLES), self.micro_batch):
                yield {name: tensor[part] for name, tensor in self.data.items()}

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the mean squared error of the predicted noise at random timesteps."""
        import torch

        latents = batch["latents"]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(latents),))
        added = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["time_ids"]}
        predicted = model(
            self.scheduler.add_noise(latents, noise, timesteps),
            timesteps,
            encoder_hidden_states=batch["prompt_embeds"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(predicted.float(), noise.float())


def fused_adamw(parameters: Any) -> Any:
    """AdamW as all loops have it."""
    import torch

    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=WEIGHT_DECAY, fused=True)


def bare(inputs: Path, launch: Path) -> Iterator[None]:
    """Plain PyTorch; one step each time it is asked."""
    import torch

    loop = Loop(inputs)
    optimizer = fused_adamw(loop.unet.parameters())
    for batch in loop.batches():
        loss = loop.loss(loop.unet, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loop.unet.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def example(inputs: Path, launch: Path) -> Iterator[None]:
    """Train as diffusers' example does, without its validation and averages."""
    from accelerate import Accelerator
    from diffusers.optimization import get_scheduler
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    loop = Loop(inputs)
    rows = [{name: tensor[i] for name, tensor in loop.data.items()} for i in range(SAMPLES)]
    loader: Any = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
    )
    optimizer = fused_adamw(loop.unet.parameters())
    schedule = get_scheduler("constant", optimizer=optimizer, num_warmup_steps=0)
    unet, optimizer, loader, schedule = accelerator.prepare(loop.unet, optimizer, loader, schedule)
    bar = tqdm(desc="Steps", file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    train_loss = 0.0
    while True:
        for batch in loader:
            with accelerator.accumulate(unet):
                loss = loop.loss(unet, batch)
                average = accelerator.gather(loss.repeat(BATCH)).mean()
                train_loss += average.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                accelerator.log({"train_loss": train_loss})
                train_loss = 0.0
            bar.set_postfix(step_loss=loss.detach().item(), lr=schedule.get_last_lr()[0])
            yield


def direct(inputs: Path, launch: Path) -> Iterator[None]:
    """deepspeed.initialize and its engine, by the same JSON."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    loop = Loop(inputs)
    config = json.loads((launch / "deepspeed.json").read_text())
    parameters = list(loop.unet.parameters())
    if "offload_optimizer" in config["zero_optimization"]:
        optimizer = DeepSpeedCPUAdam(parameters, lr=RATE, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = fused_adamw(parameters)
    engine, *_ = deepspeed.initialize(model=loop.unet, optimizer=optimizer, config=config)
    for batch in loop.batches():
        loss = loop.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        loss.item()
        yield


def ddp(inputs: Path, launch: Path) -> Iterator[None]:
    """PyTorch with DistributedDataParallel, in a group of processes that exists."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    loop = Loop(inputs)
    model = DistributedDataParallel(loop.unet)
    optimizer = fused_adamw(model.parameters())
    for batch in loop.batches():
        loss = loop.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


RIVALS: dict[str, tuple[Callable[[Path, Path], Iterator[None]], ...]] = {
    "torch": (bare, example),
    "deepspeed": (direct,),
    "several processes": (ddp,),
}
