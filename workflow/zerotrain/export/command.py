"""zerotrain export: any complete checkpoint, or exported weights, in any format, without a rule.

A conversion is checked by loading the result again.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.layout import RunFolder
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.config.adapters import PEFT_TYPE, check_format_supported
from zerotrain.config.families import FAMILIES
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import ExportSettings
from zerotrain.config.suggestions import known_names
from zerotrain.errors import PipelineError
from zerotrain.export.export import check_no_loss, export, export_universal, find_parents, lineage
from zerotrain.export.formats import FORMATS, KIND, OWN_FOLDER, Options
from zerotrain.export.formats.loading_code import text_of_readme
from zerotrain.export.formats.tensors import report_load_errors
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.export.options import ExportOptions
from zerotrain.export.provenance import find_parent, list_changes_since, trained_values
from zerotrain.export.target import WeightsTarget
from zerotrain.machine.disk_errors import check_no_file
from zerotrain.machine.regular_file import write_text
from zerotrain.models.adapter_config import read_adapter_config
from zerotrain.models.base import README
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


SHARD_SIZE = re.compile(r"\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)
"""The syntax that huggingface_hub reads."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def convert(
    source: Path,
    to: str | None,
    output: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | None = None,
    prefix: str | None = None,
    parents: Mapping[str, Artifact] | None = None,
) -> None:
    """Publish an exported weights folder in another format, checked by loading it again.

    Args:
        source: A weights folder.
        to: A key of FORMATS; default: the folder of the model's own library.
        output: Folder to publish.
        dtype: fp32, bf16 or fp16; default: the source's.
        max_shard_size: For a pipeline's folder, such as "5GB"; default: 10GB.
        prefix: For single_file, the prefix of each name; default: none.
        parents: The origin that the manifest names; default: the source.

    Raises:
        PipelineError: the source cannot have this format, a value does not fit into the type, or a
            tensor reads back with other values. Nothing is published.
    """
    weights = ExportedWeights(source)
    modality = weights.family.modality
    if weights.method is not None:
        check_format_supported(to, weights.method)
    to = to or OWN_FOLDER[modality]
    has_adapter = weights.method is not None or weights.adapter is not None
    check_format(to, source, modality, has_adapter, max_shard_size, prefix)
    dtype = dtype or weights.dtype
    options = Options(FLOAT_TYPES[dtype], max_shard_size, prefix or "")
    # By name: each format imports its own libraries, which takes seconds.
    module = importlib.import_module(f"zerotrain.export.formats.{FORMATS[to].module}")
    kind = "weights" if FORMATS[to].pipeline else KIND
    made_by = {**weights.artifact.made_by, "dtype": dtype}
    parents = parents or {"weights": weights.artifact}
    with artifact.publish(output, kind, parents=parents, made_by=made_by) as draft:
        draft.known.update(module.write(weights, options, draft.folder))
        with report_load_errors(output):
            module.verify(weights, options, draft.folder)
        if kind == "weights":
            text = text_of_readme(draft.folder, weights.artifact.content, made_by)
            write_text(draft.folder / README, text)
        draft.content = {**weights.artifact.content, "dtype": dtype}
        if kind == KIND:
            draft.content["to"] = to


def check_format(
    to: str,
    source: Path,
    modality: str,
    adapter: bool,
    max_shard_size: str | None,
    prefix: str | None,
) -> None:
    """Check that a source can have a format, and that the format uses all options.

    Args:
        to: The format.
        source: The source's name in messages.
        modality: image or text.
        adapter: Whether it holds an adapter and its base.
        max_shard_size: As given to convert; so is prefix.
        prefix: See max_shard_size.

    Raises:
        PipelineError: it cannot, or an option is unused; the hint names what is possible.
    """
    form = FORMATS[to]
    known = {n: other for n, other in FORMATS.items() if other.modality in (None, modality)}
    if to not in known:
        kinds = {"image": "images", "text": "text"}
        raise PipelineError(
            f"--to {to}: {source} is a model of {kinds[modality]}, and {to} a format of models of "
            f"{kinds[str(form.modality)]}",
            hint=f"choose one of {', '.join(known)}",
        )
    if adapter and modality == "text" and to == "single_file":
        raise PipelineError(
            f"--to single_file: {source} holds an adapter, and programs of text read one from "
            "peft's two files alone",
            hint="choose --to peft, or --to merged first",
        )
    if form.adapter and not adapter:
        possible = [name for name, other in known.items() if not other.adapter]
        raise PipelineError(
            f"--to {to}: {source} holds a whole model, no adapter",
            hint=f"choose one of {', '.join(possible)}",
        )
    if adapter and form.adapter is False:
        raise PipelineError(
            f"--to {to}: {source} holds an adapter and its base, not one model",
            hint=f"merge it first: `zerotrain export {source} --to merged --output MERGED`, "
            f"then `zerotrain export MERGED --to {to}`",
        )
    if max_shard_size:
        _check_shard_size(max_shard_size, to, modality, adapter)
    if prefix and to != "single_file":
        raise PipelineError(
            f"--prefix: the names of {to} are its own",
            hint="omit it, or choose --to single_file",
        )
    if prefix and not prefix.endswith("."):
        raise PipelineError(
            f"--prefix: {prefix!r} ends in no dot, and would run into each name",
            hint=f"give --prefix {prefix}.",
        )


def _check_shard_size(size: str, to: str, modality: str, adapter: bool) -> None:
    if not FORMATS[to].pipeline:
        raise PipelineError(
            f"--max-shard-size: {to} is one file",
            hint=f"omit it, or choose --to {'merged' if adapter else OWN_FOLDER[modality]}",
        )
    if adapter and to != "merged":
        raise PipelineError(
            "--max-shard-size: the adapter is one file, and its base's stay as they are",
            hint="omit it, or choose --to merged",
        )
    if not SHARD_SIZE.fullmatch(size) or not int(float(size[:-2]) * UNITS[size[-2:].upper()]):
        raise PipelineError(
            f"--max-shard-size: {size!r} is no size", hint="give one such as 5GB or 500MB"
        )
