"""`zerotrain verify resume`: check that a killed and resumed phase ends in the same bits.

The real stage trains the phase twice in a scratch folder: 2N steps without interruption; and N
steps to a checkpoint, kill -9 shortly after, then from the checkpoint to the same end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain import artifact
from zerotrain.artifact.documents import read_json_lines, read_text
from zerotrain.artifact.layout import LOG, RESULTS
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError
from zerotrain.graph import reruns, snakemake
from zerotrain.graph.artifacts import training_of
from zerotrain.launch.files import read_run_yaml, write_launch_files, write_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.child_process import SUPERVISOR, supervisor_mark
from zerotrain.machine.output import print_message
from zerotrain.machine.processes import kill_tree
from zerotrain.machine.regular_file import open_to_append
from zerotrain.run.curves import GrowingLog
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.training.checkpointing.progress_folder import newest_step, saved_steps, step_folder

POLL_SECONDS = 0.005

POSITION = ("step", "samples", "optimizer_step", "param_groups", "loss_scale")
"""What is compared of the position at the end."""
LONGER = 4
"""The killed run would end after this many times N steps, so that the kill comes first."""


@dataclass(frozen=True)
class Verdict:
    """The result of a verification."""

    lines: list[str]
    equal: bool


def verify_resume(config: Path, phase: str | None, steps: int) -> Verdict:
    """Train 2 x `steps` steps without and with a kill in between, and compare all bits.

    Args:
        config: The run's configuration.
        phase: Name of a phase; default: the first.
        steps: N, from the start step of the phase.

    Raises:
        PipelineError: an input cannot be made, or a training fails.
    """
    parsed = read_config(config)
    chosen = parsed.phase(phase) if phase else parsed.phases[0]
    inputs = training_of(parsed, chosen).inputs
    _make(config, parsed, inputs)
    RESULTS.mkdir(exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".verify-{parsed.run}-{chosen.name}-", dir=RESULTS))
    try:
        verdict = _compare(place, inputs, steps)
    except PipelineError as error:
        raise PipelineError(f"{error.what}; {place} is kept", hint=error.hint) from error
    if verdict.equal:
        shutil.rmtree(place)
        return verdict
    return replace(verdict, lines=[*verdict.lines, f"both trainings are kept in {place}"])


def _make(config: Path, run: RunConfig, inputs: Mapping[str, Path]) -> None:
    """Let Snakemake make missing or outdated inputs, but train no other phase."""
    snakemake.check_project()
    targets = [f"{folder}/manifest.json" for folder in inputs.values()]
    jobs = reruns.count_jobs({str(config): run}, targets)
    if "train_phase" in jobs:
        raise PipelineError(
            f"the phase continues from {inputs['start']}, which is not trained yet",
            hint=f"train it with `{snakemake.command(config, targets)}`, or verify an earlier "
            "phase",
        )
    if jobs:
        snakemake.make(config, targets)


def _compare(place: Path, inputs: Mapping[str, Path], steps: int) -> Verdict:
    phase = read_run_yaml(inputs["launch"] / "run.yaml")
    first = phase.derived.start_step
    middle = (first // steps + 1) * steps  # checkpoints are saved at multiples
    end = middle + steps
    print_message(
        f"{phase.run}/{phase.phase}: {phase.launch.preset}, "
        f"{phase.launch.num_processes} process(es), precision {phase.launch.mixed_precision}, "
        f"{phase.train.gradient_accumulation_steps} accumulation(s) a step"
    )
    once = ScratchTraining(place / "undisturbed", inputs)
    once.write_launch(phase, until=end, save_every=end)
    once.train()
    print_message(f"undisturbed: steps {first} to {end}")
    twice = ScratchTraining(place / "killed", inputs)
    twice.write_launch(phase, until=first + LONGER * steps, save_every=steps)
    reached = twice.kill_after(middle)
    twice.write_launch(phase, until=end, save_every=end)
    twice.train()
    print_message(f"killed by SIGKILL at step {reached}, resumed from step {middle} to {end}")
    return _judge(once.ending(end), twice.ending(end))


def _judge(once: Ending, twice: Ending) -> Verdict:
    equal = once == twice
    last = max(once.losses)
    lines = [
        f"{name:11} sha256 {ending.digest}  loss {ending.losses.get(last)!r}"
        for name, ending in (("undisturbed", once), ("resumed", twice))
    ]
    if equal:
        compared = f"{len(once.tensors)} tensors and the losses of {len(once.losses)} steps"
        return Verdict([*lines, f"EXACT: {compared} are equal in every bit"], equal)
    steps = sorted({*once.losses, *twice.losses})
    differing = [step for step in steps if once.losses.get(step) != twice.losses.get(step)]
    names = list(dict.fromkeys([*once.tensors, *twice.tensors]))
    apart = [name for name in names if once.tensors.get(name) != twice.tensors.get(name)]
    what = [
        f"first loss that differs: step {differing[0]}, "
        f"{once.losses.get(differing[0])!r} and {twice.losses.get(differing[0])!r}"
        if differing
        else "no loss differs",
        f"first tensor that differs: {apart[0]}; {len(apart)} of {len(names)} do"
        if apart
        else "no tensor differs",
    ]
    for key in sorted(once.position):
        if once.position[key] != twice.position[key]:
            what.append(f"{key}: {once.position[key]} and {twice.position[key]}")
    return Verdict([*lines, "NOT EXACT: the resumed training ends in other bits", *what], equal)


@dataclass(frozen=True)
class Ending:
    """The end of a training: a digest of each tensor, and the loss of each step."""

    tensors: dict[str, str]
    """sha256 by "<parameter> (<slot>)", in the order of the model."""
    losses: dict[int, float]
    position: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the sha256 of tensors and position."""
        return artifact.digest([self.tensors, self.position])


class ScratchTraining:
    """A phase in a scratch folder, trained by the stage's command."""

    def __init__(self, place: Path, inputs: Mapping[str, Path]) -> None:
        place.mkdir()
        self._place, self._inputs = place, inputs
        self._progress = place / "progress"
        self._log = place / "train_phase.log"
        self._growing = GrowingLog()

    def write_launch(self, phase: ResolvedPhase, *, until: int, save_every: int) -> None:
        """Write the phase's launch files with another end, and without trackers and validations,
        which do not affect its numbers."""
        launch = self._place / "launch"
        own = phase.with_values(
            until_step=until, save_every=save_every, keep=2, keep_every=None, log_every=1,
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
            kill_tree(process)
        if code:
            raise self._failure(code)

    def kill_after(self, step: int) -> int:
        """Kill every process once a step is saved and the next one logged; return the last one."""
        process = self._start()
        try:
            while (newest_step(self._progress, sys.maxsize) or 0) < step or self._logged() <= step:
                if process.poll() is not None:
                    raise self._failure(process.returncode)
                time.sleep(POLL_SECONDS)
        finally:
            kill_tree(process)
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
        """Read the end of the training, at its last step."""
        checkpoint = Checkpoint(step_folder(self._progress, step))
        tensors = {
            f"{name} ({slot})": _sha256(checkpoint, name, slot)
            for name, slot in _tensors(checkpoint)
        }
        position = {key: getattr(checkpoint.position, key) for key in POSITION}
        return Ending(tensors, self._losses(), position)

    def _start(self) -> subprocess.Popen[bytes]:
        words = [word for key, path in self._inputs.items() for word in (f"--{key}", str(path))]
        words[1] = str(self._place / "launch")
        command = [
            *(sys.executable, "-m", "zerotrain", "train_phase", *words),
            *("--progress", str(self._progress), "--output", str(self._place / "checkpoint")),
        ]
        with open_to_append(self._log) as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, SUPERVISOR: supervisor_mark()},
                start_new_session=True,
            )

    def _failure(self, code: int) -> PipelineError:
        last = [
            line for line in read_text(self._log, errors="replace").splitlines() if line.strip()
        ][-6:]
        output = "\n".join(["", *last]) if last else " nothing"
        return PipelineError(
            f"the training ended with code {code} where it should not; its output:{output}",
            hint=f"fix what it says; all of it is in {self._log}",
        )

    def _losses(self) -> dict[int, float]:
        lines = read_json_lines(self._progress / LOG)
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def _logged(self) -> int:
        """Return the last step with a complete line."""
        self._growing.read(self._progress / LOG)
        return int(self._growing.newest.get("step", 0))


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the tensors of a checkpoint: the weights and their EMA, then the optimizer's."""
    own = sorted(checkpoint.slots, key=lambda slot: (slot != MASTER, slot != EMA_SLOT))
    for slot in own:
        for name in checkpoint.names:
            if checkpoint.has_slot(name, slot):
                yield name, slot


def _sha256(checkpoint: Checkpoint, name: str, slot: str) -> str:
    return hashlib.sha256(checkpoint.tensor(name, slot).numpy().tobytes()).hexdigest()
