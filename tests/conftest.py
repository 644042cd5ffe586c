"""What every test may rely on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerotrain.importers import enable_launch_files
from zerotrain.machine import compiled_ops

ROOT = Path(__file__).parent.parent
Mount = Callable[[Path, str], None]

# Before anything loads torch: a gradient's last bits depend on the number of threads, and test
# processes with as many threads as the machine has cores hinder one another.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fix", action="store_true", help="write generated files again instead of comparing them"
    )


def pytest_configure() -> None:
    """Let DeepSpeed find its compiled ops, as training does: no test compiles anything.

    Configurations may name launch files, as they may in every command.
    """
    os.environ.update(compiled_ops.environment())
    enable_launch_files()


def pytest_runtest_teardown() -> None:
    """A stage that ran in this process has set its own number of threads: the next test's is 1."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


LONGEST = (
    "test_example.py", "test_cluster_kills.py", "test_cluster_nodes.py", "test_dvc_record.py",
    "test_dvc_restore.py", "test_switch.py", "test_gpu.py", "test_cluster_profiles.py",
    "test_train_phase.py", "test_fetch.py", "test_plan_grid.py",
    "test_graph.py", "test_peft_methods.py", "test_quantized_base.py", "test_optimizers.py",
    "test_host_memory.py", "test_nvme_offload.py", "test_switch_kills.py",
    "test_switch_command.py", "test_cluster_resources.py", "test_verify_resume.py",
    "test_external_launch.py", "test_validation.py", "test_dvc_remotes.py", "test_toy_family.py",
    "test_samples.py", "test_parameters.py", "test_recipes.py", "test_dvc_experiments.py",
    "test_gradient_checkpointing.py", "test_torch_compile.py", "test_zero3_init.py",
)  # fmt: skip
"""Files that take longest as a whole."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, of which each is one worker's: none is left alone with one."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def server() -> multiprocessing.context.ForkServerContext:
    """Forks processes that need not import torch, diffusers and DeepSpeed again.

    A process has one such server, so that all tests share what it preloads.
    """
    # Forks import test modules by their names, which `pytest`, unlike `python -m pytest`, hides.
    sys.path.append(str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Hold a generated file to the text it should have; with --fix it is written."""

    def hold(path: Path, text: str) -> None:
        if request.config.getoption("--fix"):
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, (
            f"{path} is out of date: make test ARGS=--fix"
        )

    return hold


def copy_project(folder: Path) -> Path:
    """Copy the project, without results, into a new folder."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "Snakefile", folder)
    for part in ("rules", "config", "profiles", "envs", "workflow"):
        ignored = shutil.ignore_patterns("*.egg-info")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    return folder


def copy_quick_project(folder: Path) -> Path:
    """Copy the project for a test that looks at no image: two steps fit an autoencoder, not 200."""
    path = copy_project(folder) / "workflow/zerotrain/models/families/autoencoders.py"
    text = path.read_text()
    assert text.count("\nVAE_STEPS = 200\n") == 1
    path.write_text(text.replace("\nVAE_STEPS = 200\n", "\nVAE_STEPS = 2\n"))
    return folder


@pytest.fixture
def private_project(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of the project in a folder of this name."""
    return lambda name: copy_project(tmp_path / name)


@pytest.fixture
def quick_project(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of the project that fits autoencoders in two steps, in a folder of this name."""
    return lambda name: copy_quick_project(tmp_path / name)


@pytest.fixture
def fresh_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ops folder of an environment in which nothing is built or remembered."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return compiled_ops.ops_folder()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script of ours, empty at first, that runs in Python's place with Python's arguments; the
    file `calls` next to it has those of each call on a line."""
    script = tmp_path / "script.sh"
    script.write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n. {script}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return script


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a disk of given options at a folder, or changes those of one that is mounted."""
    mounted: list[Path] = []

    def succeeds(*words: str) -> bool:
        return subprocess.run(words, capture_output=True).returncode == 0

    def make(folder: Path, options: str) -> None:
        if folder in mounted:
            assert succeeds("mount", "-o", f"remount,{options}", str(folder))
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not succeeds("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)):
            pytest.skip("a disk cannot be mounted here")
        mounted.append(folder)

    yield make
    for folder in mounted:
        succeeds("umount", "-l", str(folder))
