"""Export formats: an exported weights folder in the form that another program opens.

One module per format; it offers `write`, which gives the sha256 of each file by name, and `verify`,
which loads them with the real library and compares every tensor. A format's module is imported
where it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zerotrain import artifact
from zerotrain.artifact import Artifact
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    import torch

KIND = "exported"
"""Kind of a published folder that is no whole pipeline."""


@dataclass(frozen=True)
class Format:
    """What is known of a format without its module."""

    module: str
    files: str
    """What is written, in words."""
    opens: str
    """Who opens it; in bold the library that checks it."""
    adapter: bool | None
    """True: it holds an adapter; False: a whole model; None: either."""
    pipeline: bool = False
    """Whether it is a weights folder again: whole, in shards, ready for any other format."""
    modality: Literal["image", "text"] | None = None
    """Of which models; None: of both."""


FORMATS: Mapping[str, Format] = {
    "diffusers": Format(
        "diffusers_folder",
        "a pipeline's folder",
        "**diffusers**",
        adapter=None,
        pipeline=True,
        modality="image",
    ),
    "transformers": Format(
        "transformers_folder",
        "a folder with tokenizer and generation config",
        "**transformers**, vLLM, **peft**",
        adapter=None,
        pipeline=True,
        modality="text",
    ),
    "merged": Format(
        "merged",
        "a whole folder, no adapter left",
        "**diffusers**, **transformers**",
        adapter=True,
        pipeline=True,
    ),
    "single_file": Format(
        "single_file",
        "`model.safetensors`, the trained part alone",
        "**diffusers**, DiffSynth-Studio",
        adapter=None,
    ),
    "ldm": Format(
        "ldm",
        "`model.safetensors` in the original layout",
        "ComfyUI, A1111, Forge, kohya, **diffusers**",
        adapter=False,
        modality="image",
    ),
    "diffusers_lora": Format(
        "diffusers_lora",
        "`pytorch_lora_weights.safetensors`",
        "**diffusers**, InvokeAI",
        adapter=True,
        modality="image",
    ),
    "peft": Format(
        "peft_adapter",
        "`adapter_config.json`, `adapter_model.safetensors`",
        "**peft**",
        adapter=True,
    ),
    "kohya": Format(
        "kohya",
        "`lora.safetensors`",
        "ComfyUI, A1111, Forge, kohya, **diffusers**",
        adapter=True,
        modality="image",
    ),
}
OWN_FOLDER = {"image": "diffusers", "text": "transformers"}
"""The format that weights are exported in where none is named."""


@dataclass(frozen=True)
class Options:
    """What a user says of a format."""

    dtype: torch.dtype
    max_shard_size: str | None
    prefix: str
    """What stands before each name in a single file."""


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
        max_shard_size: Of a pipeline's folder, as "5GB"; default: 10GB.
        prefix: Of single_file, what stands before each name; default: nothing.
        parents: What the manifest names as its origin; default: the source.

    Raises:
        PipelineError: the source cannot have this form, a value does not fit into the type, or a
            tensor reads back otherwise. Nothing is published.
    """
    from zerotrain.export import DTYPES
    from zerotrain.formats import peft_method
    from zerotrain.formats.refusals import refuse_format
    from zerotrain.formats.weights import ExportedWeights

    weights = ExportedWeights(source)
    modality = weights.family.modality
    # Of another method than LoRA peft is the only reader.
    module: Any = peft_method.find(to, weights)
    to = to or OWN_FOLDER[modality]
    has_adapter = module is not None or weights.adapter is not None
    refuse_format(to, source, modality, has_adapter, max_shard_size, prefix)
    dtype = dtype or weights.dtype
    options = Options(DTYPES[dtype], max_shard_size, prefix or "")
    if module is None:
        module = importlib.import_module(f"zerotrain.formats.{FORMATS[to].module}")
    kind = "weights" if FORMATS[to].pipeline else KIND
    made_by = {**weights.artifact.made_by, "dtype": dtype}
    parents = parents or {"weights": weights.artifact}
    with artifact.publish(output, kind, parents=parents, made_by=made_by) as draft:
        draft.known.update(module.write(weights, options, draft.folder))
        with _loading_again(output):
            module.verify(weights, options, draft.folder)
        draft.content = {**weights.artifact.content, "dtype": dtype}
        if kind == KIND:
            draft.content["to"] = to


@contextmanager
def _loading_again(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise PipelineError(
            f"{folder}: does not load again: {error}",
            hint="look at the disk and its room; nothing was published",
        ) from error
