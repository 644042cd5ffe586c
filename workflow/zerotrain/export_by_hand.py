"""zerotrain export: what export_weights does, for any complete checkpoint and without a rule."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

from zerotrain.artifact import MANIFEST
from zerotrain.config import RunConfig, read_config
from zerotrain.errors import PipelineError
from zerotrain.export import DTYPES, WeightsTarget, export, export_universal
from zerotrain.foreign import left_out_of_universal
from zerotrain.state_source import open_source

WRITTEN = ("weights", "state", "universal")
"""Kinds of folders that an export may replace."""
FORMATS = ("diffusers", "universal")
FAMILIES: tuple[str, ...] = get_args(RunConfig.model_fields["family"].annotation)


def export_by_hand(
    checkpoint: Path,
    output: Path | None,
    state: Path | None,
    *,
    config: Path | None,
    family: str | None,
    base: Path | None,
    dtype: str | None,
    to: str,
    trust_pickle: bool,
) -> None:
    """Publish what a checkpoint holds as weights, as a state, or as DeepSpeed's universal form.

    Args:
        checkpoint: A rolling or published checkpoint, a state, or another program's checkpoint.
        output: Folder to publish the model at, in the form that `to` names.
        state: Folder to publish a state at.
        config: A run's configuration, which says family, base and dtype.
        family: The base's family, where there is no configuration.
        base: The base model; with a configuration the run's own, results/<run>/base.
        dtype: fp32, bf16 or fp16.
        to: diffusers or universal.
        trust_pickle: Let another program's pickles run code.

    Raises:
        PipelineError: an argument is missing or unknown, or the checkpoint is not right.
    """
    from zerotrain.families import load_family

    _choose("--to", to, FORMATS)
    _choose("--dtype", dtype or "fp32", tuple(DTYPES))
    _choose("--family", family or FAMILIES[0], FAMILIES)
    if output is None and state is None:
        raise PipelineError(
            "nothing to write: neither --output nor --state is given",
            hint="add --output FOLDER for the model, --state FOLDER for a training state, or both",
        )
    run = read_config(config) if config else None
    weights = None
    if output is not None and to == "diffusers":
        if run is not None:
            weights = WeightsTarget.of(
                run, base or Path("results") / run.run / "base", output, dtype
            )
        elif family is not None and base is not None:
            weights = WeightsTarget(output, base, load_family(family), dtype or "fp32")
        else:
            raise PipelineError(
                "weights need the base model that the training started from, to complete them",
                hint="add --config FILE of the run, or --family sdxl --base FOLDER; a state "
                "(--state alone) and --to universal need no base",
            )
    for folder in (output, state):
        if folder is not None:
            refuse_strangers(folder)
    source = open_source(checkpoint, trust_pickle=trust_pickle)
    if weights is not None and weights.lora is None:
        _refuse_adapter(source.names, checkpoint)
    for sentence in getattr(source, "lost", ()):
        print(f"left out: {sentence}", file=sys.stderr)
    if output is not None and to == "universal":
        for sentence in left_out_of_universal(source.position):
            print(f"left out: {sentence}", file=sys.stderr)
        export_universal(source, checkpoint, output)
    if weights is not None or state is not None:
        export(source, checkpoint, weights, state)
    for folder in (output, state):
        if folder is not None:
            print(f"wrote {folder}")


def refuse_strangers(folder: Path) -> None:
    """Publishing replaces a folder whole: refuse one that holds what no export has written.

    Raises:
        PipelineError: naming the folder and some of what it holds.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        try:
            if json.loads((folder / MANIFEST).read_text())["kind"] in WRITTEN:
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise PipelineError(
            f"{folder}: is there already, and was not written by an export",
            hint="name a new folder, or empty this one yourself",
        )


def _refuse_adapter(names: list[str], checkpoint: Path) -> None:
    if all(".lora_" in name for name in names):
        raise PipelineError(
            f"{checkpoint}: holds an adapter's parameters alone, such as {names[0]}",
            hint="add --config FILE of the run, whose `lora` says rank and alpha",
        )


def _choose(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PipelineError(
            f"{option}: {value!r} is not known", hint=f"choose one of {', '.join(known)}"
        )
