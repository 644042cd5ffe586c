"""What it costs that Snakemake and DVC agree, on a run that both know.

    snakemake --cores all train && python benchmarks/agreement.py      # in its environment

Nothing of the run is changed. In turns: `dvc repro` with nothing to do; `snakemake` with nothing to
do, with the agreement and without; what the agreement adds where it has something to do, which are
`zerotrain dvc settle` (once outputs were replaced) and `zerotrain dvc enter` of all stages (once
jobs ran; storing what they made comes on top, at the disk's speed).

Seconds are medians over the rounds, of the wall clock and of all processors. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from zerotrain.pipeline.dvc.agreement import outputs_of

CONFIG = Path("config/config.yaml")

COMMANDS = {
    "repro": ("dvc", "repro"),
    "snakemake": ("snakemake", "--cores", "1", "-n", "train"),
    "snakemake_alone": ("snakemake", "--cores", "1", "-n", "train"),
    "settle": ("zerotrain", "dvc", "settle"),
    "enter": ("zerotrain", "dvc", "enter"),
}


def timed(name: str, words: tuple[str, ...]) -> tuple[float, float]:
    """Seconds by the wall and of processors that a command took."""
    alone = {"DVC_STAGE": "none"} if name.endswith("_alone") else {}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *words] if words[0] != "snakemake" else words,
        env=os.environ | alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = name not in ("repro", "snakemake", "snakemake_alone")
    idle = quiet or "up to date" in done.stdout + done.stderr
    if done.returncode or not idle:
        raise SystemExit(
            f"{' '.join(words)}: there was something to do:\n{done.stdout}{done.stderr}"
        )
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    stages = outputs_of(CONFIG)
    if not stages or not Path("dvc.lock").is_file():
        raise SystemExit("no run that DVC knows lies here: `snakemake --cores all train` first")
    commands = {**COMMANDS, "enter": (*COMMANDS["enter"], *stages)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, words in commands.items():
            found[name].append(timed(name, words))
    result: dict[str, float] = {"stages": len(stages)}
    for name, pairs in found.items():
        for what, seconds in zip(("wall", "cpu"), zip(*pairs, strict=True), strict=True):
            result[f"{name}_{what}_seconds"] = round(statistics.median(seconds), 2)
    looking = zip(found["snakemake"], found["snakemake_alone"], strict=True)
    result["look_cpu_seconds"] = round(statistics.median(a[1] - b[1] for a, b in looking), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
