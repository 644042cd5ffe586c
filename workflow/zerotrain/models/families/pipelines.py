"""Pipelines of diffusers: imported and loaded without noise in the log, and placed on a device."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from zerotrain.errors import PipelineError
from zerotrain.machine.device import free_device_bytes
from zerotrain.machine.host import gib
from zerotrain.models.families import adapters
from zerotrain.models.families.prompt_tokens import set_prompt_tokenizers
from zerotrain.models.pretrained import from_pretrained, read_config


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries' progress bars and warnings from the terminal and the log."""
    libraries: tuple[Any, ...] = (diffusers_logging, transformers_logging)
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)


def pipeline_class(name: str) -> Any:
    """Return a pipeline's class by its name in diffusers."""
    # The import warns that image processors, which are not used here, need torchvision.
    with quiet_libraries():
        return getattr(diffusers, name)


def load_pipeline(
    name: str, folder: Path, dtype: torch.dtype | dict[str, torch.dtype], **parts: Any
) -> Any:
    """Load a pipeline, only from safetensors; a part given as None stays on disk.

    A part that is null in the folder's model_index.json is passed as None: diffusers accepts that
    for some parts only as an argument. An adapter next to the parts is applied to the denoiser.
    """
    index = read_config(folder / "model_index.json")
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    # The libraries' progress bars would fill a log with one line per file.
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = from_pretrained(
        pipeline_class(name), folder, dtype=dtype, use_safetensors=True, **{**absent, **parts}
    )
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if denoiser is not None:
        adapters.apply(denoiser, folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class PipelineEncoders:
    """Autoencoder and text encoders of a base model, used through the pipeline's own code.

    Only the kind in use is on the device: both together may not fit.

    Args:
        name: The pipeline's class.
        base: Folder of the base model.
        device: Device to encode on.
        dtype: Type that text encoders compute in; the autoencoder, which is small, in float32.
        trained_part: The part that stays on disk.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        device: str,
        dtype: torch.dtype,
        trained_part: str = "transformer",
        **arguments: Any,
    ) -> None:
        types = {"default": dtype, "vae": torch.float32}
        self.pipeline = load_pipeline(name, base, types, **{trained_part: None}, **arguments)
        self.tokenizers = set_prompt_tokenizers(self.pipeline)
        self._device = device

    @property
    def vae(self) -> Any:
        """The autoencoder, on the device."""
        self._put_to_work(lambda name: name == "vae")
        return self.pipeline.vae

    @property
    def prompt_pipeline(self) -> Any:
        """The pipeline, with its text encoders on the device."""
        self._put_to_work(lambda name: name != "vae")
        return self.pipeline

    def _put_to_work(self, works: Callable[[str], bool]) -> None:
        # Parts that leave the device are moved first.
        for name, part in sorted(self.pipeline.components.items(), key=lambda item: works(item[0])):
            if isinstance(part, torch.nn.Module):
                part.to(self._device if works(name) else "cpu")


def channel_statistics(vae: Any, device: torch.device) -> list[torch.Tensor]:
    """Return mean and deviation of each channel of latents, [1, C, 1, 1], by config.json."""
    return [
        torch.tensor(values, device=device).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    ]


@torch.inference_mode()
def latents_of(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode pixels [B, 3, H, W] in [-1, 1] to the posterior's mode, scaled float32 [B, C, h, w].

    This inverts what a pipeline with an AutoencoderKL does before it decodes.
    """
    latents = vae.encode(pixels.to(vae.device)).latent_dist.mode()
    scaled: torch.Tensor = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
    return scaled.float().cpu()


def prompt_length(pipeline: Any, tokenizer: Any, asked: int | None, most: int) -> int:
    """Return the length that a prompt is cut or padded to, in encoding and sampling.

    Args:
        pipeline: The pipeline, whose default applies if `asked` is None.
        tokenizer: The tokenizer that the length is for; None if the base has none.
        asked: cache.max_sequence_length.
        most: The pipeline's own limit.

    Raises:
        PipelineError: `asked` is more than tokenizer and pipeline take.
    """
    if tokenizer is not None:
        most = min(most, tokenizer.model_max_length)
    if asked is not None and asked > most:
        raise PipelineError(
            f"cache.max_sequence_length: {asked}, and the base takes at most {most} tokens",
            hint=f"set it to {most} or less, or remove it",
        )
    default = inspect.signature(type(pipeline).__call__).parameters["max_sequence_length"].default
    return asked or min(default, most)


WORKING = 4 * 2**30
"""Bytes that are kept free for activations: SDXL's autoencoder needs most, at 1024 px in
float32."""


class Placement(StrEnum):
    """The parts that are on the device at a time."""

    WHOLE = "all of it"
    PARTS = "the part at work"
    LAYERS = "the layer at work"


def sampling_dtype(device: str) -> torch.dtype:
    """Return the type of models on a device for sampling and measuring images."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def choose_placement(sizes: Sequence[int], free: int | None) -> Placement:
    """Choose the fastest placement that fits.

    Args:
        sizes: Bytes of each part.
        free: Bytes of the device that may be used; None if it has no separate memory.
    """
    if free is None or sum(sizes) + WORKING <= free:
        return Placement.WHOLE
    return Placement.PARTS if max(sizes) + WORKING <= free else Placement.LAYERS


def place_pipeline(pipeline: Any, device: str) -> Any:
    """Place a pipeline of diffusers on the device: all of it, or a part or a layer at a time."""
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    free = free_device_bytes(device)
    if free is not None:
        # Images are decoded one at a time, so that WORKING suffices for any number of them.
        pipeline.vae.enable_slicing()
    match _chosen(type(pipeline).__name__, [_size(part) for part in parts], free):
        case Placement.WHOLE:
            pipeline.to(device)
        case Placement.PARTS:
            pipeline.enable_model_cpu_offload(device=device)
        case Placement.LAYERS:
            pipeline.enable_group_offload(**_by_layer(device))
    return pipeline


def place_model(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Place a single model on the device: all of it, or a layer at a time."""
    placement = _chosen(type(model).__name__, [_size(model)], free_device_bytes(device))
    if placement is Placement.WHOLE:
        return model.to(device)
    apply_group_offloading(model, **_by_layer(device))
    return model


def _by_layer(device: str) -> dict[str, Any]:
    """Return diffusers' arguments; on CUDA the next layer is copied while one computes."""
    return {
        "onload_device": torch.device(device),
        "offload_type": "leaf_level",
        "use_stream": device == "cuda",
        "low_cpu_mem_usage": True,  # else all of it would be copied to pinned memory
    }


def _chosen(name: str, sizes: Sequence[int], free: int | None) -> Placement:
    found = choose_placement(sizes, free)
    if found is not Placement.WHOLE:
        print(
            f"{name}: {gib(sum(sizes))} of weights, and {gib(free or 0)} of the device are free: "
            f"{found} is there at a time, the rest waits in the host's memory",
            file=sys.stderr,
        )
    return found


def _size(model: torch.nn.Module) -> int:
    held = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
