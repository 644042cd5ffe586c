"""zerotrain export: any complete checkpoint, or exported weights, in any format, without a rule."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.config.adapters import PEFT_TYPE, check_format_supported
from zerotrain.config.families import FAMILIES
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import ExportSettings
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.export.export import check_no_loss, export, export_universal, find_parents, lineage
from zerotrain.export.formats import FORMATS, OWN_FOLDER
from zerotrain.export.formats.conversion import check_format, convert
from zerotrain.export.options import ExportOptions
from zerotrain.export.provenance import find_parent
from zerotrain.export.target import WeightsTarget
from zerotrain.export.trained_values import list_changes_since, trained_values
from zerotrain.machine.disk_errors import check_no_file
from zerotrain.models.adapter_config import read_adapter_config
from zerotrain.state.external import describe_omissions
from zerotrain.state.open import check_made_here, open_checkpoint
from zerotrain.state.position import Source

WRITTEN = ("weights", "exported", "state", "universal")
"""Kinds of folders that an export may replace."""


def export_command(options: ExportOptions) -> None:
    """Publish a checkpoint or a weights folder in the format that `to` names.

    The values that a rolling checkpoint was trained with come from its own records, which an edit
    of the configuration does not change.

    Raises:
        PipelineError: an option is missing or unknown, or the checkpoint is not right.
    """
    _check_options(options)
    check_made_here(options.checkpoint)
    if artifact.kind_of(options.checkpoint) in ("weights", "exported"):
        _convert_folder(options)
    else:
        _export_checkpoint(options)
    for folder in filter(None, (options.output, options.state)):
        print(f"wrote {folder}")
    if options.output is not None and options.to == "peft":
        config = read_adapter_config(options.output)
        if base := config.get("base_model_name_or_path"):
            print(f"peft loads it onto {base}")


def _check_options(options: ExportOptions) -> None:
    """Check the options that do not depend on the checkpoint."""
    for option, value, known in (
        ("--to", options.to, (*FORMATS, "universal")),
        ("--dtype", options.dtype, tuple(FLOAT_TYPES)),
        ("--family", options.family, tuple(FAMILIES)),
    ):
        if value is not None and value not in known:
            raise PipelineError(
                f"{option}: {value!r} is not known", hint=known_names(value, known, "there are")
            )
    if options.output is None and options.state is None:
        raise PipelineError(
            "nothing to write: neither --output nor --state is given",
            hint="add --output FOLDER for the model, --state FOLDER for a training state, or both",
        )
    if options.output is None or options.to == "universal":
        for option, given in (
            ("--max-shard-size", options.max_shard_size),
            ("--prefix", options.prefix),
            ("--dtype", options.dtype),
            ("--no-ema", not options.ema),
        ):
            if given:
                raise PipelineError(f"{option}: no model is written", hint="omit it")
    for folder in filter(None, (options.output, options.state)):
        check_replaceable(folder)


def _convert_folder(options: ExportOptions) -> None:
    """Convert a folder that an export wrote."""
    folder, output, dtype = options.checkpoint, options.output, options.dtype
    if not options.ema and (
        artifact.read_manifest(folder, (*("weights", "exported"),)).content.get("ema")
    ):
        raise PipelineError(
            f"{folder}: exported weights, which hold the averaged weights alone",
            hint="name the checkpoint or the state that they were made from",
        )
    if output is None or options.state is not None or options.to == "universal":
        raise PipelineError(
            f"{folder}: exported weights are no training, and hold no moments",
            hint="name a checkpoint or a state for --state and for --to universal",
        )
    check_no_loss(folder, [output])
    if artifact.kind_of(folder) == "exported":
        exported = artifact.read(folder, "exported")
        made_from = find_parent(exported, "weights")
        if made_from is None:
            form = exported.content["to"]
            raise PipelineError(
                f"{folder}: is exported as {form} already, and a format leads to no other",
                hint="name the weights folder that it was made from, or the checkpoint",
            )
        folder, dtype = made_from.folder, dtype or exported.content["dtype"]
        check_no_loss(folder, [output])
    convert(
        folder,
        options.to,
        output,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        prefix=options.prefix,
    )


def _export_checkpoint(options: ExportOptions) -> None:
    """Export any training: weights or a universal checkpoint, a state, or both."""
    checkpoint, output, to = options.checkpoint, options.output, options.to
    weights = None
    if output is not None and to != "universal":
        weights = _weights_target(options, output)
        modality = weights.family.modality
        to = to or OWN_FOLDER[modality]
        size, prefix = options.max_shard_size, options.prefix
        check_format(to, checkpoint, modality, weights.adapter, size, prefix)
        if weights.peft and to != OWN_FOLDER[modality]:
            check_format_supported(to, weights.peft[PEFT_TYPE])
    source = open_checkpoint(checkpoint, trust_pickle=options.trust_pickle)
    if weights is not None and not weights.adapter:
        _check_not_adapter(source.names, checkpoint)
    lost = [*getattr(source, "lost", ())]
    if output is not None and to == "universal":
        lost += describe_omissions(source)
    for sentence in lost:
        print(f"left out: {sentence}", file=sys.stderr)
    if output is not None and to == "universal":
        export_universal(source, checkpoint, output)
    if weights is None or (to in OWN_FOLDER.values() and not options.max_shard_size):
        if weights is not None or options.state is not None:
            export(source, checkpoint, weights, options.state)
    else:
        _export_as(str(to), source, weights, options)


def _weights_target(options: ExportOptions, output: Path) -> WeightsTarget:
    """Return the target of the weights, from the configuration and the values of the training."""
    from zerotrain.models.families import load_family

    if options.config is not None:
        run = read_config(options.config)
        base = options.base or RunFolder(run.run).base
        weights = WeightsTarget.of(ExportSettings.of(run), base, output, options.dtype)
    elif options.family is not None and options.base is not None:
        family = load_family(options.family)
        weights = WeightsTarget(output, options.base, family, options.dtype or "fp32")
    else:
        raise PipelineError(
            "weights need the base model that the training started from, to complete them",
            hint="add --config RUN, or --family sdxl --base FOLDER; a state "
            "(--state alone) and --to universal need no base",
        )
    trained = trained_values(options.checkpoint) or {}
    for change in list_changes_since(trained, weights) if options.config else ():
        print(f"{options.config}: {change}", file=sys.stderr)
    return replace(weights, ema=options.ema, **trained)


def _export_as(to: str, source: Source, weights: WeightsTarget, options: ExportOptions) -> None:
    """Export through a weights folder in float32, which is removed at the end."""
    output = weights.folder
    check_no_loss(options.checkpoint, [output])
    output.parent.mkdir(parents=True, exist_ok=True)
    with artifact.scratch_folder(output.with_name(f"{output.name}.fp32")) as folder:
        passing = replace(weights, folder=folder / "weights", dtype="fp32")
        export(source, options.checkpoint, passing, options.state)
        origins = find_parents(source, options.checkpoint)
        if artifact.is_described(weights.base):
            origins["base"] = artifact.read(weights.base, "base", verify=False)
        convert(
            passing.folder,
            to,
            output,
            dtype=weights.dtype,
            max_shard_size=options.max_shard_size,
            prefix=options.prefix,
            parents=lineage(origins)[0],
        )


def check_replaceable(folder: Path) -> None:
    """Check that a folder, which publishing replaces whole, is empty or was written by an export.

    Raises:
        PipelineError: it is not, or a file is in its path; the folder or file is named.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        if artifact.kind_of(folder) in WRITTEN:
            return
        raise PipelineError(
            f"{folder}: is there already, and was not written by an export",
            hint="name a new folder, or empty this one yourself",
        )
    check_no_file(folder)


def _check_not_adapter(names: list[str], checkpoint: Path) -> None:
    if all(".lora_" in name for name in names):
        raise PipelineError(
            f"{checkpoint}: holds an adapter's parameters alone, such as {names[0]}",
            hint="add --config RUN, whose `lora` says rank and alpha",
        )
