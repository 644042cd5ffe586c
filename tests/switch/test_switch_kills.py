"""`zerotrain switch` killed at every step, and called again: as if nothing had been.

In CI the same is held by parts: the command with Snakemake by tests/workflow/test_switch.py, its
edit and its lock by test_switch_races.py, and the export that it leaves by training/test_kill.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML
from tests.builders.processes import wait_until
from tests.conftest import copy_quick_project

from zerotrain.training.process.lock import read_owner

pytestmark = pytest.mark.soak

STOPPED, END = 4, 40
SWITCH = [sys.executable, "-m", "zerotrain", "switch", "digits", "--to", "zero2"]
TRAIN = [sys.executable, "-m", "snakemake", "--cores", "all", "weights"]
DEADLINE_SECONDS = 900.0
SEEDS = range(20)


@dataclass
class Project:
    """A copy of the project whose training was stopped."""

    folder: Path

    @property
    def plain(self) -> Path:
        """The results of the phase that is cut."""
        return self.folder / "results/digits/plain"

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.folder / "config/config.yaml"

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command; stdout and stderr come together."""
        own = {"PYTHONPATH": str(self.folder / "workflow")}
        return subprocess.Popen(
            command, cwd=self.folder, env=os.environ | own, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def call(self, command: list[str]) -> str:
        """What a command that ends well says."""
        process = self.start(command)
        said = process.communicate(timeout=DEADLINE_SECONDS)[0]
        assert process.returncode == 0, said[-6000:]
        return said

    def copy(self, folder: Path) -> Project:
        """The same once more."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder)

    def exported(self) -> dict[str, str]:
        """sha256 of each file of the cut phase's weights and state, by their manifests."""
        found = {}
        for part in ("weights", "state"):
            files = json.loads((self.plain / part / "manifest.json").read_text())["files"]
            for name, entry in files.items():
                if not name.startswith("records/"):
                    found[f"{part}/{name}"] = entry["sha256"]
        return found

    def trained(self) -> str:
        """sha256 of the last phase's trained tensors; the file's header names its phase."""
        phases = YAML(typ="safe").load(self.config)["phases"]
        weights = self.folder / "results/digits" / phases[-1]["name"] / "weights"
        [file] = (weights / "unet").glob("*.safetensors")
        data = file.read_bytes()
        return hashlib.sha256(data[8 + struct.unpack("<Q", data[:8])[0] :]).hexdigest()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A training that was stopped at its second checkpoint."""
    project = Project(copy_quick_project(tmp_path_factory.mktemp("stopped") / "project"))
    raw = YAML().load(project.config)
    raw["phases"] = [{"name": "plain", "until": STOPPED, "launch": "torch"}]
    raw["train"].update(save_every=2, log_every=1, global_batch_size=4)
    raw["launch"]["num_cpu_threads_per_process"] = 1
    YAML().dump(raw, project.config)
    project.call(TRAIN)
    for part in ("checkpoint", "weights", "state"):
        shutil.rmtree(project.plain / part)
    text = project.config.read_text()
    project.config.write_text(text.replace(f"until: {STOPPED}\n", f"until: {END}\n"))
    return project


@pytest.fixture(scope="module")
def exported(stopped: Project) -> dict[str, str]:
    """What a switch exports that is not killed."""
    switched = stopped.copy(stopped.folder.with_name("switched"))
    switched.call(SWITCH)
    return switched.exported()


@pytest.fixture(scope="module")
def trained(stopped: Project) -> Callable[[], str]:
    """What the training ends with that is never stopped, made when first asked for."""
    made: list[str] = []

    def get() -> str:
        if not made:
            alone = stopped.copy(stopped.folder.with_name("alone"))
            alone.call(TRAIN)
            made.append(alone.trained())
        return made[0]

    return get


def steps_of(project: Project, edited: bytes) -> list[Callable[[], object]]:
    """Signs by which it is seen from outside how far a switch is."""
    plain = project.plain
    return [
        lambda: True,
        lambda: (plain.parent / ".switch/lock").exists(),
        lambda: project.config.read_bytes() != edited,
        lambda: read_owner(plain / "progress"),
        lambda: [*plain.glob(".checkpoint.new-*"), *plain.glob("checkpoint/manifest.json")],
        lambda: (plain / "checkpoint/manifest.json").exists(),
        lambda: [*plain.glob(".weights.new-*"), *plain.glob("weights/manifest.json")],
        lambda: (plain / "weights/manifest.json").exists(),
        lambda: (plain / "state/manifest.json").exists(),
    ]


def wait_for(sign: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a sign, or for the end of the process that gives it."""
    wait_until(
        lambda: process.poll() is not None or sign(), "a sign", DEADLINE_SECONDS, pause=0.002
    )


def kill(process: subprocess.Popen[str], what: str) -> None:
    """kill -9 of the command, the Snakemake below it, the jobs below that, or all of them."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
        snakemakes = [one for one in below if "snakemake" in one.cmdline()]
    except psutil.NoSuchProcess:
        return
    jobs = [one for one in below if one not in snakemakes]
    command = psutil.Process(process.pid)
    chosen = {
        "command": [command],
        "snakemake": snakemakes,
        "jobs": jobs,
        "all": [command, *below],
    }[what]
    for one in chosen or [command]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


@contextlib.contextmanager
def running(project: Project) -> Iterator[subprocess.Popen[str]]:
    """The training runs, and is held in a step until it is asked to stop."""
    process = project.start(TRAIN)
    progress = project.plain / "progress"
    first = set(progress.glob("step-*/manifest.json"))
    wait_for(lambda: set(progress.glob("step-*/manifest.json")) - first, process)
    ranks = [
        one
        for one in psutil.Process(process.pid).children(recursive=True)
        if "zerotrain.training.rank" in " ".join(one.cmdline())
    ]
    assert ranks
    for one in ranks:
        one.suspend()
    try:
        yield process
    finally:
        for one in (*ranks, process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 5])
def test_a_killed_switch_is_completed_by_the_same_command(
    stopped: Project,
    exported: dict[str, str],
    trained: Callable[[], str],
    tmp_path: Path,
    seed: int,
) -> None:
    """Of a stopped training: what is exported is to the byte what no one killed exports, the folder
    of configurations has no file more, and no lock is in the way of any command after it. Every
    fourth trains on to the end, to the weights of a training that was never stopped."""
    rng = random.Random(seed)
    project = stopped.copy(tmp_path / "project")
    former, text = set(project.config.parent.rglob("*")), project.config.read_bytes()
    signs = steps_of(project, text)
    place, what = seed % len(signs), rng.choice(["command", "snakemake", "jobs", "all"])
    process = project.start(SWITCH)
    wait_for(signs[place], process)
    time.sleep(rng.uniform(0, 2.0 if place < 2 else 0.3))
    kill(process, what)
    killed = process.communicate()[0]
    print(f"seed {seed}: {what} killed at sign {place}: {process.returncode}, {killed[-300:]!r}")
    said = project.call(SWITCH)
    print(said[-400:])
    assert f"plain: ends at step {STOPPED}" in said or f"plain ended at step {STOPPED}" in said
    assert set(project.config.parent.rglob("*")) == former
    assert project.exported() == exported
    if seed % 4 == 2:
        project.call(TRAIN)
        assert project.trained() == trained()


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed % 5 == 0])
def test_a_killed_switch_of_a_running_training_loses_nothing(
    stopped: Project, trained: Callable[[], str], tmp_path: Path, seed: int
) -> None:
    """The command is killed as it waits for the training, or the training's ranks or its Snakemake
    are. The same command ends it, and trained on it has the weights of one never stopped."""
    rng = random.Random(seed)
    project = stopped.copy(tmp_path / "project")
    former = set(project.config.parent.rglob("*"))
    with running(project) as training:
        process = project.start(SWITCH)
        wait_for((project.plain / "progress/stop").exists, process)
        what = ["command", "ranks", "snakemake", "both"][seed // 5 % 4]
        if what in ("command", "both"):
            process.kill()
        if what in ("snakemake", "both"):
            training.kill()  # what it trains runs on
        if what == "ranks":
            for one in psutil.Process(training.pid).children(recursive=True):
                if "zerotrain.training.rank" in " ".join(one.cmdline()):
                    one.kill()
        ranks = [
            one
            for one in psutil.process_iter()
            if one.status() == psutil.STATUS_STOPPED and one.cwd() == str(project.folder)
        ]
        time.sleep(rng.uniform(0, 0.5))
        for one in ranks:
            one.resume()
        killed = process.communicate()[0]
        print(f"seed {seed}: {what} killed: {process.returncode}, {killed[-300:]!r}")
        said = project.call(SWITCH)
        print(said[-400:])
    assert "plain: ends at step" in said or "done already: plain ended at step" in said
    assert set(project.config.parent.rglob("*")) == former
    project.call(TRAIN)
    assert project.trained() == trained()
