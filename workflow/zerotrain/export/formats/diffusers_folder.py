"""diffusers: a whole pipeline's folder, with the trained part in another type or other shards."""

from __future__ import annotations

from pathlib import Path

from zerotrain.artifact import link_or_copy
from zerotrain.export.formats import Options, diffusers_lora
from zerotrain.export.formats.tensors import LazyTensor, check_finite, verify_tensors
from zerotrain.export.formats.weights import ExportedWeights
from zerotrain.models.families.model_tensors import stored_tensors


def write(weights: ExportedWeights, options: Options, out: Path) -> dict[str, str]:
    """Write the folder, link untrained parts, and return the sha256 of files by name."""
    if weights.adapter is None:
        return write_folder(weights, weights.trained, options, out)
    linked = link(weights, [*weights.base_files(), *weights.trained_files()], out)
    return linked | diffusers_lora.write(weights, options, out)


def verify(weights: ExportedWeights, options: Options, out: Path) -> None:
    """Load the trained part, or the adapter, with the library and compare it bit by bit."""
    if weights.adapter is not None:
        diffusers_lora.verify(weights, options, out)
    else:
        verify_folder(weights, weights.trained, options, out)


def write_folder(
    weights: ExportedWeights, trained: dict[str, LazyTensor], options: Options, out: Path
) -> dict[str, str]:
    """Write a whole model whose trained part has these tensors."""
    linked = link(weights, weights.base_files(), out)
    written = weights.family.save_model(
        weights.folder,
        {name: list(tensor.shape) for name, tensor in trained.items()},
        lambda name: check_finite(name, trained[name].read(), options.dtype),
        options.dtype,
        out,
        max_shard_size=options.max_shard_size,
        metadata=weights.lineage(),
    )
    return linked | written


def verify_folder(
    weights: ExportedWeights, trained: dict[str, LazyTensor], options: Options, out: Path
) -> None:
    """Load the part with the library and compare it with these tensors."""
    loaded = stored_tensors(weights.family.load_model(out, options.dtype))
    verify_tensors(trained, loaded, options.dtype, out)


def link(weights: ExportedWeights, names: list[str], out: Path) -> dict[str, str]:
    """Link or copy files of the weights, and return their sha256 by name."""
    for name in names:
        link_or_copy(weights.artifact.path(name), out / name)
    return {name: weights.artifact.files[name]["sha256"] for name in names}
