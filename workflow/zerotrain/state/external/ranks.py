"""The files of one DeepSpeed tag folder: one optimizer file per rank, and model files.

A value of another type than is read names file and key.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from zerotrain.artifact.documents import check_type, read_bytes
from zerotrain.errors import PipelineError
from zerotrain.state.external import pickles
from zerotrain.state.external.consistency import AGAIN, read_number
from zerotrain.state.position import ADAM_SLOTS

MOST_NAME = 4096
"""Bytes of `latest`, which holds the name of a folder."""
OPTIMIZER_FILE = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class Rank:
    """The files of one data-parallel rank."""

    path: Path
    """Its optimizer file."""
    optimizer: dict[str, Any]
    model_path: Path
    model: dict[str, Any]
    """Its model file: one for all ranks at stages 1 and 2, one per rank at stage 3."""


def layout_error(path: Path, what: str) -> PipelineError:
    """Return the error for a file that does not fit the others."""
    return PipelineError(
        f"{path}: {what}",
        hint="the checkpoint is half-written or not DeepSpeed's own; use an older one",
    )


def is_tag_folder(folder: Path) -> bool:
    """Return whether DeepSpeed's engine, or its universal converter, wrote its files here."""
    return is_universal(folder) or (
        folder.is_dir()
        and any(
            MODEL_FILE.fullmatch(path.name) or OPTIMIZER_FILE.fullmatch(path.name)
            for path in folder.iterdir()
        )
    )


def is_universal(folder: Path) -> bool:
    """Return whether a tag folder is a universal checkpoint: zero/ has a folder per parameter."""
    return (folder / "zero").is_dir()


def find_tag_folder(folder: Path) -> Path | None:
    """Find the tag folder of a DeepSpeed checkpoint folder, or None.

    `latest` names it, or `latest_universal` if that is missing. DeepSpeed rewrites `latest` in
    place, so a kill leaves it empty: then a single tag folder is used.

    Raises:
        PipelineError: `latest` names a missing folder, or nothing while there are several.
    """
    if is_tag_folder(folder):
        return folder
    latest = folder / "latest"
    if not latest.exists() and (folder / "latest_universal").is_file():
        latest = folder / "latest_universal"
    named = ""
    if latest.is_file():
        named = os.fsdecode(read_bytes(latest, most=MOST_NAME, follow_links=True)).strip()
    tags = sorted(path for path in folder.iterdir() if is_tag_folder(path))
    if named:
        if folder / named not in tags:
            raise PipelineError(
                f"{latest}: names {named!r}, and no folder of that name holds a checkpoint; found "
                f"{', '.join(tag.name for tag in tags) or 'none'}",
                hint="give the folder of the tag itself",
            )
        return folder / named
    if len(tags) > 1:
        raise PipelineError(
            f"{latest}: empty or missing, and there are several tags: "
            f"{', '.join(tag.name for tag in tags)}",
            hint=f"give the folder of one of them, such as {tags[-1]}",
        )
    return tags[0] if tags else None


def model_path(tag: Path, rank: int | None) -> Path:
    """Return the path of a model file; rank None: the file of stages 0, 1 and 2."""
    prefix = "" if rank is None else f"zero_pp_rank_{rank}_"
    return tag / f"{prefix}mp_rank_00_model_states.pt"


def read_model(path: Path, *, trust_pickle: bool) -> dict[str, Any]:
    """Read a model file.

    Raises:
        PipelineError: the file is missing or damaged, was saved under another rank's name, or is
            not a model file.
    """
    model = pickles.load(path, trust_pickle=trust_pickle)
    if not isinstance(model, dict) or "global_steps" not in model:
        raise layout_error(path, "no model file of DeepSpeed's engine (global_steps is not in it)")
    check_type(model, ModelFile, path, hint=AGAIN)
    check_saved_name(path)
    return model


def check_saved_name(path: Path) -> None:
    """Check that a file was not saved as another rank's: torch.save stores the name in the file.

    Raises:
        PipelineError: it was; the message has both names.
    """
    name = pickles.saved_name(path)
    if (
        name
        and name != path.name
        and (OPTIMIZER_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name))
    ):
        raise PipelineError(
            f"{path}: was saved as {name}: files are exchanged or renamed",
            hint="give each file its former name again, or copy the checkpoint again",
        )


def read_ranks(tag: Path, *, trust_pickle: bool) -> list[Rank]:
    """Read every rank's files; return an empty list if DeepSpeed partitioned nothing (stage 0).

    Raises:
        PipelineError: the checkpoint uses model or pipeline parallelism; a rank's file is missing,
            surplus, damaged or saved as another rank's; or ranks have different world sizes.
    """
    names = sorted(path.name for path in tag.iterdir())
    matches = [match for name in names if (match := OPTIMIZER_FILE.fullmatch(name))]
    parallel = [m[0] for m in matches if m[3] != "00"] or [
        name
        for name in names
        if name.startswith(("layer_", "expert_", "expp_"))
        or ((other := MODEL_FILE.fullmatch(name)) and other[2] != "00")
    ]
    if parallel:
        raise PipelineError(
            f"{tag / parallel[0]}: written under model, pipeline or expert parallelism, which is "
            "not read",
            hint="merge it with DeepSpeed's own tools, or save it from a data-parallel run",
        )
    if not matches:
        return []
    prefixes = sorted({match[1] for match in matches})
    if len(prefixes) > 1:
        raise layout_error(
            tag / matches[0][0], f"files of two precisions: {' and '.join(prefixes)}"
        )
    ranks: list[Rank] = []
    world = 1
    shared: dict[str, Any] = {}
    while len(ranks) < world:
        number = len(ranks)
        path = tag / f"{prefixes[0]}{number}_mp_rank_00_optim_states.pt"
        document = pickles.load(path, trust_pickle=trust_pickle)
        state = document.get("optimizer_state_dict") if isinstance(document, dict) else None
        if not isinstance(state, dict) or "partition_count" not in state:
            held = state if isinstance(state, dict) else document
            keys = ", ".join(map(str, held)) if isinstance(held, dict) else type(held).__name__
            raise layout_error(
                path,
                f"a layout that is not known, of DeepSpeed {version(document)}: it holds {keys}",
            )
        check_type(state, OptimizerFile, path, hint=AGAIN)
        count = state["partition_count"]
        counts = set(count) if isinstance(count, list) else {count}
        if len(counts) > 1:
            raise layout_error(
                path, f"groups of different worlds ({sorted(counts)}), as of experts"
            )
        if number and counts != {world}:
            raise layout_error(path, f"written by {counts.pop()} ranks, rank 0's file by {world}")
        world = counts.pop()
        check_saved_name(path)
        # At stage 3 every rank has a model file.
        of_rank = model_path(tag, number if "fp32_flat_groups" in state else None)
        if not ranks or ranks[-1].model_path != of_rank:
            shared = read_model(of_rank, trust_pickle=trust_pickle)
        if (written_by := shared.get("dp_world_size", world)) != world:
            raise layout_error(of_rank, f"written by {written_by} ranks, {path.name} by {world}")
        ranks.append(Rank(path, state, of_rank, shared))
    if extra := [match[0] for match in matches if int(match[2]) >= world]:
        raise layout_error(
            tag / extra[0], f"rank 0's file was written by {world} ranks; this one is left over"
        )
    return ranks


def count_updates(model: dict[str, Any]) -> int:
    """Count the engine's steps, except for those that fp16 skipped after an overflow."""
    return int(model["global_steps"] - model.get("skipped_steps", 0))


def version(document: Any) -> str:
    """Return the DeepSpeed version that a file names."""
    return str(document.get("ds_version", "unknown")) if isinstance(document, dict) else "unknown"


def section(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the dictionary under a key; an empty one if it is missing."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def loss_scale(optimizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the loss scale under our names (runtime/fp16/loss_scaler.py); None without fp16."""
    scaler: Any = optimizer.get("loss_scaler")

    def number(name: str, default: float | None = None) -> float:
        return read_number(getattr(scaler, name, default), "the optimizer's loss_scaler", name)

    scale = number("cur_scale", 1.0)
    if not getattr(scaler, "dynamic", False):
        return None if scale == 1.0 else {"scale": scale, "good_steps": 0}
    good, window = number("cur_iter") - number("last_overflow_iter") - 1, number("scale_window")
    if good > window > 0:  # it doubles at the update after each window, and keeps counting
        good = (good - 1) % window + 1
    left = int(number("cur_hysteresis", 1))
    return {"scale": scale, "good_steps": int(good), "hysteresis": left}


def _check_flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"should be a flat tensor, and has the shape {list(tensor.shape)}")
    return tensor


def _check_slots(slots: dict[Any, Any]) -> dict[Any, Any]:
    for name in ADAM_SLOTS:
        if not isinstance(slots.get(name, torch.empty(0)), torch.Tensor):
            raise ValueError(f"{name} should be a tensor")
    if slots.get("step") is not None:
        read_number(slots["step"], "the optimizer", "step")
    return slots


Count = Annotated[int, Field(ge=0)]
Shape = tuple[Count, ...]
Flat = Annotated[torch.Tensor, AfterValidator(_check_flat)]
Slots = Annotated[dict[Any, Any], AfterValidator(_check_slots)]
"""The moments of a flat group, and other values."""


class _Document(BaseModel):
    """A part of a file; keys that are not read are left out."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class ModelFile(_Document):
    """`mp_rank_00_model_states.pt`."""

    global_steps: Count
    global_samples: Count | None = None
    skipped_steps: Count = 0
    dp_world_size: Count | None = None
    param_shapes: list[dict[str, Shape]] | None = None
    frozen_param_shapes: dict[str, Shape] | None = None
    frozen_param_fragments: dict[str, torch.Tensor] | None = None
    shared_params: dict[str, str] | None = None
    buffer_names: list[str] | None = None
    module: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _frozen_parameters_have_shapes(self) -> Self:
        fragments, shapes = self.frozen_param_fragments or {}, self.frozen_param_shapes or {}
        if fragments and fragments.keys() != shapes.keys():
            raise ValueError("frozen_param_fragments and frozen_param_shapes have different names")
        return self


class Group(_Document):
    """A param group of the optimizer, whose parameters are flat groups."""

    params: list[Count]


class OptimizerState(_Document):
    """The state_dict of the optimizer within ZeRO's."""

    state: dict[Any, Slots]
    param_groups: list[Group]


class OptimizerFile(_Document):
    """`optimizer_state_dict` of a rank's file, of either layout."""

    partition_count: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]]
    zero_stage: Count | None = None
    single_partition_of_fp32_groups: list[Flat] | None = None
    base_optimizer_state: OptimizerState | list[Slots] | None = None
    param_alignment_paddings: list[list[Count]] | None = None
    fp32_flat_groups: list[Flat] | None = None
    optimizer_state_dict: OptimizerState | None = None

    @model_validator(mode="after")
    def _groups_exist(self) -> Self:
        flat = self.fp32_flat_groups
        base: OptimizerState | list[Slots] | None = self.optimizer_state_dict
        if flat is None:
            flat, base = self.single_partition_of_fp32_groups, self.base_optimizer_state
        if flat is None:
            return self  # another layout, which the reader names
        if base is None:
            raise ValueError("the optimizer's state is missing")
        if isinstance(base, list):
            if len(base) != len(flat):
                raise ValueError(f"{len(base)} states of {len(flat)} flat groups")
            return self
        if self.fp32_flat_groups is None and len(base.param_groups) != len(flat):
            raise ValueError(f"{len(base.param_groups)} param groups of {len(flat)} flat groups")
        if any(not group.params or max(group.params) >= len(flat) for group in base.param_groups):
            raise ValueError(f"params of a param group name others than {len(flat)} flat groups")
        return self
