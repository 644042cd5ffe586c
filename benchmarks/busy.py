"""How long OpenMP's threads should spin: a command next to other work, and one on an idle machine.

    python benchmarks/busy.py [--rounds 5]    # from the project's root, in its environment

Next to two busy loops, `zerotrain sample` makes one image of 32 px of an untrained model, in turns
with the package's setting and with OpenMP's own, which spins for milliseconds: `spin_ratio`. On the
idle machine, `zerotrain train_phase` takes steps of it on two threads, in turns with the package's
setting and with threads that sleep at once: `sleep_ratio`. Each is the median of the rounds'
ratios of the whole command's time, with the interval that holds the true one with 95 %. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from families import config, write_images
from settings import settings_of
from step import middle

ROOT = Path(__file__).resolve().parents[1]
LOOPS = 2
STEPS = 100
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""libgomp's own default, which OMP_WAIT_POLICY replaces (libgomp's manual, GOMP_SPINCOUNT)."""
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def call(folder: Path, *words: object, variables: Mapping[str, str] | None = None) -> float:
    """Run a command of zerotrain in a folder; return its seconds."""
    kept = {name: value for name, value in os.environ.items() if name not in THREADS}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "zerotrain", *map(str, words)], cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT / "workflow"), **(variables or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{words}\n{done.stdout[-4000:]}")
    return time.perf_counter() - began


def prepare(folder: Path) -> tuple[str, ...]:
    """Make all that a small model's training reads; return the words that train it."""
    write_images(folder / "digits")
    run = config("flux") | {
        "vae": "identity",  # its pixels are its latents, so that no autoencoder is fitted
        "launch": {"num_cpu_threads_per_process": 2},
        "phases": [{"name": "plain", "until": STEPS, "launch": "torch"}],
    }
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    data, base, cache, launch = (f"{name}/manifest.json" for name in ("data", "base", "cache", "l"))
    outputs = {
        "prepare_dataset": ("--output", data),
        "build_base": ("--dataset", data, "--output", base),
        "cache_latents": ("--dataset", data, "--size", 32, "--base", base, "--output", cache),
        "render_launch": (
            *("--dataset", data, "--preset", ROOT / "config/launch/torch.yaml"),
            *("--output", launch),
        ),
    }
    for stage, words in outputs.items():
        phase = "plain" if stage == "render_launch" else ""
        with contextlib.chdir(folder):
            settings = settings_of(stage, Path("run.json"), phase)
        call(folder, stage, "--settings", settings, *words)
    inputs = ("--launch", launch, "--base", base, "--cache", cache)
    made = ("--progress", "made", "--output", "made/checkpoint/manifest.json")
    return ("train_phase", *inputs, *made)


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """Keep cores busy until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    sample = ("sample", "base", "a digit", "--resolution", 32, "--out", "made")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = prepare(folder)
        with busy_loops():
            busy = compare(folder, sample, SPINNING, rounds)
        idle = compare(folder, train, SLEEPING, rounds)
    figures: dict[str, object] = {}
    for arm, seconds in (("spin", busy), ("sleep", idle)):
        ratio, interval = middle([other / own for own, other in seconds])
        figures |= {f"{arm}_ratio": round(ratio, 2), f"{arm}_interval": interval}
        own, other = (round(statistics.median(each), 2) for each in zip(*seconds, strict=True))
        figures |= {f"{arm}_seconds": other, f"own_seconds_of_{arm}": own}
    print(json.dumps(figures))


def compare(
    folder: Path, words: Sequence[object], other: Mapping[str, str], rounds: int
) -> list[tuple[float, float]]:
    """Run a command in turns with the package's setting and another; return their seconds."""
    seconds = []
    for _ in range(rounds):
        each = []
        for variables in ({}, other):
            each.append(call(folder, *words, variables=variables))
            shutil.rmtree(folder / "made")
        seconds.append((each[0], each[1]))
    return seconds


if __name__ == "__main__":
    main()
