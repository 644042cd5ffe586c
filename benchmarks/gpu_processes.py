"""The processes of gpu.py's measurements: forks of one that has imported what they all import.

torch, diffusers, transformers and DeepSpeed take 12 s of a core, 16 s where their files were not
read before: as long as what is measured. CUDA can be used in a fork if its parent has not started
it. Imports only ask whether there is a GPU, which with NVML_CHECK torch answers without CUDA. A
first fork tries the GPU: if it cannot use it, each measurement is a new Python (`spawn`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Images of containers forbid it by a variable: every process would compile the libraries again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PRELOADED = ["gpu_processes", "gpu_preload"]
NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
TRY_SECONDS = 120
"""Limit for the imports and the first fork."""
OPS_SECONDS = 150
"""Limit for DeepSpeed's ops to be compiled, which begins with the run."""
MOST_LINES = 25
"""Of a failure's output."""


def append(out: Path, line: dict[str, Any]) -> None:
    """Append a line, and see that it is on the disk."""
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


class Ops:
    """The compilation of DeepSpeed's ops, which runs while other things are measured."""

    def __init__(self, out: Path, limit: float) -> None:
        self._out, self._end = out, time.monotonic() + limit
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zerotrain.machine.compiled_ops"],
            stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._works: bool | None = None

    def runs(self) -> bool:
        """Return whether the compilers are at work, within their limit."""
        return self._process.poll() is None and time.monotonic() < self._end

    def wait(self) -> bool:
        """Wait until they are compiled; return whether they are."""
        if self._works is None:
            try:
                code = self._process.wait(max(0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.close()
                code = -1
            self._works = code == 0
            self._log.seek(0)
            said = self._log.read().splitlines()[-MOST_LINES:]
            append(self._out, {"name": "compiled_ops", "ok": self._works, "said": said})
            print("DeepSpeed's ops:", "compiled" if self._works else "not compiled", *said)
        return self._works

    def close(self) -> None:
        """End the compilers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


class Processes:
    """Starts a function in a process of its own, with a limit."""

    def __init__(self, nano: bool, spawn: bool) -> None:
        os.environ.update(NVML_CHECK)
        found = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, found))  # for what is preloaded
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOADED)
        self._context: Any = multiprocessing.get_context("spawn") if spawn else forks
        if spawn:
            return
        code, said = self.run(try_device, TRY_SECONDS, os.environ, nano)
        if code != 0:  # None: it hung
            print("forks of one process cannot use the GPU; each imports by itself:", *said[-3:])
            self._context = multiprocessing.get_context("spawn")

    def run(
        self, work: Callable[..., None], limit: float, environment: Mapping[str, str], *words: Any
    ) -> tuple[int | None, list[str]]:
        """Run a function of a module; return its exit code, None at the limit, and what it prints.

        Its group is killed at the limit, and if this process is told to end.
        """
        with tempfile.TemporaryDirectory(prefix="gpu-log-") as folder:
            log = Path(folder) / "log"
            process = self._context.Process(
                target=work_alone, args=(work, log, dict(environment), words)
            )
            process.start()
            try:
                process.join(limit)
                code = process.exitcode
            finally:
                if process.exitcode is None:
                    for kill in (os.killpg, os.kill):  # it may not lead its group yet
                        try:
                            kill(process.pid, signal.SIGKILL)
                            break
                        except ProcessLookupError:
                            continue
                    process.join()
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return code, [line for line in text.splitlines() if line.strip()]


def work_alone(
    work: Callable[..., None], log: Path, environment: dict[str, str], words: tuple[Any, ...]
) -> None:
    """Run a function with its environment and log; end without waiting for threads."""
    os.setsid()
    with log.open("w", encoding="utf-8") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        work(*words)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork(work: Callable[..., None], *words: Any) -> None:
    """Run a function in a fork of this process, with the same log.

    Raises:
        RuntimeError: it fails.
    """
    process = multiprocessing.get_context("fork").Process(target=end_after, args=(work, *words))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"exit code {process.exitcode}: {work.__name__}{words[:2]}")


def end_after(work: Callable[..., None], *words: Any) -> None:
    """Run a function, and end without waiting for communication threads."""
    work(*words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def try_device(nano: bool) -> None:
    """Compute on the device; a dry run may do without a GPU."""
    import gpu_preload  # noqa: F401  (a server of forks passes over what it cannot import)
    import torch

    from zerotrain.machine.device import process_device

    device = process_device()
    torch.ones(1, device=device).add_(1).item()
    if device.type == "cpu" and not nano:
        sys.exit("there is no GPU")
