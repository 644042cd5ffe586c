"""The places of a project's files: its configurations, and the folders below results/.

config/*.yaml                 one run each, or several under `runs`
results/<run>/                base, report, imported/state, and a folder for each phase
results/<run>/<phase>/        launch, progress, checkpoint, weights, state, evaluation
.../settings/                 the settings file of each stage of a run, phase or dataset
results/data/<name>/          a dataset; cache/<size>, and a base that several runs share;
                              cache_shards/<size>/<range> of a cache that several jobs encode
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

CONFIGS = Path("config")
RESULTS = Path("results")
DATA = "data"
OF_PHASE = ("launch", "checkpoint", "weights", "state", "evaluation")
"""Artifacts of a phase."""
ROLLING = "progress"
SETTINGS = "settings"
"""The folder with the settings files of stages, which no manifest lists."""
LOG = "metrics.jsonl"
RESOURCES = "resources.json"
PENDING = "pending.json"
"""Files with which a training reports, in its progress folder."""


class PhaseFolder:
    """The folders of a phase."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launch, self.checkpoint, self.weights, self.state, self.evaluation = (
            path / name for name in OF_PHASE
        )
        self.progress = path / ROLLING


class RunFolder:
    """The folders of a run."""

    def __init__(self, run: str) -> None:
        self.path = RESULTS / run
        self.base, self.report = self.path / "base", self.path / "report"
        self.imported_state = self.path / "imported" / "state"

    def phase(self, name: str) -> PhaseFolder:
        """Return the folders of a phase."""
        return PhaseFolder(self.path / name)


class DataFolder:
    """The folders of a dataset, which runs may share."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / DATA / name
        self.base = self.path / "base"

    def cache(self, size: int) -> Path:
        """Return the cache of a size: pixels per side, or tokens per row."""
        return self.path / "cache" / str(size)


def place_in_results(folder: Path) -> tuple[str, ...] | None:
    """Return the parts of a folder's path below results/ if this project's workflow makes it."""
    if not Path("Snakefile").is_file():
        return None
    parts = Path(os.path.relpath(folder)).parts
    if len(parts) < 3 or parts[:1] != RESULTS.parts:
        return None
    place = parts[1:]
    known = (
        place[1:] in (("base",), ("report",), ("imported", "state"))
        or (len(place) == 3 and place[2] in OF_PHASE)
        or (len(place) == 4 and place[2] == ROLLING)
        or (place[0] == DATA and place[2:] in ((), ("base",)))
        or (place[0] == DATA and len(place) == 4 and place[2] == "cache")
        or (place[0] == DATA and len(place) == 5 and place[2] == "cache_shards")
    )
    return place if known else None


def run_of(file: Path) -> str | None:
    """Read the run that a configuration file names; None if the file is unreadable."""
    from zerotrain.artifact.documents import DocumentError, read_yaml

    try:
        raw = read_yaml(file, follow_links=True)
    except (OSError, DocumentError):
        return None
    return str(raw["run"]) if isinstance(raw, dict) and "run" in raw else None


def runs_here() -> dict[Path, str | None]:
    """Return the run of each file of config/, sorted by name."""
    return {file: run_of(file) for file in sorted(CONFIGS.glob("*.yaml"))}


def files_of(run: str) -> list[Path]:
    """Return the files of config/ that define a run."""
    return [file for file, found in runs_here().items() if found == run]


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
