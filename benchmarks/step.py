"""The time of a training step, and from the start to the first one, against loops written by hand.

    python benchmarks/step.py                    # from the project's root, in its environment
    python benchmarks/step.py --cases torch:small zero2:small --rounds 40

Every case runs in one process on one core with one thread, or in as many processes as its name ends
with, each on a core of its own. What zerotrain.training.rank trains, as users have it (log,
TensorBoard, schedule, draws by counter, clipping), takes turns, some steps each, with

- `bare`: PyTorch, the same model, cached latents in memory, clipping, fused AdamW;
- `example`: a loop that does what diffusers' text-to-image example does, the encoders' outputs in
  memory: accelerate's prepare and accumulate, a loader, clipping, a schedule, a bar;
- `direct`: deepspeed.initialize with the very JSON and the same optimizer;
- `ddp`, in several processes: PyTorch's DistributedDataParallel, otherwise as `bare`.

A ratio is of one round's times, so that what else the machine does falls on both; given are the
medians, and the interval that holds the true one with 95 %. `start` is the time from exec to the
end of the first step of a tiny model, less that of a process which imports the libraries and ends.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory import SIDE, make_inputs, measured_phase, publish_launch, unet_sizes
from step_loops import BATCH, CLIP, RATE, RIVALS, SAMPLES, WEIGHT_DECAY

from zerotrain.machine import compiled_ops
from zerotrain.machine.child_process import SUPERVISOR

SIZES = {"tiny": (32, 64), "small": (32, 96), "large": (96, 320)}
"""Channels of the U-Net."""
CASES = (
    "torch:small", "torch:large", "zero1:small", "zero2:small", "zero2:large", "zero3:small",
    "zero1:small:2", "zero2:small:2",
)  # fmt: skip
BLOCK = {"tiny": 20, "small": 10, "large": 3}
"""Steps of a turn."""
WARM_UP = 2
"""Turns that do not count."""


def make_phase(
    preset_name: str, base: Path, until: int, log_every: int = 10, processes: int = 1
) -> Any:
    """Return a phase in float32."""
    return measured_phase(
        preset_name,
        unet_sizes(base),
        until,
        epoch_size=SAMPLES,
        num_processes=processes,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // processes,
        learning_rate=RATE,
        adam_weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        log_every=log_every,
    )


class Turns:
    """In the place of the question whether to stop, which training asks once a step: after every
    block of steps the others get their turns."""

    def __init__(self, rivals: dict[str, Iterator[None]], block: int, rounds: int) -> None:
        self._rivals, self._block = rivals, block
        self._left, self._done = rounds + WARM_UP, 0
        self.seconds: dict[str, list[float]] = {name: [] for name in ("ours", *rivals)}
        self._began = time.perf_counter()

    def __call__(self) -> bool:
        self._done += 1
        if self._done % self._block:
            return False
        self.seconds["ours"].append(time.perf_counter() - self._began)
        for name in sorted(self._rivals, reverse=bool(self._left % 2)):
            began = time.perf_counter()
            for _ in range(self._block):
                next(self._rivals[name])
            self.seconds[name].append(time.perf_counter() - began)
        self._left -= 1
        self._began = time.perf_counter()
        return self._left == 0


def case_phase(inputs: Path, preset: str, size: str, rounds: int, processes: int) -> Any:
    """Return the phase of a case, which is long enough for all turns."""
    until = (rounds + WARM_UP + 1) * BLOCK[size] + 1
    return make_phase(preset, inputs / "base", until, processes=processes)


def take_turns(place: Path, preset: str, size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by the name of the loop, in one of the processes."""
    import torch

    from zerotrain.training import rank

    torch.set_num_threads(1)
    inputs, processes = place.parent / size, int(os.environ["WORLD_SIZE"])
    torch.manual_seed(int(os.environ["RANK"]))
    block = BLOCK[size]
    phase = case_phase(inputs, preset, size, rounds, processes)
    if phase.derived.engine == "deepspeed":
        from zerotrain.training.engines.zero_engine import init_distributed

        init_distributed()
    loops = RIVALS["several processes" if processes > 1 else phase.derived.engine]
    rivals = {one.__name__: one(inputs, place / "launch") for one in loops}
    for one in rivals.values():
        next(one)
    turns = Turns(rivals, block, rounds)
    rank.StopRequest = lambda progress: turns  # type: ignore[attr-defined,assignment,misc]
    rank.run(place / "launch", inputs / "base", inputs / "cache", place / "progress")
    return {n: [s / block for s in found[WARM_UP:]] for n, found in turns.seconds.items()}


def middle(values: list[float]) -> tuple[float, list[float]]:
    """Return the median, and the order statistics that enclose the true one with 95 %."""
    ordered, count = sorted(values), len(values)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return statistics.median(ordered), [round(ordered[low], 4), round(ordered[high], 4)]


LIBRARIES = {
    "torch": "from accelerate import Accelerator",
    "deepspeed": "import deepspeed; from deepspeed.ops.adam import DeepSpeedCPUAdam",
}


def first_step_seconds(place: Path, preset: str, inputs: Path) -> float:
    """From the start of a training process to the end of its first step."""
    from zerotrain.artifact.layout import LOG
    from zerotrain.machine.ports import free_port

    progress = place / "progress"
    progress.mkdir()
    # As the stage starts it, which has looked at the folders before.
    environment = {
        **os.environ, "MASTER_PORT": str(free_port()), SUPERVISOR: str(os.getpid()),
    }  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "zerotrain.training.rank", "--launch", str(place / "launch")),
            *("--base", str(inputs / "base"), "--cache", str(inputs / "cache")),
            *("--progress", str(progress)),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = progress / LOG
    while not (log.is_file() and log.stat().st_size):
        if process.poll() is not None:
            sys.exit(process.communicate()[1][-6000:])
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    process.kill()
    process.communicate()
    return seconds


def import_seconds(engine: str) -> float:
    """From the start of a process to its end that imports what a training cannot do without."""
    words = f"{LIBRARIES[engine]}; from diffusers import DDPMScheduler, UNet2DConditionModel"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", f"import os, torch; {words}; os._exit(0)"],
        check=True, capture_output=True,
    )  # fmt: skip
    return time.perf_counter() - began


def start(folder: Path, preset: str, rounds: int, *, warm: bool) -> tuple[float, float]:
    """Median seconds to the first step, and of the imports alone, taken by turns."""
    inputs, found = folder / "tiny", []
    for number in range(rounds if warm else rounds + 1):
        place = folder / f"start-{preset}-{number}"
        place.mkdir()
        phase = make_phase(preset, inputs / "base", 10**6, log_every=1)
        publish_launch(place / "launch", phase)
        engine = phase.derived.engine
        found.append((first_step_seconds(place, preset, inputs), import_seconds(engine)))
    ours, imports = zip(*found[-rounds:], strict=True)  # one more fills the page cache
    return statistics.median(ours), statistics.median(imports)


def run_case(
    place: Path, preset: str, size: str, rounds: int, cores: list[int]
) -> dict[str, list[float]]:
    """Run a case in a process on each core; seconds of the first one, by the name of the loop."""
    from zerotrain.machine.ports import free_port

    command = [sys.executable, __file__, "--child", str(place), preset, size, str(rounds)]
    environment = {**os.environ, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(cores))}
    processes = []
    for number, core in enumerate(cores):
        process = subprocess.Popen(
            command,
            env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        os.sched_setaffinity(process.pid, {core})
        processes.append(process)
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(output[-6000:])
    found: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=CASES, help="preset:size[:processes]")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--starts", nargs="*", default=["torch", "zero2", "zero3"])
    parser.add_argument("--start-rounds", type=int, default=5)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        place, preset, size, rounds = options.child
        found = take_turns(Path(place), preset, size, int(rounds))
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)  # gloo's threads need not be waited for
    os.environ.update(compiled_ops.environment(), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", TRANSFORMERS_VERBOSITY="error")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    cores = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        used = {case.split(":")[1] for case in options.cases}
        for size in used | ({"tiny"} if options.starts else set()):
            make_inputs(folder / size, SIZES[size], SAMPLES)
        for case in options.cases:
            preset, size, *count = case.split(":")
            processes = int(count[0]) if count else 1
            place = folder / case.replace(":", "-")
            (place / "progress").mkdir(parents=True)
            phase = case_phase(folder / size, preset, size, options.rounds, processes)
            publish_launch(place / "launch", phase)
            found = run_case(place, preset, size, options.rounds, cores[:processes])
            ours = found.pop("ours")
            words = [f"{case:14} ours {statistics.median(ours) * 1e3:8.2f} ms"]
            for rival, seconds in found.items():
                ratio, interval = middle([a / b for a, b in zip(ours, seconds, strict=True)])
                key = "_".join((*case.split(":"), rival))
                result |= {f"{key}_time_ratio": round(ratio, 4), f"{key}_interval": interval}
                least = min(ours) / min(seconds)
                words.append(
                    f"{rival} {statistics.median(seconds) * 1e3:8.2f} ms, ratio {ratio:.3f} "
                    f"{interval}, of the fastest turns {least:.3f}"
                )
            print("   ".join(words), flush=True)
        for preset in options.starts:
            # The cases above have imported the same.
            warm = bool(options.cases)
            first, imports = start(folder, preset, options.start_rounds, warm=warm)
            print(f"{preset:14} first step after {first:.2f} s, the imports alone {imports:.2f} s")
            result[f"{preset}_start_seconds"] = round(first, 3)
            result[f"{preset}_start_beyond_imports_seconds"] = round(first - imports, 3)
    sizes = {"channels": SIZES, "batch": BATCH, "side": SIDE, "rounds": options.rounds}
    print(json.dumps({**result, **sizes}))


if __name__ == "__main__":
    main()
