"""Positions of trainings, what they ran on, and small checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from zerotrain import artifact
from zerotrain.state.checkpoint import KIND, Fragment, write_position, write_rank
from zerotrain.state.position import MASTER, TrainerState
from zerotrain.training.checkpointing.conditions import manifest_content
from zerotrain.training.checkpointing.progress_folder import step_folder

RAN_ON = {
    "version": 2,
    "versions.python": "3.12.3",
    "versions.torch": "2.13.0",
    "versions.diffusers": "0.36.0",
    "device": "NVIDIA H100 80GB HBM3",
    "driver": "570.86",
    "threads": 8,
    "env.NVIDIA_TF32_OVERRIDE": "0",
    "gradient_checkpointing": True,
}
HISTORY = [
    {"step": 120, "key": "versions.torch", "old": "2.12.0", "new": "2.13.0"},
    {"step": 120, "key": "gradient_checkpointing", "old": False, "new": True},
    {"step": 300, "key": "version", "old": 1, "new": RAN_ON["version"]},
    {"step": 300, "key": "env.NVIDIA_TF32_OVERRIDE", "old": None, "new": "0"},
]
"""As training writes it: digests whole."""


def make_position(step: int = 12, **changes: Any) -> TrainerState:
    """The position of a phase of flowers after so many steps of four samples."""
    values = {
        "run": "flowers", "phase": "plain", "step": step, "samples": 4 * step,
        "optimizer": "adamw", "optimizer_step": step, "param_groups": [],
        "lr_scheduler": "constant", "lr_scheduler_steps": 700,
        "rng": {"scheme": "counter", "seed": 0}, "engine": {"preset": "torch"},
        "ran_on": {}, "history": [],
    }  # fmt: skip
    return TrainerState(**values | changes)


def publish_checkpoint(
    folder: Path, step: int, *, trains: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Publish a checkpoint of one parameter, which says what it trains if that is given."""
    with artifact.publish(folder, KIND) as draft:
        if trains is not None:
            draft.content = manifest_content(trains)
        spans = [write_rank(draft.folder, 0, [Fragment("w", 0, {MASTER: torch.ones(2)})])]
        position = make_position(step, **changes)
        write_position(draft.folder, position, {"w": [2]}, [MASTER], spans)
    return folder


def save_steps(progress: Path, *steps: int, size: int = 10) -> None:
    """Publish rolling checkpoints that are no more than a file of so many bytes."""
    for step in steps:
        with artifact.publish(step_folder(progress, step), KIND) as draft:
            (draft.folder / "rank-00000-00000.safetensors").write_bytes(b"x" * size)


def changed(state: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """Publish a copy of a state, changed in its files."""
    with artifact.publish(folder, "state") as draft:
        shutil.copytree(state, draft.folder, dirs_exist_ok=True)
        (draft.folder / artifact.MANIFEST).unlink()
        change(draft.folder)
    return folder


def drop_moments(state: Path) -> None:
    """Zeros in place of the moments; everything else, the count of the steps too, stays."""
    files = sorted(state.glob("exp_avg*.safetensors"))
    assert [file.name.rpartition("-")[0] for file in files] == ["exp_avg", "exp_avg_sq"]
    for file in files:
        save_file({name: torch.zeros_like(t) for name, t in load_file(file).items()}, file)
