"""The command that makes a published folder again, for hints in error messages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from zerotrain.artifact.layout import DATA, RESULTS, ROLLING, files_of, place_in_results

EXPORTS = ("weights", "exported", "state", "universal")
"""Kinds of folders that `zerotrain export` writes."""


def rebuild_hint(
    folder: Path, kind: str | None = None, parents: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """Return a hint on how to make a folder again.

    Args:
        folder: The folder.
        kind: Its kind in the manifest, if known.
        parents: Its parents in the manifest.
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


def _snakemake(run: str, *words: str) -> str:
    """Return the call of Snakemake for a run, with the option for its configuration."""
    files = files_of(run)
    config = str(files[0]) if len(files) == 1 else "FILE"
    chosen = [] if config == "config/config.yaml" else ["--configfile", config]
    return shlex.join(["snakemake", "--cores", "all", *chosen, *words])
