"""A tiny training: a real SDXL U-Net, a real cache of random latents, and processes to train it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from diffusers import DDPMScheduler
from tests.builders.models import make_unet
from tests.builders.phases import SAMPLES, SEED, make_tiny_phase
from tests.builders.processes import join_ranks, start_ranks, wait_until
from tests.training.inputs import write_image_inputs
from tests.training.kill_point import KillPoint
from tests.training.matrix import export_state

from zerotrain import artifact
from zerotrain.cache.layout import LATENTS, TEXT, Entry, Index, drawn_digest, write_index
from zerotrain.cache.writer import StoredShards, place, write_series
from zerotrain.config.launch import LaunchConfig
from zerotrain.export.export import export
from zerotrain.export.target import WeightsTarget
from zerotrain.launch.derive import with_files
from zerotrain.launch.files import read_run_yaml, write_launch_files, write_run_yaml
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.families import load_family
from zerotrain.models.sizes import read_sizes
from zerotrain.models.trainable import choose_trained, trained_parameters
from zerotrain.stages.train_phase import train_phase
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.training import rank
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.preflight import Inputs, read_inputs
from zerotrain.training.checkpointing.rank_writer import RankWriter
from zerotrain.training.process.start import prepare


def _train(arguments: list[str], kill: KillPoint | None) -> None:
    if kill:
        kill.arm()
    rank.main(arguments)


class Training:
    """Phases of one tiny run, each trained in a process of its own."""

    def __init__(self, folder: Path, inputs: Path, server: Any) -> None:
        self.folder = folder
        self.base, self.cache = inputs / "base", inputs / "cache"
        self._server = server
        self.output = folder / "output.txt"
        """What the training processes printed."""

    def phase(
        self, name: str, preset: str, until: int, *, zero: Any = None, **changes: Any
    ) -> ResolvedPhase:
        """A phase with its launch files written; `zero` are own values of zero_optimization."""
        phase = make_tiny_phase(name, preset, until)
        phase = phase.with_values(**changes)
        parts = phase.train.gradient_accumulation_steps * phase.launch.num_processes
        phase = phase.with_values(micro_batch_size=phase.train.global_batch_size // parts)
        phase = self._with_files(phase, zero)
        launch = self.folder / name / "launch"
        with artifact.publish(launch, "launch") as draft:
            write_run_yaml(phase, draft.folder / "run.yaml")
            write_launch_files(phase, draft.folder, launch)
        return phase

    def _with_files(self, phase: ResolvedPhase, zero: Any) -> ResolvedPhase:
        sizes = read_sizes(
            artifact.read(self.base, "base"),
            phase.family,
            phase.adapter,
            phase.frozen_parameters,
            phase.trainable_parameters,
        )
        own = zero or (TINY if phase.derived.zero_stage == 3 else {})
        launch = LaunchConfig(deepspeed={"zero_optimization": own} if own else {})
        return with_files(phase, launch, sizes)

    def start(
        self, name: str, *, state: Path | None = None, kill: KillPoint | None = None
    ) -> ForkServerProcess:
        """Start a phase of one process without waiting for its end."""
        return self.start_ranks(name, 1, state=state, kill=kill)[0]

    def start_ranks(
        self,
        name: str,
        processes: int,
        *,
        state: Path | None = None,
        kill: KillPoint | None = None,
    ) -> list[ForkServerProcess]:
        """Start the processes that train a phase."""
        progress = self.progress(name)
        progress.mkdir(parents=True, exist_ok=True)
        until = read_run_yaml(self.folder / name / "launch/run.yaml").derived.until_step
        resume = progress_folder.newest_intact(progress, until)
        words = self.words(name, resume=resume, start=state)
        return start_ranks(self._server.Process, _train, processes, words, kill, output=self.output)

    def words(self, name: str, **more: Path | None) -> list[str]:
        """The command line of a phase's processes."""
        folder = self.folder / name
        named = {"launch": folder / "launch", "base": self.base, "cache": self.cache}
        named |= {"progress": self.progress(name)} | {k: v for k, v in more.items() if v}
        return [word for key, value in named.items() for word in (f"--{key}", str(value))]

    def inputs(self, name: str) -> Inputs:
        """What the stage reads of a phase."""
        return read_inputs(self.folder / name / "launch", self.base, self.cache, None)

    def prepare(self, name: str) -> None:
        """Do what the stage does with a phase's progress before it starts a process."""
        prepare(self.inputs(name), self.progress(name))

    def call_stage(self, name: str, output: str = "checkpoint") -> int:
        """Train a phase by its stage, without the command; the exit code."""
        folder, progress = self.folder / name, self.progress(name)
        launch = folder / "launch"
        return train_phase(launch, self.base, self.cache, None, progress, folder / output)

    def wait_for_step(self, name: str, step: int, *processes: Any) -> None:
        """Wait until a phase has logged a step; its processes may not end before."""
        log = self.progress(name) / progress_folder.LOG

        def reached() -> bool:
            if log.is_file() and log.read_text().count("\n") >= step:
                return True
            assert all(one.exitcode is None for one in processes), self.output.read_text()
            return False

        wait_until(reached, f"step {step}", pause=0.005)

    def train(self, name: str, *, state: Path | None = None) -> list[float]:
        """Train a phase to its end; the losses of the run so far."""
        processes = read_run_yaml(self.folder / name / "launch" / "run.yaml").launch.num_processes
        join_ranks(self.start_ranks(name, processes, state=state), self.output)
        assert (self.progress(name) / "metrics.jsonl").exists(), self.output.read_text()
        return self.losses(name)

    def train_unfinished(self, name: str) -> None:
        """Train a phase of one process whose training ends by itself before its end."""
        join_ranks([self.start(name)], self.output)

    def run(self, name: str, preset: str, until: int, **changes: Any) -> list[float]:
        """Write a phase's launch files and train it."""
        state = changes.pop("state", None)
        self.phase(name, preset, until, **changes)
        return self.train(name, state=state)

    def progress(self, name: str) -> Path:
        """The folder of a phase's progress."""
        return self.folder / name / "progress"

    def log(self, name: str) -> list[dict[str, Any]]:
        """The training log of the run so far."""
        lines = (self.progress(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> list[float]:
        """The loss of every step of the run so far."""
        return [line["loss"] for line in self.log(name) if "loss" in line]

    def hashes(self, name: str, step: int) -> dict[str, str]:
        """sha256 of the tensors of a rolling checkpoint."""
        found = artifact.read(self.rolling(name, step), "checkpoint")
        return {n: f["sha256"] for n, f in found.files.items() if n.endswith(".safetensors")}

    def assert_resumes(self, preset: str, middle: int, until: int, **changes: Any) -> list[float]:
        """Train at once, and with a start in the middle, to the same bits; the losses."""
        whole = self.run("whole", preset, until, **changes)
        self.run("parts", preset, middle, **changes)
        assert self.run("parts", preset, until, **changes) == whole
        assert self.hashes("parts", until) == self.hashes("whole", until)
        return whole

    def rolling(self, name: str, step: int) -> Path:
        """The folder of a rolling checkpoint."""
        return progress_folder.step_folder(self.progress(name), step)

    def checkpoint(self, name: str, step: int) -> Checkpoint:
        """A rolling checkpoint, opened."""
        return Checkpoint(self.rolling(name, step))

    def export_state(self, name: str, step: int) -> Path:
        """The state that a rolling checkpoint gives."""
        return export_state(self.rolling(name, step), self.folder / f"{name}-{step}-state")

    def export(
        self, name: str, step: int, family: str = "sdxl", **chosen: Any
    ) -> tuple[Path, Path]:
        """Weights and state of a rolling checkpoint; `chosen` is what of the model is trained."""
        rolling, state = self.rolling(name, step), self.folder / f"{name}-{step}-state"
        weights = self.folder / f"{name}-{step}-weights"
        target = WeightsTarget(weights, self.base, load_family(family), "fp32", **chosen)
        export(Checkpoint(rolling), rolling, target, state)
        return weights, state


def trained_model(
    family: str,
    base: Path,
    checkpoint: Path,
    adapter: Mapping[str, Any] | None = None,
    frozen: Sequence[str] = (),
) -> Any:
    """What a checkpoint holds, without any export: the base with these very master weights."""
    source, found = Checkpoint(checkpoint), load_family(family)
    model = choose_trained(found.load_model(base), adapter, frozen, seed=SEED)
    parameters = trained_parameters(model)
    assert set(source.names) == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data = source.tensor(name, MASTER)
    return model.eval()


TINY = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 3001,
}  # fmt: skip
"""Stage 3 leaves small parameters whole and in one group: no test would see it at work."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and a cache, small enough to train a step in some ten milliseconds."""
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base", (9, 15))
    write_cache(folder / "cache")
    return folder


@pytest.fixture(scope="session")
def image_inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's nano base and cache."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        write_image_inputs(family, folder)
        return folder

    return make


def write_base(folder: Path, channels: tuple[int, int]) -> None:
    """Publish a base model: a U-Net of two blocks of so many channels, and a scheduler."""
    torch.manual_seed(0)
    unet = make_unet(channels)
    with artifact.publish(folder, "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler(prediction_type="v_prediction").save_pretrained(draft.folder / "scheduler")
        draft.content = {"parts": {"unet": "made by hand"}}


def write_cache(
    folder: Path,
    spoilt: Sequence[int] = (),
    sizes: Sequence[tuple[int, int]] = ((64, 64),),
    shares: Sequence[float] = (1.0,),
) -> None:
    """Publish a cache of random latents; those of the spoilt samples are NaN.

    The heights and widths of the images are `sizes`, in turn, and so are their shares of an epoch.
    """

    def key(number: int) -> str:
        return artifact.digest(number)

    nan = {key(number) for number in spoilt}
    size_of = {key(i): sizes[i % len(sizes)] for i in range(SAMPLES + 4)}

    def latents(keys: Any) -> Iterator[dict[str, torch.Tensor]]:
        for name in keys:
            source = torch.Generator().manual_seed(int(name[:8], 16))
            height, width = size_of[name]
            latents = torch.randn(4, height // 8, width // 8, generator=source)
            yield {LATENTS: torch.full_like(latents, torch.nan) if name in nan else latents}

    def text(keys: Any) -> Iterator[dict[str, torch.Tensor]]:
        for name in keys:
            source = torch.Generator().manual_seed(int(name[:8], 16))
            yield {
                "prompt_embeds": torch.randn(5, 16, generator=source),
                "pooled_prompt_embeds": torch.randn(6, generator=source),
            }

    entries = tuple(
        Entry(f"{i}.png", key(i), key(i % 3), key(i), key(100 + i % 3), (64, 64), (0, 0),
              size_of[key(i)], "train" if i < SAMPLES else "holdout",
              share=shares[i % len(shares)])
        for i in range(SAMPLES + 4)
    )  # fmt: skip
    stored = StoredShards(folder)
    size = 2**20
    written = [
        write_series(name, keys, encode, stored, folder=folder, shard_size=size)
        for name, keys, encode in (
            (LATENTS, [e.latents for e in entries], latents),
            (TEXT, [key(99), *(e.text for e in entries)], text),
        )
    ]
    with artifact.publish(folder, "cache") as draft:
        for one in written:
            draft.known |= place(one, draft.folder)
        index = Index(
            *(64, "fp32", 1, entries, key(99), written[0].series, written[1].series),
            data_sha256=drawn_digest(entries, "fp32", None),
        )
        write_index(draft.folder, index)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Lets the writing thread take one tensor each time that it is released."""
    semaphore = threading.Semaphore(0)
    take = RankWriter._take

    def waiting(self: RankWriter, name: str) -> torch.Tensor:
        assert semaphore.acquire(timeout=20)
        return take(self, name)

    monkeypatch.setattr(RankWriter, "_take", waiting)
    yield semaphore
    semaphore.release(100)


@pytest.fixture
def training(tmp_path: Path, inputs: Path, server: Any) -> Training:
    """A run of its own over the shared inputs."""
    return Training(tmp_path, inputs, server)


@pytest.fixture
def image_training(
    tmp_path: Path, image_inputs: Callable[[str], Path], server: Any
) -> Callable[[str], Training]:
    """Gives a run of a family's nano model."""
    return lambda family: Training(tmp_path, image_inputs(family), server)


class Command:
    """The command line of one phase, run as Snakemake runs it."""

    def __init__(self, training: Any, name: str) -> None:
        self.training = training
        self.name = name
        self.progress: Path = training.progress(name)
        self.checkpoint: Path = training.folder / name / "checkpoint"
        self._outputs = iter(range(100))
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in the background; `said` gives what it printed."""
        log = self.training.folder / f"train_phase.{next(self._outputs)}.log"
        output = log.with_suffix(".out").open("wb")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "zerotrain", "--log", str(log), "train_phase"),
                *self.training.words(self.name, output=self.checkpoint),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        process.log = log  # type: ignore[attr-defined]
        self._running.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Wait for a command's end: its exit code, and what it printed; its log says that and
        more."""
        code = process.wait(120)
        log: Path = process.log  # type: ignore[attr-defined]
        said = log.with_suffix(".out").read_text()
        assert not log.is_file() or set(said.splitlines()) <= set(
            log.read_text(encoding="utf-8").splitlines()
        )
        return code, said

    def run(self) -> tuple[int, str]:
        """Run the command to its end."""
        return self.end(self.start())

    def wait_for(self, reached: Any, what: str) -> None:
        """Wait until something has come about."""

        def holds() -> bool:
            if reached():
                return True
            assert any(process.poll() is None for process in self._running), f"ended before: {what}"
            return False

        wait_until(holds, what)

    def wait_for_save(self) -> None:
        """Wait until a checkpoint is whole."""
        self.wait_for(lambda: progress_folder.saved_steps(self.progress), "a checkpoint")

    def wait_for_step(self, step: int) -> None:
        """Wait until training has logged a step."""
        log = self.progress / progress_folder.LOG
        self.wait_for(lambda: log.is_file() and log.read_text().count("\n") >= step, f"step {step}")

    def processes(self) -> list[psutil.Process]:
        """Every process that names the progress folder: supervisors, launcher, ranks."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.progress) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def wait_for_silence(self) -> None:
        """Wait until no process of the phase is left; it has a few seconds for it."""
        _, alive = psutil.wait_procs(self.processes(), timeout=20)
        assert not alive
        assert not self.processes()

    def hashes(self) -> dict[str, str]:
        """sha256 of the published checkpoint's tensors."""
        found = artifact.read(self.checkpoint, "checkpoint")
        return {n: f["sha256"] for n, f in found.files.items() if n.endswith(".safetensors")}

    def close(self) -> None:
        """End what a failed test left running."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def phase(training) -> Iterator[Any]:
    """Makes the command of a phase."""
    made = []

    def make(name: str, preset: str = "torch", until: int = 300, **changes: Any) -> Command:
        training.phase(name, preset, until, **changes)
        made.append(Command(training, name))
        return made[-1]

    yield make
    for command in made:
        command.close()
