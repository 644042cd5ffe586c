"""The command of the planner."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The run's config; default: what the options say."),
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Name of the phase; default: the first.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of a GPU, as '24 GiB'; default: this machine's."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the machine; default: this one's.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="As 'RTX 4090': estimates the step's time.")
    ] = None,
    parts: Annotated[
        str | None, typer.Option(metavar="PRESET", help="Show this preset part by part.")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Search micro batch, resolution or length, and checkpointing."),
    ] = False,
    family: Annotated[str, typer.Option(help="Without a config: the model's family.")] = "sdxl",
    base: Annotated[
        str | None, typer.Option(help="Without a config: a hub id of config/models, or a folder.")
    ] = None,
    resolution: Annotated[int, typer.Option(help="Without a config: pixels of a side.")] = 1024,
    max_length: Annotated[
        int, typer.Option(help="Without a config: tokens of a row of text.")
    ] = 512,
    batch_size: Annotated[int, typer.Option(help="Without a config: the global batch.")] = 1,
    precision: Annotated[str, typer.Option(help="Without a config: bf16, fp16 or no.")] = "bf16",
    processes: Annotated[int, typer.Option(help="Without a config: how many GPUs.")] = 1,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Without a config: recompute.")
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="RANK", help="Without a config: train a LoRA.")
    ] = None,
) -> None:
    """Predict memory, traffic and time of every preset, without a GPU or weights; say what fits."""
    import gc

    # Libraries and traces make millions of objects that live to the end of this command: looking
    # through them again and again, and once more at the exit, takes a fifth of its time.
    gc.disable()
    from zerotrain.errors import PipelineError
    from zerotrain.plan.report import plan_report

    values: dict[str, Any] = {
        "family": family, "base": base, "resolution": resolution, "max_length": max_length,
        "batch_size": batch_size,
        "precision": precision, "processes": processes, "lora_rank": lora_rank,
        "gradient_checkpointing": gradient_checkpointing,
    }  # fmt: skip
    if (config is None) == (base is None):
        raise PipelineError(
            "plan: give a config FILE, or --base and what else differs from the defaults",
            hint="zerotrain plan config/config.yaml, or zerotrain plan --base "
            "stabilityai/stable-diffusion-xl-base-1.0 --batch-size 8 --device-memory '24 GiB'",
        )
    lines = plan_report(
        config,
        values,
        phase=phase,
        device_memory=device_memory,
        host_memory=host_memory,
        gpu=gpu,
        parts=parts,
        fit=fit,
        width=shutil.get_terminal_size((100, 40)).columns,
    )
    print("\n".join(lines))
    gc.freeze()
