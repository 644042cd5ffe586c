"""A phase trained beside its run, in a folder that nobody else looks at, and killed if asked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zerotrain import artifact
from zerotrain.checkpoint import Checkpoint
from zerotrain.errors import PipelineError
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import write_run_yaml
from zerotrain.position import EMA, MASTER
from zerotrain.supervise import SUPERVISOR
from zerotrain.training.progress_folder import LOG, newest_step, saved_steps, step_folder

POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Ending:
    """How a training ended: a digest of each tensor, and the loss of each step."""

    tensors: dict[str, str]
    """sha256 by "<parameter> (<slot>)", in the order of the model."""
    losses: dict[int, float]
    position: dict[str, Any]

    @property
    def digest(self) -> str:
        """One sha256 of all."""
        return artifact.digest([self.tensors, self.position])


class ScratchTraining:
    """A phase in a scratch folder, trained by the stage's own command."""

    def __init__(self, place: Path, inputs: dict[str, Path]) -> None:
        place.mkdir()
        self._place, self._inputs = place, inputs
        self._progress = place / "progress"
        self._log = place / "train_phase.log"

    def write_launch(self, phase: ResolvedPhase, *, until: int, save_every: int) -> None:
        """Write the phase's launch files with another end, and without trackers and validations:
        its numbers do not depend on them."""
        launch = self._place / "launch"
        own = replace(
            phase, until_step=until, save_every=save_every, keep=2, keep_every=None, log_every=1,
            disk_low_threshold=None, validation=None, report_to=[],
        )  # fmt: skip
        with artifact.publish(launch, "launch") as draft:
            write_run_yaml(own, draft.folder / "run.yaml")
            write_launch_files(own, draft.folder, launch)

    def train(self) -> None:
        """Train to the end."""
        process = self._start()
        try:
            code = process.wait()
        finally:
            _kill_all(process)
        if code:
            raise self._failure(code)

    def kill_after(self, step: int) -> int:
        """Kill every process once a step is saved and the next begun; the last step logged."""
        process = self._start()
        try:
            while (newest_step(self._progress, sys.maxsize) or 0) < step or self._logged() <= step:
                if process.poll() is not None:
                    raise self._failure(process.returncode)
                time.sleep(POLL_SECONDS)
        finally:
            _kill_all(process)
        reached = self._logged()
        for later in [one for one in saved_steps(self._progress) if one > step]:
            shutil.rmtree(step_folder(self._progress, later))
        if newest_step(self._progress, step) != step:
            raise PipelineError(
                f"step {step} was saved and pruned before the kill came, at step {reached}",
                hint="the steps are too quick for so few of them: give a larger --steps",
            )
        return reached

    def ending(self, step: int) -> Ending:
        """What the training ended in, at its last step."""
        checkpoint = Checkpoint(step_folder(self._progress, step))
        position = checkpoint.position
        tensors = {
            f"{name} ({slot})": _sha256(checkpoint, name, slot)
            for name, slot in _tensors(checkpoint)
        }
        return Ending(
            tensors,
            self._losses(),
            {
                "step": position.step,
                "samples": position.samples,
                "optimizer_step": position.optimizer_step,
                "param_groups": position.param_groups,
                "loss_scale": position.loss_scale,
            },
        )

    def _start(self) -> subprocess.Popen[bytes]:
        words = [word for key, path in self._inputs.items() for word in (f"--{key}", str(path))]
        words[1] = str(self._place / "launch")
        command = [
            *(sys.executable, "-m", "zerotrain", "train_phase", *words),
            *("--progress", str(self._progress), "--output", str(self._place / "checkpoint")),
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, SUPERVISOR: str(os.getpid())},
                start_new_session=True,
            )

    def _failure(self, code: int) -> PipelineError:
        last = [line for line in self._log.read_text().splitlines() if line.strip()][-6:]
        said = "\n".join(["", *last]) if last else " nothing"
        return PipelineError(
            f"the training ended with code {code} where it should not; it said:{said}",
            hint=f"mend what it says; all of it is in {self._log}",
        )

    def _losses(self) -> dict[int, float]:
        lines = map(json.loads, (self._progress / LOG).read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def _logged(self) -> int:
        """The last step whose line is complete."""
        path = self._progress / LOG
        whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
        return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The tensors of a checkpoint: the weights and their average, then the optimizer's."""
    own = sorted(checkpoint.slots, key=lambda slot: (slot != MASTER, slot != EMA))
    for slot in own:
        for name in checkpoint.names:
            if checkpoint.holds(name, slot):
                yield name, slot


def _sha256(checkpoint: Checkpoint, name: str, slot: str) -> str:
    return hashlib.sha256(checkpoint.tensor(name, slot).numpy().tobytes()).hexdigest()


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a process that runs, and of all that it started."""
    if process.poll() is not None:
        return
    found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for one in found:
        if one.is_running():
            one.kill()
    process.wait()
    psutil.wait_procs(found, timeout=30)
