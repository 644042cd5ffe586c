"""What a command by hand takes beside other work: `zerotrain sample` next to two busy loops.

    python benchmarks/busy.py [--rounds 5]    # from the project's root, in its environment

One image of 32 px of an untrained model, in turns with the package's setting of OpenMP's threads,
which sleep while they wait, and with OpenMP's own, which spin. The loops keep two cores busy
throughout. `spin_ratio` is the median of the rounds' ratios of the whole command's time, with the
interval that holds the true one with 95 %. The last line is JSON.
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from families import config, write_images
from step import middle

ROOT = Path(__file__).resolve().parents[1]
LOOPS = 2
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""libgomp's own default, which OMP_WAIT_POLICY replaces (libgomp's manual, GOMP_SPINCOUNT)."""
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


def make_base(folder: Path) -> Path:
    """Make a small model, whose pixels are its latents, so that none is fitted."""
    write_images(folder / "digits")
    (folder / "run.json").write_text(
        json.dumps({**config("flux"), "vae": "identity"}), encoding="utf-8"
    )
    data, base = Path("data"), Path("base")
    run = ("--config", "run.json", "--output")
    call(folder, "prepare_dataset", *run, data / "manifest.json")
    call(folder, "build_base", *run, base / "manifest.json", "--dataset", data)
    return base


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
    took: dict[str, list[float]] = {"own": [], "spin": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("sample", make_base(folder), "a digit", "--resolution", 32, "--out", "images")
        with busy_loops():
            for _ in range(rounds):
                for arm, variables in (("own", {}), ("spin", SPINNING)):
                    took[arm].append(call(folder, *words, variables=variables))
                    shutil.rmtree(folder / "images")
    ratio, interval = middle([a / b for a, b in zip(took["spin"], took["own"], strict=True)])
    seconds = {f"{arm}_seconds": round(statistics.median(all_), 2) for arm, all_ in took.items()}
    print(json.dumps({"spin_ratio": round(ratio, 2), "spin_interval": interval, **seconds}))


if __name__ == "__main__":
    main()
