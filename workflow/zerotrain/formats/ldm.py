"""ldm: a whole model in one file in its original layout, as ComfyUI, A1111 and kohya open it.

Beside it, in config/, lie the small files that diffusers' from_single_file needs without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zerotrain.artifact import link_or_copy
from zerotrain.errors import PipelineError
from zerotrain.families.pipelines import pipeline_class
from zerotrain.formats import Options, sdxl_names
from zerotrain.formats.modelspec import architecture, prediction
from zerotrain.formats.tensors import Stored, hold_to, write_tensors
from zerotrain.formats.weights import ExportedWeights

FILE = "model.safetensors"
CONFIG = "config"


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the file and config/; sha256 of files by name."""
    tensors = _layout(weights)(weights)
    said = weights.lineage() | architecture(weights)
    for name in weights.descriptions():
        link_or_copy(weights.artifact.path(name), out / CONFIG / name)
    known = {f"{CONFIG}/{n}": weights.artifact.files[n]["sha256"] for n in weights.descriptions()}
    return known | {FILE: write_tensors(out / FILE, tensors, options.dtype, said)}


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the file with from_single_file, offline, and compare each part bit by bit."""
    pipeline = load_single_file(weights.family.pipeline, out / FILE, out / CONFIG, options.dtype)  # type: ignore[attr-defined]
    for part in weights.family.classes:
        expected = {_flat(n): t for n, t in weights.tensors(part).items()}
        loaded = {_flat(n): t for n, t in getattr(pipeline, part).state_dict().items()}
        hold_to(expected, loaded, options.dtype, out / FILE)


def load_single_file(pipeline: str, file: Path, config: Path, dtype: torch.dtype) -> object:
    """A pipeline of diffusers from one file in the original layout, without a network.

    Args:
        pipeline: Name of its class.
        file: The file.
        config: Folder in diffusers' layout; its weights, if there are any, are not read.
        dtype: Type to load.
    """
    found: object = pipeline_class(pipeline).from_single_file(
        str(file), config=str(config), local_files_only=True, dtype=dtype
    )
    return found


def sdxl(weights: ExportedWeights) -> dict[str, Stored]:
    """SDXL's tensors under their original names."""
    _refuse_equal_widths(weights)
    unet = sdxl_names.unet_names(weights.config("unet"))
    vae = sdxl_names.vae_names(weights.config("vae"))
    return {
        **{sdxl_names.UNET + unet(n): t for n, t in weights.tensors("unet").items()},
        **{sdxl_names.VAE + vae(n): _convolution(n, t) for n, t in weights.tensors("vae").items()},
        **{sdxl_names.CLIP + _flat(n): t for n, t in weights.tensors("text_encoder").items()},
        **_open_clip({_flat(n): t for n, t in weights.tensors("text_encoder_2").items()}),
        **_marks(weights),
    }


LAYOUTS: Mapping[str, Callable[[ExportedWeights], dict[str, Stored]]] = {"sdxl": sdxl}
"""Families whose original layout is known."""


def _layout(weights: ExportedWeights) -> Callable[[ExportedWeights], dict[str, Stored]]:
    if weights.family.name not in LAYOUTS:
        raise PipelineError(
            f"--to ldm: the original layout of {weights.family.name} is not known here",
            hint=f"it is that of {', '.join(LAYOUTS)}; single_file and diffusers are for all",
        )
    return LAYOUTS[weights.family.name]


def _refuse_equal_widths(weights: ExportedWeights) -> None:
    first, second = (weights.config(part) for part in ("text_encoder", "text_encoder_2"))
    if first["hidden_size"] == second["hidden_size"]:
        raise PipelineError(
            f"--to ldm: both text encoders of {weights.folder} are {first['hidden_size']} wide, "
            "and those who read the file tell them apart by their width",
            hint="a real SDXL has 768 and 1280; of this one, --to diffusers or single_file",
        )


def _open_clip(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The second text encoder's: q, k and v in one tensor, and the projection transposed."""
    found = {}
    for name, stored in tensors.items():
        if ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            layer, _, kind = name.partition(".self_attn.q_proj.")
            parts = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            number = layer.rsplit(".", 1)[-1]
            new = f"transformer.resblocks.{number}.attn.in_proj_{kind}"
            found[new] = _joined(parts)
        else:
            new = sdxl_names.open_clip_name(name)
            found[new] = _transposed(stored) if new == "text_projection" else stored
    return {sdxl_names.OPEN_CLIP + name: stored for name, stored in found.items()}


def _joined(parts: list[Stored]) -> Stored:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored(parts[0].dtype, shape, lambda: torch.cat([part.read() for part in parts]))


def _transposed(stored: Stored) -> Stored:
    return Stored(stored.dtype, stored.shape[::-1], lambda: stored.read().T.contiguous())


def _convolution(name: str, stored: Stored) -> Stored:
    """The autoencoder's attention is made of convolutions there."""
    if ".attentions." not in name or len(stored.shape) != 2:
        return stored
    shape = (*stored.shape, 1, 1)
    return Stored(stored.dtype, shape, lambda: stored.read().reshape(shape))


def _marks(weights: ExportedWeights) -> dict[str, Stored]:
    """Empty tensors by whose names ComfyUI and A1111 know what the model predicts."""
    kind, zero_snr = prediction(weights)
    empty = Stored(torch.float32, (0,), lambda: torch.empty(0))
    return ({"v_pred": empty} if kind == "v" else {}) | ({"ztsnr": empty} if zero_snr else {})


def _flat(name: str) -> str:
    """Names of CLIP's text model with or without its outer module, as versions differ."""
    return name.removeprefix("text_model.")
