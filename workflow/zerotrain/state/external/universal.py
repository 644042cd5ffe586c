"""DeepSpeed's universal checkpoint: one folder per parameter; any stage and world size loads it.

    <folder>/latest_universal                     the tag
    <folder>/<tag>/zero/<parameter>/<slot>.pt     fp32, exp_avg, exp_avg_sq, step
    <folder>/<tag>/zero/optimizer_state.pt        param groups and step
    <folder>/<tag>/mp_rank_00_model_states.pt     counters; stage 3 expects it under another name

An engine loads it with ``{"checkpoint": {"load_universal": true}}``. Source: DeepSpeed 0.19.8
checkpoint/ds_to_universal.py (writes), runtime/base_optimizer.py and runtime/zero/stage3.py (read).

The stages differ where the converter writes: at stages 1 and 2 a slot's file contains {"param":
tensor}, and step.pt is next to it; at stage 3 it contains a flat tensor, and the step is in
optimizer_state.pt. Names, shapes, groups and frozen parameters are in the model files, which the
converter copies.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from zerotrain.artifact.tensor_file import same_bits
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import write_text
from zerotrain.state.external import numbered, partitions, pickles
from zerotrain.state.external.checkpoint import ExternalCheckpoint, external_state
from zerotrain.state.external.consistency import read_number
from zerotrain.state.external.deepspeed import count_samples, describe_engine, frozen_shapes
from zerotrain.state.external.other_files import list_keys
from zerotrain.state.external.ranks import (
    count_updates,
    layout_error,
    loss_scale,
    model_path,
    read_model,
    section,
)
from zerotrain.state.position import ADAM_SLOTS, EMA_SLOT, MASTER, Source

FILES = {MASTER: "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
"""The file of each slot in a parameter's folder."""
STEP = "step.pt"
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
                torch.save({"param": tensor, "cat_dim": 0}, place / FILES[slot])
            torch.save(step, place / STEP)
        torch.save(_optimizer_state(source, step), draft / "zero" / "optimizer_state.pt")
        for rank in (None, 0):  # stages 1 and 2 read the first, stage 3 the second
            torch.save(_model_state(source), model_path(draft, rank))
        draft.rename(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    write_text(folder / "latest_universal", tag)
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


def open_universal(tag: Path, *, trust_pickle: bool = False) -> ExternalCheckpoint:
    """Open a universal checkpoint, such as global_step100_universal/.

    Args:
        tag: The folder with zero/ and the model files.
        trust_pickle: Whether pickles may name any class and run its code.

    Raises:
        PipelineError: a file is missing or damaged, or from another save than the others.
    """
    load = partial(pickles.load, trust_pickle=trust_pickle)
    models = _read_models(tag, trust_pickle)
    model = models[0]
    optimizer = load(tag / "zero" / "optimizer_state.pt")
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("param_groups"), list):
        raise layout_error(tag / "zero" / "optimizer_state.pt", "holds no param_groups")
    groups: list[dict[str, Any]] = optimizer["param_groups"]
    if not all(isinstance(group, dict) for group in groups):
        raise layout_error(
            tag / "zero" / "optimizer_state.pt", "holds no param_groups of values by name"
        )

    def read(name: str, slot: str) -> torch.Tensor:
        path = tag / "zero" / name / FILES[slot]
        content = load(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise layout_error(path, "holds no tensor")
        if (saved := pickles.saved_name(path)) in FILES.values() and saved != path.name:
            raise layout_error(path, f"was saved as {saved}: files are exchanged or renamed")
        return tensor.detach()

    shapes: list[dict[str, Any]] = model.get("param_shapes") or []
    if not shapes:
        raise layout_error(model_path(tag, None), "names no parameters")
    trained = {name: list(shape) for group in shapes for name, shape in group.items()}
    unread = _check_folders(tag, model, trained)
    compared = _check_weights(tag, model, trained, read)
    adam = any((tag / "zero" / name / FILES[ADAM_SLOTS[0]]).exists() for name in trained)
    named, unlike = numbered.named_groups(
        groups, _members(groups, shapes), tag / "zero" / "optimizer_state.pt"
    )
    if len(named) < len(groups):
        named = []
        unlike = [f"the values of {len(groups)} param groups: nothing says who is in which"]
    step = 0
    if adam:
        step, file = _step(tag, trained, optimizer, model, trust_pickle)
        unlike += _check_counts(tag, model, step, file, compared=compared)
    frozen = frozen_shapes(model, shapes)
    unlike += [*unread, *list_keys(model, model_path(tag, None))]

    def frozen_pieces(name: str) -> Iterable[torch.Tensor]:
        if len(models) > 1:
            return partitions.frozen_pieces(models, name, frozen[name])
        return ((model.get("frozen_param_fragments") or model["module"])[name],)

    return ExternalCheckpoint(
        folder=tag,
        position=external_state(
            step=model["global_steps"],
            samples=count_samples(model),
            optimizer="adamw" if adam else "",
            optimizer_step=step,
            param_groups=named,
            engine=describe_engine(model, stage=optimizer.get("zero_stage")),
            loss_scale=loss_scale(optimizer),
        ),
        shapes=trained,
        slots=[MASTER, *(ADAM_SLOTS if adam else ())],
        pieces=lambda name, slot: (read(name, slot),),
        frozen=frozen,
        frozen_pieces=frozen_pieces,
        tied={a: n for a, n in (model.get("shared_params") or {}).items() if n in trained},
        lost=unlike,
    )


def _read_models(tag: Path, trust_pickle: bool) -> list[dict[str, Any]]:
    """Read the model file of stages 1 and 2, or every rank's of stage 3."""
    whole, first = model_path(tag, None), model_path(tag, 0)
    if whole.is_file() or not first.is_file():
        return [read_model(whole, trust_pickle=trust_pickle)]
    model = read_model(first, trust_pickle=trust_pickle)
    ranks = range(1, int(model.get("dp_world_size") or 1))
    return [model, *(read_model(model_path(tag, r), trust_pickle=trust_pickle) for r in ranks)]


def _check_folders(tag: Path, model: dict[str, Any], trained: dict[str, list[int]]) -> list[str]:
    """Check that every parameter has a folder; names that lead out of zero/ have none.

    Returns:
        Sentences on folders and slots that are not read.
    """
    present = {path.name for path in (tag / "zero").iterdir() if path.is_dir()}
    for name in trained:
        if name not in present:
            raise PipelineError(
                f"{tag / 'zero' / name}: no such folder, and the model file names this parameter",
                hint="the checkpoint is incomplete; copy it again, whole",
            )
    slots = {path.name for name in trained for path in (tag / "zero" / name).iterdir()}
    known = {*trained, *(model.get("buffer_names") or ())}.union(
        *(section(model, key) for key in ("module", "frozen_param_shapes", "shared_params"))
    )
    unread = [f"zero/{name}: a parameter that no model file names" for name in present - known]
    if unlike := sorted(slots - {*FILES.values(), STEP}):
        unread.append(f"the optimizer's {', '.join(unlike)}: only Adam's two moments are kept")
    return sorted(unread)


def _check_weights(tag: Path, model: dict[str, Any], trained: Iterable[str], read: Any) -> bool:
    """Compare master weights and module weights; return whether the model file has any."""
    module = section(model, "module")
    compared = False
    for name in trained:
        weights = module.get(name)
        if weights is None or not weights.numel():
            continue
        compared = True
        if not same_bits(weights.detach().reshape(-1), read(name, MASTER).reshape(-1)):
            raise layout_error(
                tag / "zero" / name / FILES[MASTER], f"differs from {model_path(tag, None).name}'s"
            )
    return compared


def _check_counts(
    tag: Path, model: dict[str, Any], step: int, file: Path, *, compared: bool
) -> list[str]:
    """Check that model file and moments are of one step; return a sentence if both counts are kept.

    An optimizer that started later than the engine has made fewer updates; zerotrain's files record
    the skipped ones in the engine's count (step.pt, and a model file without weights).
    """
    updates = count_updates(model)
    if step == updates:
        return []
    if not compared and (step > updates or file.name == STEP):
        whole, first = model_path(tag, None), model_path(tag, 0)
        raise layout_error(
            whole if whole.is_file() else first,
            f"counts {updates} updates, {file.relative_to(tag)} {step}: the files are of several "
            "checkpoints",
        )
    return [f"the engine counts {updates} updates, the optimizer {step}: both are kept"]


def _members(groups: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> list[list[str]]:
    """Return the names of each param group; its `params` are numbers of the flat (sub-)groups."""
    if all("params" in group for group in groups):
        flat = [number for group in groups for number in group["params"]]
        if sorted(flat) == list(range(len(shapes))):
            return [[n for i in group["params"] for n in shapes[i]] for group in groups]
    return [list(group) for group in shapes]


def _step(
    tag: Path,
    trained: Iterable[str],
    optimizer: dict[str, Any],
    model: dict[str, Any],
    trust_pickle: bool,
) -> tuple[int, Path]:
    """Return the optimizer's step, which every step.pt must have, and a file with it."""
    paths = [tag / "zero" / name / STEP for name in trained]
    if not any(path.exists() for path in paths):
        path = tag / "zero" / "optimizer_state.pt"
        base = section(optimizer, "optimizer_state_dict")
        for kept in (*section(base, "state").values(), *optimizer["param_groups"]):
            if isinstance(kept, dict) and kept.get("step") is not None:
                return int(read_number(kept["step"], path, "step")), path
        return count_updates(model), path
    first: int | None = None
    for path in paths:
        step = int(read_number(pickles.load(path, trust_pickle=trust_pickle), path, "step"))
        if first is not None and step != first:
            raise layout_error(path, f"step {step}, {paths[0].parent.name}'s is {first}")
        first = step
    assert first is not None
    return first, paths[0]
