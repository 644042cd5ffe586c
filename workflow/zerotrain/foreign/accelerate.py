"""Folders of accelerate's save_state without DeepSpeed, and the variants trainers make of them.

accelerate writes model.safetensors (or shards, or pytorch_model.bin) beside optimizer.bin. The save
hooks of diffusers' example scripts and of SimpleTuner write the denoiser as a diffusers folder
(unet/ or transformer/) instead. Source: accelerate/checkpointing.py (save_accelerator_state).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact import read_shard_names
from zerotrain.errors import PipelineError
from zerotrain.foreign import numbered, pickles
from zerotrain.foreign.checkpoint import ForeignCheckpoint
from zerotrain.state import Shards

OPTIMIZER = "optimizer.bin"
STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")


class SafeTensors(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each mapped from its file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = Shards()
        self._file: dict[str, Path] = {}
        for path in paths:
            try:
                self._file.update(dict.fromkeys(self._shards.open(path).keys(), path))
            except Exception as error:
                raise PipelineError(
                    f"{path}: missing, truncated or no safetensors file ({error})",
                    hint="copy the checkpoint again, or use an older one",
                ) from error

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._shards.open(self._file[name]).get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def find_weights(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of the model's weights, and sentences on the models that are left out.

    The root comes first, then diffusers folders, without the averaged weights (`*_ema`).
    """
    parts = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.endswith("_ema"))
    found = [files for part in (folder, *parts) if (files := _weights_in(part))]
    others = [str(files[0].relative_to(folder)) for files in found[1:]]
    others += sorted(p.name for p in folder.glob("model_[0-9]*.safetensors"))
    lost = [f"{other}: a second model; only the first is read" for other in others]
    lost += [f"{p.name}: averaged weights" for p in sorted(folder.glob("*_ema")) if p.is_dir()]
    return (found[0] if found else []), lost


def _weights_in(folder: Path) -> list[Path]:
    for stem in STEMS:
        for suffix in ("safetensors", "bin"):
            index = folder / f"{stem}.{suffix}.index.json"
            if index.is_file():
                return [folder / name for name in read_shard_names(index)]
            if (folder / f"{stem}.{suffix}").is_file():
                return [folder / f"{stem}.{suffix}"]
    return []


def open_accelerate(
    folder: Path, *, trust_pickle: bool = False, parameter_names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Open a folder of weights and a torch optimizer.

    Args:
        folder: Such as diffusers' checkpoint-500/.
        trust_pickle: Let pickles name any class, and run its code.
        parameter_names: The trained parameters, in the order of the optimizer's param groups.

    Raises:
        PipelineError: a file is truncated, or shapes of weights and moments differ.
    """

    def load(name: str) -> Any:
        path = folder / name
        return pickles.load(path, trust_pickle=trust_pickle) if path.is_file() else None

    paths, lost = find_weights(folder)
    weights: Mapping[str, torch.Tensor]
    tied: dict[str, str] = {}
    if paths[0].suffix == ".safetensors":
        weights = SafeTensors(paths)
    else:
        held: dict[str, torch.Tensor] = {}
        for path in paths:
            held.update(pickles.load(path, trust_pickle=trust_pickle))
        tied = numbered.find_ties(held)
        weights = {name: tensor for name, tensor in held.items() if name not in tied}
    optimizer = numbered.TorchOptimizer(load(OPTIMIZER) or {})
    if not optimizer.groups:
        lost.append(f"the optimizer's state: {folder / OPTIMIZER} is not there")
    if (folder / "optimizer_1.bin").is_file():
        lost.append("optimizer_1.bin: a second optimizer; only the first is read")
    scaler = load("scaler.pt")
    step = _step(folder)
    if step is None and not optimizer.state:
        counted = (load("random_states_0.pkl") or {}).get("step")
        if counted is not None:
            step = int(counted)
            lost.append(f"step {step} is accelerate's count of micro batches in its epoch")
    return numbered.open_numbered(
        folder,
        weights,
        optimizer,
        parameter_names,
        step=step,
        samples=0,
        engine={
            "preset": "",
            "engine": "torch",
            "zero_stage": 0,
            "offload_optimizer": "none",
            "offload_param": "none",
            "world_size": len(list(folder.glob("random_states_*.pkl"))) or 1,
            "mixed_precision": "fp16" if scaler else "unknown",
        },
        loss_scale={"scale": float(scaler["scale"]), "good_steps": int(scaler["_growth_tracker"])}
        if scaler
        else None,
        tied=tied,
        lost=lost,
    )


def open_weights_file(
    path: Path, *, parameter_names: Sequence[str] | None = None
) -> ForeignCheckpoint:
    """Open a safetensors file of weights alone, as DiffSynth-Studio leaves them (step-2000...).

    Raises:
        PipelineError: the file is no safetensors file, or truncated.
    """
    named = re.fullmatch(r"(?:step|checkpoint)[-_](\d+)", path.stem)
    engine = {"preset": "", "engine": "unknown", "world_size": 1, "mixed_precision": "unknown"}
    return numbered.open_numbered(
        path,
        SafeTensors([path]),
        numbered.TorchOptimizer({}),
        parameter_names,
        step=int(named[1]) if named else 0,
        samples=0,
        engine=engine,
        loss_scale=None,
        lost=[f"{path.name} holds weights alone: no moments, and no step but what its name says"],
    )


def _step(folder: Path) -> int | None:
    """Optimizer steps, as trainers note them: in training_state.json, or in the folder's name."""
    state = folder / "training_state.json"  # SimpleTuner's
    if state.is_file() and isinstance(
        step := json.loads(state.read_text()).get("global_step"), int
    ):
        return step
    named = re.fullmatch(r"checkpoint[-_](\d+)", folder.resolve().name)
    return int(named[1]) if named else None
