"""Checks that the files of a DeepSpeed checkpoint are from one save of one training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.artifact.tensor_file import same_bits
from zerotrain.state.external import records
from zerotrain.state.external.ranks import Rank, count_updates, layout_error, loss_scale, section
from zerotrain.state.external.weight_files import SafeTensors
from zerotrain.state.position import MASTER

if TYPE_CHECKING:
    from zerotrain.state.external.partitions import Partitions

COUNTS = ("global_steps", "skipped_steps", "global_samples")
"""Counts that are equal in every rank's model file."""


def check_ranks(ranks: list[Rank], layout: Partitions) -> int:
    """Compare every rank's counts and settings with rank 0's.

    Returns:
        The optimizer's step.

    Raises:
        PipelineError: a file differs from rank 0's; the message names the first, and both values.
    """
    first = {what: value for _, what, value in _settings(ranks[0], layout)}
    for rank in ranks[1:]:
        for path, what, value in _settings(rank, layout):
            if value != first.get(what, "none of it"):
                raise layout_error(
                    path, f"{what} {value}, rank 0's files have {first.get(what, 'none of it')}"
                )
    return _optimizer_step(ranks[0], layout)


def check_weights(tag: Path, ranks: list[Rank], layout: Partitions, step: int) -> list[str]:
    """Compare the master weights with the weights in the model files, part by part, in their dtype.

    Stages 1 and 2 save every weight in the model file. Stage 3, as written by DeepSpeed 0.19, saves
    none: the check uses the names inside the files, the settings, and the gathered weights that
    HF's Trainer saves next to the tag.

    Args:
        tag: The folder; its name may contain the step.
        ranks: Every rank's files.
        layout: Finds a parameter's parts in them.
        step: The optimizer's step.

    Returns:
        Sentences for the user, on what was not compared or has two different counts.

    Raises:
        PipelineError: a part differs; the message names its optimizer file, and the model file.
    """
    model, updates = ranks[0].model, count_updates(ranks[0].model)
    steps = f" (the model file is of step {updates}, the optimizer files of step {step})"
    compared = 0
    held = {rank.model_path: rank.model.get("module") or {} for rank in ranks}
    if not _is_quantized(model):
        for path, module in [*held.items(), *_gathered_weights(tag)]:
            for name, weights in module.items():
                if name in layout.place and isinstance(weights, torch.Tensor) and weights.numel():
                    compared += 1
                    _check_parts(path, name, weights, layout, steps if step != updates else "")
    notes = []
    if step != updates:
        notes.append(f"the engine counts {updates} updates, the optimizer {step}: both are kept")
    named = re.fullmatch(r"global_step(\d+)", tag.name)
    if named and int(named[1]) != model["global_steps"]:
        notes.append(
            f"the folder's name says step {named[1]}, its files {model['global_steps']}: the files "
            "are believed"
        )
    if not compared and any(records.saved_name(rank.path) is None for rank in ranks[1:]):
        notes.append(
            "exchanged ranks would not be noticed: the optimizer files hold no names, and the "
            "model files no weights to compare with"
        )
    every = {path for rank in ranks for path in (rank.path, rank.model_path)}
    if bare := sorted(path.name for path in every if not records.has_checksums(path)):
        notes.append(f"damage in {', '.join(bare)} would not be noticed: saved without checksums")
    return notes


def _is_quantized(model: dict[str, Any]) -> bool:
    """Return whether ZeRO++ gathers weights rounded to 8 bits, which differ from the masters."""
    zero = section(section(model, "ds_config"), "zero_optimization")
    return bool(
        zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights")
    )


def _gathered_weights(tag: Path) -> list[tuple[Path, Mapping[str, torch.Tensor]]]:
    """Map the 16-bit weights that HF's Trainer gathers next to the tag at the same step."""
    if not (tag.parent / "trainer_state.json").is_file():
        return []
    return [(path, SafeTensors([path])) for path in sorted(tag.parent.glob("model*.safetensors"))]


def _check_parts(
    path: Path, name: str, weights: torch.Tensor, layout: Partitions, steps: str
) -> None:
    flat, start = weights.detach().reshape(-1), 0
    for owner, part in layout.parts(name, MASTER):
        own = flat[start : start + part.numel()]
        start += part.numel()
        if not same_bits(own, part.detach().reshape(-1)):
            raise layout_error(owner.path, f"its part of {name} differs from {path.name}'s{steps}")
    if start != flat.numel():
        raise layout_error(path, f"{name} has {flat.numel()} elements, the optimizer files {start}")


def _settings(rank: Rank, layout: Partitions) -> Iterator[tuple[Path, str, Any]]:
    """Yield the values that all ranks have in common: file, name, and value."""
    groups = layout.param_groups(rank)
    yield rank.path, "optimizer step", _optimizer_step(rank, layout)
    yield rank.path, "loss scale", loss_scale(rank.optimizer)
    yield rank.path, "number of param groups", len(groups)
    for number, group in enumerate(groups):
        for key, value in group.items():
            yield rank.path, f"param group {number} has {key}", _plain(value)
    for key in COUNTS:
        yield rank.model_path, key.replace("_", " "), rank.model.get(key)
    shapes = [{n: list(s) for n, s in group.items()} for group in rank.model["param_shapes"] or ()]
    yield rank.model_path, "param_shapes", shapes
    for key, value in _leaves(section(rank.model, "ds_config"), ()):
        yield rank.model_path, key, value


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield a configuration's values, except for paths, which may differ between machines."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif not (isinstance(value, str) and "/" in value):
        yield f"{'.'.join(keys)} in its ds_config:", value


def _plain(value: Any) -> Any:
    """Convert a value to lists and numbers: a learning rate may be a tensor, betas a tuple."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _optimizer_step(rank: Rank, layout: Partitions) -> int:
    """Return the optimizer's step count, which some keep by group; else the engine's."""
    for kept in (*layout.states(rank), *layout.param_groups(rank)):
        if kept.get("step") is not None:
            return int(kept["step"])
    started = any(layout.states(rank))
    return count_updates(rank.model) if started else 0
