"""After `snakemake`, what it made is recorded, as by `dvc commit`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotrain.artifact import MANIFEST, copy_new, replacing
from zerotrain.artifact.layout import RESULTS, DataFolder, RunFolder
from zerotrain.artifact.leftovers import KEPT_MANIFEST, keep_manifest
from zerotrain.config.run import RunConfig
from zerotrain.config.runs import read_runs
from zerotrain.data.dataset_folder import SAMPLES
from zerotrain.errors import PipelineError
from zerotrain.graph.dvc.files import PIPELINE, load_pipeline
from zerotrain.graph.dvc.pipeline import config_of, outputs_of, pipeline

OF_RUN = (f"*/{MANIFEST}", f"*/*/{MANIFEST}", "*/metrics.json")
OF_DATA = (MANIFEST, f"base/{MANIFEST}", f"cache/*/{MANIFEST}", f"cache_shards/*/*/{MANIFEST}")
WRITABLE = 0o200


def make_writable(runs: Iterable[RunConfig]) -> None:
    """Replace read-only manifests and metrics of runs by writable copies with the same times.

    DVC makes the links to its cache read-only. Snakemake refuses to make a read-only output again,
    and its times are set to plan by them; the cache, which shares both, may be another user's.
    """
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


SAMPLES_FOLDER = Path(SAMPLES).parent.name
"""The part of a dataset next to its manifest."""


def record(config: Path, current: Collection[str], began: float) -> None:
    """Record the stages of dvc.yaml that are up to date, with what they were made from.

    Nothing happens inside a stage of DVC, where DVC is not in use, and for a configuration that
    dvc.yaml does not have. A failure is a warning: the results are there.

    Args:
        config: The configuration that Snakemake was called with.
        current: The files that it made, or found up to date.
        began: The time before it planned. What was edited since may not be what a job has read.
    """
    if "DVC_STAGE" in os.environ or not (Path(".dvc").is_dir() and PIPELINE.is_file()):
        return
    try:
        loaded = load_pipeline().get("stages") or {}
        ours = {name: stage for name, stage in loaded.items() if config_of(stage) == config}
        if not ours:
            return
        made = pipeline(config)["stages"]
        if ours != made:
            print(
                f"{PIPELINE}: not what `zerotrain dvc generate {config}` would write now; only the "
                "stages that are the same are recorded",
                file=sys.stderr,
            )
        wanted = [
            name
            for name, stage in ours.items()
            if made.get(name) == stage
            and all(_is_made(Path(out), current) for out in outputs_of(stage))
            and not any(_is_edited(Path(file), began) for file in _sources(stage))
        ]
        if wanted:
            _commit(wanted)
            make_writable(read_runs(config).values())
    except PipelineError as error:
        print(f"WARNING: DVC: nothing is recorded: {error.what}", file=sys.stderr)


def _is_made(out: Path, current: Collection[str]) -> bool:
    """Return whether an output is there and up to date; of a folder, Snakemake has the manifest."""
    if out.name == SAMPLES_FOLDER:
        return out.is_dir()
    return str(out / MANIFEST if out.is_dir() else out) in current


def _sources(stage: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files and folders that a stage is made from, and no stage makes."""
    yield from (file for of_file in stage["params"] for file in of_file)
    yield from (dep for dep in stage.get("deps", ()) if not dep.startswith(f"{RESULTS}/"))


def _is_edited(path: Path, began: float) -> bool:
    """Return whether a file, or one of a folder, was written or renamed after a time."""
    if not path.exists():
        return True
    return any(one.lstat().st_ctime > began for one in (path, *path.rglob("*")))


def _commit(stages: list[str]) -> None:
    """Call `dvc commit`.

    Raises:
        PipelineError: it failed; its messages are printed above.
    """
    try:
        code = subprocess.run(
            ["dvc", "commit", "--quiet", "--force", *stages],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        ).returncode
    except FileNotFoundError:  # not installed, so not in use
        return
    if code:
        raise PipelineError(
            f"`dvc commit` ended with code {code}; above it says why",
            hint="fix that; `dvc repro` records the run",
        )
