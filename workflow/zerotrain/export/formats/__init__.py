"""Export formats: an exported weights folder in a format that another program opens.

Each format is a module with `write`, which returns the sha256 of each file by name, and `verify`,
which loads the files with the real library and compares every tensor. A format's module is imported
when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KIND = "exported"
"""Kind of a published folder that is not a whole pipeline."""


@dataclass(frozen=True)
class Format:
    """The properties of a format that are known without its module."""

    module: str
    files: str
    """The written files, in words."""
    opens: str
    """Programs that open it; in bold the library that checks it."""
    adapter: bool | None
    """True: for an adapter; False: for a whole model; None: for either."""
    pipeline: bool = False
    """Whether it is a weights folder: whole, in shards, ready for any other format."""
    modality: Literal["image", "text"] | None = None
    """The models it is for; None: both."""


FORMATS: Mapping[str, Format] = {
    "diffusers": Format(
        "library_folder",
        "a pipeline's folder",
        "**diffusers**",
        adapter=None,
        pipeline=True,
        modality="image",
    ),
    "transformers": Format(
        "library_folder",
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
"""The default format of each modality."""


@dataclass(frozen=True)
class Options:
    """A user's options for a format."""

    dtype: torch.dtype
    max_shard_size: str | None
    prefix: str
    """The prefix of each name in a single file."""
