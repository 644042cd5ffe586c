"""An exported weights folder for the formats: a model's parts, and possibly an adapter.

Header entries describe a file's model, for programs that sort files by them: Stability AI's model
metadata standard, https://github.com/Stability-AI/ModelSpec; and for a LoRA, kohya's own ss_ keys,
which A1111 and similar programs show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zerotrain import artifact
from zerotrain.artifact import RECORDS, Artifact
from zerotrain.config.adapters import PEFT_TYPE
from zerotrain.config.families import FAMILIES, ROOT, Titles
from zerotrain.errors import PipelineError
from zerotrain.export.formats.tensors import LazyTensor, tensors_in
from zerotrain.models.adapter_config import read_adapter_config, read_adapter_header
from zerotrain.models.base import in_part, is_model_file
from zerotrain.models.families import Family, load_family
from zerotrain.models.families.adapters import FOLDER
from zerotrain.models.families.lora import (
    ADAPTER,
    PEFT_ADAPTER,
    PEFT_CONFIG,
    adapter_file,
)
from zerotrain.models.families.model_tensors import without_memory
from zerotrain.models.pretrained import read_config

KIND = "weights"
SECOND_FACTOR = ".lora_B."
ADAPTER_FILES = (ADAPTER, PEFT_ADAPTER, PEFT_CONFIG)
NAME = "trained"
"""The adapter's name in peft."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of the trained part."""

    settings: dict[str, Any]
    """peft's LoraConfig: r, lora_alpha, target_modules and values other than its defaults."""
    tensors: dict[str, LazyTensor]
    """Tensors by peft's names within the part: `<layer>.lora_A.weight`."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that it changes."""
        return tuple(dict.fromkeys(name.split(".lora_")[0] for name in self.tensors))

    def config(self) -> Any:
        """Return its configuration in peft."""
        from peft import LoraConfig

        return LoraConfig(**self.settings)

    def layers_of(self, model: torch.nn.Module) -> dict[str, Any]:
        """Add an adapter of this configuration to a model, and return peft's layers by name."""
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = inject_adapter_in_model(self.config(), model, adapter_name=NAME)
        return {n: m for n, m in adapted.named_modules() if isinstance(m, BaseTunerLayer)}


class ExportedWeights:
    """A published weights folder, in the layout of diffusers or transformers.

    Its files are those of its manifest.
    """

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
    def method(self) -> str | None:
        """peft's name of the trained adapter's method if it is no LoRA, which only peft reads."""
        config = f"{FOLDER}/{PEFT_CONFIG}"
        if config not in self.artifact.files:
            return None
        return str(read_adapter_config(self.artifact.path(config).parent).get(PEFT_TYPE))

    def method_tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors of an adapter of another method by their names in its file."""
        return tensors_in([self.artifact.path(f"{FOLDER}/{PEFT_ADAPTER}")])

    @cached_property
    def adapter(self) -> Adapter | None:
        """The trained LoRA; None if the model itself or an adapter of another method was trained.

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
        """Return peft's configuration of an adapter, from diffusers' file or next to peft's."""
        if self.part == ROOT:
            from peft import PeftConfig

            return dict(PeftConfig.from_pretrained(str(self.folder)).to_dict())
        settings = read_adapter_header(path)
        return {key.removeprefix(prefix): settings[key] for key in settings}

    @cached_property
    def scales(self) -> dict[str, float]:
        """The scale of each layer's factors in peft: usually alpha / rank."""
        assert self.adapter is not None
        layers = self.adapter.layers_of(self.family.empty_model(self.folder))
        return {name: float(layer.scaling[NAME]) for name, layer in layers.items()}

    def config(self, part: str) -> dict[str, Any]:
        """Return the configuration of a part."""
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        return read_config(self.artifact.path(f"{part}/{name}"))

    def tensors(self, part: str) -> dict[str, LazyTensor]:
        """Return the tensors of a part by its own names."""
        files = [n for n in sorted(self.artifact.files) if in_part(n, part)]
        return tensors_in(self.artifact.path(n) for n in files if n.endswith(".safetensors"))

    @cached_property
    def trained(self) -> dict[str, LazyTensor]:
        """The tensors of the trained part; the base's if an adapter was trained."""
        return self.tensors(self.part)

    def trained_files(self) -> list[str]:
        """Return the files of the trained part."""
        return [n for n in self.artifact.files if in_part(n, self.part) and is_model_file(n)]

    def base_files(self) -> list[str]:
        """Return the files of the untrained parts, and of the model as a whole."""
        return [
            name
            for name in self.artifact.files
            if is_model_file(name)
            and not in_part(name, self.part)
            and not name.startswith((f"{FOLDER}/", RECORDS))
            and name not in ADAPTER_FILES
        ]

    def descriptions(self) -> list[str]:
        """Return the files without weights, which a loader of single files also needs."""
        ends = (".safetensors", ".index.json")
        return [
            name
            for name in self.artifact.files
            if is_model_file(name) and not name.endswith(ends) and not name.startswith(RECORDS)
        ]

    def lineage(self) -> dict[str, str]:
        """Return a file's header, which names the weights' manifest as the origin."""
        made_by, base = self.artifact.made_by, self.artifact.parents.get("base", {})
        header = {
            "zerotrain.weights": self.artifact.identity,
            "zerotrain.run": made_by.get("run"),
            "zerotrain.phase": made_by.get("phase"),
            "zerotrain.step": str(self.artifact.content["step"]),
            "zerotrain.base": base.get("identity"),
            "zerotrain.ema": "true" if self.artifact.content.get("ema") else None,
        }
        return {key: value for key, value in header.items() if value}


def file_name(name: str) -> str:
    """Return an adapter tensor's name in peft's files, where DoRA's magnitudes are not a layer."""
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def plain_name(name: str) -> str:
    """Return a LoRA tensor's name in peft's files from its name in a model, with the adapter's."""
    return file_name(re.sub(r"(\.lora_\w+)\.[^.]+\.", r"\1.", name))


def model_without_memory(weights: ExportedWeights) -> torch.nn.Module:
    """Return the trained part as built by the library, each weight a view of a single zero."""
    return without_memory(weights.family.empty_model(weights.folder))


DEFAULT_SAMPLE_SIZE = 128
"""Side in latents of models without a native size (such as FluxPipeline)."""


def architecture(weights: ExportedWeights, suffix: str = "") -> dict[str, str]:
    """Return modelspec's entries for a file.

    Args:
        weights: The weights that the file is made from.
        suffix: "/lora" for an adapter.
    """
    lineage = weights.lineage()
    run = lineage.get("zerotrain.run", weights.family.name)
    side = resolution(weights)
    name = weights.family.name
    kind, known = prediction(weights)[0], titles_of(name)
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": base_name(name, weights.config(weights.part)) + suffix,
        "modelspec.implementation": known.implementation,
        "modelspec.title": f"{run}, step {lineage['zerotrain.step']}",
        "modelspec.resolution": f"{side}x{side}",
        **({"modelspec.prediction_type": kind} if kind else {}),
    }


def titles_of(family: str) -> Titles:
    """Return the names of an image family in other programs."""
    titles = FAMILIES[family].titles
    assert titles is not None
    return titles


def base_name(family: str, config: Mapping[str, Any]) -> str:
    """Return modelspec's name of a base, by its family and the config.json of its denoiser."""
    titles = titles_of(family)
    for key, name in titles.variants.items():
        if bool(config.get(key.removeprefix("not "))) != key.startswith("not "):
            return name
    return titles.architecture


def network(weights: ExportedWeights) -> dict[str, str]:
    """Return kohya's entries for a LoRA, except dates and file names, which differ in each run."""
    assert weights.adapter is not None
    settings = weights.adapter.settings
    kind, zero_snr = prediction(weights)
    known = titles_of(weights.family.name)
    return {
        "ss_base_model_version": known.base_version,
        "ss_network_module": known.network,
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(float(settings["lora_alpha"])),
        "ss_v2": "False",
        "ss_v_parameterization": str(kind == "v"),
        "ss_zero_terminal_snr": str(zero_snr),
        "ss_steps": weights.lineage()["zerotrain.step"],
    }


def prediction(weights: ExportedWeights) -> tuple[str | None, bool]:
    """Return `epsilon`, `v`, or None for a flow, and whether the last timestep is pure noise."""
    config = weights.config("scheduler")
    if config["_class_name"].startswith("FlowMatch"):
        return None, False
    kind = "v" if config.get("prediction_type") == "v_prediction" else "epsilon"
    return kind, bool(config.get("rescale_betas_zero_snr"))


def resolution(weights: ExportedWeights) -> int:
    """Return the model's native image side in pixels."""
    latent: int = weights.config(weights.part).get("sample_size", DEFAULT_SAMPLE_SIZE)
    vae = weights.config("vae")
    halved = vae.get("temperal_downsample", vae.get("block_out_channels", [0])[1:])
    pixels: int = latent * 2 ** len(halved)
    return pixels
