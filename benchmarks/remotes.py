"""How fast `dvc push` and `dvc pull` are through a folder, against a plain copy of the same bytes.

    python benchmarks/remotes.py                    # from the project's root, in its environment
    python benchmarks/remotes.py --gib 4 --rounds 5 --folder /data/tmp

A cache-like folder of random bytes is pushed and pulled with the project's own .dvc/config, once in
few shards and once as many small files. In each round, one after the other: `cp -r` of the folder,
`dvc push` into an empty remote, `dvc pull` into a project that has neither the folder nor a cache.
Each is over when every file it wrote is on the disk (fsync); the commands' start-up counts. A pull
writes the bytes twice where the file system has no reflinks, once into the cache and once to their
place, so its least ratio there is 2; `fetch_ratio` is that of the first half alone.

Ratios are medians over the rounds of (seconds of DVC) / (seconds of the copy in the same round).
The commands take a while before they move anything, which counts for little in a large folder:
`start_seconds` is a push with nothing to do, and `push_bytes_ratio`, `fetch_bytes_ratio` and
`pull_bytes_ratio` leave it out. `files_push_ratio` and `files_pull_ratio` are those of the small
files; `push_gain` and `pull_gain` say how many times longer DVC takes for them than for the shards.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


class Project:
    """A project of DVC with one tracked folder, `cache`; the remote lies in its user's home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.data = self.folder / "cache"
        self.stored = self.folder / ".dvc" / "cache"
        self.remote = folder / "zerotrain-remote"
        self.copied = folder / "copied"
        self._environment = {
            **os.environ, "HOME": str(folder), "DVC_SITE_CACHE_DIR": str(folder / "site")
        }  # fmt: skip
        self.folder.mkdir(parents=True)
        subprocess.run(["git", "init", "-q", self.folder], check=True)
        self.dvc("init", "-q")
        shutil.copy(ROOT / ".dvc" / "config", self.folder / ".dvc" / "config")

    def dvc(self, *words: str) -> None:
        """Call DVC; its output is of interest only where it fails."""
        command = [sys.executable, "-m", "dvc", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"dvc {' '.join(words)}: {done.stderr}")

    def fill(self, sizes: list[int]) -> None:
        """Write the folder, random bytes in files of these sizes, and let DVC track it."""
        self.data.mkdir()
        for number, size in enumerate(sizes):
            with (self.data / f"{number:05}.safetensors").open("wb") as file:
                for start in range(0, size, MIB):
                    file.write(os.urandom(min(MIB, size - start)))
        self.dvc("add", "-q", "cache")
        on_disk(self.data, self.stored)

    def round(self) -> dict[str, float]:
        """Seconds of one copy, push, fetch and pull, each until all is on the disk."""
        for folder in (self.copied, self.remote):
            shutil.rmtree(folder, ignore_errors=True)
        seconds: dict[str, float] = {}

        def timed(name: str, *written: Path) -> None:
            on_disk(*written)
            seconds[name] = time.perf_counter() - start

        start = time.perf_counter()
        subprocess.run(["cp", "-r", self.data, self.copied], check=True)
        timed("copy", self.copied)
        start = time.perf_counter()
        self.dvc("push", "-q")
        timed("push", self.remote)
        start = time.perf_counter()
        self.dvc("push", "-q")
        timed("start")
        for folder in (self.data, self.stored):
            shutil.rmtree(folder)
        start = time.perf_counter()
        self.dvc("fetch", "-q")
        timed("fetch", self.stored)
        shutil.rmtree(self.stored)
        start = time.perf_counter()
        self.dvc("pull", "-q")
        timed("pull", self.stored, self.data)
        return seconds


def on_disk(*folders: Path) -> None:
    """Return when all files below have reached the disk."""
    with ThreadPoolExecutor(16) as pool:  # one after the other, small files would wait for each
        for folder in folders:
            list(pool.map(_to_disk, (path for path in folder.rglob("*") if path.is_file())))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(name: str, sizes: list[int], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each round for files of these sizes, by what was timed."""
    project = Project(folder / name)
    project.fill(sizes)
    found = [project.round() for _ in range(rounds)]
    shutil.rmtree(folder / name)
    for number, one in enumerate(found):
        text = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in one.items())
        print(f"{name}, round {number + 1}: {text}", flush=True)
    return {what: [one[what] for one in found] for what in found[0]}


def ratios(found: dict[str, list[float]], what: str, *, start: bool = True) -> list[float]:
    """Of DVC's seconds to the copy's, round by round, with its start-up or without."""
    rounds = zip(found[what], found["start"], found["copy"], strict=True)
    return [(ours - (0 if start else idle)) / copy for ours, idle, copy in rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the folder")
    parser.add_argument("--shard-mib", type=int, default=256, help="size of a shard")
    parser.add_argument("--files", type=int, default=10_000, help="number of small files; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with shards; one with files")
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to be measured")
    given = parser.parse_args()
    total = int(given.gib * 1024) * MIB
    shard = given.shard_mib * MIB
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        sizes = [min(shard, total - start) for start in range(0, total, shard)]
        shards = measure("shards", sizes, given.rounds, Path(folder))
        result: dict[str, object] = {}
        for what in ("push", "fetch", "pull"):
            for name, start in ((f"{what}_ratio", True), (f"{what}_bytes_ratio", False)):
                found = ratios(shards, what, start=start)
                result[name] = round(statistics.median(found), 2)
                result[f"{name}_interval"] = [round(min(found), 2), round(max(found), 2)]
        if given.files:
            files = measure("files", [total // given.files] * given.files, 1, Path(folder))
            for what in ("push", "pull"):
                result[f"files_{what}_ratio"] = round(ratios(files, what)[0], 2)
                gain = files[what][0] / statistics.median(shards[what])
                result[f"{what}_gain"] = round(gain, 2)
    result |= {
        "bytes": total,
        "shards": len(sizes),
        "files": given.files,
        "start_seconds": round(statistics.median(shards["start"]), 2),
        "copy_bytes_per_second": round(total / statistics.median(shards["copy"])),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
