"""Exported weights of a small SDXL, whole and with an adapter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.builders.adapters import make_adapted, write_adapter
from tests.builders.images import build_nano
from tests.formats.languages import Language, exported

from zerotrain import artifact
from zerotrain.config.families import LANGUAGE_MODELS
from zerotrain.models.families import nano as nano_parts
from zerotrain.models.families import sdxl_nano
from zerotrain.models.families.sdxl import FAMILY

LAYERS = ("to_q", "to_out.0", "proj_in", "ff.net.0.proj", "ff.net.2", "conv1", "conv_shortcut")
"""Kinds of layers that formats name differently; the last two are convolutions."""
ADAPTER = {"rank": 4, "alpha": 6.0, "target_modules": LAYERS}


def build_base(folder: Path) -> None:
    """A nano model with attention in its autoencoder; its numbers are all random."""
    autoencoder = nano_parts.build_autoencoder

    def with_attention(side: int) -> Any:
        return type(autoencoder(side)).from_config(
            {**autoencoder(side).config, "mid_block_add_attention": True}
        )

    build_nano(replace(sdxl_nano.SMALL, build_autoencoder=with_attention), folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "base"
    with artifact.publish(folder, "base") as draft:
        build_base(draft.folder)
        draft.content = {"family": "sdxl", "base": "nano", "commit": None, "parts": {}}
    return folder


def published(base: Path, folder: Path, adapter: Path | None = None, family: str = "sdxl") -> Path:
    """A weights folder as an export publishes it; the trained part is the base's."""
    made_by = {"run": "houses", "phase": "only", "dtype": "fp32"}
    parents = {"base": artifact.read(base, "base")}
    with artifact.publish(folder, "weights", parents=parents, made_by=made_by) as draft:
        shutil.copytree(base, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        if adapter is not None:
            shutil.copytree(adapter, draft.folder, dirs_exist_ok=True)
        draft.content = {"family": family, "step": 12, "dtype": "fp32"}
    return folder


@pytest.fixture(scope="session")
def whole(base: Path) -> Path:
    """Weights of a training of the whole model."""
    return published(base, base.parent / "whole")


@pytest.fixture(scope="session")
def lora(base: Path) -> Path:
    """Weights of a LoRA whose alpha is not its rank."""
    unet = make_adapted(base, **ADAPTER)
    write_adapter(base, unet, base.parent / "adapter", **ADAPTER)
    return published(base, base.parent / "lora", base.parent / "adapter")


@pytest.fixture(scope="session")
def trained(lora: Path) -> torch.nn.Module:
    """The U-Net that was trained, with its adapter."""
    return FAMILY.load_trained(lora)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_below(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.fixture(scope="session", params=LANGUAGE_MODELS)
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Language:
    """Base and weights of a language model."""
    return exported(request.param, tmp_path_factory.mktemp(request.param))
