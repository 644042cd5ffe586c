"""Host memory of real trainings on this machine's CPU against what the planner says of them.

    python benchmarks/memory.py                  # from the project's root, in its environment
    python benchmarks/memory.py --channels 64 128 --cases zero2_offload:bf16 torch:no:2

A U-Net of SDXL's kind is trained for three steps with a checkpoint after the last, each case in
processes of its own: a preset, a precision and a number of processes. What counts is the increase
of RssAnon + RssShmem (/proc/self/status; ru_maxrss would count mapped files) over the same process
before it began, everything imported that such a training imports. On a CPU device and host are one
memory, so that the planner's parts of both are held to it. What the planner needs of the activations
is traced in a training of the same model (torch.autograd.graph.saved_tensors_hooks). The last line
is JSON: `ratio` is predicted over measured, the worst of all cases.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

SAMPLES = 4
STEPS = 3
SIDE = 8
"""Of the latents: activations are small beside the model."""
TEXT_WIDTH = 128
CASES = [
    f"{preset}:{precision}"
    for preset in ("torch", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    for precision in ("no", "bf16")
] + ["torch:no:2", "zero2:bf16:2", "zero2_offload:no:2", "zero3:bf16:2", "zero3_offload:bf16:2"]


def make_inputs(folder: Path, channels: list[int]) -> None:
    """Publish a base model of these channels and a cache of random latents."""
    import torch
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from zerotrain import artifact
    from zerotrain.cache.layout import LATENTS, TEXT, Entry, Index, write_index
    from zerotrain.cache.writer import Stored, place, write_series

    torch.manual_seed(0)
    deeper = len(channels) - 1
    unet = UNet2DConditionModel(
        sample_size=SIDE, in_channels=4, out_channels=4, block_out_channels=tuple(channels),
        layers_per_block=1, cross_attention_dim=TEXT_WIDTH, attention_head_dim=8,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * deeper),
        up_block_types=(*["CrossAttnUpBlock2D"] * deeper, "UpBlock2D"),
        transformer_layers_per_block=(1,) * len(channels), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=6 * 32 + TEXT_WIDTH,
    )  # fmt: skip
    with artifact.publish(folder / "base", "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler().save_pretrained(draft.folder / "scheduler")
        draft.content = {"parts": {"unet": "made by a benchmark"}}
    keys = [artifact.digest(number) for number in range(SAMPLES + 1)]
    latents = ({LATENTS: torch.randn(4, SIDE, SIDE)} for _ in keys[1:])
    texts = (
        {
            "prompt_embeds": torch.randn(8, TEXT_WIDTH),
            "pooled_prompt_embeds": torch.randn(TEXT_WIDTH),
        }
        for _ in keys
    )
    cache = folder / "cache"
    one = Stored(cache)
    written = [
        write_series(LATENTS, keys[1:], lambda _: latents, one, folder=cache, shard_size=2**20),
        write_series(TEXT, keys, lambda _: texts, one, folder=cache, shard_size=2**20),
    ]
    pixels = (SIDE * 8, SIDE * 8)
    entries = tuple(
        Entry(f"{key}.png", key, key, key, key, pixels, (0, 0), pixels, "train") for key in keys[1:]
    )
    with artifact.publish(cache, "cache") as draft:
        for series in written:
            draft.known |= place(series, draft.folder)
        index = Index(SIDE * 8, "fp32", 1, entries, keys[0], written[0].series, written[1].series)
        write_index(draft.folder, index)


def write_launch(folder: Path, case: str) -> None:
    """Publish the launch files of a case."""
    from zerotrain import artifact
    from zerotrain.launch.files import write_launch_files
    from zerotrain.launch.preset import read_preset
    from zerotrain.launch.resolved import ResolvedPhase, write_run_yaml

    name, precision, *count = case.split(":")
    world = int(count[0]) if count else 1
    preset = read_preset(Path(f"config/launch/{name}.yaml"))
    phase = ResolvedPhase(
        run="memory", phase="measured", family="sdxl", seed=7, preset=name, engine=preset.engine,
        zero_stage=preset.zero_stage, offload_optimizer=preset.offload_optimizer,
        offload_param=preset.offload_param, num_processes=world, num_cpu_threads_per_process=1,
        mixed_precision=precision, start_step=0, until_step=STEPS, epoch_size=SAMPLES,
        resolution=SIDE * 8, global_batch_size=world, micro_batch_size=1,
        gradient_accumulation_steps=1, gradient_checkpointing=False, optimizer="adamw",
        learning_rate=1e-5, lr_scheduler="constant", lr_warmup_steps=0, lr_scheduler_steps=STEPS,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, adam_weight_decay=0.01,
        max_grad_norm=1.0, snr_gamma=None, caption_dropout_probability=0.0, save_every=STEPS,
        keep=2, log_every=1,
    )  # fmt: skip
    with artifact.publish(folder, "launch") as draft:
        write_run_yaml(phase, draft.folder / "run.yaml")
        write_launch_files(phase, preset, draft.folder, folder)


class Watch:
    """Most anonymous and shared memory of this process at each moment."""

    def __init__(self) -> None:
        self.moment = "idle"
        self.most: dict[str, int] = {}
        self._done = threading.Event()
        sys.setswitchinterval(0.0005)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enter(self, moment: str) -> str:
        """Begin a moment; the one before."""
        self._note()
        before, self.moment = self.moment, moment
        self._note()
        return before

    def close(self) -> dict[str, int]:
        """The most of each moment."""
        self._note()
        self._done.set()
        self._thread.join()
        return self.most

    def _note(self) -> None:
        moment = self.moment
        self.most[moment] = max(self.most.get(moment, 0), resident())

    def _run(self) -> None:
        while not self._done.wait(0.001):
            self._note()


def resident() -> int:
    """Anonymous and shared resident memory of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    return sum(int(text.partition(key)[2].split()[0]) for key in ("RssAnon:", "RssShmem:")) * 1024


def watched(watch: Watch, owner: Any, name: str, moment: str) -> None:
    """Have a function's calls count as a moment."""
    plain = getattr(owner, name)

    def call(*words: Any, **named: Any) -> Any:
        before = watch.enter(moment)
        try:
            return plain(*words, **named)
        finally:
            watch.enter(before)

    setattr(owner, name, call)


def train(folder: Path, launch: Path, progress: Path, modules: Path) -> None:
    """Train in this process; what it imported to the file `modules`, else what was measured."""
    import torch

    from zerotrain.training import loop, rank

    known = modules.is_file()
    for name in modules.read_text().split() if known else []:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if known:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()
    small = torch.nn.Conv2d(8, 8, 3)  # the libraries' own start
    small(torch.zeros(1, 8, 8, 8)).square().mean().backward()
    watch = Watch()
    time.sleep(0.05)
    watch.enter("load")
    opening = rank.open_engine

    def open_engine(*words: Any, **named: Any) -> Any:
        watch.enter("build")
        engine = opening(*words, **named)
        if os.environ.get("TRIM"):
            import ctypes
            ctypes.CDLL(None).malloc_trim(0)
        watch.enter("forward")
        watched(watch, engine, "backward", "backward")
        watched(watch, engine, "step", "step")
        return engine

    rank.open_engine = open_engine
    watched(watch, loop, "save", "save")
    rank.run(launch, folder / "base", folder / "cache", progress)
    found = watch.close()
    if not known:
        modules.write_text("\n".join(sorted(m for m in sys.modules if m != "__main__")))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)


def measure(folder: Path, inputs: Path, case: str, modules: Path) -> dict[str, int]:
    """Train a case; the increase of rank 0's memory at each moment."""
    launch = folder / "launch"
    write_launch(launch, case)
    progress = folder / "progress"
    progress.mkdir()
    world = int((case.split(":") + ["1"])[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, __file__, "--child", "train", *map(str, (inputs, launch, progress))]
    started = [
        subprocess.Popen(
            [*words, str(modules)],
            env=os.environ
            | {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(world)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("\n".join(said)[-6000:])
    found = json.loads(said[0].splitlines()[-1])
    return {moment: most - found["idle"] for moment, most in found.items() if moment != "idle"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, nargs="+", default=[192, 512])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        act, *rest = options.child
        if act == "make":
            make_inputs(Path(rest[0]), [int(word) for word in rest[1:]])
        else:
            train(*map(Path, rest))
        return
    from zerotrain import compiled_ops
    os.environ.update(compiled_ops.environment(), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = [sys.executable, __file__, "--child", "make"]
        subprocess.run([*make, str(folder / "inputs"), *map(str, options.channels)], check=True)
        subprocess.run([*make, str(folder / "small"), "32", "64"], check=True)
        for case in options.cases:
            place = folder / case.replace(":", "-")
            modules = place / "modules"
            for which in ("small", "inputs"):
                (place / which).mkdir(parents=True)
                found = measure(place / which, folder / which, case, modules)
            print(case, {k: round(v / 1e6, 1) for k, v in found.items()}, flush=True)


if __name__ == "__main__":
    main()
