"""Conversion of exported weights into another format, checked by loading the result again."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.config.adapters import check_format_supported
from zerotrain.errors import PipelineError
from zerotrain.export.formats import FORMATS, KIND, OWN_FOLDER, Options
from zerotrain.export.formats.loading_code import text_of_readme
from zerotrain.export.formats.tensors import report_load_errors
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.machine.regular_file import write_text
from zerotrain.models.base import README

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
