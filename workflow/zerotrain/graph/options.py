"""Options of the commands new and switch, which the command line reads before it runs any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.config.command_options import RunName


@dataclass(frozen=True)
class NewOptions:
    """Options of `zerotrain new`."""

    name: Annotated[str, typer.Argument(help="Name of the run: config/NAME.yaml.")]
    base: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Folder or hub id of the model, or nano: a small one."),
    ]
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of your images.")] = (
        None
    )
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your text: .json, .jsonl, .csv, or a dataset's hub id."),
    ] = None
    instance_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="One caption for all images.")
    ] = None
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA, not the whole model.")] = False
    lora_rank: Annotated[
        int | None, typer.Option(metavar="RANK", min=1, help="The LoRA's rank; default: 16.")
    ] = None
    resolution: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Side; default: the model's own.")
    ] = None
    until: Annotated[
        str | None,
        typer.Option(help="Where the phase ends: 1000, '3 epochs', '5000 samples'."),
    ] = None
    family: Annotated[
        str | None, typer.Option(help="Of a base that does not say it; as flux, seq2seq_lm.")
    ] = None

    all_keys: Annotated[
        bool, typer.Option("--all-keys", help="Write every key, with its default and meaning.")
    ] = False

    @property
    def rank(self) -> int | None:
        """Return the LoRA's rank; None to train the whole model."""
        return self.lora_rank or (16 if self.lora else None)


@dataclass(frozen=True)
class SwitchOptions:
    """Options of `zerotrain switch`."""

    run: RunName
    to: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="Launch preset to continue under; default: the same."),
    ] = None
    num_processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processes, one a GPU; the global batch stays, accumulation follows."
        ),
    ] = None
    machines: Annotated[
        int | None,
        typer.Option(metavar="N", help="Machines; alone, each keeps its number of processes."),
    ] = None
    mixed_precision: Annotated[
        str | None, typer.Option(metavar="no|bf16|fp16", help="Precision of forward and backward.")
    ] = None
    at: Annotated[
        str, typer.Option(metavar="STEP", help="Saved step to end the phase at, or `last`.")
    ] = "last"
    name: Annotated[
        str | None, typer.Option(help="Name of the new phase; default: PHASE-PRESET.")
    ] = None
    offload_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder on a fast disk, for presets that use one."),
    ] = None
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a running training may take to stop.")
    ] = 600.0
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Continue though code, data or values have changed."),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False
