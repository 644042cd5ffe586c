"""DeepSpeed's compiled ops, built once into a folder of the environment.

By default DeepSpeed compiles them at the first training step, into a folder that environments
share, and a killed build leaves a lock that blocks every later process silently. Here they are
built at set-up: by a first load in a child process, with a timeout, under a lock that ends with its
owner.

The op for NVMe offload needs libaio, which few machines have: it is built when a training needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from zerotrain.errors import EXIT_USER_ERROR, PipelineError
from zerotrain.machine.file_lock import lock_stream
from zerotrain.machine.processes import kill_tree
from zerotrain.machine.regular_file import open_new, open_to_change, open_to_read, write_text

OPS = {"cpu_adam": "CPUAdamBuilder", "deepspeed_shm_comm": "ShareMemCommBuilder"}
"""Folder and builder of each op: the optimizer of the offload presets, and gloo's shared memory."""

WRAPPERS = "cxx"
"""Folder of the compiler that builds the ops."""

BUILT = "built.json"
"""Written last: every op in the folder has been compiled and loaded."""

SWAP_OP = "async_io"
SWAP_BUILDER = "AsyncIOBuilder"
SWAP_BUILT = "async_io.json"
BUILD_SWAP_OP = "python -m zerotrain.machine.compiled_ops --async-io"
"""Builds only the op of NVMe offload; loading it also compiles `pin_memory`."""


def ops_folder() -> Path:
    """Return the folder of the ops for this torch, DeepSpeed and processor.

    The ops are compiled for the exact processor (-march=native), so each processor has its own
    folder.
    """
    name = f"torch-{version('torch')}-deepspeed-{version('deepspeed')}-{_processor()[:12]}"
    return Path(sys.prefix) / "zerotrain-ops" / name


def environment() -> dict[str, str]:
    """Return variables with which a training process finds the built ops and compiles nothing."""
    scripts = sysconfig.get_path("scripts")  # has ninja; torch looks for it on PATH
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return {
        "TORCH_EXTENSIONS_DIR": str(ops_folder()),
        "PATH": os.pathsep.join([scripts, *(entry for entry in path if entry != scripts)]),
        "CXX": _built_with() or _wrapper() or compiler() or "c++",
    }


def built_ops() -> dict[str, bool]:
    """Return whether each op that zerotrain uses is in the folder."""
    return {op: any((ops_folder() / op).glob("*.so")) for op in (*OPS, SWAP_OP)}


def build(timeout_s: float = 1800) -> None:
    """Compile and load every op that this machine uses; if they are built, remove stale locks.

    torch takes an op's lock for each load: a process killed during it would block all others.

    Raises:
        PipelineError: there is no compiler, the compiler fails, or timeout_s has passed.
    """
    folder = ops_folder()
    if _built_with():
        for dead in folder.glob("*/lock"):
            _remove_dead_lock(dead)
        return
    if not compiler():
        raise PipelineError(
            "no C++ compiler found (c++, g++ or clang++), DeepSpeed's ops cannot be built",
            hint="install one, on Debian or Ubuntu `apt-get install g++`, or set CXX",
        )
    deadline = time.monotonic() + timeout_s
    with _build_lock(folder, deadline) as lock:
        if _built_with():
            return
        cxx = _write_wrapper(folder)
        enough_cores = len(os.sched_getaffinity(0)) >= 4  # each op is two sources, built at once
        for ops in [list(OPS)] if enough_cores else [[op] for op in OPS]:
            _build_together(ops, deadline, lock)
        new = folder / f".{BUILT}.new"
        write_text(new, json.dumps({"cxx": cxx}) + "\n")
        new.replace(folder / BUILT)


def build_swap_op(timeout_s: float = 1800) -> None:
    """Compile and load the op for NVMe offload; return immediately if it is built.

    Raises:
        PipelineError: libaio is missing, the compiler fails, or timeout_s has passed.
    """
    folder = ops_folder()
    if (folder / SWAP_BUILT).exists():
        return
    build(timeout_s)
    deadline = time.monotonic() + timeout_s
    with _build_lock(folder, deadline) as lock:
        if (folder / SWAP_BUILT).exists():
            return
        print(f"DeepSpeed's {SWAP_OP} is built, once: some minutes", file=sys.stderr, flush=True)
        _remove_dead_lock(folder / "pin_memory" / "lock")
        try:
            _build_together([SWAP_OP], deadline, lock)
        except PipelineError as error:
            raise PipelineError(
                f"NVMe offload needs libaio and DeepSpeed's {SWAP_OP}. {error.what}",
                hint="install libaio's headers, on Debian or Ubuntu `apt-get install libaio-dev`, "
                f"on Fedora or RHEL `dnf install libaio-devel`, then `{BUILD_SWAP_OP}`; "
                "zero3_offload needs neither",
            ) from error
        new = folder / f".{SWAP_BUILT}.new"
        write_text(new, json.dumps({"cxx": compiler()}) + "\n")
        new.replace(folder / SWAP_BUILT)


def build_ops() -> None:
    """Build missing ops and print their folder: the command `zerotrain build_ops`."""
    start = time.monotonic()
    build()
    print(f"DeepSpeed's compiled ops: {ops_folder()} ({time.monotonic() - start:.0f} s)")


def _processor() -> str:
    """Compute a digest of the processor's properties that -march=native uses."""
    lines = [platform.machine()]
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        lines += [line for line in text.splitlines() if line.split("\t")[0].strip() in wanted]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def compiler() -> str | None:
    """Return the C++ compiler that builds ops; None if no compiler is found."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((name for name in names if name and shutil.which(name.split()[0])), None)


def _wrapper() -> str | None:
    """Return the compiler that `_write_wrapper` wrote, if it did."""
    return next((str(path) for path in (ops_folder() / WRAPPERS).glob("*")), None)


def _write_wrapper(folder: Path) -> str:
    """Write the compiler without debug information, for which DeepSpeed asks: it doubles the time.

    The flags are in torch's build file, which must stay the same for all processes. The name is the
    compiler's, since torch looks for gcc and clang in it.
    """
    shutil.rmtree(folder / WRAPPERS, ignore_errors=True)  # $CXX may name an earlier one
    name, *options = (compiler() or "c++").split()
    path = folder / WRAPPERS / Path(name).name
    path.parent.mkdir()
    # A name alone could be that of a script in PATH which calls this one.
    named = shlex.join([shutil.which(name) or name, *options])
    write_text(path, f'#!/bin/sh\nexec {named} "$@" -g0\n')
    path.chmod(0o755)
    return str(path)


def _built_with() -> str | None:
    """Return the compiler that built the ops, or None; with another, torch would rebuild them."""
    try:
        with open_to_read(ops_folder() / BUILT) as stream:
            return str(json.loads(stream.read())["cxx"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _build_lock(folder: Path, deadline: float) -> Iterator[int]:
    """Let only one process build.

    The compilers inherit the descriptor: a killed builder's lock is released once they have ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = open_to_change(folder / ".build-lock", make=True)
    except OSError as error:
        raise PipelineError(
            f"{folder}: cannot be written ({error.strerror}), DeepSpeed's ops have no place",
            hint="let the owner of the environment run `zerotrain build_ops` on this machine",
        ) from error
    with stream:
        while lock_stream(stream) is False:
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"{folder}: another process has been building the ops all the time",
                    hint="wait for it, or end it and run `zerotrain build_ops`",
                )
            time.sleep(0.2)
        yield stream.fileno()


def _build_together(ops: list[str], deadline: float, lock: int) -> None:
    """Load each op in a separate child process, which compiles it."""
    children = {op: _start(op, lock) for op in ops}
    try:
        for op, child in children.items():
            log = ops_folder() / f"{op}.log"
            try:
                code = child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise PipelineError(
                    f"DeepSpeed's {op} was not built in time; its output so far: {log}",
                    hint="run `zerotrain build_ops` again when the machine is less busy",
                ) from None
            if code:
                with open_to_read(log) as stream:
                    output = stream.read().decode(errors="replace")
                raise PipelineError(
                    f"DeepSpeed's {op} did not build: {_cause(output)}",
                    hint=f"read {log}, fix the cause and run `zerotrain build_ops`",
                )
    finally:
        for child in children.values():
            if child.poll() is None:
                # ninja gives each compiler its own process group.
                kill_tree(child)


def _start(op: str, lock: int) -> subprocess.Popen[bytes]:
    folder = ops_folder()
    _remove_dead_lock(folder / op / "lock")
    with open_new(folder / f"{op}.log") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "zerotrain.machine.compiled_ops", "--load", op],
            env=os.environ | environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only the builder, which ends the compilers. In a session of their own
            # they would not run at its priority.
            process_group=0,
            pass_fds=[lock],
        )


def _remove_dead_lock(lock: Path) -> None:
    """Remove torch's lock, which blocks builds forever, unless a process has it open."""
    if lock.exists() and not _is_open_somewhere(lock):
        lock.unlink(missing_ok=True)


def _is_open_somewhere(path: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path.resolve():
                return True
    return False


def _cause(log: str) -> str:
    """Return why a build failed: the compiler's first error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "fatal" in line.lower()]
    return (errors or lines[-1:] or ["it printed nothing"])[0]


def _load(op: str) -> None:
    """Load an op in the child process, which compiles it if it is missing."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(SWAP_BUILDER if op == SWAP_OP else OPS[op])
    if builder is None:
        print(f"{op}: not used with this accelerator")
    elif op == SWAP_OP and not builder.is_compatible():
        sys.exit("error: libaio is missing: a test program that calls io_submit does not build")
    else:
        builder.load(verbose=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the compilers
    try:
        if sys.argv[1:2] == ["--load"]:
            _load(sys.argv[2])
        elif sys.argv[1:] == ["--async-io"]:
            build_swap_op()
        else:
            build_ops()
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
