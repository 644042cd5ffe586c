"""ldm: a model in one file in its original layout, for ComfyUI, A1111 and kohya.

config/ next to it has the small files that diffusers' from_single_file needs offline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch

from zerotrain.artifact import link_or_copy
from zerotrain.errors import PipelineError
from zerotrain.export.formats import Options, original
from zerotrain.export.formats.original import (
    FLUX_WIDTH,
    SLOTS,
    flux_width,
    rows_of,
    to_original_layout,
)
from zerotrain.export.formats.tensors import LazyTensor, verify_tensors, write_tensors
from zerotrain.export.formats.weights import ExportedWeights, architecture, prediction
from zerotrain.models.families import Family
from zerotrain.models.families.pipelines import pipeline_class, quiet_libraries

FILE = "model.safetensors"
CONFIG = "config"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file and config/, and return the sha256 of files by name."""
    tensors = _layout(weights).tensors(weights)
    header = weights.lineage() | architecture(weights)
    for name in weights.descriptions():
        link_or_copy(weights.artifact.path(name), out / CONFIG / name)
    known = {f"{CONFIG}/{n}": weights.artifact.files[n]["sha256"] for n in weights.descriptions()}
    return known | {FILE: write_tensors(out / FILE, tensors, options.dtype, header)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file with from_single_file, offline, and compare each part bit by bit."""
    loaded = load_parts(weights.family, out / FILE, out / CONFIG, options.dtype)
    for part, model in loaded.items():
        expected = {_flat(n): t for n, t in weights.tensors(part).items()}
        actual = {_flat(n): t for n, t in model.state_dict().items()}
        verify_tensors(expected, actual, options.dtype, out / FILE)


def load_parts(
    family: Family, file: Path, config: Path, dtype: torch.dtype
) -> dict[str, torch.nn.Module]:
    """Load the parts in a file of a family's original layout, offline.

    Args:
        family: The family.
        file: The file.
        config: Folder in diffusers' layout; its weights, if there are any, are not read.
        dtype: Type to load.
    """
    parts = LAYOUTS[family.name].parts
    if set(parts) == set(family.spec.classes):
        pipeline = load_single_file(family.spec.pipeline, file, config, dtype)
        return {part: getattr(pipeline, part) for part in parts}
    with quiet_libraries():
        return {
            part: getattr(diffusers, family.spec.classes[part]).from_single_file(
                str(file), config=str(config), subfolder=part, local_files_only=True, dtype=dtype
            )
            for part in parts
        }


def load_single_file(pipeline: str, file: Path, config: Path, dtype: torch.dtype) -> object:
    """Load a pipeline of diffusers from one file with all its parts; see load_parts."""
    with quiet_libraries():
        loaded: object = pipeline_class(pipeline).from_single_file(
            str(file), config=str(config), local_files_only=True, dtype=dtype
        )
    return loaded


def sdxl(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return SDXL's tensors under their original names."""
    _check_widths(weights)
    return {
        **_denoiser(weights, original.UNET),
        **_autoencoder(weights),
        **{original.CLIP + _flat(n): t for n, t in weights.tensors("text_encoder").items()},
        **_open_clip({_flat(n): t for n, t in weights.tensors("text_encoder_2").items()}),
        **_marks(weights),
    }


def sd3(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return SD3's tensors as in sd3_medium.safetensors: without text encoders."""
    return {**_denoiser(weights, original.UNET), **_autoencoder(weights)}


def flux(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return Flux's tensors as in flux1-dev.safetensors: only the transformer."""
    if (width := flux_width(weights)) != FLUX_WIDTH:
        raise PipelineError(
            f"--to ldm: the layers of {weights.folder} are {width} wide, and diffusers reads the "
            f"original layout only at Flux's own width {FLUX_WIDTH}",
            hint="of this one, --to diffusers or single_file",
        )
    return _denoiser(weights, "")


@dataclass(frozen=True)
class Layout:
    """The layout of a family's original file."""

    tensors: Callable[[ExportedWeights], dict[str, LazyTensor]]
    parts: tuple[str, ...]
    """The parts in it."""


LAYOUTS: Mapping[str, Layout] = {
    "sdxl": Layout(sdxl, ("text_encoder", "text_encoder_2", "unet", "vae")),
    "sd3": Layout(sd3, ("transformer", "vae")),
    "flux": Layout(flux, ("transformer",)),
}
"""Families whose original layout is known."""


def _layout(weights: ExportedWeights) -> Layout:
    if weights.family.name not in LAYOUTS:
        raise PipelineError(
            f"--to ldm: {weights.family.name} has no layout of its own here",
            hint=f"{', '.join(LAYOUTS)} have; single_file and diffusers are for all, and ComfyUI "
            "opens the single_file of qwen_image",
        )
    return LAYOUTS[weights.family.name]


def _denoiser(weights: ExportedWeights, prefix: str) -> dict[str, LazyTensor]:
    slot_of = SLOTS[weights.family.name](weights.config(weights.part))
    tensors = to_original_layout(weights.trained, slot_of)
    return {prefix + name: stored for name, stored in tensors.items()}


def _autoencoder(weights: ExportedWeights) -> dict[str, LazyTensor]:
    name_of = original.vae_names(weights.config("vae"))
    tensors = weights.tensors("vae").items()
    return {original.VAE + name_of(name): _convolution(name, t) for name, t in tensors}


def _check_widths(weights: ExportedWeights) -> None:
    first, second = (weights.config(part) for part in ("text_encoder", "text_encoder_2"))
    if first["hidden_size"] == second["hidden_size"]:
        raise PipelineError(
            f"--to ldm: both text encoders of {weights.folder} are {first['hidden_size']} wide, "
            "and those who read the file tell them apart by their width",
            hint="a real SDXL has 768 and 1280; of this one, --to diffusers or single_file",
        )


def _open_clip(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the second text encoder's tensors: q, k and v in one, the projection transposed."""
    renamed = {}
    for name, stored in tensors.items():
        if ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            layer, _, kind = name.partition(".self_attn.q_proj.")
            parts = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            number = layer.rsplit(".", 1)[-1]
            new = f"transformer.resblocks.{number}.attn.in_proj_{kind}"
            renamed[new] = rows_of(parts)
        else:
            new = original.open_clip_name(name)
            renamed[new] = _transpose(stored) if new == "text_projection" else stored
    return {original.OPEN_CLIP + name: stored for name, stored in renamed.items()}


def _transpose(stored: LazyTensor) -> LazyTensor:
    return LazyTensor(stored.dtype, stored.shape[::-1], lambda: stored.read().T.contiguous())


def _convolution(name: str, stored: LazyTensor) -> LazyTensor:
    """Return a tensor of the autoencoder's attention as a convolution, as in the original."""
    if ".attentions." not in name or len(stored.shape) != 2:
        return stored
    shape = (*stored.shape, 1, 1)
    return LazyTensor(stored.dtype, shape, lambda: stored.read().reshape(shape))


def _marks(weights: ExportedWeights) -> dict[str, LazyTensor]:
    """Return empty tensors, from whose names ComfyUI and A1111 read what the model predicts."""
    kind, zero_snr = prediction(weights)
    empty = LazyTensor(torch.float32, (0,), lambda: torch.empty(0))
    return ({"v_pred": empty} if kind == "v" else {}) | ({"ztsnr": empty} if zero_snr else {})


def _flat(name: str) -> str:
    """Return a name in CLIP's text model without its outer module, which some versions have."""
    return name.removeprefix("text_model.")
