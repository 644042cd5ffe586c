"""`zerotrain trace`: from weights, or a copied file of them, to everything they were made from."""

from __future__ import annotations

import os
from pathlib import Path

from zerotrain.artifact import MANIFEST
from zerotrain.artifact.layout import RESULTS
from zerotrain.errors import PipelineError
from zerotrain.run.lineage.chain import (
    Walk,
)
from zerotrain.run.lineage.index import (
    ArtifactIndex,
    UnreadableError,
    enclosing,
    load,
    project_of,
)
from zerotrain.run.lineage.verify import Files
from zerotrain.run.lineage.walk import Walker


def trace(weights: Path) -> Walk:
    """Walk from weights to everything they were made from, and verify it.

    Args:
        weights: A published folder, or a file in one; for a copied file the folder under results/
            that lists its hash.

    Raises:
        PipelineError: the path does not exist, or no folder lists the file.
    """
    place = weights.expanduser().absolute()
    if not os.path.exists(place):
        raise PipelineError(
            f"{weights}: no such file or folder", hint="name a folder of weights, or a file in one"
        )
    files = Files()
    # A link may point into a project from outside, or out of it to another disk.
    folder = enclosing(place) or enclosing(place.resolve())
    if folder is None and place.is_dir():
        _check_no_folders_inside(weights)
        # Its manifest is missing: its place tells where its parents may be.
        return Walker(ArtifactIndex(project_of(place, {})), files).walk(place)
    folder = folder or _listing(place, files)
    if folder is None:
        raise PipelineError(
            f"{weights}: not in a published folder, and none under {RESULTS}/ lists its hash",
            hint=f"name the weights of a phase; {RESULTS}/ is that of the working directory",
        )
    try:
        root = project_of(folder, load(folder).parents)
    except UnreadableError:
        root = project_of(folder, {})
    return Walker(ArtifactIndex(root), files).walk(folder)


def _check_no_folders_inside(folder: Path) -> None:
    """Check that a folder is no run, phase or progress folder, which have no manifest."""
    inside = sorted(found.parent for found in folder.glob(f"*/{MANIFEST}"))
    inside += sorted(found.parent for found in folder.glob(f"*/weights/{MANIFEST}"))
    if inside:
        named = [found for found in inside if found.name == "weights"] or inside
        raise PipelineError(
            f"{folder}: is no published folder, but holds some",
            hint=f"zerotrain trace {named[-1]}",
        )


def _listing(file: Path, files: Files) -> Path | None:
    """Find the folder under results/ that lists a file's hash; prefer weights."""
    sha256, bytes = files.sha256(file), file.stat().st_size
    listing = [
        found
        for found in ArtifactIndex(Path.cwd()).published
        if any((one["sha256"], one["bytes"]) == (sha256, bytes) for one in found.files.values())
    ]
    listing.sort(key=lambda found: found.kind not in ("weights", "exported"))
    return listing[0].folder if listing else None
