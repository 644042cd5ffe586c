"""The artifacts of the planned runs: what makes each, from what, and where.

Rules take their inputs from here (zerotrain.graph.jobs), and the plan compares each with
its recipe (zerotrain.graph.currency).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerotrain.artifact import digest, file_sha256, layout
from zerotrain.artifact.damage import MANIFEST
from zerotrain.artifact.layout import DATA, RESULTS, DataFolder, RunFolder
from zerotrain.artifact.recipe import UNKNOWN
from zerotrain.artifact.verdicts import remembering
from zerotrain.config.models import Phase
from zerotrain.config.run import RunConfig
from zerotrain.config.section import ConditionedPrompt
from zerotrain.config.stage_settings import (
    SETTINGS,
    BuildSettings,
    CacheSettings,
    EvaluateSettings,
    ImportSettings,
    LaunchSettings,
    PrepareSettings,
    StageSettings,
)
from zerotrain.config.suggestions import join_first
from zerotrain.data.conditioning import prompt_files
from zerotrain.data.files import DatasetFiles
from zerotrain.data.open import source_files
from zerotrain.errors import PipelineError
from zerotrain.evaluation.results import METRICS
from zerotrain.graph.runs import Runs, checked
from zerotrain.models.base_places import local_folders
from zerotrain.state.checkpoint_path import find_checkpoint, optimizers_beside

PRESETS = Path("config/launch")


def digests(settings: StageSettings, folder: Path) -> dict[str, str]:
    """Return the digest of each group of files of users that a stage reads outside of results/.

    They are no inputs of rules, as a mere `touch` would rerun jobs. Large ones are hashed again
    only when they have changed on this disk (zerotrain.artifact.verdicts). The digest
    of a group without files is UNKNOWN: it may be on a disk that is not there now.

    Args:
        settings: The stage's settings.
        folder: The folder that it publishes; next to a dataset's manifest is a listing of its
            files, which spares hashing them.

    Raises:
        PipelineError: a folder or file that the settings name cannot be used.
    """
    if isinstance(settings, PrepareSettings) and settings.data.has_image_files:
        return {"files": DatasetFiles(settings.data, folder).update()}
    groups = files_of(settings).items()
    return {name: _digest(files) if files else UNKNOWN for name, files in groups}


def files_of(settings: StageSettings) -> dict[str, list[str]]:
    """List the files that a stage reads outside of results/, by group."""
    if isinstance(settings, PrepareSettings):
        return {"files": source_files(settings.data)}
    if isinstance(settings, BuildSettings):
        return {"model": [] if settings.is_preset else _files_of_base(settings.base)}
    if isinstance(settings, CacheSettings):
        return {"images": _prompt_images(settings.validation_prompts)}
    if isinstance(settings, EvaluateSettings):
        images = settings.evaluate.conditioning_images or []
        return {"images": prompt_files(images, "evaluate.conditioning_images")}
    if isinstance(settings, LaunchSettings):
        return {"preset": preset_files(settings.phases[-1].launch.preset)}
    if isinstance(settings, ImportSettings):
        return _external(settings)
    return {}


def preset_files(preset: str) -> list[str]:
    """List the file of a launch preset; for `auto` all that it chooses from."""
    if preset == "auto":
        return sorted(str(path) for path in PRESETS.glob("*.yaml"))
    return [str(PRESETS / f"{preset}.yaml")]


def _prompt_images(prompts: Sequence[str | ConditionedPrompt]) -> list[str]:
    found = [files for _, files in (one for one in prompts if not isinstance(one, str))]
    return prompt_files(found, "validation.conditioning_images")


def _files_of_base(base: str) -> list[str]:
    """List the files of the folders that a base names."""
    file = Path(base).expanduser()
    found = [path for folder in local_folders(base) for path in _below(folder)]
    return [*found, *([str(file)] if file.is_file() else [])]


def _external(settings: ImportSettings) -> dict[str, list[str]]:
    """List the files of an external checkpoint."""
    resume = settings.resume_from_checkpoint
    if resume is None:
        return {}
    path = find_checkpoint(Path(resume.folder).expanduser())
    own = [str(path), *map(str, optimizers_beside(path))] if path.is_file() else _below(path)
    names = [] if resume.names in (None, "module") else [os.path.expanduser(str(resume.names))]
    return {"checkpoint": own, "names": names}


def _below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


def _digest(files: Sequence[str]) -> str:
    """Compute the digest of files by name and content; a missing one counts as missing."""
    sha256 = remembering(file_sha256)
    names = [os.path.basename(file) for file in files]
    hashes = [sha256(Path(file)) if os.path.isfile(file) else None for file in files]
    return digest([*zip(names, hashes, strict=True)])


SHARDS = "cache_shards"


@dataclass(frozen=True)
class Planned:
    """One job of a stage: the folders that it publishes together, and what they are made from."""

    stage: str
    folders: tuple[Path, ...]
    settings_file: Path
    run: RunConfig
    phase: str = ""
    inputs: Mapping[str, Path] = field(default_factory=dict)
    """Folders of other stages by name; their identities are in the recipe."""
    unrecorded: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Further folders that the rule takes as inputs, which are in no recipe."""
    files: Mapping[Path, Path] = field(default_factory=dict)
    """Files that it writes outside of its folders, with their copies inside."""
    records: Path = RESULTS
    """The folder with the logs and the benchmarks of its rule."""

    @cached_property
    def settings(self) -> StageSettings:
        """Return what the stage reads of the configuration."""
        return SETTINGS[self.stage].of(self.run, self.phase)

    @property
    def name(self) -> str:
        """Name the job as `train_phase RUN/PHASE`, `cache_latents DATA 512` or `report RUN`."""
        place = self.folders[0].relative_to(RESULTS).parts
        if self.stage in OF_DATA:
            return " ".join([self.stage, place[1], *place[3:]])
        subject = place[1] if place[0] == DATA else place[0]
        return f"{self.stage} {subject}" + (f"/{self.phase}" if self.phase else "")

    @property
    def rule(self) -> str:
        """Name the rule that makes it: some stages have several."""
        place = self.folders[0].relative_to(RESULTS).parts
        if self.stage == "cache_latents" and place[2] == SHARDS:
            return "encode_shard"
        if self.stage == "build_base" and place[0] == DATA:
            return "build_shared_base"
        return self.stage

    @property
    def log(self) -> Path:
        """Return the log of its rule."""
        return self.records / "logs" / f"{self._job}.log"

    @property
    def benchmark(self) -> Path:
        """Return the benchmark of its rule, which Snakemake writes when the job has succeeded."""
        return self.records / "benchmarks" / f"{self._job}.tsv"

    @property
    def _job(self) -> str:
        own = self.folders[0].relative_to(RESULTS).parts[3:] if self.stage in OF_DATA else ()
        return ".".join(filter(None, [self.rule, self.phase, *own]))

    @property
    def sources(self) -> list[Path]:
        """List the folders of other stages that its rule takes as inputs."""
        return [*self.inputs.values(), *(one for some in self.unrecorded.values() for one in some)]

    @property
    def ancient(self) -> tuple[Path, ...]:
        """List those of them that, made again, do not have it run."""
        return self.unrecorded.get("dataset", ())

    @property
    def outputs(self) -> list[Path]:
        """List the files that the rule declares."""
        return [*(folder / MANIFEST for folder in self.folders), *self.files]

    def manifests(self, name: str) -> list[str]:
        """List the manifests of one of the inputs; empty if the job has none of that name."""
        found = self.unrecorded.get(name) or filter(None, [self.inputs.get(name)])
        return [str(folder / MANIFEST) for folder in found]


class Artifacts:
    """The artifacts of the planned runs, those that are made first before the others.

    Args:
        runs: The runs.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self.planned: dict[str, Planned] = {}
        for one in self._all():
            own = replace(one, records=self._records(one))
            self.planned.setdefault(str(one.settings_file), own)
        self.of_output = {str(path): one for one in self.planned.values() for path in one.outputs}
        """The artifact that each output of a rule belongs to."""

    def find(self, stage: str, wildcards: Any) -> Planned:
        """Return the artifact that a rule's job makes."""
        run = self._runs.of(wildcards)
        if stage in OF_DATA:
            shard = [wildcards[name] for name in ("size", "shard") if name in wildcards.keys()]  # noqa: SIM118
            return self.of_settings(of_data(run.data_name, stage, *shard))
        phase = wildcards.get("phase", "") if stage in OF_PHASE else ""
        return self.of_settings(of_run(run.run, stage, phase))

    @checked
    def of_settings(self, file: Path) -> Planned:
        """Return the artifact with a settings file.

        Raises:
            PipelineError: a target asks for one that the configuration does not have.
        """
        if found := self.planned.get(str(file)):
            return found
        folder = file.parents[1]
        near = [one for one in map(Path, self.planned) if one.parent == file.parent]
        raise PipelineError(
            f"{folder}: the configuration has no {file.stem} here",
            hint=f"it has {join_first([one.stem for one in near])}; "
            "where dvc.yaml asks for another, `zerotrain dvc generate` renews it",
        )

    def _records(self, planned: Planned) -> Path:
        """Return the folder of a rule's logs: of several runs, that of the dataset they share."""
        shared = planned.stage in OF_DATA or planned.rule == "build_shared_base"
        run = planned.run
        return RESULTS / (run.data_name if shared and self._runs.are_several else run.run)

    def _all(self) -> Iterator[Planned]:
        for name, run in self._runs.by_data.items():
            folder = DataFolder(name).path
            yield Planned("prepare_dataset", (folder,), of_data(name, "prepare_dataset"), run)
        for run in self._runs.by_name.values():
            yield self._base(run, RunFolder(run.run).base)
        for run in self._runs.by_name.values():
            yield from self._caches(run)
        for run in self._runs.by_name.values():
            yield from self._of_run(run)

    def _base(self, run: RunConfig, folder: Path) -> Planned:
        # A base that is built stays as it is when its dataset changes: with another tokenizer or
        # autoencoder every sample would be encoded again, and every phase trained again.
        dataset = {"dataset": (DataFolder(run.data_name).path,)} if run.is_preset else {}
        file = folder.with_name(layout.SETTINGS) / "build_base.json"
        return Planned("build_base", (folder,), file, run, unrecorded=dataset)

    def _caches(self, run: RunConfig) -> Iterator[Planned]:
        name = run.data_name
        base = Path(self._runs.base_of_data(name)).parent
        if str(base / MANIFEST) not in {str(one.base / MANIFEST) for one in self._run_folders()}:
            yield self._base(self._runs.by_data[name], base)
        inputs = {"dataset": DataFolder(name).path, "base": base}
        count = run.cache.shards
        for size in dict.fromkeys(map(run.cache_size, run.phases)):
            shards = []
            for number in range(count if count > 1 else 0):
                shard = f"{number}-of-{count}"
                shards.append(DataFolder(name).path / SHARDS / str(size) / shard)
                file = of_data(name, "cache_latents", str(size), shard)
                yield Planned("cache_latents", (shards[-1],), file, run, inputs=inputs)
            file = of_data(name, "cache_latents", str(size))
            folder = DataFolder(name).cache(size)
            ranges = {"shards": tuple(shards)} if shards else {}
            yield Planned("cache_latents", (folder,), file, run, inputs=inputs, unrecorded=ranges)

    def _run_folders(self) -> list[RunFolder]:
        return [RunFolder(name) for name in self._runs.by_name]

    def _of_run(self, run: RunConfig) -> Iterator[Planned]:
        place = RunFolder(run.run)
        start: dict[str, Path] = {}
        if run.resume_from_checkpoint:
            yield Planned(
                "import_checkpoint",
                (place.imported_state,),
                of_run(run.run, "import_checkpoint"),
                run,
                inputs={"base": place.base},
            )
            start = {"start": place.imported_state}
        evaluated: dict[str, Path] = {}
        state = start
        for phase in run.phases:
            yield from self._of_phase(run, phase, start, state)
            folders = place.phase(phase.name)
            state = {"start": folders.state}
            evaluated[f"{phase.name}/evaluation"] = folders.evaluation
            evaluated[f"{phase.name}/launch"] = folders.launch
        yield Planned("report", (place.report,), of_run(run.run, "report"), run, inputs=evaluated)

    def _of_phase(
        self, run: RunConfig, phase: Phase, start: dict[str, Path], state: dict[str, Path]
    ) -> Iterator[Planned]:
        """Yield the artifacts of a phase, of a run that begins with `start`."""
        place, name = RunFolder(run.run), phase.name
        own = place.phase(name)
        data = DataFolder(run.data_name)
        cache = {"cache": data.cache(run.cache_size(phase))}

        def planned(stage: str, *folders: Path, **rest: Any) -> Planned:
            return Planned(stage, folders, of_run(run.run, stage, name), run, name, **rest)

        sizes = {} if phase.launch.preset == "torch" else {"base": place.base}
        rows = cache if run.is_text else {}
        launched = {"dataset": data.path, **rows, **sizes, **start}
        yield planned("render_launch", own.launch, inputs=launched)
        trained = {"launch": own.launch, "base": place.base, **cache, **state}
        yield planned("train_phase", own.checkpoint, inputs=trained)
        exported = {"checkpoint": own.checkpoint, "base": place.base}
        yield planned("export_weights", own.weights, own.state, inputs=exported)
        measured = {"dataset": data.path, **cache, "weights": own.weights, "state": own.state}
        files = {own.path / "metrics.json": own.evaluation / METRICS}
        yield planned("evaluate", own.evaluation, inputs=measured, files=files)


def training_of(run: RunConfig, phase: Phase) -> Planned:
    """Return the artifact that a phase's training makes."""
    settings = of_run(run.run, "train_phase", phase.name)
    return Artifacts(Runs({"": run})).planned[str(settings)]


OF_PHASE = ("render_launch", "train_phase", "export_weights", "evaluate")
OF_DATA = ("prepare_dataset", "cache_latents")
"""The stages whose results runs may share."""


def of_data(name: str, stage: str, *parts: str) -> Path:
    """Return the settings file of a dataset's stage; `parts` are the cache's size and range."""
    return DataFolder(name).path / layout.SETTINGS / f"{'-'.join([stage, *parts])}.json"


def of_run(run: str, stage: str, phase: str = "") -> Path:
    """Return the settings file of a run's stage, or of its phase's."""
    return RunFolder(run).path / phase / layout.SETTINGS / f"{stage}.json"
