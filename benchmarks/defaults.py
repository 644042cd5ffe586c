"""Defaults that a CPU can decide, each against other values in turns.

    python benchmarks/defaults.py                    # from the project's root, in its environment
    python benchmarks/defaults.py --only workers threads --rounds 9

    readers        threads that read batches (training/batches.py), 5 ms steps, batch 1, 450 KB each
    ahead          batches that they read ahead
    workers        data.num_workers, with an encoder that waits as a GPU would (benchmarks/cache.py)
    encode_batch   cache.batch_size at 256 pixels, an autoencoder on the CPU
    threads        threads of DeepSpeed's CPU Adam, of 20 M weights
    step_threads   threads of a training step of a U-Net
    buckets        reduce_bucket_size and overlap_comm, ZeRO-2 on two processes with gloo
    prefetch       stage3_prefetch_bucket_size, ZeRO-3 on two processes
    binding        two such processes, each on a core of its own, or wherever the kernel puts them

A ratio is the default's time over that of the fastest other value, of one round; given are medians
and the interval that holds the true one with 95 %. A default is `slower` if the interval is above
1. The last line is JSON. What a GPU has to decide is `python benchmarks/gpu.py --tune`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import loader
from memory import make_inputs, publish_launch
from step import SIZES, make_phase, middle
from step_loops import SAMPLES, bare, direct

from zerotrain.machine import compiled_ops

Seconds = dict[str, list[float]]
READ_SAMPLES, STEPS = 200, 120
PHOTOGRAPHS = 16
NUMEL = 20_000_000
BLOCK = 3
"""Steps of a turn."""
SIZE = "large"
LEAST_ROUNDS = 6
"""The range of fewer values holds the median with less than 95 %."""


def take_turns(arms: Mapping[str, Callable[[], float]], rounds: int) -> Seconds:
    """Return the seconds of each arm in each round; the first round warms up."""
    found: Seconds = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in [*arms][:: 1 if number % 2 else -1]:
            took = arms[name]()
            if number:
                found[name].append(took)
    return found


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that gives the seconds of a work."""

    def measure() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return measure


def judge(default: str, found: Seconds) -> dict[str, Any]:
    """Compare a default with the fastest other value."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    best = min((name for name in found if name != default), key=medians.__getitem__)
    ratio, interval = middle([a / b for a, b in zip(found[default], found[best], strict=True)])
    verdict = "slower" if interval[0] > 1 else "fastest" if interval[1] < 1 else "within noise"
    if len(found[default]) < LEAST_ROUNDS:
        verdict = "too few rounds"
    return {
        "default": default,
        "best_other": best,
        "ratio": round(ratio, 4),
        "interval": interval,
        "verdict": verdict,
        "milliseconds": {name: round(1e3 * seconds, 3) for name, seconds in medians.items()},
    }


def feed_arms(folder: Path, changes: dict[str, dict[str, int]]) -> dict[str, Callable[[], float]]:
    """Return works that train steps which sleep, with other constants of the reader."""
    from zerotrain.training import batches

    loader.make_cache(folder, READ_SAMPLES)

    def step_seconds(values: dict[str, int]) -> float:
        known = {name: vars(batches)[name] for name in values}
        vars(batches).update(values)
        try:
            waited = loader.feed(folder, READ_SAMPLES, 1, STEPS)["waiting_percent_1"]
        finally:
            vars(batches).update(known)
        return float(loader.STEP_SECONDS / (1 - waited / 100))

    return {name: partial(step_seconds, values) for name, values in changes.items()}


def readers(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure steps by the threads that read."""
    from zerotrain.training.batches import READERS

    arms = feed_arms(folder, {str(count): {"READERS": count} for count in (1, 2, 4)})
    return str(READERS), take_turns(arms, rounds)


def ahead(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure steps by the batches that are read ahead."""
    from zerotrain.training.batches import MOST_AHEAD

    changes = {str(most): {"MOST_AHEAD": most} for most in (2, 4, 8, 16)}
    return str(MOST_AHEAD), take_turns(feed_arms(folder, changes), rounds)


def encoding_arms(
    folder: Path, resolution: int, family: Any, changes: Mapping[str, dict[str, Any]]
) -> dict[str, Callable[[], float]]:
    """Return works that encode photographs, with other values of data and cache."""
    import cache

    from zerotrain import artifact
    from zerotrain.config.read import parse_config
    from zerotrain.config.stage_settings import CacheSettings
    from zerotrain.stages.prepare_dataset import prepare_dataset

    def settings(change: dict[str, Any]) -> Any:
        data = {
            "images": str(folder / "images"), "caption_strategy": "instanceprompt",
            "instance_prompt": "a photograph", **change.get("data", {}),
        }  # fmt: skip
        raw = {
            "run": "photographs", "base": "nano", "data": data,
            "cache": change.get("cache", {}), "train": {"resolution": resolution},
            "phases": [{"name": "only", "until": 1, "launch": "torch"}],
        }  # fmt: skip
        return parse_config(raw, "benchmark")

    cache.write_photographs(folder / "images", PHOTOGRAPHS)
    with artifact.publish(folder / "base", "base") as draft:
        draft.content = {"parts": {"vae": "drawn"}}
    prepare_dataset(settings({}).data, folder / "dataset", resolution)
    turns = iter(range(10**6))

    def encode(change: dict[str, Any]) -> None:
        family.calls.clear()
        given = CacheSettings.of(settings(change))
        cache.encode(given, resolution, family, folder, folder / f"out-{next(turns)}")

    return {name: timed(partial(encode, change)) for name, change in changes.items()}


def workers(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure encoding by data.num_workers."""
    import cache

    from zerotrain.config.data import DataConfig

    family = cache.Timed(lambda pixels: pixels[:, :, ::8, ::8].clone())
    changes = {str(count): {"data": {"num_workers": count}} for count in (0, 1, 2, 4, 8)}
    arms = encoding_arms(folder, 512, family, changes)
    for turn in range(cache.WARM_UP):
        seconds = cache.encode_naively(folder / "images", 512, family, folder / f"naive-{turn}")
    family.encode = cache.stand_in(seconds)
    return str(DataConfig.model_fields["num_workers"].default), take_turns(arms, rounds)


def encode_batch(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure encoding on the CPU by cache.batch_size."""
    import cache

    from zerotrain.cache.encoding import batch_size

    default = str(batch_size((256, 256)))
    changes: dict[str, dict[str, Any]] = {
        count: {"cache": {"batch_size": int(count)}} for count in ("1", "4", default)
    }
    family = cache.Timed(cache.autoencoder())
    return default, take_turns(encoding_arms(folder, 256, family, changes), rounds)


def threaded(work: Callable[[], object]) -> dict[str, Callable[[], float]]:
    """Return a work with one thread, and with one for each core."""
    import torch

    def on(threads: int) -> None:
        torch.set_num_threads(threads)
        work()

    counts = sorted({1, cores(), 2 * cores()})
    return {str(count): timed(partial(on, count)) for count in counts}


def threads(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure DeepSpeed's CPU Adam by its threads."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    parameter.grad = torch.randn(NUMEL)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-5)
    return str(cores()), take_turns(threaded(optimizer.step), rounds)


def step_threads(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure steps of plain PyTorch by their threads."""
    os.environ["WORLD_SIZE"] = "1"
    make_inputs(folder, SIZES[SIZE], SAMPLES)
    steps = bare(folder, folder)
    return str(cores()), take_turns(threaded(lambda: next(steps)), rounds)


def cores() -> int:
    """Return the cores of this process."""
    return len(os.sched_getaffinity(0))


def on_two(
    folder: Path, rounds: int, preset: str, changes: Mapping[str, Mapping[str, Any]]
) -> Seconds:
    """Measure steps of two processes by values of DeepSpeed's zero_optimization."""
    from zerotrain.machine.ports import free_port

    make_inputs(folder, SIZES[SIZE], SAMPLES)
    publish_launch(folder / "launch", make_phase(preset, folder / "base", 1, processes=2))
    known = json.loads((folder / "launch/deepspeed.json").read_text(encoding="utf-8"))
    for name, change in changes.items():
        (folder / name).mkdir()
        section = {**known["zero_optimization"], **change}
        text = json.dumps({**known, "zero_optimization": section})
        (folder / name / "deepspeed.json").write_text(text, encoding="utf-8")
    environment = {
        **os.environ, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", str(folder), str(rounds), *changes]
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(outputs[0][-6000:])
    found: Seconds = json.loads(outputs[0].splitlines()[-1])
    return found


FREE = "free"
"""The arm of a process that the kernel may move; others have a core of their own."""


def child(folder: Path, rounds: int, names: list[str]) -> Seconds:
    """Take turns with an engine for each name, in one of two processes."""
    import torch

    from zerotrain.training.engines.zero_engine import init_distributed

    torch.set_num_threads(1)
    every, rank = os.sched_getaffinity(0), int(os.environ["RANK"])
    init_distributed()
    loops: dict[str, Iterator[None]] = {name: direct(folder, folder / name) for name in names}

    def turn(name: str) -> None:
        os.sched_setaffinity(0, every if name == FREE else {sorted(every)[rank % len(every)]})
        torch.distributed.barrier()
        for _ in range(BLOCK):
            next(loops[name])

    return take_turns({name: timed(partial(turn, name)) for name in names}, rounds)


def buckets(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure ZeRO-2 by its buckets."""
    changes: dict[str, dict[str, Any]] = {
        "derived": {},
        "1 M": {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        "DeepSpeed's 500 M": {"reduce_bucket_size": 5 * 10**8, "allgather_bucket_size": 5 * 10**8},
        "derived, overlap_comm": {"overlap_comm": True},
    }
    return "derived", on_two(folder, rounds, "zero2", changes)


def prefetch(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure ZeRO-3 by what it gathers in advance."""
    key = "stage3_prefetch_bucket_size"
    changes = {"derived": {}, "none": {key: 0}, "1 M": {key: 10**6}}
    return "derived", on_two(folder, rounds, "zero3", changes)


def binding(folder: Path, rounds: int) -> tuple[str, Seconds]:
    """Measure ZeRO-2 on two processes by where they may run."""
    return FREE, on_two(folder, rounds, "zero2", {FREE: {}, "bound": {}})


CASES: dict[str, Callable[[Path, int], tuple[str, Seconds]]] = {
    one.__name__: one
    for one in (
        readers, ahead, workers, encode_batch, threads, step_threads, buckets, prefetch, binding,
    )
}  # fmt: skip


def main() -> None:
    """Measure, and print the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, rounds, *names = options.child
        print("\n" + json.dumps(child(Path(folder), int(rounds), names)), flush=True)
        os._exit(0)  # gloo's threads need not be waited for
    os.environ.update(compiled_ops.environment(), MASTER_ADDR="127.0.0.1")
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", TRANSFORMERS_VERBOSITY="error")
    result: dict[str, Any] = {"rounds": options.rounds, "cores": cores()}
    for name in options.only:
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
            default, seconds = CASES[name](Path(place), options.rounds)
        found = judge(default, seconds)
        print(
            f"{name:13} default {default}: {found['verdict']}, {found['ratio']:.3f} "
            f"{found['interval']} of {found['best_other']}; ms: {found['milliseconds']}",
            flush=True,
        )
        result |= {f"{name}_{key}": value for key, value in found.items()}
    print(json.dumps({**result, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
