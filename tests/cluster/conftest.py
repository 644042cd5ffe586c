"""The virtual cluster, one for all tests of a worker, and projects whose jobs run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.builders import processes
from tests.cluster.virtual_slurm import VirtualSlurm, missing, virtual_slurm

EAGER = Path(__file__).with_name("eager_snakemake.py")
SECONDS = 300
"""Longer than anything here is waited for."""
PROFILE = (
    *("--profile", "profiles/slurm"),
    *("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"),
)
NO_GPUS = (
    "--set-resources",
    *(f"{rule}:gres=none" for rule in ("train_phase", "cache_latents", "evaluate")),
)
"""What a profile says on a cluster that trains on CPUs."""


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    """A cluster that is started when a test first asks for it."""
    if text := missing():
        pytest.skip(text)
    with virtual_slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: VirtualSlurm) -> Iterator[VirtualSlurm]:
    """The cluster without a job; what a test leaves on it is ended."""
    one_cluster.clear()
    yield one_cluster
    one_cluster.clear()


class Snakemake:
    """A `snakemake` that runs; what it says goes to a file, for a pipe that no one reads fills."""

    def __init__(
        self, words: list[str], folder: Path, environment: dict[str, str], said: Path
    ) -> None:
        self._said = said
        with said.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def end(self, code: int | None = 0) -> str:
        """What it printed, once it has ended with this code; None: whichever."""
        self.process.wait(3 * SECONDS)
        said = self._said.read_text()
        assert code is None or self.process.returncode == code, said[-6000:]
        return said


class Project:
    """A copy of the project, whose `snakemake` submits to a cluster or runs here."""

    def __init__(self, folder: Path, cluster: VirtualSlurm) -> None:
        self.folder = folder
        self.cluster = cluster
        self._started = 0
        self.environment = {
            **cluster.environment,
            "PYTHONPATH": str(folder / "workflow"),
            "OMP_NUM_THREADS": "1",
        }

    def configure(self, name: str, text: str) -> None:
        """Write config/<name>.yaml."""
        (self.folder / "config" / f"{name}.yaml").write_text(text)

    def start(self, *words: str) -> Snakemake:
        """`snakemake`, without waiting for it; it leads a process group."""
        self._started += 1
        return Snakemake(
            [sys.executable, "-P", str(EAGER), *words],
            self.folder,
            self.environment,
            self.folder.with_name(f"snakemake-{self._started}.txt"),
        )

    def snakemake(self, *words: str, code: int | None = 0) -> str:
        """What `snakemake` printed, which is to end with this code."""
        return self.start(*words).end(code)

    def progress(self, phase: str) -> Path:
        """The progress folder of a phase, RUN/PHASE."""
        return self.folder / "results" / phase / "progress"

    def steps(self, phase: str) -> list[int]:
        """The steps that training has logged, in the order in which it did them."""
        path = self.progress(phase) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines]
        return [row["step"] for row in rows if "loss" in row]

    def wait_for_step(self, phase: str, step: int) -> None:
        """Wait until a phase has logged a step."""
        wait_until(lambda: max(self.steps(phase), default=0) >= step, f"{phase} at step {step}")

    def ranks(self, phase: str) -> list[int]:
        """Pids of the training processes of a phase, by rank."""
        paths = sorted((self.progress(phase) / "ranks").glob("*.json"))
        return [json.loads(path.read_text())["process"]["pid"] for path in paths]


wait_until = partial(processes.wait_until, seconds=SECONDS, pause=0.1)


def weights(phase: Path) -> torch.Tensor:
    """All of a phase's trained weights, one after the other by their names."""
    found = load_file(phase / "weights" / "unet" / "diffusion_pytorch_model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.fixture
def project(quick_project: Callable[[str], Path], cluster: VirtualSlurm) -> Project:
    """A copy of the project next to a cluster without jobs."""
    return Project(quick_project("project"), cluster)
