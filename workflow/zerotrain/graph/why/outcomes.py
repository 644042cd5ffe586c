"""What follows from a plan, stage by stage: work, time and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from zerotrain.artifact import is_published
from zerotrain.config.run import RunConfig
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import centre_crop
from zerotrain.data.dataset import Sample, caption_sha256, read_dataset
from zerotrain.data.open import open_source
from zerotrain.data.source import Found, count_epoch
from zerotrain.errors import PipelineError
from zerotrain.graph.currency import Currency
from zerotrain.graph.reruns import Reruns
from zerotrain.graph.switch.point import origin_of
from zerotrain.graph.why import estimates
from zerotrain.graph.why.causes import PREPARE, TRAINED_FROM, TRAINING, Causes, values_of
from zerotrain.graph.why.estimates import PhaseForecast, forecast_phase
from zerotrain.graph.why.samples import UNREAD, compare_samples, count
from zerotrain.graph.why.work import (
    EVERY_KEY,
    TEXT_KEYS,
    Encodes,
    count_encodes,
    foresee_restoring,
    foresee_training,
)
from zerotrain.launch.resolve import phase_spans
from zerotrain.training.checkpointing.progress_folder import saved_steps

T = TypeVar("T")

BASE, CACHE, LAUNCH = "build_base", "cache_latents", "render_launch"
EXPORT, EVALUATE = "export_weights", "evaluate"
SAME_CONTENT = {"version", "rule", "damaged", "missing", "forced"}
"""Kinds of causes after which a stage most likely makes what it made before."""
KEPT = "is kept if what it reads comes out equal"
SECONDS_TO_KEEP = 1.0


@dataclass
class Outcome:
    """What a job would do.

    Attributes:
        made: The artifact.
        what: The job's work in words; empty if its name says it.
        seconds: Estimated from earlier jobs; None if there was none.
        bytes: Estimated bytes that it writes; None if unknown.
        changes: Whether a training that reads its result would find another one.
        equal: Whether its result most likely comes out as it is.
        encodes: What a cache's job encodes.
        forecast: Whether the time is the planner's forecast.
        ends: Whether it fails, or is not reached because a job before it fails.
    """

    made: Currency
    what: str
    seconds: float | None
    bytes: int | None
    changes: bool
    equal: bool = False
    encodes: Encodes | None = None
    ends: bool = False
    forecast: bool = False

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.made.planned.name


class Outcomes:
    """The outcomes of what runs, in the order of the graph.

    Args:
        reruns: What runs.
        causes: Why.
    """

    def __init__(self, reruns: Reruns, causes: Causes) -> None:
        self._reruns, self._causes = reruns, causes
        self._found: dict[Currency, Outcome] = {}
        self._forecasts: dict[tuple[str, str], PhaseForecast | None] = {}
        for one in reruns.running:
            self._found[one] = self._foresee(one)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._found.values())

    def of(self, one: Currency) -> Outcome:
        """Return the outcome of an artifact's job."""
        return self._found[one]

    def _foresee(self, one: Currency) -> Outcome:
        before, own, stage = self._before(one), self._causes.kinds(one), one.planned.stage
        if any(each.ends for each in before):
            return Outcome(one, "is not reached", 0.0, 0, False, ends=True)
        if stage == TRAINING:
            return self._training(one)
        equal = own <= SAME_CONTENT and all(each.equal for each in before)
        if equal and not own:
            return Outcome(one, KEPT, SECONDS_TO_KEEP, 0, False, equal=True)
        makers = {CACHE: self._cache, PREPARE: self._dataset}
        found = makers.get(one.planned.rule, self._other)(one)
        found.equal = equal and stage != EVALUATE  # its seconds are in it
        return found

    def _before(self, one: Currency, *stages: str) -> list[Outcome]:
        """List the outcomes of the jobs whose results a job reads, of all stages or some."""
        found = [self._found[each] for each in self._reruns.before(one) if each in self._found]
        return [each for each in found if not stages or each.made.planned.stage in stages]

    def _differs(self, one: Currency) -> bool:
        """Return whether a job has a cause of its own that changes its result."""
        return bool(self._causes.kinds(one) - SAME_CONTENT)

    def _other(self, one: Currency) -> Outcome:
        planned = one.planned
        written: int | None = 0
        if planned.stage == EXPORT:
            written = self._export_bytes(one)
        elif planned.stage == BASE and planned.run.is_preset:
            written = estimates.folder_bytes(planned.folders[0], "base")
        # A training reads the state alone, on which the values of an export have no effect.
        own = planned.stage != EXPORT and self._differs(one)
        changes = own or any(each.changes for each in self._before(one))
        return Outcome(one, "", estimates.past_seconds(planned), written, changes)

    def _export_bytes(self, one: Currency) -> int | None:
        """Return the bytes of weights and state, of this phase or of another of its run."""
        planned = one.planned
        known = _of_any_phase(planned.folders[0].parent, estimates.exported_bytes)
        if known is not None:
            return known
        found = self._forecast(planned.run, planned.phase)
        return found.exports if found else None

    def _forecast(self, run: RunConfig, phase: str) -> PhaseForecast | None:
        """Return the planner's forecast of a phase, made once."""
        if (run.run, phase) not in self._forecasts:
            self._forecasts[run.run, phase] = forecast_phase(run, phase)
        return self._forecasts[run.run, phase]

    def _dataset(self, one: Currency) -> Outcome:
        changes = self._causes.samples.get(one)
        seconds = estimates.past_seconds(one.planned)
        what = ""
        if changes is not None:
            former = len(_samples(one.planned.folders[0]))
            what = f"checks {count(len(changes.samples), 'image')}"
            if seconds is not None and former:
                seconds *= len(changes.samples) / former
        others = self._causes.kinds(one) - SAME_CONTENT - {"samples"}
        differs = bool(others) or (changes is not None and not changes.trains_same)
        return Outcome(one, what, seconds, 0, differs)

    def _cache(self, one: Currency) -> Outcome:
        planned, own = one.planned, self._causes.kinds(one)
        values = {value.key for value in values_of(one)}
        trained = bool((EVERY_KEY | TEXT_KEYS) & values) or "file" in own
        changes = trained or any(each.changes for each in self._before(one, PREPARE))
        seconds, encodes = estimates.past_seconds(planned), None
        if not planned.run.is_text:
            encodes = count_encodes(
                planned.folders[0],
                int(planned.folders[0].name),
                self._present(one),
                CacheSettings.of(planned.run),
                base=planned.inputs["base"],
                again=self._encoders_again(one),
            )
            if seconds is not None and (last := estimates.items_encoded(planned.log)):
                seconds *= (encodes.images + encodes.captions) / last
        what = str(encodes) if encodes else "tokenises the text that is new"
        if "version" in own and encodes:
            what = "compares eight items of each kind, and " + what
        written = encodes.bytes if encodes else None
        return Outcome(one, what, seconds, written, changes, encodes=encodes)

    def _encoders_again(self, one: Currency) -> set[str]:
        """Name the encoders of a cache's base that it may have again: images, captions."""
        bases = [each for each in self._before(one, BASE) if each.changes]
        if not bases:
            return set()
        # A preset's autoencoder is fitted to the training images alone.
        changes = self._causes.samples.get(self._dataset_of(one))
        kept = changes is not None and changes.trains_same_images
        kept = kept and not any(self._differs(each.made) for each in bases)
        return {"captions"} if kept else {"images", "captions"}

    def _dataset_of(self, one: Currency) -> Currency:
        """Return the dataset that a cache is of."""
        return next(each for each in self._reruns.before(one) if each.planned.stage == PREPARE)

    def _present(self, one: Currency) -> Sequence[Sample]:
        """List the samples that the cache will have; before a first dataset, by their names."""
        prepared, data = self._dataset_of(one), one.planned.run.data
        if changes := self._causes.samples.get(prepared):
            return changes.samples
        folder = prepared.planned.folders[0]
        if values_of(prepared):  # other captions, perhaps
            changes = compare_samples(data, folder)
            if changes is not None:
                return changes.samples
        if samples := _samples(folder):
            return samples
        return [_unread(entry) for entry in open_source(data).found() if entry.reason is None]

    def _training(self, one: Currency) -> Outcome:
        planned = one.planned
        folder = planned.folders[0].parent
        phase = planned.run.phase(planned.phase)
        launch = next(each for each in self._reruns.before(one) if each.planned.stage == LAUNCH)
        values = [
            value
            for value in [*values_of(launch), *values_of(one)]
            if value.phase in ("", phase.name) and value.key not in TRAINED_FROM
        ]
        own, before = self._causes.kinds(one), self._before(one, CACHE, EXPORT, BASE)
        other = "file" in own or any(each.changes for each in before)
        span = self._spans(one).get(phase.name)
        if own & {"damaged", "missing"} and not (values or other):
            found = foresee_restoring(folder, span)
        else:
            found = foresee_training(phase, folder, span, values, other)
        steps = found.steps
        seconds, foreseen = _training_seconds(one, steps), False
        written: int | None = 0
        if steps != 0:
            size = _of_any_phase(folder, estimates.checkpoint_bytes)
            forecast = self._forecast(planned.run, phase.name) if size is None else None
            kept = phase.train.keep if found.restarts or not _has_steps(folder) else 1
            written = forecast.checkpoints if forecast else None
            if size is not None:
                written = kept * size
            if seconds is None and steps and forecast and forecast.step:
                seconds, foreseen = steps * forecast.step, True
        changes = steps != 0 or found.other_end
        return Outcome(
            *(one, found.what, seconds, written, changes, not changes),
            ends=found.refused,
            forecast=foreseen,
        )

    def _spans(self, one: Currency) -> dict[str, tuple[int, int]]:
        """Return first and last step of a run's phases; empty if unknown data decide them."""
        run = one.planned.run
        if not any(phase.until.endswith("epochs") for phase in run.phases):
            return phase_spans(run.phases, 1, origin_of(run))
        [cache] = [each for each in self._reruns.before(one) if each.planned.stage == CACHE]
        dataset = self._dataset_of(cache)
        changes = self._causes.samples.get(dataset)
        samples = changes.samples if changes else _samples(dataset.planned.folders[0])
        train = [each for each in samples if each.split == "train"]
        repeats, shares = (
            np.array([getattr(each, name) for each in train]) for name in ("repeats", "share")
        )
        epoch = count_epoch(repeats, shares, run.data.repeats)
        if run.is_text or not epoch:
            return {}
        return phase_spans(run.phases, epoch, origin_of(run))


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


def _of_any_phase(folder: Path, measure: Callable[[Path], T | None]) -> T | None:
    """Measure a phase's folder, or the first other one of its run that can be measured."""
    others = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
    found = (measure(one) for one in [folder, *others])
    return next((one for one in found if one is not None), None)


def _training_seconds(one: Currency, steps: int | None) -> float | None:
    """Estimate a training: its start as the last time, and its steps as those logged."""
    folder = one.planned.folders[0].parent
    rate = _of_any_phase(folder, estimates.seconds_per_step)
    if steps == 0:
        return 0.0
    if steps is None or rate is None:
        return None
    trained = _of_any_phase(folder, estimates.trained_seconds) or 0.0
    start = (estimates.past_seconds(one.planned) or 0.0) - trained
    return max(0.0, start) + steps * rate


def _has_steps(folder: Path) -> bool:
    """Return whether a phase has a checkpoint, a published or a rolling one."""
    return is_published(folder / "checkpoint") or bool(saved_steps(folder / "progress"))
