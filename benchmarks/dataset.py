"""Planning of a large dataset that has not changed: 100,000 images with captions.

    python benchmarks/dataset.py [--images 100000]   # from the project's root, in its environment

The images have one pixel each, so that planning is measured and no pixels. They are prepared once.
Then a bare walk, which asks for size, time and inode of each file, and what planning does take
turns: whether the dataset is as it was, and the digest of its files. `snakemake -n train` is timed
on the same folder, and on one with two images. The last line is JSON: medians, their ratio, and the
lines that the dry run prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from zerotrain.config.data import DataConfig
from zerotrain.data.files import DatasetFiles, walk
from zerotrain.stages.prepare_dataset import prepare_dataset

REPEATS = 7
GOAL_RATIO, GOAL_SECONDS, GOAL_LINES = 1.5, 4.0, 100
IN_FOLDER = 1000
"""Images in each folder."""
COPIED = ("Snakefile", "rules", "config", "profiles", "envs", "workflow/zerotrain", "data")
CONFIG = """\
run: {name}
base: nano
data: {{images: {name}}}
train: {{resolution: 32}}
phases:
  - {{name: plain, until: 1, launch: torch}}
  - {{name: offload, until: 2, launch: zero2_offload}}
"""


def write_images(folder: Path, count: int) -> None:
    """Write images of one pixel, each of another colour, with their captions."""
    for number in range(count):
        inner = folder / f"{number // IN_FOLDER:05d}"
        if number % IN_FOLDER == 0:
            inner.mkdir(parents=True)
        colour = (number % 256, number // 256 % 256, number // 65536)
        content = io.BytesIO()
        Image.new("RGB", (1, 1), colour).save(content, "png")
        (inner / f"{number:08d}.png").write_bytes(content.getvalue())
        (inner / f"{number:08d}.txt").write_text(f"picture number {number}")


def bare_walk(folder: Path) -> int:
    """Ask for size, time and inode of each file, and count them."""
    waiting, count = [str(folder)], 0
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    waiting.append(entry.path)
                else:
                    entry.stat()
                    count += 1
    return count


def validated_walk(data: DataConfig, output: Path) -> None:
    """Do what planning does with a dataset: it is unchanged, and its digest stays."""
    files = DatasetFiles(data, output, walk(data))
    assert files.are_unchanged()
    files.update()


def seconds(act: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def planned(name: str) -> tuple[float, str]:
    """Seconds of a dry run in this folder, and what it printed."""
    command = ["snakemake", "-n", "train", "--configfile", f"config/{name}.yaml"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout + done.stderr


def prepare(name: str, count: int) -> None:
    """Make a dataset, its configuration and its manifest in this folder."""
    write_images(Path(name), count)
    Path(f"config/{name}.yaml").write_text(CONFIG.format(name=name), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_dataset(DataConfig(images=name), Path("results/data") / name)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100_000)
    images = parser.parse_args().images
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = Path(name), Path(folder) / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
        with contextlib.chdir(folder):
            prepare("small", 2)
            preparing = seconds(lambda: prepare("large", images))
            data, output = DataConfig(images="large"), Path("results/data/large")
            bare, validated, large, small = [], [], [], []
            for _ in range(REPEATS):
                bare.append(seconds(lambda: bare_walk(Path("large"))))
                validated.append(seconds(lambda: validated_walk(data, output)))
                took, said = planned("large")
                large.append(took)
                small.append(planned("small")[0])
    ratio = statistics.median(validated) / statistics.median(bare)
    lines = len(said.splitlines())
    print(f"{images} images written and prepared in {preparing:.0f} s")
    print(f"an unchanged dataset takes {ratio:.2f} times a bare walk; goal {GOAL_RATIO}")
    print(f"a dry run takes {statistics.median(large):.2f} s, goal {GOAL_SECONDS}")
    print(f"with 2 images {statistics.median(small):.2f} s")
    print(f"it prints {lines} lines, goal {GOAL_LINES}")
    print(json.dumps({
        "images": images,
        "bare_walk_seconds": round(statistics.median(bare), 3),
        "validated_seconds": round(statistics.median(validated), 3),
        "ratio": round(ratio, 3),
        "dry_run_seconds": round(statistics.median(large), 2),
        "dry_run_of_2_images_seconds": round(statistics.median(small), 2),
        "lines": lines,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
