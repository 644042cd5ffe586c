"""The tensors of a model to write: trained ones, and the base's for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from zerotrain.artifact import write_json
from zerotrain.artifact.tensor_file import open_tensors, write_tensor_file
from zerotrain.errors import PipelineError

MAX_SHARD_SIZE = "10GB"


def tensor_sources(
    model: torch.nn.Module,
    shapes: Mapping[str, list[int]],
    frozen: Callable[[str], bool],
    config: Path,
) -> dict[str, str | None]:
    """Return the trained tensor for each of the model's; None for those that the base fills.

    Raises:
        PipelineError: the model or the training lacks a tensor, or its shape differs between them;
            the first is named.
    """
    held = model.state_dict(keep_vars=True)
    trained = {id(held[name]): name for name in shapes if name in held}
    # Tied weights are one parameter under several names, of which training knows only one.
    found = {n: n if n in shapes else trained.get(id(tensor)) for n, tensor in held.items()}
    left = {id(tensor) for name, tensor in held.items() if frozen(name)}
    for name in sorted(held.keys() | shapes.keys()):
        buffer = name in held and not isinstance(held[name], torch.nn.Parameter)
        source = found.get(name, name)
        if source is None and (buffer or id(held.get(name)) in left):
            continue
        expected = tuple(held[name].shape) if name in held else "absent"
        given = tuple(shapes[source]) if source is not None and source in shapes else "absent"
        if expected != given:
            raise PipelineError(
                f"{name}: {given} in the trained tensors, {expected} by {config}",
                hint="export the weights with the base model that the training started from",
            )
    return found


class ModelTensors:
    """The tensors to write, by the model's own names."""

    def __init__(
        self,
        folder: Path,
        sources: Mapping[str, str | None],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._sources = sources
        self._read = read
        kept = None in sources.values()
        self._base = open_tensors(sorted(folder.glob("*.safetensors"))) if kept else {}

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor with this name."""
        source = self._sources[name]
        found: torch.Tensor = (
            self._base[name].get_tensor(name) if source is None else self._read(source)
        )
        return found


def without_memory(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model from the meta device to the CPU, each parameter as a view of a single zero.

    An adapter then gets values, which it has not on the meta device.
    """
    for parameter in list(model.parameters()):
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        # Swapped in place, which keeps ties.
        torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
            parameter, torch.nn.Parameter(stand_in)
        )
    return model


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that the model's library writes; tied ones only under their first name."""
    held = model.state_dict(keep_vars=True)
    tied = getattr(model, "all_tied_weights_keys", {})
    return {
        name: tensor
        for name, tensor in held.items()
        if name not in tied or held[name] is not held.get(tied[name])
    }


def write_model(
    model: torch.nn.Module,
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    stem: str,
    *,
    max_shard_size: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write a model's tensors as safetensors, in shards with an index if one file is too large.

    Args:
        model: The model, on the meta device.
        read: Returns a tensor when it is written; only one is held.
        dtype: Type to write; counters and indices keep theirs.
        folder: Folder to write into.
        stem: Name of the files before their numbers.
        max_shard_size: Larger files are split into shards; 10GB by default.
        metadata: Further entries of the files' headers.

    Returns:
        sha256 of each file of tensors, by its name.
    """
    expected = stored_tensors(model)
    types = {n: dtype if t.is_floating_point() else t.dtype for n, t in expected.items()}
    plan = split_torch_state_dict_into_shards(
        {n: torch.empty(t.shape, dtype=types[n], device="meta") for n, t in expected.items()},
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size or MAX_SHARD_SIZE,
    )
    known = {}
    for file, names in plan.filename_to_tensors.items():
        layout = {name: (types[name], expected[name].shape) for name in sorted(names)}
        known[file] = write_tensor_file(folder / file, layout, read, metadata)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    return known
