"""The inputs of rules, as functions of a job's wildcards."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.artifact.layout import DataFolder
from zerotrain.data.conditioning_file import prompt_files
from zerotrain.data.files import DatasetFiles
from zerotrain.data.open import source_files
from zerotrain.errors import PipelineError
from zerotrain.models.composed_base import local_folders
from zerotrain.pipeline.graph.runs import Runs, checked
from zerotrain.state.checkpoint_path import find_checkpoint, optimizers_beside

Files = str | list[str]


class JobInputs:
    """The input files of jobs.

    Args:
        runs: The runs that are planned.
        updates: Whether this process looks at the files of datasets: not in a job on a node.
    """

    def __init__(self, runs: Runs, *, updates: bool) -> None:
        self._runs = runs
        self._updates = updates
        self._base_of_data = cache(runs.base_of_data)  # called for each cache of each run

    @checked
    def dataset_files(self, wildcards: Any) -> Files:
        """Return the digest of a dataset's images and captions, brought up to date; the files of
        text and of the built-in example."""
        run = self._runs.of(wildcards)
        if not run.data.has_image_files:
            return _check_names(source_files(run.data), "data.path")
        files = DatasetFiles(run.data, DataFolder(run.data_name).path)
        # A job on a node is planned from files that were looked at.
        if self._updates:
            files.update()
        return str(files.digest_file)

    def dataset(self, wildcards: Any) -> str:
        """Return the manifest of the run's dataset."""
        return f"results/data/{self._runs.of(wildcards).data_name}/manifest.json"

    @checked
    def evaluation_images(self, wildcards: Any) -> list[str]:
        """List the conditioning images of the evaluation prompts."""
        found = self._runs.of(wildcards).evaluate.conditioning_images
        key = "evaluate.conditioning_images"
        return _check_names(prompt_files(found or [], key), key)

    @checked
    def validation_images(self, wildcards: Any) -> list[str]:
        """List the conditioning images of the validation prompts."""
        asked = self._runs.of(wildcards).validation_prompts
        found = [files for _, files in (one for one in asked if not isinstance(one, str))]
        key = "validation.conditioning_images"
        return _check_names(prompt_files(found, key), key)

    def base_dataset(self, wildcards: Any) -> Files:
        """Return the dataset that a preset is built for; other bases do not depend on one."""
        return self.dataset(wildcards) if self._runs.of(wildcards).is_preset else []

    def base_files(self, wildcards: Any) -> list[str]:
        """List the files of a base in the user's folders; empty for a preset."""
        run = self._runs.of(wildcards)
        return [] if run.is_preset else _files_of_base(run.base)

    def cache_base(self, wildcards: Any) -> str:
        """Return the base whose encoders fill the caches of the job's dataset."""
        return self._base_of_data(self._runs.of(wildcards).data_name)

    def cache_shards(self, wildcards: Any) -> list[str]:
        """List the ranges that other jobs encode; empty if one job encodes the whole cache."""
        run = self._runs.of(wildcards)
        count = run.cache.shards
        folder = f"results/data/{run.data_name}/cache_shards/{wildcards.size}"
        names = [f"{number}-of-{count}" for number in range(count if count > 1 else 0)]
        return [f"{folder}/{name}/manifest.json" for name in names]

    def phase_cache(self, wildcards: Any) -> str:
        """Return the cache at the phase's resolution, or at its maximum text length."""
        run = self._runs.of(wildcards)
        size = run.cache_size(self._runs.phase_of(wildcards))
        return f"results/data/{run.data_name}/cache/{size}/manifest.json"

    def launch_cache(self, wildcards: Any) -> Files:
        """Return the cache of a text family, which sets the rows per epoch; images need none."""
        return self.phase_cache(wildcards) if self._runs.of(wildcards).is_text else []

    def phase_preset(self, wildcards: Any) -> str:
        """Return the launch preset of the phase."""
        return f"config/launch/{self._runs.phase_of(wildcards).launch.preset}.yaml"

    def preset_choice(self, wildcards: Any) -> list[str]:
        """List the presets that `auto` chooses from; empty for a phase that names its preset."""
        if self._runs.phase_of(wildcards).launch.preset != "auto":
            return []
        return sorted(str(path) for path in Path("config/launch").glob("*.yaml"))

    def launch_base(self, wildcards: Any) -> Files:
        """Return the base, whose sizes determine ZeRO's buckets; empty for plain PyTorch."""
        if self._runs.phase_of(wildcards).launch.preset == "torch":
            return []
        return f"results/{self._runs.of(wildcards).run}/base/manifest.json"

    def phase_start(self, wildcards: Any) -> list[str]:
        """List the state that the phase continues; empty for the first of a run from scratch."""
        run = self._runs.of(wildcards)
        before = run.phase_before(wildcards.phase)
        if before:
            return [f"results/{run.run}/{before.name}/state/manifest.json"]
        return self.run_start(wildcards)

    def run_start(self, wildcards: Any) -> list[str]:
        """List the state that a run starts from, if it continues an external checkpoint."""
        run = self._runs.of(wildcards)
        imported = f"results/{run.run}/imported/state/manifest.json"
        return [imported] if run.resume_from_checkpoint else []

    @checked
    def external_checkpoint(self, wildcards: Any) -> Files:
        """List the files of the external checkpoint."""
        resume = self._runs.of(wildcards).resume_from_checkpoint
        assert resume
        path = find_checkpoint(Path(resume.folder).expanduser())
        key = "resume_from_checkpoint"
        if path.is_file():
            return _check_names([str(path), *map(str, optimizers_beside(path))], key)
        return _files_below(path, key)

    @checked
    def names_file(self, wildcards: Any) -> Files:
        """Return the file that names the parameters of the external checkpoint's optimizer."""
        resume = self._runs.of(wildcards).resume_from_checkpoint
        names = resume.names if resume else None
        if names in (None, "module"):
            return []
        return _check_names([os.path.expanduser(str(names))], "resume_from_checkpoint.names")[0]

    def of_phases(self, *name: str) -> Callable[[Any], list[str]]:
        """Return a function that lists a file of each phase of the run, or its folder."""

        def of_job(wildcards: Any) -> list[str]:
            run = self._runs.of(wildcards)
            return [os.path.join("results", run.run, one.name, *name) for one in run.phases]

        return of_job

    def of_runs(self, *names: str, phases: slice = slice(None)) -> list[str]:
        """List files of each run; names with {phase} are listed once per phase."""
        return [
            f"results/{run.run}/{name.format(phase=phase)}"
            for run in self._runs.by_name.values()
            for name in names
            for phase in ([one.name for one in run.phases[phases]] if "{phase}" in name else [""])
        ]

    def datasets(self, *, of_presets: bool = False) -> list[str]:
        """List the datasets of all runs, or of those whose base is a preset."""
        found = self._runs.by_data.items()
        names = [name for name, run in found if run.is_preset or not of_presets]
        return [f"results/data/{name}/manifest.json" for name in names]

    def caches(self) -> list[str]:
        """List the caches of all runs, and the bases whose encoders fill them."""
        found: dict[str, None] = {}
        for run in self._runs.by_name.values():
            found[self._base_of_data(run.data_name)] = None
            for size in map(run.cache_size, run.phases):
                found[f"results/data/{run.data_name}/cache/{size}/manifest.json"] = None
        return [*found]


@cache
@checked
def _files_of_base(base: str) -> list[str]:
    """List the files of the folders that a base names."""
    folders = local_folders(base)
    found = sorted(str(path) for folder in folders for path in folder.rglob("*") if path.is_file())
    file = Path(base).expanduser()
    found += [str(file)] if file.is_file() else []
    return _check_names(found, "base")


@checked
def _files_below(folder: Path, key: str) -> list[str]:
    """List every file in a user's folder."""
    found = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    if not found:
        raise PipelineError(
            f"{key}: {folder}: no such folder, or nothing in it",
            hint=f"name a folder that exists, or remove `{key}`",
        )
    return _check_names(found, key)


def _check_names(files: list[str], key: str) -> list[str]:
    """Return the files, after checking that their names are valid as Snakemake inputs."""
    braced = [name for name in files if "{" in name or "}" in name]
    if braced:
        raise PipelineError(
            f"{key}: {braced[0]}: its name holds a brace, which Snakemake takes for a wildcard",
            hint="rename it, or move it out of that folder",
        )
    return files
