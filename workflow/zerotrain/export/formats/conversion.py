"""Conversion of exported weights into another format, checked by loading the result again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.artifact.tensor_file import FLOAT_TYPES
from zerotrain.config.adapters import check_format_supported
from zerotrain.export.formats import FORMATS, KIND, OWN_FOLDER, Options
from zerotrain.export.formats.loading_code import text_of_readme
from zerotrain.export.formats.refusals import check_format
from zerotrain.export.formats.tensors import report_load_errors
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.models.base import README


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
            (draft.folder / README).write_text(text, encoding="utf-8")
        draft.content = {**weights.artifact.content, "dtype": dtype}
        if kind == KIND:
            draft.content["to"] = to
