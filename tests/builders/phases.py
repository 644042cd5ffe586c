"""Resolved phases and their launch files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerotrain.config.launch import LaunchConfig
from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.config.training import TrainConfig
from zerotrain.launch.derive import with_files
from zerotrain.launch.files import write_launch_files, write_run_yaml
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.sizes import model_sizes

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "config/launch"
SAMPLES = 24
SEED = 7


def make_phase(preset: str = "torch", **changes: Any) -> ResolvedPhase:
    """A phase of a run of cats, until step 300."""
    raw = {
        "run": "cats", "base": "nano", "data": {"images": "photos"},
        "phases": [{"name": "plain", "until": 300, "launch": preset, "global_batch_size": 4}],
    }  # fmt: skip
    chosen = read_preset(PRESETS / f"{preset}.yaml")
    sizes = model_sizes({"a.weight": [10, 10]})
    resolved = resolve_phase(LaunchSettings.of(parse_config(raw, "c"), "plain"), chosen, 100, sizes)
    return resolved.with_values(**changes)


def make_tiny_phase(name: str, preset: str, until: int, **values: Any) -> ResolvedPhase:
    """A phase of one process in float32."""
    chosen = read_preset(PRESETS / f"{preset}.yaml")
    return ResolvedPhase.from_values(dict(
        run="tiny", phase=name, family="sdxl", seed=SEED, preset=preset, engine=chosen.engine,
        zero_stage=chosen.zero_stage, offload_optimizer=chosen.offload_optimizer,
        offload_param=chosen.offload_param, num_processes=1, num_cpu_threads_per_process=1,
        mixed_precision="no", start_step=0, until_step=until, epoch_size=SAMPLES,
        resolution=64, global_batch_size=4, micro_batch_size=4,
        gradient_accumulation_steps=1, gradient_checkpointing=False,
        optimizer="adamw", learning_rate=1e-3, lr_scheduler="cosine", lr_warmup_steps=3,
        lr_scheduler_steps=16, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8,
        adam_weight_decay=0.1, max_grad_norm=1.0, objective={"snr_gamma": 5.0},
        caption_dropout_probability=0.3, save_every=100, keep=2, log_every=1, **values,
    ))  # fmt: skip


def make_swapped_phase(disk: Path, precision: Any = "bf16") -> ResolvedPhase:
    """A phase of the preset that offloads to this disk."""
    phase = make_tiny_phase("swapped", "zero3_nvme", 8, offload_path=str(disk)).with_values(
        mixed_precision=precision, lr_scheduler="constant", lr_warmup_steps=0, lr_scheduler_steps=8,
        epoch_size=8, objective={}, caption_dropout_probability=0.0, save_every=8, keep=1,
    )  # fmt: skip
    return with_files(phase, LaunchConfig(), model_sizes({"a.weight": [1000, 1000]}))


def write_launch(folder: Path, phase: ResolvedPhase) -> Path:
    """Write the launch files of a phase, in a new folder `launch`."""
    launch = folder / "launch"
    launch.mkdir()
    write_run_yaml(phase, launch / "run.yaml")
    write_launch_files(phase, launch, launch)
    return launch


def make_schedule(lr_scheduler: str, warmup: int = 0, **values: Any) -> TrainConfig:
    """The section of a phase with a schedule, which was checked before."""
    peak = {"learning_rate": 1e-3, "lr_scheduler_args": {}}
    return TrainConfig.model_construct(
        lr_scheduler=lr_scheduler, lr_warmup_steps=warmup, **{**peak, **values}
    )
