"""DeepSpeed's universal checkpoint: one folder per parameter; any stage and world size loads it.

    <folder>/latest_universal                     the tag
    <folder>/<tag>/zero/<parameter>/<slot>.pt     fp32, exp_avg, exp_avg_sq, step
    <folder>/<tag>/zero/optimizer_state.pt        param groups and step
    <folder>/<tag>/mp_rank_00_model_states.pt     counters; stage 3 expects it under another name

An engine loads it with ``{"checkpoint": {"load_universal": true}}``. Source: DeepSpeed 0.19.8
checkpoint/ds_to_universal.py (writes), runtime/base_optimizer.py and runtime/zero/stage3.py (read).
"""

from __future__ import annotations

import math
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.errors import PipelineError
from zerotrain.state.external.ranks import model_path
from zerotrain.state.position import ADAM_SLOTS, EMA_SLOT, MASTER

if TYPE_CHECKING:
    from zerotrain.state.position import Source


SUB_GROUP_ELEMENTS = 10**9
"""DeepSpeed's default `sub_group_size`."""


def describe_omissions(source: Source) -> list[str]:
    """Return sentences on values that DeepSpeed does not load from a universal checkpoint."""
    position = source.position
    sentences = []
    if differing := _list_differing(position.param_groups):
        sentences.append(
            f"{', '.join(differing)} of {len(position.param_groups)} param groups, where stage 3 "
            "loads it: its loader knows values of one group alone, so each group keeps what the "
            "loading program gives it; stages 1 and 2 take them from here"
        )
    if _has_several_sub_groups(source):
        sentences.append(
            "the step, where stage 3 loads it for torch.optim.AdamW: its loader shares one counter "
            "among the groups, so AdamW ends with `state_steps`; DeepSpeed's own Adams continue"
        )
    if position.loss_scale is not None:
        sentences.append("the fp16 loss scale: DeepSpeed begins with its configuration's")
    if EMA_SLOT in source.slots:
        sentences.append("the averaged weights (ema): DeepSpeed keeps none")
    return sentences


def write_universal(folder: Path, source: Source, *, tag: str | None = None) -> Path:
    """Write a universal checkpoint, tensor by tensor.

    DeepSpeed loads trained weights, moments, steps and param groups from it, but no frozen weights,
    buffers or loss scale: those come from the model and the configuration. Its stage 3 loader gives
    every param group the values of the first, so only values that all groups share are written for
    it; and it gives all sub-groups one step counter, see `_has_several_sub_groups`.

    Args:
        folder: The folder for the tag's folder and `latest_universal`, which is written last.
        source: A State, a Checkpoint or an ExternalCheckpoint with Adam's moments.
        tag: The tag's name; default: global_step<step>_universal.

    Returns:
        The tag's folder.

    Raises:
        PipelineError: the source has no moments, or the tag exists already.
    """
    position = source.position
    if position.optimizer not in ("", "adamw", "adam"):
        raise PipelineError(
            f"{folder}: the source's optimizer is {position.optimizer}; DeepSpeed's universal "
            "checkpoints carry Adam's state alone",
            hint="continue in zerotrain, which carries all of them, or start from the weights",
        )
    if not set(ADAM_SLOTS) <= set(source.slots):
        raise PipelineError(
            f"{folder}: the source holds {', '.join(source.slots)} alone, and DeepSpeed loads no "
            "universal checkpoint without Adam's moments",
            hint="start from its weights instead, with a new optimizer",
        )
    tag = tag or f"global_step{position.step}_universal"
    final, draft = folder / tag, folder / f".{tag}.new-{os.getpid()}"
    if final.exists():
        raise PipelineError(f"{final}: there already", hint="choose another tag or folder")
    # A tensor, like the counter of torch.optim.AdamW; DeepSpeed's optimizers accept it too.
    step = torch.tensor(float(position.optimizer_step))
    try:
        for name in source.names:
            place = draft / "zero" / name
            place.mkdir(parents=True)
            for slot in (MASTER, *ADAM_SLOTS):
                # A view would save the whole file that it is part of.
                tensor = source.tensor(name, slot).clone()
                file = "fp32" if slot == MASTER else slot
                torch.save({"param": tensor, "cat_dim": 0}, place / f"{file}.pt")
            torch.save(step, place / "step.pt")
        torch.save(_optimizer_state(source, step), draft / "zero" / "optimizer_state.pt")
        for rank in (None, 0):  # stages 1 and 2 read the first, stage 3 the second
            torch.save(_model_state(source), model_path(draft, rank))
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    (folder / "latest_universal").write_text(tag)
    return final


def _optimizer_state(source: Source, step: torch.Tensor) -> dict[str, Any]:
    """Build the optimizer's file: stages 1 and 2 read `param_groups`, stage 3 the nested ones."""
    position = source.position
    groups = [
        {key: tuple(v) if key == "betas" else v for key, v in group.items() if key != "parameters"}
        for group in position.param_groups
    ]
    differing = _list_differing(position.param_groups)
    shared = [{k: v for k, v in group.items() if k not in differing} for group in groups]
    counter = position.optimizer_step if _has_several_sub_groups(source) else step
    return {
        "ds_version": version("deepspeed"),
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": counter}}, "param_groups": shared},
    }


def _list_differing(groups: list[dict[str, Any]]) -> list[str]:
    """Return the keys whose values differ between param groups."""
    keys = sorted({key for group in groups for key in group} - {"parameters"})
    return [key for key in keys if any(g.get(key) != groups[0].get(key) for g in groups[1:])]


def _has_several_sub_groups(source: Source) -> bool:
    """Return whether stage 3 has several sub-groups, which its loader gives one step counter.

    With a tensor, any optimizer would advance the counter once per sub-group, and silently get a
    wrong bias correction. With an integer, each of DeepSpeed's Adams has its own count, and torch's
    fails with an error. torch's needs a tensor, so a single sub-group gets one.
    """
    elements = sum(math.prod(shape) for shape in source.shapes.values())
    return len(source.position.param_groups) > 1 or elements > SUB_GROUP_ELEMENTS


def _model_state(source: Source) -> dict[str, Any]:
    """Build the model file: counters and names; under load_universal zero/ has the weights."""
    position = source.position
    step = position.step
    # DeepSpeed's format: one dictionary per param group, the only record of its members.
    members = [group["parameters"] for group in position.param_groups]
    if sorted(name for group in members for name in group) != sorted(source.names):
        members = [source.names]
    shapes = [{name: torch.Size(source.shapes[name]) for name in group} for group in members]
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        # The counters of DeepSpeed's schedules and torch's.
        "lr_scheduler": {
            "last_batch_iteration": step, "last_epoch": step, "_step_count": step + 1,
            "lr_lambdas": [],
        },
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": step - position.optimizer_step,
        "global_steps": step,
        "global_samples": position.samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        "ds_config": {},
        "ds_version": version("deepspeed"),
    }  # fmt: skip
