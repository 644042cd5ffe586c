"""Validation during training: what evaluate would measure on the current weights.

It computes like an evaluation, without gradients and in eval mode, and uses no random numbers of
the training: the trained weights are the same with it and without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerotrain.cache.reader import Cache, TokenCache
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.families import Family, Objective
from zerotrain.training import ranks
from zerotrain.training.engines.ema import EMA
from zerotrain.training.engines.engine import Engine
from zerotrain.training.reporting.holdout_loss import (
    HeldOutImages,
    HeldOutText,
    batch_losses,
    conditions,
    mean_loss,
    perplexity,
)
from zerotrain.training.reporting.log import Log
from zerotrain.training.reporting.validation_history import (
    ValidationHistory,
    Verdict,
    read_history,
    write_best,
    write_finished,
)

if TYPE_CHECKING:
    from zerotrain.training.reporting.samples import LatentSampler


class Validation:
    """Validations of one phase; every process has one, and reaches the same verdicts."""

    def __init__(
        self,
        engine: Engine,
        objective: Objective,
        held_out: HeldOutImages | HeldOutText,
        phase: ResolvedPhase,
        history: ValidationHistory,
        log: Log,
        progress: Path,
        ema: EMA | None = None,
        sampler: LatentSampler | None = None,
    ) -> None:
        assert phase.derived.validation is not None
        self._engine, self._objective, self._held_out = engine, objective, held_out
        self._phase, self._settings, self._history = phase, phase.derived.validation, history
        self._log, self._progress, self._sampler = log, progress, sampler
        # Averages are not measured under NVMe offload: that would read and write all weights.
        on_disk = "nvme" in (phase.derived.offload_optimizer, phase.derived.offload_param)
        self._ema = None if on_disk else ema
        if engine.rank == 0:
            write_best(progress, history.best(self._settings))

    def at(self, step: int) -> Verdict:
        """Validate a step if that is due and not done yet; return the consequences."""
        if self._history.at(step) or not self._is_due(step):
            return Verdict(ended=self._history.end_reason(self._settings) is not None)
        results = self._measure(step)
        self._history.note(step, results, self._settings)
        self._log.record_validation(step, results)
        best = self._history.best(self._settings)
        shown = ", ".join(f"{key} {value:.6g}" for key, value in results.items())
        if best:
            shown += f" (best {best['value']:.6g} at step {best['step']})"
        if results:
            self._log.say(f"{self._phase.phase}: validation at step {step}: {shown}")
        reason = self._history.end_reason(self._settings)
        return Verdict(bool(best and best["step"] == step), reason is not None)

    def finish(self, step: int) -> None:
        """Record and report that the phase ends early, at a step whose checkpoint is written."""
        reason = self._history.end_reason(self._settings)
        if reason is not None and self._engine.rank == 0:
            write_finished(self._progress, step, reason, self._settings)
            self._log.say(f"{self._phase.phase}: ends early at step {step}: {reason}")

    def write_records(self, folder: Path) -> None:
        """Write the history into a checkpoint's records."""
        self._history.write(folder)

    def close(self, finished: bool) -> None:
        """Wait for the images in progress, if the phase is finished."""
        if self._sampler:
            self._sampler.close(finished)

    def _is_due(self, step: int) -> bool:
        if step == self._history.began:
            return bool(self._settings["eval_on_start"])
        return step % self._settings["eval_steps"] == 0 or step == self._phase.derived.until_step

    def _measure(self, step: int) -> dict[str, float]:
        results: dict[str, float] = {}
        self._engine.model.eval()
        results |= self._losses("")
        if self._ema:
            with self._ema.in_use():
                results |= self._losses("_ema")
                self._sample(step)
        else:
            self._sample(step)
        self._engine.model.train()
        return results

    def _sample(self, step: int) -> None:
        if self._sampler:
            self._sampler.sample(step)

    def _losses(self, suffix: str) -> dict[str, float]:
        if not len(self._held_out):
            return {}
        loss = mean_loss(self._batches())
        results = {f"val_loss{suffix}": loss}
        if isinstance(self._held_out, HeldOutText):
            results[f"val_perplexity{suffix}"] = perplexity(loss)
        return results

    def _batches(self) -> list[torch.Tensor]:
        """Return the losses of all batches in order, each computed by one process.

        Every process runs the same number of forward passes: under ZeRO-3 each pass needs the
        weight partitions of all processes.
        """
        engine = self._engine
        batches = self._held_out.batches(self._settings["batch_size"])
        count = len(batches)
        own = [
            batch_losses(
                engine.model,
                self._objective,
                self._held_out,
                engine.device,
                batches[min(number + engine.rank, count - 1)],
            )
            for number in range(0, count, engine.world_size)
        ]
        shared = ranks.gather(own)
        return [shared[i % engine.world_size][i // engine.world_size] for i in range(count)]


def open_validation(
    engine: Engine,
    family: Family,
    base: Path,
    cache: Cache | TokenCache,
    phase: ResolvedPhase,
    log: Log,
    progress: Path,
    step: int,
    resumed: Path | None,
    ema: EMA | None,
) -> Validation | None:
    """Return the phase's validation, if it has one.

    Args:
        engine: The engine that trains.
        family: The model's family.
        base: Folder of the base model.
        cache: The phase's cache, whose held-out samples are measured.
        phase: The resolved phase.
        log: The log for the results.
        progress: The phase's progress folder.
        step: The current step.
        resumed: The checkpoint of this phase that is resumed, with the history so far.
        ema: The averaged weights, which are measured in addition to the live ones.
    """
    settings = phase.derived.validation
    if settings is None:
        return None
    most = settings["max_samples"]
    held_out: HeldOutImages | HeldOutText
    if isinstance(cache, TokenCache):
        held_out = HeldOutText(cache, most)
    else:
        held_out = HeldOutImages(cache, phase.seed, most)
    history = (read_history(resumed) if resumed else None) or ValidationHistory(step)
    objective = family.objective(base, conditions(phase.derived.objective))
    if trained := phase.derived.objective.get("loss_type"):
        log.say(f"{phase.phase}: val_loss is the mean squared error (l2); {trained} is trained")
    sampler = None
    if settings.get("prompts"):
        from zerotrain.training.reporting.samples import LatentSampler  # pipelines load slowly

        assert isinstance(cache, Cache)
        assert family.modality == "image"
        sampler = LatentSampler(engine, family, base, cache, phase, progress, log)
    return Validation(engine, objective, held_out, phase, history, log, progress, ema, sampler)
