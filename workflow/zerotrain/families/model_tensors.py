"""What to write of a model: trained tensors, and the base's own where nothing was trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards

from zerotrain.artifact import write_json
from zerotrain.errors import PipelineError
from zerotrain.families import ROOT
from zerotrain.tensor_file import open_tensors, write_tensor_file

if TYPE_CHECKING:
    from zerotrain.families import TextFamily

MAX_SHARD_SIZE = "10GB"


def tensor_sources(
    model: torch.nn.Module,
    shapes: Mapping[str, list[int]],
    frozen: Callable[[str], bool],
    config: Path,
) -> dict[str, str | None]:
    """The trained tensor that fills each of the model's; None where the base's own does.

    Raises:
        PipelineError: naming the first tensor that the model or the training lacks, or whose shape
            differs between them.
    """
    held = model.state_dict(keep_vars=True)
    trained = {id(held[name]): name for name in shapes if name in held}
    # Tied weights are one parameter under several names, of which training knows one.
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
    """The tensors to write, each by one of the model's own names."""

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
        """The tensor of that name."""
        source = self._sources[name]
        found: torch.Tensor = (
            self._base[name].get_tensor(name) if source is None else self._read(source)
        )
        return found


def without_memory(model: torch.nn.Module) -> torch.nn.Module:
    """A model on the meta device on the CPU instead, each parameter a view of one zero.

    An adapter then gets values, which it would not have on the meta device.
    """
    for parameter in list(model.parameters()):
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        # In its place, so that ties stay.
        torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
            parameter, torch.nn.Parameter(stand_in)
        )
    return model


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that the model's library writes: of tied ones, its first name alone."""
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
    """Write a model's tensors as safetensors, in shards with an index where one is too small.

    Args:
        model: The model, on the meta device.
        read: Gives a tensor when its turn comes; only one is held.
        dtype: Type to write; counters and indices keep theirs.
        folder: Folder to write into.
        stem: What the files are called before their numbers.
        max_shard_size: A larger file becomes several; 10GB by default.
        metadata: What the files' headers say beside their tensors.

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


def store_by_own_names(family: TextFamily, folder: Path, source: str) -> None:
    """Write a language model's files anew unless they name its tensors as its class does.

    A model that was saved without its head loads, yet its names lack the class's prefix, and
    buffers of the head are missing.

    Args:
        family: The model's family.
        folder: Of the model; files are replaced, never written to: they may be links.
        source: What messages call it.

    Raises:
        PipelineError: a weight is missing, which loading would draw at random.
    """
    files = sorted(folder.glob("model*.safetensors*"))  # also their index
    held = open_tensors(path for path in files if path.suffix == ".safetensors")
    if stored_tensors(family.empty_model(folder)).keys() <= held.keys():
        return
    types = (held[name].get_tensor(name).dtype for name in held)
    dtype = functools.reduce(torch.promote_types, types)
    model, found = getattr(transformers, family.classes[ROOT]).from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    parameters = dict(model.named_parameters())
    if missing := sorted(found["missing_keys"] & parameters.keys()):
        raise PipelineError(
            f"{source}: no tensor {missing[0]}, which the model's config.json asks for",
            hint="complete the folder, or download the model again",
        )
    for path in files:
        path.unlink()
    write_model(model, model.state_dict().__getitem__, dtype, folder, "model")
