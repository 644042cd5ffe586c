"""Published datasets with other samples than they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact.columns import Columns
from zerotrain.artifact.manifest import DATASET
from zerotrain.data.dataset import IMAGES
from zerotrain.data.dataset_folder import SAMPLES, read_samples


def edit_samples(
    folder: Path, edit: Callable[[Sequence[Any]], Sequence[Any]], of: Any = IMAGES
) -> None:
    """Replace the samples, and their file's hash in the manifest; the identity stays."""
    samples = edit(read_samples(artifact.read(folder, DATASET), of))
    Columns.of(of.record, samples).write(folder / SAMPLES)
    manifest = json.loads((folder / "manifest.json").read_text())
    size, sha256 = (folder / SAMPLES).stat().st_size, artifact.file_sha256(folder / SAMPLES)
    manifest["files"][SAMPLES] = {"sha256": sha256, "bytes": size}
    artifact.write_json(folder / "manifest.json", manifest)
