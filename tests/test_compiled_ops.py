"""DeepSpeed's ops are built once, under a time-out, and no killed build leaves anyone waiting."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.builders.processes import is_running, wait_until

from zerotrain.errors import PipelineError
from zerotrain.machine import compiled_ops

OPS = list(compiled_ops.OPS)
PYTHON = sys.executable


def built(stand_in: Path) -> list[str]:
    """The ops that were to be built, in the order of the calls: -m MODULE --load OP."""
    noted = stand_in.with_name("calls")
    return [line.split()[3] for line in noted.read_text().splitlines()] if noted.exists() else []


def test_folder_lies_in_the_environment_and_names_what_decides_it(fresh_ops: Path) -> None:
    """Two environments, two versions or two processors never share compiled code."""
    assert fresh_ops.parts[-3:-1] == ("venv", "zerotrain-ops")
    assert "torch-2.13.0" in fresh_ops.name
    assert "deepspeed-0.19.8" in fresh_ops.name


def test_environment_points_torch_at_the_folder_and_at_ninja(fresh_ops: Path) -> None:
    """What a training process needs in order to compile nothing."""
    found = compiled_ops.environment()
    assert found["TORCH_EXTENSIONS_DIR"] == str(fresh_ops)
    scripts = found["PATH"].split(os.pathsep)[0]
    assert (Path(scripts) / "ninja").exists()


def test_import_is_cheap() -> None:
    """Rules that need no torch do not wait for it."""
    code = "import sys, zerotrain.machine.compiled_ops; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_op_is_built_once(fresh_ops: Path, stand_in: Path) -> None:
    """A second call starts no process."""
    compiled_ops.build()
    assert sorted(built(stand_in)) == sorted(OPS)
    compiled_ops.build()
    assert len(built(stand_in)) == len(OPS)


def test_later_processes_use_the_compiler_that_built(
    fresh_ops: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler in the environment would make torch compile everything again."""
    monkeypatch.setenv("CXX", "g++")
    compiled_ops.build()
    monkeypatch.setenv("CXX", "clang++")
    compiler = Path(compiled_ops.environment()["CXX"])
    assert compiler.name == "g++"
    assert subprocess.run([compiler, "--version"], capture_output=True).returncode == 0


def test_a_compiler_in_path_that_calls_that_of_the_ops_ends(
    fresh_ops: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a cache of objects under the compiler's name; they would call each other forever."""
    monkeypatch.setenv("CXX", "c++")
    compiled_ops.build()
    compiler = compiled_ops.environment()["CXX"]
    script = tmp_path / "first/c++"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [script, "--version"], env=os.environ | {"PATH": path}, capture_output=True, timeout=20
    )
    assert done.returncode == 0


def test_failed_build_says_the_compilers_first_error(fresh_ops: Path, stand_in: Path) -> None:
    """The cause in one sentence, the whole output in a log."""
    stand_in.write_text(
        "echo warming up; echo 'a.cpp:1: fatal error: no Python.h'; echo Trace; exit 1",
        encoding="utf-8",
    )
    with pytest.raises(PipelineError) as caught:
        compiled_ops.build()
    assert "did not build: a.cpp:1: fatal error: no Python.h" in caught.value.what
    assert str(fresh_ops / OPS[0]) + ".log" in caught.value.hint
    assert not (fresh_ops / compiled_ops.BUILT).exists()


@pytest.mark.slow
def test_a_build_that_hangs_is_ended_with_its_children(fresh_ops: Path, stand_in: Path) -> None:
    """A time-out leaves no compiler behind, and the next call builds."""
    pid_file = stand_in.with_name("pid")
    stand_in.write_text(f"sleep 60 & echo $! > {pid_file}; wait", encoding="utf-8")
    with pytest.raises(PipelineError, match="was not built in time"):
        compiled_ops.build(timeout_s=1)
    pid = int(pid_file.read_text())
    wait_until(lambda: not is_running(pid))
    stand_in.write_text("", encoding="utf-8")
    compiled_ops.build()


def test_interrupted_set_up_leaves_no_compiler(fresh_ops: Path, stand_in: Path) -> None:
    """A compiler that outlives its builder would write into the next build's files."""
    builder, compiler = start_builder(stand_in)
    builder.terminate()
    assert builder.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(compiler))


def test_next_build_waits_for_the_compilers_of_a_killed_one(
    fresh_ops: Path, stand_in: Path
) -> None:
    """They hold the lock, and the next build starts when they have ended."""
    builder, compiler = start_builder(stand_in)
    builder.kill()
    builder.wait(30)
    calls = len(built(stand_in))
    with pytest.raises(PipelineError, match="another process has been building"):
        compiled_ops.build(timeout_s=0.3)
    assert len(built(stand_in)) == calls
    os.kill(compiler, signal.SIGKILL)
    stand_in.write_text("", encoding="utf-8")
    compiled_ops.build(timeout_s=30)
    assert len(built(stand_in)) == calls + len(OPS)


def start_builder(stand_in: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A set-up that compiles for a minute, and the compiler's process id."""
    pid_file = stand_in.with_name("pid")
    # As ninja does it, the compiler has a process group of its own.
    stand_in.write_text(
        f"set -m; sleep 60 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait",
        encoding="utf-8",
    )
    code = (
        "import runpy, sys; "
        f"sys.executable = {sys.executable!r}; sys.prefix = {sys.prefix!r}; "
        "sys.argv = ['compiled_ops']; runpy.run_module('zerotrain.machine.compiled_ops', "
        "run_name='__main__')"
    )
    builder = subprocess.Popen([PYTHON, "-c", code])
    while not pid_file.exists():
        assert builder.poll() is None
        time.sleep(0.05)
    return builder, int(pid_file.read_text())


@pytest.mark.parametrize("built", [False, True], ids=["by a build", "by a training"])
def test_lock_of_a_killed_process_is_removed(fresh_ops: Path, stand_in: Path, built: bool) -> None:
    """torch would wait on such a lock without an end and without a word. A training takes it for
    the moment of loading what set-up has built. Who works right now has the lock open."""
    if built:
        compiled_ops.build()
    lock = fresh_ops / OPS[0] / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    compiled_ops.build()
    assert not lock.exists()
    with lock.open("w"):
        compiled_ops.build()
        assert lock.exists()


def test_second_builder_waits_and_says_for_whom(fresh_ops: Path, stand_in: Path) -> None:
    """One process builds; the other does not start a second compilation next to it."""
    fresh_ops.mkdir(parents=True)
    with (fresh_ops / ".build-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PipelineError, match="another process has been building"):
            compiled_ops.build(timeout_s=0.3)
    assert built(stand_in) == []


def test_missing_compiler_is_reported(
    fresh_ops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PipelineError, match=r"no C\+\+ compiler found") as caught:
        compiled_ops.build()
    assert "apt-get install g++" in caught.value.hint


def test_environment_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared environment belongs to someone who can build in it."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled_ops.sys, "prefix", str(tmp_path / "file"))
    with pytest.raises(PipelineError, match="cannot be written") as caught:
        compiled_ops.build()
    assert "zerotrain build_ops" in caught.value.hint


@pytest.mark.slow
def test_the_ops_of_set_up_load_without_compiling() -> None:
    """The very ops, which set-up has built in this environment: nothing is compiled or written."""
    hold_that_ops_load(compiled_ops.ops_folder())


@pytest.mark.soak
def test_real_ops_build_and_load_without_compiling_again(fresh_ops: Path) -> None:
    """The very ops, in a fresh folder, as set-up builds them."""
    compiled_ops.build()
    hold_that_ops_load(fresh_ops)


def hold_that_ops_load(folder: Path) -> None:
    """Load each op in a process of its own, which finds it built."""
    objects = {path: path.stat().st_mtime_ns for op in OPS for path in (folder / op).glob("*.so")}
    assert [path.parent.name for path in objects] == OPS
    for op in OPS:
        command = [sys.executable, "-m", "zerotrain.machine.compiled_ops", "--load", op]
        done = subprocess.run(
            command,
            env=os.environ | compiled_ops.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "no work to do" in done.stdout
    assert objects == {path: path.stat().st_mtime_ns for path in objects}


def test_offload_to_memory_needs_no_cuda_compiler() -> None:
    """On GPUs its optimizer is compiled as on a machine without; what swaps to a disk is not."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    make = CUDA_Accelerator().create_op_builder
    builders = {op: make(builder) for op, builder in compiled_ops.OPS.items()}
    assert not any(isinstance(one, CUDAOpBuilder) for one in builders.values())
    assert isinstance(make(compiled_ops.SWAP_BUILDER), CUDAOpBuilder)
