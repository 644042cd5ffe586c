"""Rolling checkpoints: when one is due, and writing it while the next step's passes run.

What a checkpoint holds (master weights, the optimizer's tensors, the average) is changed by the
optimizer's step and by the average alone. So a thread writes it from where it lies, while the loop
goes on, and the loop lets the thread finish with it before the next update: what the thread has
not come to is copied, up to one shard, and waited for beyond that. Numbers and the log are those of
the moment in which the save began.

The threads talk to nobody: the processes agree in the loop, and the first one publishes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from zerotrain import artifact
from zerotrain.artifact import Draft
from zerotrain.checkpoint import KIND, write_position
from zerotrain.disk_errors import DiskError
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.host import detect_host
from zerotrain.position import EMA, MASTER, TrainingPosition
from zerotrain.save_interval import minutes
from zerotrain.state import SHARD_BYTES
from zerotrain.training import ranks
from zerotrain.training.average import WeightAverage
from zerotrain.training.checkpoint_room import checkpoint_bytes, make_room, not_written
from zerotrain.training.clock import Clock
from zerotrain.training.engine import Engine
from zerotrain.training.log import Log
from zerotrain.training.optimizer import describe_group
from zerotrain.training.progress_folder import prune, step_folder
from zerotrain.training.rank_writer import RankWriter, Written, write_now
from zerotrain.training.schedule import learning_rate, momentum
from zerotrain.training.validation_history import note_best

T = TypeVar("T")


class Saving:
    """The checkpoints that one process's loop writes; every process calls the same methods.

    A context manager: what is under way at the end of its block is brought to its end.
    """

    def __init__(
        self,
        engine: Engine,
        phase: ResolvedPhase,
        log: Log,
        progress: Path,
        average: WeightAverage | None = None,
        write_records: Callable[[Path], None] | None = None,
    ) -> None:
        """`write_records` writes what else belongs to the records of a checkpoint."""
        self._write_records = write_records
        self._engine = engine
        self._phase = phase
        self._log = log
        self._progress = progress
        self._average = average
        self._minutes = minutes(phase.save_every)
        self._began = time.monotonic()
        self._publishing: contextlib.ExitStack | None = None
        self._draft: Draft | None = None
        self._position: TrainingPosition | None = None
        self._slots: list[str] = []
        self._writer: RankWriter | None = None
        self._written: Written | None = None
        self._pruning: threading.Thread | None = None
        self.seconds = 0.0
        """What saving has cost the loop so far."""

    def due(self, step: int) -> bool:
        """Whether a step is one that is saved, by its number."""
        each, kept = self._phase.save_every, self._phase.keep_every
        return bool((isinstance(each, int) and step % each == 0) or (kept and step % kept == 0))

    def overdue(self) -> bool:
        """Whether a save is due by the clock; the first process's is the one that counts."""
        if self._minutes is None or self._engine.rank:
            return False
        return time.monotonic() - self._began >= 60 * self._minutes

    def writing(self) -> bool:
        """Whether this process's part of a checkpoint is still on its way to the disk."""
        return self._writer is not None and self._writer.writing()

    def begin(self, clock: Clock, *, wait: bool = False) -> None:
        """Save this step: beside the next passes, or with `wait` before this returns.

        Raises:
            PipelineError: it cannot be written; the checkpoints before it stay.
        """
        self.finish()
        called = time.monotonic()
        self._began = called
        self._finish_pruning()
        self._position = self._describe(clock)
        self._slots = [MASTER, *self._engine.slots(), *([EMA] if self._average else [])]
        folder = self._open_draft(clock.step)
        source = self._average or self._engine
        rank, fragments = self._engine.rank, source.fragments()
        if self._engine.steady:
            self._writer = RankWriter(folder, rank, fragments)
        else:
            self._written = write_now(folder, rank, fragments)
        self.seconds += time.monotonic() - called
        if wait or not self._engine.steady:
            self.finish()
        if wait:
            self._finish_pruning()

    def settle(self, writing: bool) -> None:
        """Let the engine's tensors be changed. Called just before that, by all processes.

        Args:
            writing: Whether any process still writes, as they have agreed: the same in all.

        Raises:
            PipelineError: the checkpoint could not be written; those before it stay.
        """
        if self._writer is None:
            return
        if not writing:
            self.finish()
            return
        called = time.monotonic()
        self._writer.free(self._allowance())
        self.seconds += time.monotonic() - called

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and publish it.

        Raises:
            PipelineError: it could not be written; those before it stay.
        """
        if self._writer is None and self._written is None:
            return
        called = time.monotonic()
        written = self._writer.result() if self._writer else self._written
        self._writer = self._written = None
        assert written is not None
        assert self._position is not None
        parts = ranks.gather(written)
        step = self._position.step
        try:
            for part in parts:
                if part.errno is not None:
                    raise not_written(self._progress, step, OSError(part.errno, ""))
            self._first_does(lambda: self._publish(parts))
            if self._engine.rank == 0:
                # To give gigabytes back takes a file system a fifth of the time to write them.
                self._pruning = threading.Thread(target=self._prune, args=(step,), daemon=True)
                self._pruning.start()
        finally:
            self._drop()
            self.seconds += time.monotonic() - called

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
            self._finish_pruning()
            return
        # What has begun is whole when it is written; but others may not come to agree on it.
        if self._writer is not None and self._engine.world_size > 1:
            self._writer.cancel()
            self._writer = None
            self._drop()
        with contextlib.suppress(PipelineError, OSError):
            self.finish()
        self._finish_pruning()

    def _prune(self, step: int) -> None:
        try:
            prune(self._progress, self._phase.keep, step, self._phase.keep_every)
        except OSError as error:
            self._log.say(f"{self._progress}: an old checkpoint cannot be removed: {error}")

    def _finish_pruning(self) -> None:
        if self._pruning is not None:
            self._pruning.join()

    def _open_draft(self, step: int) -> Path:
        """The folder that all processes write into; the first one makes it."""
        return self._first_does(lambda: self._make_draft(step))

    def _first_does(self, act: Callable[[], T]) -> T:
        """What the first process's act gives, or its failure, in every process."""
        assert self._position is not None
        found: T | None = None
        trouble = None
        if self._engine.rank == 0:
            try:
                found = act()
            except (OSError, DiskError) as error:
                trouble = not_written(self._progress, self._position.step, error)
            except PipelineError as error:
                trouble = error
        said = (trouble.what, trouble.hint) if trouble else None
        found, said = ranks.broadcast((found, said))
        if said is not None:
            raise PipelineError(said[0], hint=said[1])
        return found  # type: ignore[return-value]

    def _make_draft(self, step: int) -> Path:
        assert self._position is not None
        needed = checkpoint_bytes(self._engine.shapes, self._slots, self._phase.optimizer)
        for line in make_room(self._progress, step, needed, self._phase.keep_every):
            self._log.say(line)
        self._publishing = contextlib.ExitStack()
        target = step_folder(self._progress, step)
        try:
            self._draft = self._publishing.enter_context(artifact.publish(target, KIND))
            records = self._draft.folder / "records"
            self._log.write_records(records)
            if self._write_records:
                self._write_records(records)
        except (OSError, DiskError):
            self._drop()
            raise
        return self._draft.folder

    def _publish(self, parts: list[Written]) -> None:
        """Complete the checkpoint by one rename."""
        assert self._draft is not None
        assert self._position is not None
        assert self._publishing is not None
        for part in parts:
            self._draft.known.update(part.known)
        spans = [part.spans for part in parts]
        shapes = self._engine.shapes
        write_position(self._draft.folder, self._position, shapes, self._slots, spans)
        publishing, self._publishing = self._publishing, None
        publishing.close()
        if self._phase.validation:
            # Not before its checkpoint is there: until then the best is one that pruning may spare.
            saved = step_folder(self._progress, self._position.step)
            note_best(self._progress, saved, self._phase.validation)

    def _drop(self) -> None:
        """Clear what was not published."""
        publishing, self._publishing, self._draft = self._publishing, None, None
        if publishing is not None:
            dropped = InterruptedError()
            with contextlib.suppress(InterruptedError):
                publishing.__exit__(InterruptedError, dropped, None)

    def _allowance(self) -> int:
        """Bytes that may be copied: a shard, or less where the host has hardly any memory."""
        return min(SHARD_BYTES, detect_host().available // (2 * self._engine.world_size))

    def _describe(self, clock: Clock) -> TrainingPosition:
        phase, engine = self._phase, self._engine
        rate = learning_rate(phase, clock.step, clock.horizon)
        beta1 = momentum(phase, clock.step, clock.horizon)
        return TrainingPosition(
            run=phase.run,
            phase=phase.phase,
            step=clock.step,
            samples=clock.samples,
            optimizer=phase.optimizer,
            optimizer_step=engine.optimizer_step(),
            param_groups=[
                describe_group(phase, group, rate, beta1, scalars)
                for group, scalars in zip(engine.groups, engine.scalars(), strict=True)
            ],
            lr_scheduler=phase.lr_scheduler,
            lr_scheduler_steps=clock.horizon,
            rng={"scheme": "counter", "seed": phase.seed},
            engine=engine.describe(),
            loss_scale=engine.loss_scale(),
        )
