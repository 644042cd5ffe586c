"""Before Snakemake plans: settings files and file times are made to agree with what manifests say.

An artifact is current if its recipe is the one that it would be made from now, and all files that
its manifest lists are there with their sizes. Then its settings file is older than its manifest,
and its manifest not older than those of its inputs. Otherwise its settings file is newer. So
Snakemake, which plans by times, plans by content: in a clone, after a copy, a checkout or
`dvc pull`, without records and with `--rerun-triggers mtime`.

A dry run writes settings files and times, too, and no results.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.artifact.damage import MANIFEST, find_damage
from zerotrain.artifact.documents import DocumentError, read_text
from zerotrain.artifact.layout import ROLLING
from zerotrain.artifact.leftovers import (
    is_kept,
    keep_manifest,
    recover_interrupted_publish,
    replace_by_link,
)
from zerotrain.artifact.manifest import Artifact, is_published, read_manifest
from zerotrain.artifact.recipe import UNKNOWN, Difference, Recipe, differences, recipe_of
from zerotrain.artifact.whole_file import write_whole
from zerotrain.config import stage_settings
from zerotrain.errors import PipelineError
from zerotrain.graph.artifacts import Planned, digests
from zerotrain.machine.disk_errors import check_writable, writing
from zerotrain.training.checkpointing.progress_folder import saved_steps

UNFINISHED = "unfinished"
"""In place of the identity of a checkpoint that a phase will publish at its end."""
KEPT = ("train_phase", "export_weights")
"""Stages that another version of reruns nothing: only a user's edit trains again."""


@dataclass(eq=False)
class Currency:
    """What was found of one artifact."""

    planned: Planned
    missing: bool = False
    """Whether a folder of it has no manifest."""
    differences: list[Difference] = field(default_factory=list)
    """Why it is not current; none if it is, or is missing."""
    version: Difference | None = None
    """The other version that made it, of a stage whose results stay."""

    @property
    def missing_outputs(self) -> list[Path]:
        """List the files that its rule declares and that are not there."""
        return [path for path in self.planned.outputs if not path.exists()]


def refresh(artifacts: Iterable[Planned]) -> list[Currency]:
    """Make settings files and file times agree with recipes.

    Args:
        artifacts: Those of the planned runs, or those that a target needs, in the order of the
            graph.

    Returns:
        What was found of each, in this order.

    Raises:
        PipelineError: files that a configuration names cannot be used.
        DiskError: a settings file cannot be written.
    """
    # Snakemake, which writes there also in a dry run, would end in a traceback.
    check_writable(Path(".snakemake"))
    look = _Look()
    return [_refresh(one, look) for one in artifacts]


def mark_for_rebuild(planned: Planned) -> None:
    """Have a job make its folders again even if they are current, as `--forcerun` asks for."""
    _write(planned, datetime.now(UTC).isoformat())


class _Look:
    """What is read of each folder, once per plan."""

    def __init__(self) -> None:
        self.newest: dict[Path, int] = {}
        """Time of each folder's outputs in nanoseconds, as Snakemake will see it."""
        self.read = cache(_read)

    def identity(self, folder: Path) -> str:
        """Return the identity of a folder, or that it is unknown, or unfinished: then what was made
        of its former content is not current."""
        found = self.read(folder)
        if isinstance(found, Artifact):
            return found.identity
        unfinished = folder.name == "checkpoint" and saved_steps(folder.with_name(ROLLING))
        return UNFINISHED if unfinished and found is None else UNKNOWN


def _read(folder: Path) -> Artifact | DocumentError | PipelineError | None:
    """Read a folder's manifest; return None if it has no manifest, the error if that is damaged."""
    recover_interrupted_publish(folder)
    if not is_published(folder):
        return None
    with contextlib.suppress(OSError):
        if not is_kept(folder):  # of a dataset, DVC brings back one name alone
            keep_manifest(folder)
    try:
        return read_manifest(folder, None)
    except (DocumentError, PipelineError) as error:
        return error


def _refresh(planned: Planned, look: _Look) -> Currency:
    found = Currency(planned)
    restore_files(planned.files)
    published = [look.read(folder) for folder in planned.folders]
    if any(one is None for one in published):
        found.missing = True
    else:
        _compare(planned, found, published, look)
    if found.missing or not found.differences:
        _write(planned, None)
        _make_older(planned, look)
    else:
        # Each time another text: Snakemake records a failed job's inputs as done, and a text that
        # it has recorded counts as unchanged, however new the file is.
        mark_for_rebuild(planned)
        _make_newer(planned)
    return found


def restore_files(files: Mapping[Path, Path]) -> None:
    """Copy missing files back: Snakemake removes those of a failed job."""
    for path, copy in files.items():
        if copy.is_file() and not path.exists():
            replace_by_link(copy, path)


def _compare(
    planned: Planned,
    found: Currency,
    published: Iterable[Artifact | PipelineError | None],
    look: _Look,
) -> None:
    inputs = {name: look.identity(folder) for name, folder in planned.inputs.items()}
    wanted = stage_settings.recipe(planned.stage, planned.settings).with_inputs(inputs)
    for folder, artifact in zip(planned.folders, published, strict=True):
        if not isinstance(artifact, Artifact):
            found.differences.append(Difference("file", str(folder / MANIFEST), new=str(artifact)))
            continue
        for one in _differences(planned, artifact, wanted, look):
            if one in found.differences:
                continue
            if one.kind == "version" and planned.stage in KEPT:
                found.version = one
            else:
                found.differences.append(one)


def _differences(
    planned: Planned, artifact: Artifact, wanted: Recipe, look: _Look
) -> Iterator[Difference]:
    """Yield how a published folder differs from a recipe, and its missing and resized files."""
    made = recipe_of(artifact)
    if planned.stage == "train_phase":
        yield from differences(made, Recipe(wanted.stage, wanted.version, {}, {}))
        yield from _training_differences(planned, artifact, look)
    else:
        own = digests(planned.settings, planned.folders[0])
        yield from differences(made, wanted.with_inputs(own))
    for damage in find_damage(artifact.folder, artifact.files, None):
        if not damage.unread:
            yield Difference("file", str(damage.path), new=damage.what)


def _training_differences(planned: Planned, checkpoint: Artifact, look: _Look) -> list[Difference]:
    """Return how what a phase would train differs from what its published checkpoint was.

    While an input is missing, nothing is known of it.
    """
    from zerotrain.training.checkpointing import published

    inputs = {name: look.read(folder) for name, folder in planned.inputs.items()}
    known = {name: one for name, one in inputs.items() if isinstance(one, Artifact)}
    if known.keys() != inputs.keys():
        return []
    try:
        return published.differences(known, checkpoint.folder.with_name("progress"), checkpoint)
    except (PipelineError, OSError):  # of an input or a listed file that is damaged
        return []


def _write(planned: Planned, rebuild: str | None) -> None:
    """Write a settings file if its text differs."""
    text = stage_settings.render(planned.stage, planned.settings, rebuild)
    with contextlib.suppress(OSError, PipelineError):
        if read_text(planned.settings_file) == text:
            return
    write_whole(planned.settings_file, text)


def _make_older(planned: Planned, look: _Look) -> None:
    """Make a settings file no newer than the outputs, and these no older than their inputs.

    To Snakemake the benchmark of a job is one of its outputs.
    """
    folders = [*planned.inputs.values(), *planned.unrecorded.get("shards", ())]
    inputs = max((look.newest.get(folder, 0) for folder in folders), default=0)
    times = []
    for path in filter(Path.exists, [*planned.outputs, planned.benchmark]):
        times.append(max(_time(path), inputs))
        if _time(path) < inputs:
            _set_time(path, inputs)
    look.newest.update(dict.fromkeys(planned.folders, max(times, default=inputs)))
    if times and _time(planned.settings_file) > min(times):
        _set_time(planned.settings_file, min(times))


def _make_newer(planned: Planned) -> None:
    """Make a settings file newer than each of the outputs."""
    newest = max(map(_time, filter(Path.exists, planned.outputs)), default=0)
    if _time(planned.settings_file) <= newest:
        _set_time(planned.settings_file, max(time.time_ns(), newest + SECOND))


SECOND = 10**9


def _time(path: Path) -> int:
    """Return when a file was written, in nanoseconds."""
    return path.stat().st_mtime_ns


def _set_time(path: Path, nanoseconds: int) -> None:
    # Of a colleague's file only the owner may choose a time; Snakemake then plans a job that finds
    # its folder current.
    with contextlib.suppress(PermissionError):
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)


@dataclass(frozen=True)
class StageJob:
    """What a stage is called with: its settings, its recipe, and whether its folders are current.

    Snakemake runs each job whose input was made again, and mostly the input is what it was: such a
    job publishes its folders again, and takes no longer than its start.
    """

    settings: Any
    """Its class in zerotrain.config.stage_settings.SETTINGS."""
    recipe: Recipe
    rebuild: bool
    """Whether its folders are made again even if they are current."""

    @classmethod
    def read(
        cls, stage: str, file: Path, output: Path, inputs: Mapping[str, Path | None]
    ) -> StageJob:
        """Read a stage's settings file, and compute its recipe.

        Args:
            stage: Its name.
            file: Its settings file.
            output: The first folder that it publishes.
            inputs: The folders whose identities are in the recipe, by name.

        Raises:
            PipelineError: the settings file is damaged, or an input is missing.
        """
        settings, found = stage_settings.read_settings(file, stage)
        read = {name: read_manifest(folder, None) for name, folder in inputs.items() if folder}
        identities = {name: one.identity for name, one in read.items()}
        known = {**identities, **digests(settings, output)}
        recipe = stage_settings.recipe(stage, settings).with_inputs(known)
        return cls(settings, recipe, rebuild=found.rebuild is not None)

    def keep(self, *folders: Path, copies: Mapping[Path, Path] | None = None) -> bool:
        """Publish the folders again as they are, if all are current.

        Args:
            folders: The folders that the stage publishes together.
            copies: Files that the stage writes outside of its folders, with their copies inside.

        Returns:
            Whether there is nothing else to do.
        """
        if self.rebuild or not all(map(self._is_current, folders)):
            return False
        restore_files(copies or {})
        files = [*(copies or {}), *(folder / MANIFEST for folder in folders)]
        if not all(path.is_file() for path in files):
            return False
        for path in files:
            with writing(path):
                os.utime(path)
        print(f"{', '.join(map(str, folders))}: current, kept")
        return True

    def _is_current(self, folder: Path) -> bool:
        try:
            found = read_manifest(folder, None)
            if differences(recipe_of(found), self.recipe):
                return False
        except PipelineError:
            return False
        return not any(find_damage(folder, found.files, None))
