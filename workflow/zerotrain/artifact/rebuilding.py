"""The command that makes a published folder again, as hints of error messages name it."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from zerotrain.errors import PipelineError

RESULTS = "results"
DATA = "data"
OF_PHASE = ("launch", "checkpoint", "weights", "state", "evaluation")
ROLLING = "progress"
FIND_CONFIG = "zerotrain.config.find"
EXPORTS = ("weights", "exported", "state", "universal")
"""Kinds of folders that `zerotrain export` writes."""


def rebuild_hint(
    folder: Path, kind: str | None = None, parents: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """Say how to make a folder again.

    Args:
        folder: The folder.
        kind: What its manifest calls it, if that is known.
        parents: What its manifest says of its parents.
    """
    place = place_in_results(folder)
    if place is not None and ROLLING in place:
        command = _snakemake(place[0], "train")
        return f"`{command}` continues from the checkpoint before it, or copy it back"
    if place is not None:
        target = f"{RESULTS}/{'/'.join(place)}/manifest.json"
        command = _snakemake(place[1] if place[0] == DATA else place[0], "--force", "--", target)
        return f"`{command}` makes it again from its inputs"
    for name in ("weights", "checkpoint", "state"):
        source = (parents or {}).get(name, {}).get("path")
        if source and kind in EXPORTS:
            option = "--state" if kind == "state" else "--output"
            command = shlex.join(["zerotrain", "export", source, option, str(folder)])
            return f"export it again (`{command}` with the options of then), or copy it again"
    return (
        "copy it again from where it came from, or make it again; a folder that you changed on "
        "purpose is your own once its manifest.json is removed"
    )


def place_in_results(folder: Path) -> tuple[str, ...] | None:
    """The parts of a folder's path below results/, where the workflow of this project makes it."""
    if not Path("Snakefile").is_file():
        return None
    parts = Path(os.path.relpath(folder)).parts
    if len(parts) < 3 or parts[0] != RESULTS:
        return None
    place = parts[1:]
    known = (
        place[1:] in (("base",), ("report",), ("imported", "state"))
        or (len(place) == 3 and place[2] in OF_PHASE)
        or (len(place) == 4 and place[2] == ROLLING)
        or (place[0] == DATA and place[2:] in ((), ("base",)))
        or (place[0] == DATA and len(place) == 4 and place[2] == "cache")
    )
    return place if known else None


def _snakemake(run: str, *words: str) -> str:
    """The call of Snakemake for a run, with the option that chooses its configuration."""
    # By name: what a stage computes does not depend on how its messages find a configuration.
    try:
        config = str(importlib.import_module(FIND_CONFIG).find_config(run))
    except PipelineError:
        config = "FILE"
    chosen = [] if config == "config/config.yaml" else ["--configfile", config]
    return shlex.join(["snakemake", "--cores", "all", *chosen, *words])
