"""What a rolling checkpoint costs the training loop, written beside the steps or at once.

    python benchmarks/save.py                       # from the project's root, in its environment
    python benchmarks/save.py --batch 256 --cases zero3 --folder /data/tmp

Each preset trains a stack of square layers with AdamW in a process of its own, with pinned threads.
Windows of equal steps follow each other in turns: without a save, with one that is written beside
the next steps, with one that is waited for.

`stall_ratio` is the time for which the loop stands still for a save beside the steps, over that for
one at once: medians, the worst preset. `window_ratio` is the same of the time that a window takes
longer than the one without a save before it, with what the writing thread takes from the passes'
processors in it; it says something on an idle machine alone. `passes_ratio` says how long forward
and backward take against the write: where they are shorter, what is not written when they end is
copied, up to one shard, and waited for beyond it. `memory_ratio` is the most of RssAnon during the
window with a save beyond its most in the one without, over a shard. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory import measured_phase

from zerotrain.machine import compiled_ops

CASES = ("torch", "zero2_offload", "zero3")


class Memory:
    """The most of RssAnon while it watches."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.most = max(self.most, rss_anon())

    def close(self) -> int:
        """Stop, and return the most bytes."""
        self._done.set()
        self._thread.join()
        return max(self.most, rss_anon())


def rss_anon() -> int:
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(case: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in this process; the figures of one preset."""
    import torch

    from zerotrain.state.position import StepCounter
    from zerotrain.state.state import SHARD_BYTES
    from zerotrain.training import ranks
    from zerotrain.training.checkpointing.progress_folder import saved_steps
    from zerotrain.training.checkpointing.saving import Saving
    from zerotrain.training.reporting.log import NoLog
    from zerotrain.training.setup import build_engine

    torch.manual_seed(0)
    width, layers = arguments.width, arguments.layers
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    phase = write_launch(folder, case, model)
    engine = build_engine(model, phase, folder, exact=True)
    batch = torch.randn(arguments.batch, width, device=engine.device)
    saving = Saving(engine, phase, NoLog(), folder / "progress")
    (folder / "progress").mkdir()
    counter = StepCounter(0, 0, phase.derived.until_step)
    passes: list[float] = []

    def step() -> None:
        began = time.monotonic()
        with engine.micro_batch(last=True):
            engine.backward(engine.model(batch).square().mean())
        passes.append(time.monotonic() - began)
        _, (writing,) = ranks.reduce_loss_and_flags(0.0, [saving.is_writing()], engine.device)
        saving.wait_or_stage_tensors(writing)
        engine.step(1e-9)
        counter.step += 1

    def window(how: str) -> tuple[float, float, int]:
        """Seconds of a window, those for which the loop stood still, and the most memory."""
        memory, held, began = Memory(), saving.seconds, time.monotonic()
        if how != "without":
            saving.begin(counter, wait=how == "at once")
        for _ in range(arguments.steps):
            step()
        saving.finish()
        return time.monotonic() - began, saving.seconds - held, memory.close()

    for _ in range(2):
        step()
    window("beside")
    passes.clear()
    costs: dict[str, list[float]] = {"beside": [], "at once": []}
    held: dict[str, list[float]] = {"beside": [], "at once": []}
    more = []
    alone = []
    for turn in range(arguments.repeats):
        for how in ("beside", "at once") if turn % 2 else ("at once", "beside"):
            passes.clear()
            plain, _, most = window("without")
            alone += passes
            seconds, stood, peak = window(how)
            costs[how].append(seconds - plain)
            held[how].append(stood)
            if how == "beside":
                more.append(peak - most)
    state = sum(p.stat().st_size for p in (folder / "progress").glob("step-*/*.safetensors"))
    write = statistics.median(held["at once"])
    return {
        "stall_ratio": statistics.median(held["beside"]) / write,
        "stall_range": [min(held["beside"]) / write, max(held["beside"]) / write],
        "window_ratio": statistics.median(costs["beside"]) / statistics.median(costs["at once"]),
        "memory_ratio": max(more) / SHARD_BYTES,
        "passes_ratio": statistics.median(alone) / write,
        "seconds_at_once": write,
        "seconds_passes": statistics.median(alone),
        "state_bytes": state // len(saved_steps(folder / "progress")),
    }


def write_launch(folder: Path, case: str, model: Any) -> Any:
    """Write the launch files of a preset, fitted to the model; the phase."""
    from zerotrain.launch.files import write_launch_files
    from zerotrain.models.sizes import model_sizes

    sizes = model_sizes({name: list(p.shape) for name, p in model.named_parameters()})
    phase = measured_phase(case, sizes, 10**6, learning_rate=1e-9, adam_weight_decay=0.0, keep=1)
    write_launch_files(phase, folder, folder)
    return phase


@contextlib.contextmanager
def own_folder(place: Path | None) -> Iterator[Path]:
    """Yield a folder that is removed at the end."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)


def main() -> None:
    """Measure each preset in a process of its own and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--steps", type=int, default=4, help="steps of a window")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        with own_folder(arguments.folder) as folder:
            print(json.dumps(measure(arguments.only, arguments, folder)))
        return
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    found: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(arguments.cases):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", case],
            env={
                **os.environ,
                **compiled_ops.environment(),
                **threads,
                **alone,
                "MASTER_PORT": str(29700 + number),
            },
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[case] = json.loads(done.stdout.splitlines()[-1])
        print(case, found[case], flush=True)
    worst = {
        key: round(max(one[key] for one in found.values()), 3)
        for key in ("stall_ratio", "window_ratio", "memory_ratio")
    }
    least = round(min(one["passes_ratio"] for one in found.values()), 3)
    print(
        json.dumps(
            {
                **worst,
                "passes_ratio": least,
                "presets": found,
                "parameters": arguments.width**2 * arguments.layers,
                "cores": len(os.sched_getaffinity(0)),
                "repeats": arguments.repeats,
            }
        )
    )


if __name__ == "__main__":
    main()
