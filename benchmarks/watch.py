"""What `zerotrain watch` takes of a training's time, drawing in a terminal of 80x24.

    python benchmarks/watch.py                     # from the project's root, in its environment

One training of a tiny U-Net, which logs every step, runs throughout. Windows of equal time take
turns, with a watcher at its default interval and without one. `cpu_percent` is the more precise
figure: the processor time of one core that a watcher takes once it has started;
`cpu_share_of_machine` is that over the number of cores, which is what it takes of a training that
keeps them all busy. `start_cpu_seconds` is the processor time until its first drawing. `time_ratio`
compares the time of a step in each pair of windows, and `step_cpu_ratio` the training's own
processor time for a step, which says the same on a busy machine; given are medians, and the
interval that holds the true one with 95 %. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from memory import make_inputs, measured_phase, publish_launch, unet_sizes
from step import SIZES, middle

HERE = Path(__file__).resolve().parent.parent
RUN, PHASE = "benchmark", "measured"
BUSY_SECONDS = 300.0
"""Longest time until the first step or the first drawing."""


@contextlib.contextmanager
def training(project: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """Train in a project until the block ends; yields the training process and its log."""
    inputs, phase = project / "inputs", project / "results" / RUN / PHASE
    make_inputs(inputs, SIZES["tiny"])
    resolved = measured_phase("torch", unet_sizes(inputs / "base"), 10**7)
    publish_launch(phase / "launch", resolved)
    words = {
        "launch": phase / "launch", "base": inputs / "base", "cache": inputs / "cache",
        "progress": phase / "progress", "output": phase / "checkpoint",
    }  # fmt: skip
    command = [sys.executable, "-m", "zerotrain", "--log", str(project / "log"), "train_phase"]
    command += [word for key, value in words.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(
        command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        log = phase / "progress" / "metrics.jsonl"
        wait_for(lambda: log.is_file() and log.stat().st_size > 0)
        children = psutil.Process(process.pid).children(recursive=True)
        yield max(children, key=lambda one: sum(one.cpu_times()[:2])), log
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def watcher(project: Path) -> Iterator[psutil.Process]:
    """Watch in a pseudo-terminal; yields once it has drawn."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "zerotrain", "watch", RUN], cwd=project, stdin=follower,
        stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    drawn = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(leader, 65536):
                if b"of 10000000" in data:
                    drawn.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        wait_for(drawn.is_set)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def wait_for(done: object) -> None:
    """Wait until a function returns a true value."""
    assert callable(done)
    deadline = time.monotonic() + BUSY_SECONDS
    while not done():
        if time.monotonic() > deadline:
            sys.exit("the training or the watcher did not start")
        time.sleep(0.05)


def last_step(log: Path) -> int:
    """Return the step of a log's last whole line."""
    lines = log.read_bytes()[-4096:].rpartition(b"\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"])


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has taken."""
    return float(sum(process.cpu_times()[:2]))


def window(trainer: psutil.Process, log: Path, seconds: float) -> tuple[float, float]:
    """Return the time of a step in a window, and the training's processor time for a step."""
    began, cpu, step = time.perf_counter(), cpu_seconds(trainer), last_step(log)
    time.sleep(seconds)
    steps = last_step(log) - step
    return (time.perf_counter() - began) / steps, (cpu_seconds(trainer) - cpu) / steps


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    options = parser.parse_args()
    times, cpus, shares, starts = [], [], [], []
    os.environ["PYTHONPATH"] = str(HERE / "workflow")
    with tempfile.TemporaryDirectory() as name, training(Path(name)) as (trainer, log):
        for number in range(options.rounds):
            found: dict[bool, tuple[float, float]] = {}
            for watched in (True, False) if number % 2 else (False, True):
                if not watched:
                    found[watched] = window(trainer, log, options.seconds)
                    continue
                with watcher(Path(name)) as process:
                    starts.append(cpu_seconds(process))
                    began, used = time.perf_counter(), cpu_seconds(process)
                    found[watched] = window(trainer, log, options.seconds)
                    took = cpu_seconds(process) - used
                    shares.append(took / (time.perf_counter() - began))
            times.append(found[True][0] / found[False][0])
            cpus.append(found[True][1] / found[False][1])
            print(f"step {times[-1]:.4f}, watcher {shares[-1]:.4%} of a core", flush=True)
    (ratio, interval), (cpu, cpu_interval) = middle(times), middle(cpus)
    share = statistics.median(shares)
    cores = len(os.sched_getaffinity(0))
    result = {
        "cpu_percent": round(100 * share, 3), "cpu_share_most": round(max(shares), 5),
        "cpu_share_of_machine": round(share / cores, 5),
        "start_cpu_seconds": round(statistics.median(starts), 2),
        "time_ratio": round(ratio, 4), "interval": interval,
        "step_cpu_ratio": round(cpu, 4), "step_cpu_interval": cpu_interval,
        "cores": cores, "rounds": options.rounds, "seconds": options.seconds,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
