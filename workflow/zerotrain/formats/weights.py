"""An exported weights folder as the formats see it: a model's parts, and an adapter or none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact
from zerotrain.base import in_part, is_model_file
from zerotrain.errors import PipelineError
from zerotrain.families import ROOT, Family, load_family
from zerotrain.families.adapters import FOLDER
from zerotrain.families.lora import ADAPTER, METADATA, PEFT_ADAPTER, PEFT_CONFIG, adapter_file
from zerotrain.families.model_tensors import without_memory
from zerotrain.formats.tensors import Stored, tensors_in

KIND = "weights"
SECOND_FACTOR = ".lora_B."
ADAPTER_FILES = (ADAPTER, PEFT_ADAPTER, PEFT_CONFIG)
NAME = "trained"
"""What peft is told to call the adapter."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of the trained part."""

    settings: dict[str, Any]
    """peft's LoraConfig: r, lora_alpha, target_modules and what differs from its defaults."""
    tensors: dict[str, Stored]
    """By peft's names within the part: `<layer>.lora_A.weight`."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that it changes."""
        return tuple(dict.fromkeys(name.split(".lora_")[0] for name in self.tensors))

    def config(self) -> Any:
        """peft's configuration of it."""
        from peft import LoraConfig

        return LoraConfig(**self.settings)

    def layers_of(self, model: torch.nn.Module) -> dict[str, Any]:
        """peft's layers by name, once it has put an adapter of this configuration into a model."""
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = inject_adapter_in_model(self.config(), model, adapter_name=NAME)
        return {n: m for n, m in adapted.named_modules() if isinstance(m, BaseTunerLayer)}


class ExportedWeights:
    """A published weights folder, in the layout of diffusers or transformers; its files are those
    of its manifest."""

    def __init__(self, folder: Path) -> None:
        self.artifact: Artifact = artifact.read(folder, KIND)
        self.folder = folder
        self.family: Family = load_family(self.artifact.content["family"])
        self.part = self.family.trained_part

    @property
    def dtype(self) -> str:
        """Type of the trained tensors, as --dtype names it."""
        return str(self.artifact.content["dtype"])

    @cached_property
    def adapter(self) -> Adapter | None:
        """The adapter that was trained; None where the model itself was.

        Raises:
            PipelineError: it is empty, or does nothing.
        """
        file, prefix = adapter_file(self.part)
        if file not in self.artifact.files:
            return None
        path = self.artifact.path(file)
        tensors = {n.removeprefix(prefix): t for n, t in tensors_in([path]).items()}
        second = [tensor for name, tensor in tensors.items() if SECOND_FACTOR in name]
        if not any(bool(tensor.read().any()) for tensor in second):
            raise PipelineError(
                f"{path}: the adapter does nothing: each second factor is zero"
                if second
                else f"{path}: the adapter is empty",
                hint="train it for a step at least, and export it again",
            )
        return Adapter(self._settings(path, prefix), tensors)

    def _settings(self, path: Path, prefix: str) -> dict[str, Any]:
        """What peft is told of an adapter: in its file of diffusers, beside it of peft."""
        if self.part == ROOT:
            from peft import PeftConfig

            return dict(PeftConfig.from_pretrained(str(self.folder)).to_dict())
        with safe_open(path, "pt") as file:
            said = json.loads(file.metadata()[METADATA])
        return {key.removeprefix(prefix): said[key] for key in said}

    @cached_property
    def scales(self) -> dict[str, float]:
        """What each layer's factors are multiplied with, as peft has it: alpha / rank, mostly."""
        assert self.adapter is not None
        layers = self.adapter.layers_of(self.family.empty_model(self.folder))
        return {name: float(layer.scaling[NAME]) for name, layer in layers.items()}

    def config(self, part: str) -> dict[str, Any]:
        """The configuration of a part."""
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        document: dict[str, Any] = json.loads(self.artifact.path(f"{part}/{name}").read_text())
        return document

    def tensors(self, part: str) -> dict[str, Stored]:
        """The tensors of a part by its own names."""
        files = [n for n in sorted(self.artifact.files) if in_part(n, part)]
        return tensors_in(self.artifact.path(n) for n in files if n.endswith(".safetensors"))

    @cached_property
    def trained(self) -> dict[str, Stored]:
        """The tensors of the part that was trained; of its base where an adapter was."""
        return self.tensors(self.part)

    def own(self) -> list[str]:
        """Files of the part that was trained."""
        return [n for n in self.artifact.files if in_part(n, self.part) and is_model_file(n)]

    def others(self) -> list[str]:
        """Files of the parts that were not trained, and of the whole model."""
        return [
            name
            for name in self.artifact.files
            if is_model_file(name)
            and not in_part(name, self.part)
            and not name.startswith((f"{FOLDER}/", RECORDS))
            and name not in ADAPTER_FILES
        ]

    def descriptions(self) -> list[str]:
        """Files without weights: what a loader of single files needs beside them."""
        ends = (".safetensors", ".index.json")
        return [
            name
            for name in self.artifact.files
            if is_model_file(name) and not name.endswith(ends) and not name.startswith(RECORDS)
        ]

    def lineage(self) -> dict[str, str]:
        """What a file's header says of its origin; it leads back to the weights' manifest."""
        made_by, base = self.artifact.made_by, self.artifact.parents.get("base", {})
        said = {
            "zerotrain.weights": self.artifact.identity,
            "zerotrain.run": made_by.get("run"),
            "zerotrain.phase": made_by.get("phase"),
            "zerotrain.step": str(self.artifact.content["step"]),
            "zerotrain.base": base.get("identity"),
            "zerotrain.ema": "true" if self.artifact.content.get("ema") else None,
        }
        return {key: value for key, value in said.items() if value}


def file_name(name: str) -> str:
    """A tensor of an adapter as peft's files name it: DoRA's magnitudes are no layer there."""
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def model_without_memory(weights: ExportedWeights) -> torch.nn.Module:
    """The trained part as the library builds it, each weight a view of one zero."""
    return without_memory(weights.family.empty_model(weights.folder))
