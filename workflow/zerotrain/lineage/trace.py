"""The walk that `zerotrain trace WEIGHTS` shows: every hash is verified."""

from __future__ import annotations

import os
from pathlib import Path

from zerotrain.artifact import MANIFEST
from zerotrain.errors import PipelineError
from zerotrain.lineage.chain import Walk
from zerotrain.lineage.shelf import RESULTS, Shelf, Unreadable, enclosing, load, project_of
from zerotrain.lineage.verify import Files
from zerotrain.lineage.walk import Walker


def trace(weights: Path) -> Walk:
    """Walk from weights to what they were made from, and verify it all.

    Args:
        weights: A published folder, or a file in one; of a file that was copied elsewhere the
            folder under results/ is taken that lists its hash.

    Raises:
        PipelineError: there is nothing at the path, or no folder knows it.
    """
    place = weights.expanduser().absolute()
    if not os.path.exists(place):
        raise PipelineError(
            f"{weights}: no such file or folder", hint="name a folder of weights, or a file in one"
        )
    files = Files()
    # A link may lead into a project from elsewhere, or out of it to another disk.
    folder = enclosing(place) or enclosing(place.resolve())
    if folder is None and place.is_dir():
        _refuse_several(weights)
        # Its manifest is what is missing: its place tells where the rest may lie.
        return Walker(Shelf(project_of(place, {})), files).walk(place)
    folder = folder or _listing(place, files)
    if folder is None:
        raise PipelineError(
            f"{weights}: lies in no published folder, and none under {RESULTS}/ lists its hash",
            hint=f"name the weights of a phase; {RESULTS}/ is that of the working directory",
        )
    try:
        root = project_of(folder, load(folder).parents)
    except Unreadable:
        root = project_of(folder, {})
    return Walker(Shelf(root), files).walk(folder)


def _refuse_several(folder: Path) -> None:
    """A run, a phase or its progress has no manifest, and misses none."""
    inside = sorted(found.parent for found in folder.glob(f"*/{MANIFEST}"))
    inside += sorted(found.parent for found in folder.glob(f"*/weights/{MANIFEST}"))
    if inside:
        named = [found for found in inside if found.name == "weights"] or inside
        raise PipelineError(
            f"{folder}: is no published folder, but holds some",
            hint=f"zerotrain trace {named[-1]}",
        )


def _listing(file: Path, files: Files) -> Path | None:
    """The folder under results/ that lists a file's hash, weights before others."""
    sha256, bytes = files.sha256(file), file.stat().st_size
    listing = [
        found
        for found in Shelf(Path.cwd()).published
        if any((one["sha256"], one["bytes"]) == (sha256, bytes) for one in found.files.values())
    ]
    listing.sort(key=lambda found: found.kind not in ("weights", "exported"))
    return listing[0].folder if listing else None
