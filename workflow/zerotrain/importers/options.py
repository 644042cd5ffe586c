"""Options of the command `launch init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Answers:
    """Answers given in advance; None: ask."""

    num_processes: Annotated[int | None, typer.Option(min=1, help="GPUs of this machine.")] = None
    zero_stage: Annotated[
        str | None, typer.Option(metavar="STAGE", help="none (no DeepSpeed), 1, 2 or 3.")
    ] = None
    offload_optimizer: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="none, cpu or nvme.")
    ] = None
    offload_param: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="none, cpu or nvme; at stage 3.")
    ] = None
    offload_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder on a fast disk, for nvme.")
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(min=1, help="Forward passes per optimizer step.")
    ] = None
    gradient_clipping: Annotated[
        float | None, typer.Option(min=0, help="Largest norm of the gradient; 0 disables clipping.")
    ] = None
    zero3_init: Annotated[
        bool | None, typer.Option(help="Build the model sharded from the start, at stage 3.")
    ] = None
    mixed_precision: Annotated[
        str | None, typer.Option(metavar="TYPE", help="bf16, fp16 or no.")
    ] = None
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a GPU and forward pass.")
    ] = None
    until: Annotated[
        str | None, typer.Option(help="Where the phase ends: 1000, '3 epochs', '5000 samples'.")
    ] = None
    name: Annotated[str | None, typer.Option(help="The phase's name; default: its preset's.")] = (
        None
    )


@dataclass(frozen=True)
class InitOptions(Answers):
    """Options of `zerotrain launch init`."""

    defaults: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="accelerate's YAML whose answers to offer; default: its cached one.",
        ),
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run that it is for: shows its plan.")
    ] = None
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Without a run: an SDXL's plan is shown.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: standard output.")
    ] = None
