"""Options of the command `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config.command_options import RUN_HELP, config_of
from zerotrain.config.families import DEFAULT


@dataclass(frozen=True)
class PlanOptions:
    """Options of `zerotrain plan`."""

    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", parser=config_of, help=f"{RUN_HELP} Default: what the options say."
        ),
    ] = None
    phase: Annotated[str | None, typer.Option(help="Name of the phase; default: the first.")] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of a GPU, as '24 GiB'; default: that of --gpu, or this machine's."
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the machine with that GPU; default: this one's."),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As 'RTX 4090': its memory, and the step's time."),
    ] = None
    parts: Annotated[
        str | None, typer.Option(metavar="PRESET", help="Show this preset part by part.")
    ] = None
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Search micro batch, resolution or length, and checkpointing."),
    ] = False
    family: Annotated[str, typer.Option(help="Without a config: the model's family.")] = DEFAULT
    base: Annotated[
        str | None, typer.Option(help="Without a config: a hub id of config/models, or a folder.")
    ] = None
    resolution: Annotated[int, typer.Option(help="Without a config: pixels of a side.")] = 1024
    max_length: Annotated[int, typer.Option(help="Without a config: tokens of a row of text.")] = (
        512
    )
    batch_size: Annotated[int, typer.Option(help="Without a config: the global batch.")] = 1
    conditioning_images: Annotated[
        int,
        typer.Option(metavar="NUMBER", help="Without a config: conditioning images of a sample."),
    ] = 0
    precision: Annotated[str, typer.Option(help="Without a config: bf16, fp16 or no.")] = "bf16"
    processes: Annotated[int, typer.Option(help="Without a config: how many GPUs.")] = 1
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Without a config: recompute.")
    ] = False
    lora_rank: Annotated[
        int | None, typer.Option(metavar="RANK", help="Without a config: train a LoRA.")
    ] = None
