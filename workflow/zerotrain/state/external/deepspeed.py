"""Checkpoints of DeepSpeed's engine (engine.save_checkpoint), with any stage and world size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from zerotrain.state.external import numbered, rank_consistency
from zerotrain.state.external.checkpoint import ExternalCheckpoint, external_state
from zerotrain.state.external.consistency import read_number
from zerotrain.state.external.left_out import list_keys
from zerotrain.state.external.partitions import Partitions, Zero3, Zero12, frozen_pieces
from zerotrain.state.external.ranks import (
    Rank,
    layout_error,
    loss_scale,
    model_path,
    read_model,
    read_ranks,
    section,
    version,
)
from zerotrain.state.external.torch_optimizer import TorchOptimizer
from zerotrain.state.position import ADAM_SLOTS, MASTER


def open_deepspeed(
    tag: Path, *, trust_pickle: bool = False, parameter_names: Sequence[str] | None = None
) -> ExternalCheckpoint:
    """Open a tag folder, such as global_step100/ or accelerate's pytorch_model/.

    Args:
        tag: The folder of the ranks' files.
        trust_pickle: Whether pickles may name any class and run its code.
        parameter_names: The trained parameters in the optimizer's order; needed only for stage 0.

    Raises:
        PipelineError: the layout is unknown, or files do not belong together.
    """
    ranks = read_ranks(tag, trust_pickle=trust_pickle)
    if not ranks:
        return _open_stage0(tag, trust_pickle, parameter_names)
    model = ranks[0].model
    shapes = model.get("param_shapes")
    if not shapes:
        raise layout_error(tag, f"no param_shapes in its model file (DeepSpeed {version(model)})")
    layout = _layout(ranks, shapes)
    step = rank_consistency.check_ranks(ranks, layout)
    lost = rank_consistency.check_weights(tag, ranks, layout, step)
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


def _open_stage0(
    tag: Path, trust_pickle: bool, parameter_names: Sequence[str] | None
) -> ExternalCheckpoint:
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
        parameter_names,
        step=model["global_steps"],
        samples=count_samples(model),
        engine=describe_engine(model, stage=0),
        loss_scale=None,
        tied=tied,
        lost=list_keys(model, path),
    )
