"""Checkpoints of DeepSpeed's engine (engine.save_checkpoint), with any stage and world size.

Their files are checked to be from one save of one training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.artifact.tensor_file import same_bits
from zerotrain.state.external import numbered, pickles
from zerotrain.state.external.checkpoint import ExternalCheckpoint, TorchOptimizer, external_state
from zerotrain.state.external.consistency import read_number
from zerotrain.state.external.other_files import list_keys
from zerotrain.state.external.partitions import Partitions, Zero3, Zero12, frozen_pieces
from zerotrain.state.external.ranks import (
    Rank,
    count_updates,
    layout_error,
    loss_scale,
    model_path,
    read_model,
    read_ranks,
    section,
    version,
)
from zerotrain.state.external.weight_files import SafeTensors
from zerotrain.state.position import ADAM_SLOTS, MASTER

if TYPE_CHECKING:
    from zerotrain.state.external.partitions import Partitions


def open_deepspeed(tag: Path, *, trust_pickle: bool = False) -> ExternalCheckpoint:
    """Open a tag folder, such as global_step100/ or accelerate's pytorch_model/.

    Args:
        tag: The folder of the ranks' files.
        trust_pickle: Whether pickles may name any class and run its code.

    Raises:
        PipelineError: the layout is unknown, or files do not belong together.
    """
    ranks = read_ranks(tag, trust_pickle=trust_pickle)
    if not ranks:
        return _open_stage0(tag, trust_pickle)
    model = ranks[0].model
    shapes = model.get("param_shapes")
    if not shapes:
        raise layout_error(tag, f"no param_shapes in its model file (DeepSpeed {version(model)})")
    layout = _layout(ranks, shapes)
    step = check_ranks(ranks, layout)
    lost = check_weights(tag, ranks, layout, step)
    lost += list_keys(model, ranks[0].model_path)
    slots = set.intersection(*(set(s) for rank in ranks for s in layout.states(rank)))
    adam = slots.issuperset(ADAM_SLOTS)
    if extra := sorted(slots - {*ADAM_SLOTS, "step"}):
        lost.append(f"the optimizer's {', '.join(extra)}: only Adam's two moments are kept")
    base_groups = layout.param_groups(ranks[0])
    groups, unlike = numbered.named_groups(base_groups, layout.group_names(shapes))
    if not base_groups:
        lost.append("learning rate, betas and weight decay: an elastic checkpoint has none")
    frozen = frozen_shapes(model, shapes)
    trained = {name: list(shape) for group in shapes for name, shape in group.items()}

    def pieces_of_frozen(name: str) -> Iterable[torch.Tensor]:
        if isinstance(layout, Zero3):
            return frozen_pieces([rank.model for rank in ranks], name, frozen[name])
        held: torch.Tensor = (model.get("frozen_param_fragments") or model["module"])[name]
        return (held,)

    return ExternalCheckpoint(
        folder=tag,
        position=external_state(
            step=model["global_steps"],
            samples=count_samples(model),
            optimizer="adamw" if adam else "",
            optimizer_step=step,
            param_groups=groups,
            engine=describe_engine(
                model,
                stage=3 if isinstance(layout, Zero3) else ranks[0].optimizer.get("zero_stage"),
                prefixed=ranks[0].path.name.startswith("bf16_"),
            ),
            loss_scale=loss_scale(ranks[0].optimizer),
        ),
        shapes=trained,
        slots=[MASTER, *(ADAM_SLOTS if adam else ())],
        pieces=layout.pieces,
        frozen=frozen,
        frozen_pieces=pieces_of_frozen,
        tied={a: n for a, n in (model.get("shared_params") or {}).items() if n in trained},
        lost=lost + unlike,
    )


def _layout(ranks: list[Rank], shapes: list[dict[str, torch.Size]]) -> Partitions:
    for layout in (Zero12, Zero3):
        if layout.FLAT_GROUPS not in ranks[0].optimizer:
            continue
        for rank in ranks:
            if (count := len(rank.optimizer[layout.FLAT_GROUPS])) != len(shapes):
                raise layout_error(
                    rank.path, f"{count} flat groups, the model file has names for {len(shapes)}"
                )
        return layout(ranks, shapes)
    raise layout_error(
        ranks[0].path,
        f"a layout that is not known, of DeepSpeed {version(ranks[0].model)}: it holds "
        f"{', '.join(sorted(ranks[0].optimizer))}",
    )


def frozen_shapes(model: dict[str, Any], shapes: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the frozen parameters: stages 2 and 3 save them separately, stage 1 in the module."""
    if model.get("frozen_param_fragments"):
        return {name: list(shape) for name, shape in model["frozen_param_shapes"].items()}
    others = {*model.get("buffer_names", ()), *(model.get("shared_params") or ())}
    others.update(name for group in shapes for name in group)
    return {
        name: list(tensor.shape)
        for name, tensor in (model.get("module") or {}).items()
        if name not in others and isinstance(tensor, torch.Tensor) and tensor.numel()
    }


def count_samples(model: dict[str, Any]) -> int:
    """Return the number of samples seen: the engine's count, or steps times the batch."""
    batch = section(model, "ds_config").get("train_batch_size")
    samples = model.get("global_samples")
    if samples is None and isinstance(batch, int):
        samples = model["global_steps"] * batch
    return int(samples or 0)


def describe_engine(
    model: dict[str, Any], *, stage: int | None = None, prefixed: bool = False
) -> dict[str, Any]:
    """Describe the engine of a checkpoint, from the configuration that DeepSpeed saves with it.

    Args:
        model: A model file.
        stage: The ZeRO stage, if the files contain it; None: the configuration's.
        prefixed: Whether the optimizer files have the prefix bf16.
    """
    config = section(model, "ds_config")  # a path, if it was given as one
    zero = section(config, "zero_optimization")
    offload = {
        part: section(zero, f"offload_{part}").get("device", "none") if config else "unknown"
        for part in ("optimizer", "param")
    }
    precisions = [p for p in ("bf16", "fp16") if section(config, p).get("enabled") is True]
    mixed = "bf16" if prefixed else next(iter(precisions), "no" if config else "unknown")
    batch = (model.get("global_samples") or 0) / max(model["global_steps"], 1)
    return {
        "preset": "",
        "engine": "deepspeed",
        "zero_stage": int(read_number(zero.get("stage", 1), "ds_config", "stage"))
        if stage is None
        else stage,
        "offload_optimizer": offload["optimizer"],
        "offload_param": offload["param"],
        "world_size": int(model.get("dp_world_size") or 1),
        "mixed_precision": mixed,
        "global_batch_size": math.floor(batch),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", 1),
        "deepspeed": version(model),
    }


def _open_stage0(tag: Path, trust_pickle: bool) -> ExternalCheckpoint:
    """Open a stage 0 checkpoint: one file with the module and a plain torch optimizer."""
    path = model_path(tag, None)
    model = read_model(path, trust_pickle=trust_pickle)
    optimizer, module = model.get("optimizer"), model.get("module")
    if not isinstance(module, dict):
        raise layout_error(path, f"no module in it (DeepSpeed {version(model)})")
    if not isinstance(optimizer, dict) or "param_groups" not in optimizer:
        raise layout_error(
            path,
            f"neither optimizer files next to it nor a torch optimizer in it (DeepSpeed "
            f"{version(model)}); it holds {', '.join(map(str, optimizer or ['no optimizer']))}",
        )
    tied = numbered.find_ties(module)
    others = {*tied, *(model.get("buffer_names") or ())}
    weights = {name: tensor for name, tensor in module.items() if name not in others}
    return numbered.open_numbered(
        tag,
        weights,
        TorchOptimizer(optimizer),
        step=model["global_steps"],
        samples=count_samples(model),
        engine=describe_engine(model, stage=0),
        loss_scale=None,
        tied=tied,
        lost=list_keys(model, path),
    )


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
    if not compared and any(pickles.saved_name(rank.path) is None for rank in ranks[1:]):
        notes.append(
            "exchanged ranks would not be noticed: the optimizer files hold no names, and the "
            "model files no weights to compare with"
        )
    every = {path for rank in ranks for path in (rank.path, rank.model_path)}
    if bare := sorted(path.name for path in every if not pickles.has_checksums(path)):
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
