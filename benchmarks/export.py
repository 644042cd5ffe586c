"""Export of a DeepSpeed checkpoint: this project's reader and writer against DeepSpeed's own.

    python benchmarks/export.py                  # from the project's root, in its environment
    python benchmarks/export.py --parameters 30e6 --repeats 1 --keep

A model of large linear layers is trained for one step by DeepSpeed's engine at ZeRO-2 and at
ZeRO-3, and saved by engine.save_checkpoint. The same folders are then exported, in turn and each
time in a process of its own, by

    theirs   deepspeed.utils.zero_to_fp32's convert_zero_checkpoint_to_fp32_state_dict, safetensors
    fp32     this project: every tensor checked for NaN, hashed on its way, brought to disk (fsync);
             then read from there again and compared with the master weights
    bf16     the same in bfloat16
    own      the same in fp32, of the folder that this project's own checkpoint would be

`theirs` does none of these checks, and leaves the file to the cache. Time counts from after the
imports: "seconds" to the whole file, which is what both make; "verified" to the end of the
comparison, for which a disk has to give back what it took, and which has nothing beside it in
`theirs`. Memory
is the largest RssAnon (/proc/PID/status: anonymous pages; ru_maxrss would count mapped files),
above what it was after the imports ("growth", of which the memory ratios are) and as such ("peak").
Every tensor is compared: fp32 bit by bit with theirs, bf16 with theirs rounded. The last line is
JSON; ratios are ours over theirs, of the medians, the worse of both stages where none is named;
`interval` has the smallest and largest ratio of one repeat.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = (2, 3)
WIDTH = 2048
UNITS = {
    "seconds": "seconds",
    "verified": "verified_seconds",
    "cpu": "cpu_seconds",
    "growth": "growth_bytes",
    "peak": "peak_bytes",
}
TARGETS = {"time_ratio": 0.5, "bf16_time_ratio": 0.7, "memory_ratio": 0.2}


def make(folder: Path, stage: int, parameters: int) -> None:
    """Train one step at a ZeRO stage, and save it as DeepSpeed does."""
    import deepspeed
    import torch

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 1000))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    layers = max(1, round(parameters / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.randn(1, WIDTH, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(str(folder))


def convert(checkpoint: Path, own: Path) -> None:
    """Convert the training to a checkpoint of this project."""
    from zerotrain import artifact
    from zerotrain.state.checkpoint import KIND, Fragment, write_position, write_rank
    from zerotrain.state.external import open_external

    source = open_external(checkpoint)
    with artifact.publish(own, KIND) as draft:
        parts = (
            Fragment(name, 0, {slot: source.tensor(name, slot).flatten() for slot in source.slots})
            for name in source.names
        )
        spans = [write_rank(draft.folder, 0, parts)]
        write_position(draft.folder, source.position, source.shapes, source.slots, spans)


def theirs(checkpoint: Path, out: Path) -> Callable[[], None]:
    """DeepSpeed's conversion, imported and ready."""
    import safetensors.torch  # noqa: F401  (what it imports when it begins)
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    return lambda: convert_zero_checkpoint_to_fp32_state_dict(
        str(checkpoint), str(out), safe_serialization=True
    )


def ours(checkpoint: Path, out: Path, dtype: str) -> Callable[[], float]:
    """Return this project's export, imported and ready; a call returns the seconds to the file.

    What follows these is the comparison.
    """
    import torch

    from zerotrain.artifact.tensor_file import (
        FLOAT_TYPES,
        open_tensors,
        same_bits,
        write_tensor_file,
    )
    from zerotrain.export.export import CheckedSource
    from zerotrain.state.external import open_external  # noqa: F401
    from zerotrain.state.open import open_checkpoint
    from zerotrain.state.position import MASTER

    # As in the rule: Snakemake sets OMP_NUM_THREADS to its threads.
    torch.set_num_threads(1)

    def act() -> float:
        began = time.monotonic()
        source = open_checkpoint(checkpoint)
        checked, kind = CheckedSource(source), FLOAT_TYPES[dtype]
        out.mkdir()
        layout = {name: (kind, shape) for name, shape in source.shapes.items()}
        path = out / "model.safetensors"
        digest = write_tensor_file(path, layout, lambda name: checked.tensor(name, MASTER, kind))
        (out / "sha256").write_text(digest)
        seconds = time.monotonic() - began
        for name, file in open_tensors([path]).items():
            if not same_bits(file.get_tensor(name), source.tensor(name, MASTER)):
                raise SystemExit(f"{name} reads back with other values")
        return seconds

    return act


def anonymous() -> int:
    """Anonymous resident memory of this process in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def measure(act: Callable[[], float | None]) -> dict[str, float]:
    """Run it: seconds, CPU seconds, and most anonymous memory, above the start and as such."""
    start = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    began, worked = time.monotonic(), time.process_time()
    written = act()
    seconds, worked = time.monotonic() - began, time.process_time() - worked
    done.set()
    thread.join()
    return {
        "seconds": seconds if written is None else written,
        "verified": seconds,
        "cpu": worked,
        "growth": max(most, anonymous()) - start,
        "peak": most,
    }


def compare(reference: Path, out: Path, dtype: str) -> None:
    """Hold every tensor of a folder to DeepSpeed's own."""
    from zerotrain.artifact.tensor_file import open_tensors, same_bits

    expected = open_tensors(reference.glob("*.safetensors"))
    found = open_tensors(out.glob("*.safetensors"))
    if expected.keys() != found.keys():
        sys.exit(f"{out}: other tensors: {sorted(expected.keys() ^ found.keys())[:5]}")
    wanted = {"fp32": "F32", "bf16": "BF16"}[dtype]
    for name, file in found.items():
        if file.get_slice(name).get_dtype() != wanted or not same_bits(
            file.get_tensor(name), expected[name].get_tensor(name)
        ):
            sys.exit(f"{out}: {name} differs from DeepSpeed's")


def child(*words: object) -> str:
    """Run this file's own sub-command in a fresh process; its last line."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    return (done.stdout.splitlines() or [""])[-1]


def serve(words: list[str]) -> None:
    """Run a child's command."""
    act, *rest = words
    if act == "make":
        make(Path(rest[0]), int(rest[1]), int(rest[2]))
    elif act == "convert":
        convert(Path(rest[0]), Path(rest[1]))
    elif act == "compare":
        compare(Path(rest[0]), Path(rest[1]), rest[2])
    elif act == "theirs":
        print("\n" + json.dumps(measure(theirs(Path(rest[0]), Path(rest[1])))))
    else:
        print("\n" + json.dumps(measure(ours(Path(rest[0]), Path(rest[1]), rest[2]))))


def run_stage(folder: Path, stage: int, parameters: int, repeats: int) -> dict[str, Any]:
    """Make a stage's checkpoint, export it in turn by all ways; figures by way."""
    checkpoint, own = folder / "checkpoint", folder / "own"
    child("make", checkpoint, stage, parameters)
    child("convert", checkpoint, own)
    runs: dict[str, list[dict[str, float]]] = {w: [] for w in ("theirs", "fp32", "bf16", "own")}
    for number in range(repeats):
        for way in runs:
            out = folder / f"{way}-{number}"
            words = {
                "theirs": ("theirs", checkpoint, out),
                "fp32": ("ours", checkpoint, out, "fp32"),
                "bf16": ("ours", checkpoint, out, "bf16"),
                "own": ("ours", own, out, "fp32"),
            }[way]
            os.sync()  # no way pays for the writing of the one before
            runs[way].append(json.loads(child(*words)))
            print(f"ZeRO-{stage} {way:7}", *(f"{k} {v:,.2f}" for k, v in runs[way][-1].items()))
            if way != "theirs":
                dtype = "bf16" if way == "bf16" else "fp32"
                child("compare", folder / f"theirs-{number}", out, dtype)
                shutil.rmtree(out)
        shutil.rmtree(folder / f"theirs-{number}")
    return runs


def ratios(runs: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Ratios of the medians, and the smallest and largest ratio of one repeat."""
    kinds = {
        "time_ratio": ("fp32", "seconds"),
        "bf16_time_ratio": ("bf16", "seconds"),
        "own_time_ratio": ("own", "seconds"),
        "verified_time_ratio": ("fp32", "verified"),
        "bf16_verified_time_ratio": ("bf16", "verified"),
        "cpu_ratio": ("fp32", "cpu"),
        "memory_ratio": ("fp32", "growth"),
        "bf16_memory_ratio": ("bf16", "growth"),
        "own_memory_ratio": ("own", "growth"),
        "peak_ratio": ("fp32", "peak"),
    }
    found, intervals = {}, {}
    for name, (way, key) in kinds.items():
        a, b = ([run[key] for run in runs[w]] for w in (way, "theirs"))
        found[name] = round(statistics.median(a) / statistics.median(b), 3)
        each = [x / y for x, y in zip(a, b, strict=True)]
        intervals[name] = [round(min(each), 3), round(max(each), 3)]
    return found, intervals


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the folder, and say where")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.child)
        return
    folder = Path(tempfile.mkdtemp(prefix="export-benchmark-"))
    result: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    try:
        for stage in STAGES:
            place = folder / f"zero{stage}"
            place.mkdir()
            runs = run_stage(place, stage, int(options.parameters), options.repeats)
            found, spans = ratios(runs)
            result |= {f"zero{stage}_{name}": value for name, value in found.items()}
            intervals |= {f"zero{stage}_{name}": span for name, span in spans.items()}
            for way, measured in runs.items():
                for key, unit in UNITS.items():
                    name = f"zero{stage}_{way}_{unit}"
                    result[name] = round(statistics.median(run[key] for run in measured), 2)
            if not options.keep:
                shutil.rmtree(place)
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    worst = {name: max(result[f"zero{stage}_{name}"] for stage in STAGES) for name in TARGETS}
    layers = max(1, round(options.parameters / WIDTH**2))
    print(
        json.dumps(
            {
                **worst,
                "targets": TARGETS,
                "bit_exact": True,
                "parameters": layers * (WIDTH**2 + WIDTH),
                "repeats": options.repeats,
                "cores": os.cpu_count(),
                "load_average": round(os.getloadavg()[0], 2),
                **result,
                "interval": intervals,
            }
        )
    )


if __name__ == "__main__":
    main()
