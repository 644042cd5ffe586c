"""Rolling checkpoints: when one is due, and writing it while the next step's passes run.

Only the optimizer's step and the average change what a checkpoint holds (master weights, the
optimizer's tensors, the average). So a thread writes it in place while the loop continues, and the
loop lets the thread finish before the next update: what the thread has not reached is copied, up to
one shard, and waited for beyond that. Numbers and the log are those of the moment when the save
started.

The threads do not communicate: the processes agree in the loop, and the first one publishes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from zerotrain import artifact
from zerotrain.artifact import UnpublishedFolder
from zerotrain.config.save_interval import minutes
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.schedules import learning_rate, momentum
from zerotrain.machine.disk_errors import DiskError
from zerotrain.machine.host import detect_host
from zerotrain.state.checkpoint import KIND, write_position
from zerotrain.state.position import EMA_SLOT, MASTER, StepCounter, TrainerState
from zerotrain.state.state import SHARD_BYTES
from zerotrain.training import ranks
from zerotrain.training.checkpointing.checkpoint_room import (
    checkpoint_bytes,
    make_room,
    write_error,
)
from zerotrain.training.checkpointing.conditions import manifest_content
from zerotrain.training.checkpointing.progress_folder import prune, step_folder
from zerotrain.training.checkpointing.provenance import Provenance
from zerotrain.training.checkpointing.rank_writer import (
    PartReport,
    RankWriter,
    WrittenPart,
    check_written,
)
from zerotrain.training.engines.ema import EMA
from zerotrain.training.engines.engine import Engine
from zerotrain.training.optim.optimizer import describe_group
from zerotrain.training.reporting.log import Log
from zerotrain.training.reporting.validation_history import note_best

T = TypeVar("T")


class Saving:
    """The checkpoints that one process's loop writes; every process calls the same methods.

    A context manager: a save that is running at the end of its block is completed.
    """

    def __init__(
        self,
        engine: Engine,
        phase: ResolvedPhase,
        log: Log,
        progress: Path,
        ema: EMA | None = None,
        write_records: Callable[[Path], None] | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        """Store what a save needs.

        Args:
            engine: The engine.
            phase: The resolved phase.
            log: The log, whose state is among the records.
            progress: Folder of the phase's progress.
            ema: The moving average of the weights, if one is kept.
            write_records: Writes further records of a checkpoint.
            provenance: What the first process records of the steps; the others have none.
        """
        self._write_records = write_records
        self._provenance = provenance or Provenance()
        self._engine = engine
        self._phase = phase
        self._log = log
        self._progress = progress
        self._ema = ema
        self._minutes = minutes(phase.train.save_every)
        self._began = time.monotonic()
        self._publishing: contextlib.ExitStack | None = None
        self._draft: UnpublishedFolder | None = None
        self._position: TrainerState | None = None
        self._slots: list[str] = []
        self._writer: RankWriter | WrittenPart | None = None
        self._pruning: threading.Thread | None = None
        self.seconds = 0.0
        """Seconds that saving has cost the loop so far."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is saved because of its number."""
        each, kept = self._phase.train.save_every, self._phase.train.keep_every
        return bool((isinstance(each, int) and step % each == 0) or (kept and step % kept == 0))

    def is_overdue(self) -> bool:
        """Return whether a save is due by the clock; only the first process decides."""
        if self._minutes is None or self._engine.rank:
            return False
        return time.monotonic() - self._began >= 60 * self._minutes

    def is_writing(self) -> bool:
        """Return whether this process's part of a checkpoint is still being written."""
        return self._writer is not None and self._writer.is_writing()

    def begin(self, counter: StepCounter, *, wait: bool = False) -> None:
        """Save this step: during the next passes, or with `wait` before this returns.

        Raises:
            PipelineError: it cannot be written; the checkpoints before it stay.
        """
        self.finish()
        called = time.monotonic()
        self._began = called
        self._finish_pruning()
        self._position = self._describe(counter)
        self._slots = [MASTER, *self._engine.slots(), *([EMA_SLOT] if self._ema else [])]
        folder = self._open_draft(counter.step)
        source = self._ema or self._engine
        rank, fragments = self._engine.rank, source.fragments()
        if self._engine.steady:
            self._writer = RankWriter(folder, rank, fragments)
        else:
            self._writer = WrittenPart(folder, rank, fragments)
        self.seconds += time.monotonic() - called
        if wait:
            self.finish()
        if wait:
            self._finish_pruning()

    def wait_or_stage_tensors(self, writing: bool) -> None:
        """Prepare for a change to the engine's tensors; all processes call this just before it.

        Args:
            writing: Whether any process is still writing: the same value in all.

        Raises:
            PipelineError: the checkpoint could not be written; those before it stay.
        """
        if self._writer is None:
            return
        if not writing:
            self.finish()
            return
        called = time.monotonic()
        self._writer.release_tensors(self._allowance())
        self.seconds += time.monotonic() - called

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and publish it.

        Raises:
            PipelineError: it could not be written; those before it stay.
        """
        if self._writer is None:
            return
        called = time.monotonic()
        written = self._writer.result()
        self._writer = None
        assert self._position is not None
        parts = ranks.gather(written)
        step = self._position.step
        try:
            for part in parts:
                if part.errno is not None:
                    raise write_error(self._progress, step, OSError(part.errno, ""))
            self._run_on_first_rank(lambda: self._publish(parts))
            if self._engine.rank == 0:
                # Freeing gigabytes takes a file system a fifth of the time to write them.
                self._pruning = threading.Thread(target=self._prune, args=(step,), daemon=True)
                self._pruning.start()
        finally:
            self._drop()
            self.seconds += time.monotonic() - called

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
            self._finish_pruning()
            return
        # A save that has started would be whole, but the other processes may never agree on it.
        if self._writer is not None and self._engine.world_size > 1:
            self._writer.cancel()
            self._writer = None
            self._drop()
        with contextlib.suppress(PipelineError, OSError):
            self.finish()
        self._finish_pruning()

    def _prune(self, step: int) -> None:
        try:
            prune(self._progress, self._phase.train.keep, step, self._phase.train.keep_every)
        except OSError as error:
            self._log.say(f"{self._progress}: an old checkpoint cannot be removed: {error}")

    def _finish_pruning(self) -> None:
        if self._pruning is not None:
            self._pruning.join()

    def _open_draft(self, step: int) -> Path:
        """Return the folder that all processes write into; the first one creates it."""
        return self._run_on_first_rank(lambda: self._make_draft(step))

    def _run_on_first_rank(self, act: Callable[[], T]) -> T:
        """Return the result of `act` in the first process, or raise its failure, in every one."""
        assert self._position is not None
        result: T | None = None
        trouble = None
        if self._engine.rank == 0:
            try:
                result = act()
            except (OSError, DiskError) as error:
                trouble = write_error(self._progress, self._position.step, error)
            except PipelineError as error:
                trouble = error
        failure = (trouble.what, trouble.hint) if trouble else None
        result, failure = ranks.broadcast((result, failure))
        if failure is not None:
            raise PipelineError(failure[0], hint=failure[1])
        return result  # type: ignore[return-value]

    def _make_draft(self, step: int) -> Path:
        assert self._position is not None
        needed = checkpoint_bytes(self._engine.shapes, self._slots, self._phase.train.optimizer)
        for line in make_room(self._progress, step, needed, self._phase.train.keep_every):
            self._log.say(line)
        self._publishing = contextlib.ExitStack()
        target = step_folder(self._progress, step)
        try:
            self._draft = self._publishing.enter_context(artifact.publish(target, KIND))
            self._draft.content = manifest_content(self._provenance.trains)
            records = self._draft.folder / "records"
            self._log.write_records(records)
            self._provenance.write_records(records)
            if self._write_records:
                self._write_records(records)
        except (OSError, DiskError):
            self._drop()
            raise
        return self._draft.folder

    def _publish(self, parts: list[PartReport]) -> None:
        """Complete the checkpoint by one rename."""
        assert self._draft is not None
        assert self._position is not None
        assert self._publishing is not None
        check_written(self._draft.folder, parts)
        for part in parts:
            self._draft.known.update(part.known)
        spans = [part.spans for part in parts]
        shapes = self._engine.shapes
        write_position(self._draft.folder, self._position, shapes, self._slots, spans)
        publishing, self._publishing = self._publishing, None
        publishing.close()
        if self._phase.derived.validation:
            # Only once its checkpoint is there: until then pruning must keep the best one before.
            saved = step_folder(self._progress, self._position.step)
            note_best(self._progress, saved, self._phase.derived.validation)

    def _drop(self) -> None:
        """Remove what was not published."""
        publishing, self._publishing, self._draft = self._publishing, None, None
        if publishing is not None:
            dropped = InterruptedError()
            with contextlib.suppress(InterruptedError):
                publishing.__exit__(InterruptedError, dropped, None)

    def _allowance(self) -> int:
        """Return the bytes that may be copied: a shard, or less if the host has little memory."""
        return min(SHARD_BYTES, detect_host().available // (2 * self._engine.world_size))

    def _describe(self, counter: StepCounter) -> TrainerState:
        phase, engine = self._phase, self._engine
        rate = learning_rate(phase.train, counter.step, counter.horizon)
        beta1 = momentum(phase.train, counter.step, counter.horizon)
        return TrainerState(
            run=phase.run,
            phase=phase.phase,
            step=counter.step,
            samples=counter.samples,
            optimizer=phase.train.optimizer,
            optimizer_step=engine.optimizer_step(),
            param_groups=[
                describe_group(phase, group, rate, beta1, scalars)
                for group, scalars in zip(engine.groups, engine.scalars(), strict=True)
            ],
            lr_scheduler=phase.train.lr_scheduler,
            lr_scheduler_steps=counter.horizon,
            rng={"scheme": "counter", "seed": phase.seed},
            engine=engine.describe(),
            loss_scale=engine.loss_scale(),
            ran_on=self._provenance.ran_on,
            history=self._provenance.history,
        )
