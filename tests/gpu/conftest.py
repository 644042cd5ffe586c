"""Trainings on one GPU, in processes that run next to each other.

Without a GPU these tests skip; ZEROTRAIN_TEST_DEVICE=cpu runs their bodies on the CPU instead.
`make test-gpu` fails where there is no GPU.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.processes import start_ranks
from tests.conftest import ROOT
from tests.gpu.jobs import can_compute, train
from tests.training.conftest import Training, write_base, write_cache
from tests.training.inputs import write_image_inputs

from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml
from zerotrain.machine import compiled_ops
from zerotrain.training.checkpointing import progress_folder

HERE = Path(__file__).parent
ON_CPU = os.environ.get("ZEROTRAIN_TEST_DEVICE") == "cpu"
DEVICE = "cpu" if ON_CPU else "cuda"
NO_GPU = "there is no GPU that torch can use; ZEROTRAIN_TEST_DEVICE=cpu runs it on the CPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if ON_CPU or torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


class GpuTraining(Training):
    """Phases of a run whose processes get variables of the environment of their own."""

    environment: dict[str, str]

    def __init__(self, folder: Path, inputs: Path, server: Any, **environment: str) -> None:
        super().__init__(folder, inputs, server)
        folder.mkdir(exist_ok=True)
        self.environment = environment

    def start_ranks(
        self, name: str, processes: int, *, state: Path | None = None, kill: Any = None
    ) -> list[Any]:
        """Start the processes that train a phase."""
        return self.start_job(name, processes, train, self.environment, kill, state=state)

    def start_job(
        self, name: str, processes: int, job: Any, *more: Any, state: Path | None = None
    ) -> list[Any]:
        """Start processes that call a job with the command line of a phase."""
        progress = self.progress(name)
        progress.mkdir(parents=True, exist_ok=True)
        until = read_run_yaml(self.folder / name / "launch/run.yaml").derived.until_step
        resume = progress_folder.newest_intact(progress, until)
        words = self.words(name, resume=resume, start=state)
        start = self._server.Process
        return start_ranks(start, job, processes, words, *more, output=self.output)

    def train_on_cpu(self, name: str) -> list[float]:
        """Train a phase on the CPU, in an interpreter that sees no GPU; the losses."""
        self.progress(name).mkdir(parents=True, exist_ok=True)
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        words = [sys.executable, "-m", "zerotrain.training.rank", *self.words(name)]
        done = subprocess.run(words, env=os.environ | hidden, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        return self.losses(name)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder among all workers; whether its content is still to be made.

    It counts as made once the body has ended without an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "made"
    with (folder / ".lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        missing = not done.exists()
        yield missing
        done.touch()


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this session."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "together"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def server(together: Path) -> Any:
    """Makes processes: forks of one that has imported all, or new ones where such a fork cannot
    use the GPU, which something has touched while it was imported.
    """
    with locked(together / "ops") as missing:
        if missing:
            compiled_ops.build()
    # Else asking whether there is a GPU opens it, and a fork cannot open it again.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(together / "inductor"))
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    # A new interpreter finds the package as this one does.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "workflow"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.gpu.preload"])
    probe = forks.Process(target=can_compute, args=(DEVICE,))
    probe.start()
    probe.join(120)
    if probe.exitcode == 0:
        return forks
    print("forks cannot use the GPU: each process is a new one")
    return multiprocessing.get_context("spawn")


@pytest.fixture(scope="session")
def inputs(together: Path) -> Path:
    """A base model and a cache, small, with parameters of odd sizes."""
    folder = together / "inputs"
    with locked(folder) as missing:
        if missing:
            write_base(folder / "base", (9, 15))
            write_cache(folder / "cache")
    return folder


@pytest.fixture(scope="session")
def image_inputs(together: Path) -> Callable[[str], Path]:
    """Gives the folder of a family's nano base and cache, encoded on the device."""

    @cache
    def make(family: str) -> Path:
        folder = together / family
        with locked(folder) as missing:
            if missing:
                write_image_inputs(family, folder)
        return folder

    return make


@pytest.fixture
def training(tmp_path: Path, inputs: Path, server: Any) -> GpuTraining:
    """A run of its own over the shared inputs."""
    return GpuTraining(tmp_path, inputs, server)


@pytest.fixture
def image_training(
    tmp_path: Path, image_inputs: Callable[[str], Path], server: Any
) -> Callable[[str], GpuTraining]:
    """Gives a run of a family's nano model."""
    return lambda family: GpuTraining(tmp_path, image_inputs(family), server)


class Wholes:
    """Uninterrupted runs, each made once for all workers."""

    def __init__(self, folder: Path, inputs: Path, server: Any) -> None:
        # float32 on the device is float32: bounds between engines are not those of TF32.
        self.training = GpuTraining(folder, inputs, server, NVIDIA_TF32_OVERRIDE="0")

    def losses(self, name: str, preset: str, until: int, **changes: Any) -> list[float]:
        """The losses of a run."""
        with locked(self.training.folder / f"{name}-whole") as missing:
            if missing:
                self.training.run(name, preset, until, **changes)
        return self.training.losses(name)

    def on_cpu(self, name: str, until: int, **changes: Any) -> list[float]:
        """The losses of a run of plain PyTorch on the CPU."""
        with locked(self.training.folder / f"{name}-whole") as missing:
            if missing:
                self.training.phase(name, "torch", until, **changes)
                self.training.train_on_cpu(name)
        return self.training.losses(name)

    def state(self, name: str, step: int) -> Path:
        """The state at a step of a run."""
        with locked(self.training.folder / f"{name}-{step}-exported") as missing:
            if missing:
                self.training.export_state(name, step)
        return self.training.folder / f"{name}-{step}-state"


@pytest.fixture(scope="session")
def wholes(together: Path, inputs: Path, server: Any) -> Wholes:
    return Wholes(together / "wholes", inputs, server)


@pytest.fixture(scope="session")
def swap_op(server: Any) -> None:
    """The op of NVMe offload; without it the test is skipped with the reason."""
    try:
        compiled_ops.build_swap_op()
    except PipelineError as error:
        pytest.skip(f"NVMe offload is not tested: {error}")
