"""The files of one DeepSpeed tag folder: one optimizer file a rank, and model files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError
from zerotrain.foreign import pickles

OPTIMIZER_FILE = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class Rank:
    """What one data-parallel rank saved."""

    path: Path
    """Its optimizer file."""
    optimizer: dict[str, Any]
    model: dict[str, Any]
    """Its model file: one for all ranks at stages 1 and 2, one per rank at stage 3."""


def refuse(path: Path, what: str) -> PipelineError:
    """The error about a file that does not fit the others."""
    return PipelineError(
        f"{path}: {what}",
        hint="the checkpoint is half-written or not DeepSpeed's own; use an older one",
    )


def is_tag_folder(folder: Path) -> bool:
    """Whether DeepSpeed's engine wrote its files here."""
    return folder.is_dir() and any(
        MODEL_FILE.fullmatch(path.name) or OPTIMIZER_FILE.fullmatch(path.name)
        for path in folder.iterdir()
    )


def find_tag_folder(folder: Path) -> Path | None:
    """The tag folder that a DeepSpeed checkpoint folder means, or None where there is none.

    DeepSpeed rewrites `latest` in place, so a kill leaves it empty: then a single tag folder is it.

    Raises:
        PipelineError: `latest` names a folder that is not there, or nothing, among several.
    """
    if is_tag_folder(folder):
        return folder
    latest = folder / "latest"
    named = latest.read_text().strip() if latest.is_file() else ""
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


def read_model(tag: Path, rank: int | None, *, trust_pickle: bool) -> dict[str, Any]:
    """Read a model file: rank None for the one that stages 0, 1 and 2 write."""
    prefix = "" if rank is None else f"zero_pp_rank_{rank}_"
    path = tag / f"{prefix}mp_rank_00_model_states.pt"
    found = pickles.load(path, trust_pickle=trust_pickle)
    if not isinstance(found, dict) or "global_steps" not in found:
        raise refuse(path, "no model file of DeepSpeed's engine (global_steps is not in it)")
    return found


def read_ranks(tag: Path, *, trust_pickle: bool) -> list[Rank]:
    """Read every rank's files; an empty list where DeepSpeed partitioned nothing (stage 0).

    Raises:
        PipelineError: model or pipeline parallelism, a rank's file missing or one too many, or
            ranks of different worlds.
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
        raise refuse(tag / matches[0][0], f"files of two precisions: {' and '.join(prefixes)}")
    ranks: list[Rank] = []
    world = 1
    shared: dict[str, Any] | None = None
    while len(ranks) < world:
        number = len(ranks)
        path = tag / f"{prefixes[0]}{number}_mp_rank_00_optim_states.pt"
        found = pickles.load(path, trust_pickle=trust_pickle)
        state = found.get("optimizer_state_dict") if isinstance(found, dict) else None
        if not isinstance(state, dict) or "partition_count" not in state:
            raise refuse(
                path,
                f"a layout that is not known, of DeepSpeed {version(found)}: it holds "
                f"{', '.join(map(str, state if isinstance(state, dict) else found))}",
            )
        count = state["partition_count"]
        counts = set(count) if isinstance(count, list) else {count}
        if len(counts) > 1:
            raise refuse(path, f"groups of different worlds ({sorted(counts)}), as of experts")
        if number and counts != {world}:
            raise refuse(path, f"written by {counts.pop()} ranks, rank 0's file by {world}")
        world = counts.pop()
        if "fp32_flat_groups" in state:  # stage 3: every rank has a model file
            model = read_model(tag, number, trust_pickle=trust_pickle)
        else:
            model = shared = shared or read_model(tag, None, trust_pickle=trust_pickle)
        ranks.append(Rank(path, state, model))
    if extra := [match[0] for match in matches if int(match[2]) >= world]:
        raise refuse(
            tag / extra[0], f"rank 0's file was written by {world} ranks; this one is left over"
        )
    return ranks


def version(document: Any) -> str:
    """The DeepSpeed version that a file names."""
    return str(document.get("ds_version", "unknown")) if isinstance(document, dict) else "unknown"
