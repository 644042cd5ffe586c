"""The time from the command of a training to its first step, with a base of the size of SDXL's.

    python benchmarks/start.py                                 # from the project's root
    python benchmarks/start.py --before ../older/checkout      # against another version

A tiny U-Net is trained whose base holds two more files, sparse and of zeros: one in `unet`, as
large as SDXL's in 16 bits, which a start has to check, and one in `text_encoder`, which training
opens in no process. Each start is the real `zerotrain train_phase` in a fresh progress folder:

- `first`: nothing is remembered on this machine, as after the base was downloaded by another one;
- `again`: the hashes are remembered, as after any stage that has read the files;
- `small`: a base without the large files, for what a start takes apart from them.

`before` is `again` of another checkout, whose starts are taken by turns with the others.
`first_ratio` and `again_ratio` are over `before` where there is one, else over `first`; given are
medians, and the interval that holds the true one with 95 %. `_cpu_ratio` is the same of the
processor time of all processes of the command until the first step, which says the same whatever
else the machine does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from memory import make_inputs
from step import SIZES, middle

from zerotrain import artifact

HERE = Path(__file__).resolve().parent.parent
PADDING = {"unet/padding.safetensors": 5.14, "text_encoder/padding.safetensors": 1.64}
"""Large files and their GB: those of SDXL's U-Net and of its text encoders in 16 bits."""
WRITE_LAUNCH = """
import pathlib, sys
from memory import measured_phase, publish_launch, unet_sizes
base, launch = map(pathlib.Path, sys.argv[1:])
publish_launch(launch, measured_phase("torch", unet_sizes(base), 10**6))
"""
"""Run by each checkout: an older one knows fewer keys."""


def pad(base: Path, small: Path, bytes_of: dict[str, int]) -> None:
    """Publish a copy of a base with sparse files of these sizes next to its own."""
    found = artifact.read(small, "base")
    with artifact.publish(base, "base") as draft:
        for name in found.files:
            (draft.folder / name).parent.mkdir(exist_ok=True)
            (draft.folder / name).write_bytes(found.path(name).read_bytes())
        for name, size in bytes_of.items():
            path = draft.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes((2).to_bytes(8, "little") + b"{}")  # a header without tensors
            os.truncate(path, size)
        draft.content = found.content


def first_step(
    place: Path, inputs: Path, base: Path, checkout: Path, memory: Path
) -> tuple[float, float]:
    """From the start of the command to the first line of the training's log, and the processor
    time until then.

    Args:
        place: A new folder for launch files and progress.
        inputs: Has the cache.
        base: The base.
        checkout: Whose command is started.
        memory: Where hashes are remembered.
    """
    launch, progress = place / "launch", place / "progress"
    modules = os.pathsep.join(str(checkout / name) for name in ("workflow", "benchmarks"))
    environment = {**os.environ, "PYTHONPATH": modules, "XDG_CACHE_HOME": str(memory)}
    subprocess.run(
        [sys.executable, "-c", WRITE_LAUNCH, inputs / "base", launch],
        cwd=checkout, env=environment, check=True,
    )  # fmt: skip
    words = {
        "launch": launch, "base": base, "cache": inputs / "cache", "progress": progress,
        "output": place / "checkpoint",
    }  # fmt: skip
    command = [sys.executable, "-m", "zerotrain", "--log", str(place / "log"), "train_phase"]
    command += [word for key, value in words.items() for word in (f"--{key}", str(value))]
    began = time.perf_counter()
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=output, stderr=output
        )
    log = progress / "metrics.jsonl"
    while not (log.is_file() and log.stat().st_size):
        if process.poll() is not None:
            sys.exit((place / "output").read_text()[-6000:])
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    command_process = psutil.Process(process.pid)
    cpu = 0.0
    for one in (command_process, *command_process.children(recursive=True)):
        cpu += sum(one.cpu_times()[:4])  # its own, and of its children that have ended
    process.terminate()  # it saves, and ends its processes
    process.wait()
    return seconds, cpu


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="root of another checkout")
    parser.add_argument("--scale", type=float, default=1.0, help="of the large files' sizes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where files are made")
    options = parser.parse_args()
    sizes = {name: int(options.scale * size * 1e9) for name, size in PADDING.items()}
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        inputs, large = folder / "small", folder / "large"
        make_inputs(inputs, SIZES["tiny"])
        pad(large, inputs / "base", sizes)
        time.sleep(3)  # a file that has just changed is not remembered
        cases: dict[str, tuple[Path, Path]] = {
            "first": (large, HERE), "again": (large, HERE), "small": (inputs / "base", HERE),
        }  # fmt: skip
        if options.before:
            cases["before"] = large, options.before.resolve()
        for number in range(options.rounds + 1):
            for case, (base, checkout) in cases.items():
                place = folder / f"{case}-{number}"
                place.mkdir()
                memory = folder / ("memory" if case == "again" else f"memory-{case}-{number}")
                took = first_step(place, inputs, base, checkout, memory)
                if number:  # the first round fills the page cache, and `again` its memory
                    found.setdefault(case, []).append(took)
                    print(f"{case:8} {took[0]:.2f} s, processor {took[1]:.2f} s", flush=True)
    result: dict[str, Any] = {}
    against = found.get("before", found["first"])
    for case in ("first", "again") if options.before else ("again",):
        for which, key in enumerate((case, f"{case}_cpu")):
            ratios = [a[which] / b[which] for a, b in zip(found[case], against, strict=True)]
            ratio, result[f"{key}_interval"] = middle(ratios)
            result[f"{key}_ratio"] = round(ratio, 4)
    medians: dict[str, float] = {}
    for case, took_each in found.items():
        seconds, cpu = (statistics.median(part) for part in zip(*took_each, strict=True))
        medians |= {f"{case}_seconds": round(seconds, 2), f"{case}_cpu_seconds": round(cpu, 2)}
    print(json.dumps({**result, **medians, "bytes": sizes, "rounds": options.rounds}))


if __name__ == "__main__":
    main()
