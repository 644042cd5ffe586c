"""Folders of accelerate's save_state and HF's Trainer without DeepSpeed, and trainers' variants.

accelerate writes model.safetensors (or shards, or pytorch_model.bin) next to optimizer.bin; Trainer
writes the same next to optimizer.pt. The save hooks of diffusers' example scripts and of
SimpleTuner write the denoiser as a diffusers folder (unet/ or transformer/) instead; LoRA trainings
and peft write only an adapter. Source: accelerate/checkpointing.py (save_accelerator_state),
transformers Trainer._save_checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.checkpoint_path import OPTIMIZERS, optimizers_beside
from zerotrain.state.external import adapter_files, numbered, pickles
from zerotrain.state.external.checkpoint import ExternalCheckpoint, TorchOptimizer
from zerotrain.state.external.consistency import (
    AGAIN,
    STEP_FILES,
    check_counts,
    check_optimizer,
    check_schedule,
    check_tensors,
    read_number,
)
from zerotrain.state.external.other_files import Progress, read_file_progress, read_progress
from zerotrain.state.external.weight_files import SafeTensors, check_shards, find_weights


def open_accelerate(folder: Path, *, trust_pickle: bool = False) -> ExternalCheckpoint:
    """Open a folder of weights and a torch optimizer.

    Args:
        folder: A folder such as diffusers' checkpoint-500/.
        trust_pickle: Whether pickles may name any class and run its code.

    Raises:
        PipelineError: a file is truncated, or shapes of weights and moments differ.
    """

    def load(name: str) -> Any:
        path = folder / name
        return pickles.load(path, trust_pickle=trust_pickle) if path.is_file() else None

    def load_values(name: str) -> dict[str, Any]:
        document = load(name)
        if isinstance(document, dict) or document is None:
            return document or {}
        raise PipelineError(
            f"{folder / name}: holds {type(document).__name__}, no values by name", hint=AGAIN
        )

    paths, lost = find_weights(folder)
    weights: Mapping[str, torch.Tensor]
    tied: dict[str, str] = {}
    header: dict[str, str] = {}
    if paths[0].suffix == ".safetensors":
        weights = files = SafeTensors(paths)
        header = files.header
        check_shards(paths, files.names_in)
    else:
        held: dict[str, torch.Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for path in paths:
            document = pickles.load(path, trust_pickle=trust_pickle)
            by_file[path] = list(check_tensors(document, path))
            held.update(document)
        check_shards(paths, by_file.__getitem__)
        tied = numbered.find_ties(held)
        weights = {name: tensor for name, tensor in held.items() if name not in tied}
    adapter = None
    if adapter_files.is_adapter(list(weights)):
        weights, adapter, left = adapter_files.open_adapter(weights, paths[0], header)
        lost += left
    file = next((name for name in OPTIMIZERS if (folder / name).is_file()), "")
    optimizer = TorchOptimizer(check_optimizer(load(file), folder / file) if file else {})
    if not file:
        lost.append(f"the optimizer's state: {folder / OPTIMIZERS[0]} is not there")
    if (folder / "optimizer_1.bin").is_file():
        lost.append("optimizer_1.bin: a second optimizer; only the first is read")
    scaler = load_values("scaler.pt")
    processes = len([*folder.glob("random_states_*.pkl"), *folder.glob("rng_state_*.pth")])
    by_trainer = (folder / STEP_FILES[0]).is_file()
    progress = read_progress(folder)
    step = progress.step
    if file and optimizer.state:
        schedule = load_values("scheduler.bin") or load_values("scheduler.pt")
        check_counts(folder / file, optimizer.step, step, progress.source, skips=bool(scaler))
        if not scaler and (processes or by_trainer):
            check_schedule(folder / file, optimizer.step, schedule, processes or 1, once=by_trainer)
    if step is None and not optimizer.step:
        counted = load_values("random_states_0.pkl").get("step")
        if counted is not None:
            step = int(read_number(counted, folder / "random_states_0.pkl", "step"))
            source = "accelerate's count of micro batches in its epoch (random_states_0.pkl)"
            progress = Progress(step, None, source)
    opened = numbered.open_numbered(
        folder,
        weights,
        optimizer,
        step=step,
        samples=0,
        engine={
            "preset": "",
            "engine": "torch",
            "zero_stage": 0,
            "offload_optimizer": "none",
            "offload_param": "none",
            "world_size": processes or 1,
            "mixed_precision": "fp16" if scaler else "unknown",
        },
        loss_scale=_loss_scale(scaler, folder / "scaler.pt") if scaler else None,
        tied=tied,
        lost=lost,
    )
    described = progress.describe(file, optimizer.step)
    return replace(opened, adapter=adapter, progress=described)


def open_weights_file(path: Path, *, trust_pickle: bool = False) -> ExternalCheckpoint:
    """Open a safetensors file of weights: a model, or an adapter.

    Its header, its name or its folder's may contain the step (step-2000, cat-step00002000,
    checkpoint-2000/). ai-toolkit's have the optimizer of the last file next to them.

    Raises:
        PipelineError: the file is truncated, or not a safetensors file.
    """
    engine = {"preset": "", "engine": "unknown", "world_size": 1, "mixed_precision": "unknown"}
    files = SafeTensors([path])
    weights: Mapping[str, torch.Tensor] = files
    adapter: dict[str, Any] | None = None
    left: list[str] = []
    if adapter_files.is_adapter(list(files)):
        weights, adapter, left = adapter_files.open_adapter(files, path, files.header)
    progress = read_file_progress(path, files.header)
    optimizer, unread = _optimizer_of(path, progress.step, trust_pickle=trust_pickle)
    left += unread
    if not optimizer.state:
        left = [f"{path.name} holds weights alone: no moments", *left]
    opened = numbered.open_numbered(
        path,
        weights,
        optimizer,
        step=progress.step or 0,
        samples=0,
        engine=engine,
        loss_scale=None,
        lost=left,
    )
    return replace(opened, adapter=adapter, progress=progress.describe("", 0))


def _optimizer_of(
    path: Path, step: int | None, *, trust_pickle: bool
) -> tuple[TorchOptimizer, list[str]]:
    """Open the optimizer next to a file of weights, if it is of the same step.

    Returns:
        It, or an empty one with a sentence on what is left out.
    """
    for file in optimizers_beside(path):
        found = TorchOptimizer(check_optimizer(pickles.load(file, trust_pickle=trust_pickle), file))
        if found.step and found.step == step:
            return found, []
        of = f"is of step {found.step}" if found.step else "has no count of steps"
        return TorchOptimizer({}), [f"{file.name} next to it {of}, and left out"]
    return TorchOptimizer({}), []


def _loss_scale(scaler: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the state of torch's GradScaler under zerotrain's names."""
    scale, good = (read_number(scaler.get(k), path, k) for k in ("scale", "_growth_tracker"))
    return {"scale": scale, "good_steps": int(good)}
