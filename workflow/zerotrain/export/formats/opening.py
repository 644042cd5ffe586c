"""Opening of any exported format of an image family as its pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerotrain.artifact import MANIFEST, Artifact, file_sha256, read_around
from zerotrain.artifact.documents import read_header
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.families import FAMILIES
from zerotrain.errors import PipelineError
from zerotrain.export.formats import kohya, ldm
from zerotrain.export.formats.tensors import fold_alphas
from zerotrain.machine.memory_errors import find_out_of_memory
from zerotrain.models.base import MODEL_INDEX
from zerotrain.models.families import Family, adapters, load_family
from zerotrain.models.families.diffusion import DiffusionFamily
from zerotrain.models.families.lora import ADAPTER, PEFT_CONFIG
from zerotrain.models.families.pipelines import place_pipeline, sampling_dtype
from zerotrain.models.pretrained import check_lora_file, loading, read_config

ORIGINAL_BLOCK = re.compile(r"(model\.diffusion_model\.)?(joint|double)_blocks\.")
"""Blocks of SD3 and Flux in their original layouts."""
ADAPTERS = (ADAPTER, PEFT_CONFIG, adapters.FOLDER)
"""Each of these identifies a weights folder with an adapter."""
OPENED = ("weights", "exported", "base")
"""Kinds of published folders that hold weights."""


def check_whole(path: Path, base: Path | None) -> Artifact | None:
    """Check weights, and the base that completes them, against their manifests.

    Files are hashed, large ones only once after each change.

    Args:
        path: A folder or a file.
        base: The base model's folder, if one is named.

    Returns:
        The published folder of `path`; None if it is another program's.

    Raises:
        PipelineError: a listed file is missing or differs, a manifest is missing, or there is an
            adapter that it does not list.
    """
    sha256 = remembering(file_sha256)
    if base is not None:
        read_around(base, OPENED, sha256=sha256)
    manifest = read_around(path, OPENED, sha256=sha256)
    if manifest is not None:
        for name in ADAPTERS:
            if (manifest.folder / name).exists() and not any(
                n.startswith(name) for n in manifest.files
            ):
                manifest.path(name)  # a loader would apply it
    return manifest


def open_pipeline(path: Path, base: Path | None, device: str) -> tuple[DiffusionFamily, Any]:
    """Open a pipeline of diffusers for a device, with the formats' own loaders.

    Args:
        path: A folder in diffusers' layout, an exported folder, or its safetensors file.
        base: Folder of the base model in diffusers' layout, for formats that have only a part.
        device: Device to sample on; see zerotrain.models.families.pipelines.

    Returns:
        The family and its pipeline.

    Raises:
        PipelineError: there is nothing to open, the base is missing or superfluous, names fit no
            format, or a file differs from its manifest.
    """
    check_whole(path, base)
    if (path / MODEL_INDEX).is_file():
        if base is not None:
            raise PipelineError(f"--base: {path} is a whole model already", hint="omit --base")
        family, pipeline = _open_folder(path, device)
        return family, place_pipeline(pipeline, device)
    if (path / "tokenizer_config.json").is_file():
        raise PipelineError(
            f"{path}: is a language model", hint=f"zerotrain generate {path} PROMPT asks it"
        )
    file = only_file(path, MODEL_INDEX)
    names = tensor_names(file)
    if any(name.startswith("conditioner.embedders.") for name in names):
        config = base or file.parent / ldm.CONFIG
        family = family_of(_read_base(config, path))
        with loading(str(file)), name_file_in_errors(file):
            loaded: Any = ldm.load_single_file(
                family.spec.pipeline, file, config, sampling_dtype(device)
            )
        loaded.set_progress_bar_config(disable=True)
        return family, place_pipeline(loaded, device)
    folder = _read_base(base, path)
    family, pipeline = _open_folder(folder, device)
    with loading(str(file)), name_file_in_errors(file):
        if any(ORIGINAL_BLOCK.match(name) for name in names):
            parts = ldm.load_parts(family, file, folder, pipeline.dtype)
            for part, model in parts.items():
                setattr(pipeline, part, model)
        else:
            _load_file(pipeline, family, file, names)
    return family, place_pipeline(pipeline, device)


def family_of(folder: Path) -> DiffusionFamily:
    """Return the family of a folder in diffusers' layout, by the pipeline that its index names.

    Raises:
        PipelineError: the pipeline belongs to no family; it is named.
    """
    class_name = read_config(folder / MODEL_INDEX).get("_class_name")
    for name in FAMILIES:
        family = load_family(name)
        known = (family.spec.pipeline, *family.spec.conditioning)
        if family.modality == "image" and class_name in known:
            return family
    raise PipelineError(
        f"{folder / MODEL_INDEX}: {class_name} is the pipeline of no family here",
        hint="open it with diffusers: DiffusionPipeline.from_pretrained(FOLDER)",
    )


def _open_folder(folder: Path, device: str) -> tuple[DiffusionFamily, Any]:
    family = family_of(folder)
    return family, family.load_pipeline(folder, device)


def _read_base(base: Path | None, path: Path) -> Path:
    """Return the base's folder, after checking that it is a model without an adapter."""
    if base is None or not (base / MODEL_INDEX).is_file():
        raise PipelineError(
            f"{path}: is a part of a model, and the rest is needed"
            if base is None
            else f"--base: {base} has no {MODEL_INDEX}, so it is not a model in diffusers' layout",
            hint="add --base FOLDER: the model that the training started from, such as "
            "results/RUN/base",
        )
    own = next((name for name in (ADAPTER, adapters.FOLDER) if (base / name).exists()), None)
    if own is not None:
        raise PipelineError(
            f"--base: {base} has an adapter of its own, {own}",
            hint="name the model that the training started from, such as results/RUN/base",
        )
    return base


def only_file(path: Path, index: str) -> Path:
    """Return the only safetensors file that a path names or contains.

    Raises:
        PipelineError: no file, or several, are found; the message names `index`, a whole
            model's file.
    """
    if not path.exists():
        raise PipelineError(
            f"{path}: there is nothing", hint="name a folder or a file that an export wrote"
        )
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if len(files) != 1 or files[0].suffix != ".safetensors":
        raise PipelineError(
            f"{path}: holds {len(files)} safetensors files and no {index}"
            if path.is_dir()
            else f"{path}: is no safetensors file",
            hint=f"name a folder with {index}, an exported folder, or its file; a folder "
            f"with {MANIFEST} alone is unfinished",
        )
    return files[0]


def tensor_names(file: Path) -> list[str]:
    """Return the names of a file's tensors.

    Raises:
        PipelineError: it cannot be read.
    """
    return [*read_header(file, follow_links=True, hint="copy or download it again").tensors]


def _load_file(pipeline: Any, family: Family, file: Path, names: list[str]) -> None:
    """Load a file's adapter or denoiser into the pipeline of its base."""
    part = family.trained_part
    denoiser = getattr(pipeline, part)
    own = [n.removesuffix(".weight") for n in denoiser.state_dict() if n.endswith(".weight")]
    if (file.parent / PEFT_CONFIG).is_file():
        adapters.apply_peft(denoiser, file.parent)
        return
    check_lora_file(denoiser, file)
    if any(name.endswith(".lora_down.weight") for name in names):
        if family.name == "sd3":  # the pipeline's own loader would ignore all of it
            kohya.load(family, denoiser, file)
        else:
            pipeline.load_lora_weights(fold_alphas(load_file(file)))
    elif any(".lora_A." in name for name in names):
        layers = {name.partition(".lora_A.")[0] for name in names if ".lora_A." in name}
        prefix = prefix_before(layers, set(own), file).removesuffix(".") or None
        if any(name.endswith(".alpha") for name in names):
            denoiser.load_lora_adapter(fold_alphas(load_file(file)), prefix=prefix)
        else:  # its header has the scales
            denoiser.load_lora_adapter(str(file.parent), prefix=prefix, weight_name=file.name)
    else:
        expected = denoiser.state_dict()
        prefix = prefix_before(names, set(expected), file)
        state = {name.removeprefix(prefix): t for name, t in load_file(file).items()}
        denoiser.load_state_dict(state)


@contextmanager
def name_file_in_errors(file: Path) -> Iterator[None]:
    """Name the file in the error of a library that cannot load it into its base."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # the device is full; this is not about the file
    except (RuntimeError, ValueError, KeyError) as error:
        if find_out_of_memory(error):
            raise
        what = str(error).strip().rpartition("\n")[2].strip()
        raise PipelineError(
            f"{file}: does not fit the base ({what})",
            hint="name the base that the training started from, or export the weights again",
        ) from error


def prefix_before(names: Iterable[str], own: set[str], file: Path) -> str:
    """Return the prefix of the file's names that the model's own names do not have.

    Raises:
        PipelineError: the model does not know some of the names.
    """
    names = sorted(names)
    first = names[0]
    places = [0, *(place + 1 for place, letter in enumerate(first) if letter == ".")]
    unknown = names
    for place in places:
        prefix = first[:place]
        left = [n for n in names if not n.startswith(prefix) or n.removeprefix(prefix) not in own]
        if not left:
            return prefix
        unknown = min(unknown, left, key=len)
    raise PipelineError(
        f"{file}: {unknown[0]} and {len(unknown) - 1} more of its {len(names)} names belong to no "
        "format that is known here, or to another base",
        hint="name the base that the training started from; of a file in another form, open it "
        "where it was made",
    )
