"""What follows from a plan, job by job: work, time and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zerotrain.artifact import MANIFEST, is_published, read
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.crop import centre_crop
from zerotrain.data.dataset import Sample, caption_sha256, read_dataset
from zerotrain.data.open import open_source
from zerotrain.data.shares import count_epoch
from zerotrain.data.source import Found
from zerotrain.errors import PipelineError
from zerotrain.launch.resolve import phase_spans
from zerotrain.pipeline.rebuild import CACHE, TRAINED_AGAIN, TRAINING, describe_training
from zerotrain.pipeline.switch.point import imported_state
from zerotrain.pipeline.terminal.reasons import LAUNCH, job_name
from zerotrain.pipeline.why import estimates
from zerotrain.pipeline.why.causes import DAMAGED, PREPARE, Plan
from zerotrain.pipeline.why.encodes import EVERY_KEY, TEXT_KEYS, Encodes, count_encodes
from zerotrain.pipeline.why.estimates import PhaseForecast, forecast_phase
from zerotrain.pipeline.why.samples import UNREAD, compare_samples, count
from zerotrain.pipeline.why.training import foresee_training
from zerotrain.state.position import read_position
from zerotrain.training.checkpointing.progress_folder import saved_steps

T = TypeVar("T")

BASE, EXPORT = "build_base", "export_weights"
SAME_CONTENT = {"version", "rule", "damaged", "missing", "interrupted", "forced", "environment"}
"""Kinds of causes after which a stage most likely makes what it made before."""


@dataclass
class Outcome:
    """What a job would do.

    Attributes:
        job: Snakemake's job.
        what: Its work in words; empty if its name says it.
        seconds: Estimated from earlier jobs; None if there was none.
        bytes: Estimated bytes that it writes; None if unknown.
        changes: Whether a training that reads its result would find another one.
        encodes: What a cache's job encodes.
        forecast: Whether the time is the planner's forecast.
        ends: Whether it fails, or is not reached because a job before it fails.
    """

    job: Any
    what: str
    seconds: float | None
    bytes: int | None
    changes: bool
    encodes: Encodes | None = None
    ends: bool = False
    forecast: bool = False

    @property
    def name(self) -> str:
        """Name of the job."""
        return job_name(self.job)


class Outcomes:
    """The outcomes of a plan's jobs, in the order of the graph.

    Args:
        plan: The plan.
        dag: Snakemake's graph.
    """

    def __init__(self, plan: Plan, dag: Any) -> None:
        self._plan = plan
        self._dag = dag
        self._found: dict[Any, Outcome] = {}
        self._forecasts: dict[tuple[str, str], PhaseForecast | None] = {}
        makers = {TRAINING: self._training, CACHE: self._cache, PREPARE: self._dataset}
        for job in plan.jobs:
            if any(one.ends for one in self._before(job)):
                self._found[job] = Outcome(job, "is not reached", 0.0, 0, False, ends=True)
            else:
                self._found[job] = makers.get(job.rule.name, self._other)(job)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._found.values())

    def of(self, job: Any) -> Outcome:
        """Return the outcome of a job."""
        return self._found[job]

    def _before(self, job: Any, *rules: str) -> list[Outcome]:
        """List the outcomes of the planned jobs whose results a job reads, of all rules or some."""
        found = [self._found[one] for one in self._dag.dependencies[job] if one in self._found]
        return [one for one in found if not rules or one.job.rule.name in rules]

    def _differs(self, job: Any) -> bool:
        """Return whether a job has a cause of its own that changes its result."""
        return bool(self._own_kinds(job) - SAME_CONTENT)

    def _own_kinds(self, job: Any) -> set[str]:
        return {cause.kind for cause in self._plan.causes if job in cause.jobs}

    def _other(self, job: Any) -> Outcome:
        run = self._plan.config_of(job)
        written: int | None = 0
        if job.rule.name == EXPORT:
            written = self._export_bytes(job)
        elif job.rule.name.startswith("build_") and run.is_preset:
            written = estimates.folder_bytes(Path(job.output[0]).parent, "base")
        # A training reads the state alone, on which the values of an export have no effect.
        own = job.rule.name != EXPORT and self._differs(job)
        changes = own or any(one.changes for one in self._before(job))
        return Outcome(job, "", estimates.past_seconds(job), written, changes)

    def _export_bytes(self, job: Any) -> int | None:
        """Return the bytes of weights and state, of this phase or of another of its run."""
        known = _of_any_phase(Path(job.output[0]).parents[1], estimates.exported_bytes)
        if known is not None:
            return known
        found = self._forecast(self._plan.config_of(job), job.wildcards["phase"])
        return found.exports if found else None

    def _forecast(self, run: RunConfig, phase: str) -> PhaseForecast | None:
        """Return the planner's forecast of a phase, made once."""
        if (run.run, phase) not in self._forecasts:
            self._forecasts[run.run, phase] = forecast_phase(run, phase)
        return self._forecasts[run.run, phase]

    def _dataset(self, job: Any) -> Outcome:
        changes = self._plan.samples.get(str(job.output[0]))
        seconds = estimates.past_seconds(job)
        what = ""
        if changes is not None:
            former = len(_samples(Path(job.output[0]).parent))
            what = f"checks {count(len(changes.samples), 'image')}"
            if seconds is not None and former:
                seconds *= len(changes.samples) / former
        others = self._own_kinds(job) - SAME_CONTENT - {"samples"}
        differs = bool(others) or (changes is not None and not changes.trains_same)
        return Outcome(job, what, seconds, 0, differs)

    def _cache(self, job: Any) -> Outcome:
        run = self._plan.config_of(job)
        cache, dataset = Path(job.output[0]).parent, Path(job.input["dataset"]).parent
        values = {change.key for change in self._plan.values.get(job, ())}
        own = self._own_kinds(job)
        trained = bool((EVERY_KEY | TEXT_KEYS) & values) or "file" in own
        changes = trained or any(one.changes for one in self._before(job, PREPARE))
        seconds, encodes = estimates.past_seconds(job), None
        if not run.is_text:
            present = self._present(job, run, dataset)
            encodes = count_encodes(
                *(cache, int(job.wildcards["size"]), present, CacheSettings.of(run)),
                base=Path(job.input["base"]).parent,
                again=self._encoders_again(job),
                damaged=_damaged_names(self._dag.reason(job)),
            )
            if seconds is not None and (last := estimates.items_encoded(job)):
                seconds *= (encodes.images + encodes.captions) / last
        what = str(encodes) if encodes else "tokenises the text that is new"
        if "version" in own and encodes:
            what = "compares eight items of each kind, and " + what
        return Outcome(job, what, seconds, encodes.bytes if encodes else None, changes, encodes)

    def _encoders_again(self, job: Any) -> set[str]:
        """Name the encoders of a cache's base that it may have again: images, captions."""
        bases = [one for one in self._before(job, *_bases(self._dag, job)) if one.changes]
        changes = self._plan.samples.get(str(job.input["dataset"]))
        # A preset's autoencoder is fitted to the training images alone.
        same_images = changes is not None and changes.trains_same_images
        if not bases:
            return set()
        kept = same_images and not any(self._differs(one.job) for one in bases)
        return {"captions"} if kept else {"images", "captions"}

    def _present(self, job: Any, run: RunConfig, dataset: Path) -> Sequence[Sample]:
        """List the samples that the cache will have; before a first dataset, by their names."""
        if changes := self._plan.samples.get(str(job.input["dataset"])):
            return changes.samples
        prepared = self._before(job, PREPARE)
        if any(self._plan.values.get(one.job) for one in prepared):  # other captions, perhaps
            changes = compare_samples(run.data, dataset)
            if changes is not None:
                return changes.samples
        if samples := _samples(dataset):
            return samples
        found = [one for one in open_source(run.data).found() if one.reason is None]
        return [_unread(one) for one in found]

    def _training(self, job: Any) -> Outcome:
        folder = Path(job.output[0]).parents[1]
        launch = next(one for one in self._dag.dependencies[job] if one.rule.name == LAUNCH)
        run = self._plan.config_of(launch)
        phase = run.phase(job.wildcards["phase"])
        values = [
            change
            for change in self._plan.values.get(launch, ())
            if change.phase in ("", phase.name)
        ]
        before = self._before(job, CACHE, EXPORT, *_bases(self._dag, job))
        other = self._differs(job) or any(one.changes for one in before)
        own = self._own_kinds(job)
        span = self._spans(run, job).get(phase.name)
        found = foresee_training(phase, folder, span, values, other)
        what, steps = found.what, found.steps
        if steps == 0 and not found.refused and "missing" in own:
            what = "publishes its checkpoint again, no step is trained"
        if "damaged" in own:
            what = describe_training(folder / "checkpoint").removeprefix(f"{TRAINING} ")
            steps = _lost_steps(what, span)
        size = _of_any_phase(folder, estimates.checkpoint_bytes)
        rate = _of_any_phase(folder, estimates.seconds_per_step)
        forecast = self._forecast(run, phase.name) if steps != 0 and size is None else None
        kept = phase.train.keep if found.restarts or not _has_steps(folder) else 1
        if steps == 0:
            written: int | None = 0
        elif size is not None:
            written = kept * size
        else:
            written = forecast.checkpoints if forecast else None
        seconds = _training_seconds(job, folder, steps, rate)
        foreseen = False
        if seconds is None and steps and forecast and forecast.step:
            seconds, foreseen = steps * forecast.step, True
        changes = steps != 0 or found.other_end
        return Outcome(
            *(job, what, seconds, written, changes), ends=found.refused, forecast=foreseen
        )

    def _spans(self, run: RunConfig, job: Any) -> dict[str, tuple[int, int]]:
        """Return first and last step of a run's phases; empty if unknown data decide them."""
        if not any(phase.until.endswith("epochs") for phase in run.phases):
            return phase_spans(run.phases, 1, _origin(run))
        cache = Path(job.input["cache"]).parent
        changes = self._plan.samples.get(str(cache.parents[1] / MANIFEST))
        samples = changes.samples if changes else _samples(cache.parents[1])
        train = [one for one in samples if one.split == "train"]
        repeats, shares = (
            np.array([getattr(one, name) for one in train]) for name in ("repeats", "share")
        )
        epoch = count_epoch(repeats, shares, run.data.repeats)
        if run.is_text or not epoch:
            return {}
        return phase_spans(run.phases, epoch, _origin(run))


def _lost_steps(what: str, span: tuple[int, int] | None) -> int | None:
    """Return the steps that describe_training says are trained again; None if unknown."""
    if TRAINED_AGAIN not in what:
        return 0
    if span is None:
        return None
    since = re.search(r"from step (\d+)", what)
    return span[1] - (int(since[1]) if since else span[0])


def _bases(dag: Any, job: Any) -> list[str]:
    """Name the rules that build the base which a job reads: one of them, for each kind of run."""
    rules = {one.rule.name for one in dag.dependencies[job]}
    return [name for name in rules if name.startswith("build_")]


def _damaged_names(reason: Any) -> set[str]:
    """Name the damaged files of a job's folder."""
    files = map(str, reason.missing_output)
    return {Path(file.removesuffix(DAMAGED)).name for file in files}


def _samples(dataset: Path) -> Sequence[Sample]:
    """Read the samples of a dataset of images; empty without one."""
    try:
        return read_dataset(dataset, verify=False).samples
    except (PipelineError, OSError, LookupError, TypeError):
        return ()


def _unread(entry: Found) -> Sample:
    """Return a sample of which only the name and the caption are known."""
    caption = entry.caption
    return Sample(
        *(entry.file, entry.file, caption, caption_sha256(caption), UNREAD, UNREAD),
        *(centre_crop(UNREAD), "train"),
    )


def _origin(run: RunConfig) -> tuple[int, int]:
    """Return the step and the samples at which a run begins."""
    state = imported_state(run)
    if state is None:
        return 0, 0
    position = read_position(read(state, "state", verify=False), "state.json")
    return position.step, position.samples


def _of_any_phase(folder: Path, measure: Callable[[Path], T | None]) -> T | None:
    """Measure a phase's folder, or the first other one of its run that can be measured."""
    others = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
    found = (measure(one) for one in [folder, *others])
    return next((one for one in found if one is not None), None)


def _training_seconds(
    job: Any, folder: Path, steps: int | None, rate: float | None
) -> float | None:
    """Estimate a training: its start as the last time, and its steps as those logged."""
    if steps == 0:
        return 0.0
    if steps is None or rate is None:
        return None
    whole, trained = estimates.past_seconds(job), _of_any_phase(folder, estimates.trained_seconds)
    return max(0.0, (whole or 0.0) - (trained or 0.0)) + steps * rate


def _has_steps(folder: Path) -> bool:
    """Return whether a phase has a checkpoint, a published or a rolling one."""
    return is_published(folder / "checkpoint") or bool(saved_steps(folder / "progress"))
