"""Files that DVC has linked to its cache are read-only; those that Snakemake declares must not be.

Snakemake refuses to make a read-only output again, and its times are set to plan by them. A link
shares mode and times with the cache, which may be another user's, so such a file becomes a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zerotrain.artifact import MANIFEST, copy_new, replacing
from zerotrain.artifact.layout import DataFolder, RunFolder
from zerotrain.artifact.leftovers import KEPT_MANIFEST, keep_manifest
from zerotrain.config.run import RunConfig

OF_RUN = (f"*/{MANIFEST}", f"*/*/{MANIFEST}", "*/metrics.json")
OF_DATA = (MANIFEST, f"base/{MANIFEST}", f"cache/*/{MANIFEST}", f"cache_shards/*/*/{MANIFEST}")
WRITABLE = 0o200


def make_writable(runs: Iterable[RunConfig]) -> None:
    """Replace read-only manifests and metrics of runs by writable copies with the same times."""
    for run in runs:
        places = ((RunFolder(run.run).path, OF_RUN), (DataFolder(run.data_name).path, OF_DATA))
        for folder, patterns in places:
            for path in (path for pattern in patterns for path in folder.glob(pattern)):
                mode = path.stat().st_mode
                if not mode & WRITABLE and os.access(path.parent, os.W_OK):
                    _replace_by_copy(path, mode | WRITABLE)


def _replace_by_copy(path: Path, mode: int) -> None:
    with replacing(path) as new:
        copy_new(path, new)
        new.chmod(mode)
    if path.name == MANIFEST and (path.parent / KEPT_MANIFEST).exists():
        keep_manifest(path.parent)
