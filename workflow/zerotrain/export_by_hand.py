"""zerotrain export: any complete checkpoint, or exported weights, in any form, without a rule."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from zerotrain import artifact
from zerotrain.artifact import MANIFEST
from zerotrain.config import read_config
from zerotrain.disk_errors import check_no_file
from zerotrain.errors import PipelineError
from zerotrain.export import (
    DTYPES,
    WeightsTarget,
    export,
    export_universal,
    lineage,
    parents_of,
    refuse_loss,
)
from zerotrain.families import FAMILIES
from zerotrain.foreign import left_out_of_universal
from zerotrain.formats import FORMATS, OWN_FOLDER, convert
from zerotrain.formats.refusals import refuse_format
from zerotrain.origin import parent
from zerotrain.peft_methods import PEFT_TYPE, refuse_form
from zerotrain.state_source import Source, check_made_here, open_source

WRITTEN = ("weights", "exported", "state", "universal")
"""Kinds of folders that an export may replace."""


def export_by_hand(
    checkpoint: Path,
    output: Path | None,
    state: Path | None,
    *,
    config: Path | None,
    family: str | None,
    base: Path | None,
    dtype: str | None,
    to: str | None = None,
    max_shard_size: str | None = None,
    prefix: str | None = None,
    ema: bool = True,
    trust_pickle: bool,
) -> None:
    """Publish what a checkpoint or a weights folder holds, in the form that `to` names.

    Args:
        checkpoint: A rolling or published checkpoint, a state, another program's checkpoint, or
            an exported weights folder.
        output: Folder to publish the model at, in the form that `to` names.
        state: Folder to publish a state at.
        config: A run's configuration, which says family, base and dtype.
        family: The base's family, where there is no configuration.
        base: The base model; with a configuration the run's own, results/<run>/base.
        dtype: fp32, bf16 or fp16.
        to: A key of zerotrain.formats.FORMATS, or universal: what DeepSpeed loads; default: the
            folder of the model's own library.
        max_shard_size: Size above which a model's file becomes several, such as 5GB.
        prefix: What stands before each name of a single file.
        ema: Whether the averaged weights are written where the training kept them.
        trust_pickle: Let another program's pickles run code.

    Raises:
        PipelineError: an argument is missing or unknown, or the checkpoint is not right.
    """
    from zerotrain.families import load_family

    _choose("--to", to, (*FORMATS, "universal"))
    _choose("--dtype", dtype, tuple(DTYPES))
    _choose("--family", family, tuple(FAMILIES))
    if output is None and state is None:
        raise PipelineError(
            "nothing to write: neither --output nor --state is given",
            hint="add --output FOLDER for the model, --state FOLDER for a training state, or both",
        )
    if output is None or to == "universal":
        for option, given in (
            ("--max-shard-size", max_shard_size),
            ("--prefix", prefix),
            ("--dtype", dtype),
            ("--no-ema", not ema),
        ):
            if given:
                raise PipelineError(f"{option}: no model is written", hint="leave it away")
    for folder in (output, state):
        if folder is not None:
            refuse_strangers(folder)
    check_made_here(checkpoint)
    if artifact.kind_of(checkpoint) in ("weights", "exported"):
        if not ema and _is_averaged(checkpoint):
            raise PipelineError(
                f"{checkpoint}: exported weights, which hold the averaged weights alone",
                hint="name the checkpoint or the state that they were made from",
            )
        _convert_folder(checkpoint, output, state, dtype, to, max_shard_size, prefix)
        return
    run = read_config(config) if config else None
    weights = None
    if output is not None and to != "universal":
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
        weights = replace(weights, ema=ema)
        modality = weights.family.modality
        to = to or OWN_FOLDER[modality]
        refuse_format(to, checkpoint, modality, weights.adapter, max_shard_size, prefix)
        if weights.peft and to != OWN_FOLDER[modality]:
            refuse_form(to, weights.peft[PEFT_TYPE])
    source = open_source(checkpoint, trust_pickle=trust_pickle)
    if weights is not None and not weights.adapter:
        _refuse_adapter(source.names, checkpoint)
    for sentence in getattr(source, "lost", ()):
        print(f"left out: {sentence}", file=sys.stderr)
    if output is not None and to == "universal":
        for sentence in left_out_of_universal(source):
            print(f"left out: {sentence}", file=sys.stderr)
        export_universal(source, checkpoint, output)
    if weights is not None or state is not None:
        if weights is None or to is None or (to in OWN_FOLDER.values() and not max_shard_size):
            export(source, checkpoint, weights, state)
        else:
            _export_as(source, checkpoint, weights, state, to, max_shard_size, prefix)
    for folder in (output, state):
        if folder is not None:
            print(f"wrote {folder}")


def _convert_folder(
    folder: Path,
    output: Path | None,
    state: Path | None,
    dtype: str | None,
    to: str | None,
    max_shard_size: str | None,
    prefix: str | None,
) -> None:
    """What an export does with a folder that an export wrote."""
    if output is None or state is not None or to == "universal":
        raise PipelineError(
            f"{folder}: exported weights are no training, and hold no moments",
            hint="name a checkpoint or a state for --state and for --to universal",
        )
    refuse_loss(folder, [output])
    if artifact.kind_of(folder) == "exported":
        exported = artifact.read(folder, "exported")
        made_from = parent(exported, "weights")
        if made_from is None:
            form = exported.content["to"]
            raise PipelineError(
                f"{folder}: is exported as {form} already, and a format leads to no other",
                hint="name the weights folder that it was made from, or the checkpoint",
            )
        folder, dtype = made_from.folder, dtype or exported.content["dtype"]
        refuse_loss(folder, [output])
    convert(folder, to, output, dtype=dtype, max_shard_size=max_shard_size, prefix=prefix)
    print(f"wrote {output}")


def _export_as(
    source: Source,
    checkpoint: Path,
    weights: WeightsTarget,
    state: Path | None,
    to: str,
    max_shard_size: str | None,
    prefix: str | None,
) -> None:
    """Go through a weights folder in float32, which lies beside the output for the time."""
    output = weights.folder
    refuse_loss(checkpoint, [output])
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}.weights-", dir=output.parent) as folder:
        passing = replace(weights, folder=Path(folder) / "weights", dtype="fp32")
        export(source, checkpoint, passing, state)
        origins = parents_of(source, checkpoint)
        if artifact.is_described(weights.base):
            origins["base"] = artifact.read(weights.base, "base", verify=False)
        convert(
            passing.folder,
            to,
            output,
            dtype=weights.dtype,
            max_shard_size=max_shard_size,
            prefix=prefix,
            parents=lineage(origins)[0],
        )


def refuse_strangers(folder: Path) -> None:
    """Publishing replaces a folder whole: refuse one that holds what no export has written.

    Raises:
        PipelineError: naming the folder, or a file above it.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        if artifact.kind_of(folder) in WRITTEN:
            return
        raise PipelineError(
            f"{folder}: is there already, and was not written by an export",
            hint="name a new folder, or empty this one yourself",
        )
    check_no_file(folder)


def _refuse_adapter(names: list[str], checkpoint: Path) -> None:
    if all(".lora_" in name for name in names):
        raise PipelineError(
            f"{checkpoint}: holds an adapter's parameters alone, such as {names[0]}",
            hint="add --config FILE of the run, whose `lora` says rank and alpha",
        )


def _is_averaged(folder: Path) -> bool:
    return bool(json.loads((folder / MANIFEST).read_text()).get("content", {}).get("ema"))


def _choose(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise PipelineError(
            f"{option}: {value!r} is not known", hint=f"choose one of {', '.join(known)}"
        )
