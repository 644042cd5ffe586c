"""Host memory of real trainings on this machine's CPU against what the planner says of them.

    python benchmarks/memory.py                  # from the project's root, in its environment
    python benchmarks/memory.py --channels 64 128 --cases zero2_offload:bf16 torch:no:2

A U-Net of SDXL's kind is trained for three steps with a checkpoint after the last, each case in
processes of its own: a preset, a precision, a number of processes, and `init` for zero3_init or
`states` for bf16_optimizer_states, whose peak over that of the case without is CASE_ratio. What
counts is the increase of RssAnon + RssShmem (/proc/self/status; ru_maxrss would count mapped files)
over the same process before it began, everything imported that such a training imports. On a CPU
device and host are one memory, so that the planner's parts of both are held to it. What it is told
of the activations is traced in a training of the same model
(torch.autograd.graph.saved_tensors_hooks). The last line is JSON: `ratio` is predicted over
measured, the worst of all cases.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotrain.launch.planner.inputs import Moment, since
from zerotrain.machine import compiled_ops
from zerotrain.stages.train_phase import ALLOCATOR

SAMPLES = 4
STEPS = 3
SIDE = 8
"""Of the latents: activations are small beside the model."""
TEXT_WIDTH = 128
TOKENS = 8
CASES = [
    f"{preset}:{precision}"
    for preset in ("torch", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    for precision in ("no", "bf16")
] + [
    "torch:no:2", "zero1:bf16:2", "zero2:no:2", "zero2:bf16:2", "zero2_offload:no:2", "zero3:no:2",
    "zero3:bf16:2", "zero3_offload:bf16:2", "zero3:bf16:1:init", "zero3_offload:no:2:init",
    "zero2_offload:bf16:1:states", "zero3_offload:bf16:1:states",
]  # fmt: skip

MOMENTS = {
    "build": since(Moment.PLACE, Moment.BUCKETS),
    "forward": (Moment.FORWARD,),
    "backward": (Moment.BACKWARD, Moment.REDUCE),
    "step": (Moment.CLIP, Moment.STEP, Moment.GATHER),
    "save": (Moment.SAVE,),
}
"""What is told apart here, and the planner's moments in it."""


def make_inputs(folder: Path, channels: Sequence[int], samples: int = SAMPLES) -> None:
    """Publish a base model of these channels and a cache of random latents."""
    import torch
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from zerotrain import artifact
    from zerotrain.cache.layout import LATENTS

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
    latents = ({LATENTS: torch.randn(4, SIDE, SIDE)} for _ in range(samples))
    texts = (
        {
            "prompt_embeds": torch.randn(TOKENS, TEXT_WIDTH),
            "pooled_prompt_embeds": torch.randn(TEXT_WIDTH),
        }
        for _ in range(samples + 1)
    )
    publish_cache(folder / "cache", SIDE * 8, latents, texts, samples)


def publish_cache(
    folder: Path, pixels: int, latents: Iterator[Any], texts: Iterator[Any], count: int
) -> None:
    """Publish a cache of square images.

    Args:
        folder: The cache.
        pixels: Side of the images.
        latents: Tensors of each image.
        texts: Tensors of the caption of each image, and of the empty caption.
        count: Number of images.
    """
    from zerotrain import artifact
    from zerotrain.cache.layout import LATENTS, TEXT, Entry, Index, write_index
    from zerotrain.cache.writer import StoredShards, place, write_series

    keys = [artifact.digest(number) for number in range(count)]
    captions = [artifact.digest(["caption", number]) for number in range(count + 1)]
    stored = StoredShards(folder)
    written = [
        write_series(LATENTS, keys, lambda _: latents, stored, folder=folder, shard_size=2**28),
        write_series(TEXT, captions, lambda _: texts, stored, folder=folder, shard_size=2**28),
    ]
    size = (pixels, pixels)
    entries = tuple(
        Entry(f"{key}.png", key, key, key, caption, size, (0, 0), size, "train")
        for key, caption in zip(keys, captions, strict=False)
    )
    with artifact.publish(folder, "cache") as draft:
        for series in written:
            draft.known |= place(series, draft.folder)
        first, second = (series.series for series in written)
        index = Index(
            *(pixels, "fp32", 1, entries, captions[-1], first, second), data_sha256="0" * 64
        )
        write_index(draft.folder, index)


def measured_phase(preset_name: str, sizes: Any, until: int, **values: Any) -> Any:
    """Return a phase under a preset, with its launch files fitted to a model's sizes.

    One process, float32 and one sample a step, unless `values` say otherwise.
    """
    from zerotrain.config.launch import LaunchConfig
    from zerotrain.launch.derive import with_files
    from zerotrain.launch.preset import read_preset
    from zerotrain.launch.resolved import ResolvedPhase

    preset = read_preset(Path(f"config/launch/{preset_name}.yaml"))
    usual: dict[str, Any] = dict(
        run="benchmark", phase="measured", family="sdxl", seed=7, preset=preset_name,
        engine=preset.engine, zero_stage=preset.zero_stage,
        offload_optimizer=preset.offload_optimizer, offload_param=preset.offload_param,
        num_processes=1, num_cpu_threads_per_process=1, mixed_precision="no", start_step=0,
        until_step=until, epoch_size=SAMPLES, resolution=SIDE * 8, global_batch_size=1,
        micro_batch_size=1, gradient_accumulation_steps=1, gradient_checkpointing=False,
        optimizer="adamw", learning_rate=1e-5, lr_scheduler="constant", lr_warmup_steps=0,
        lr_scheduler_steps=until, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        adam_weight_decay=0.01, max_grad_norm=1.0, caption_dropout_probability=0.0,
        save_every=until, keep=2, log_every=1,
    )  # fmt: skip
    return with_files(ResolvedPhase.from_values(usual | values), LaunchConfig(), sizes)


def publish_launch(folder: Path, phase: Any) -> None:
    """Publish a phase's launch files."""
    from zerotrain import artifact
    from zerotrain.launch.files import write_launch_files, write_run_yaml

    with artifact.publish(folder, "launch") as draft:
        write_run_yaml(phase, draft.folder / "run.yaml")
        write_launch_files(phase, draft.folder, folder)


def unet_sizes(base: Path) -> Any:
    """Sizes of a base model that make_inputs made."""
    from zerotrain import artifact
    from zerotrain.models.sizes import read_sizes

    return read_sizes(artifact.read(base, "base"), "sdxl", None, ())


def write_launch(folder: Path, case: str, base: Path) -> None:
    """Publish the launch files of a case, fitted to the base model."""
    name, precision, *count = case.split(":")
    world = int(count[0]) if count else 1
    publish_launch(
        folder,
        measured_phase(
            name,
            unet_sizes(base),
            STEPS,
            num_processes=world,
            global_batch_size=world,
            mixed_precision=precision,
            zero3_init="init" in count,
            bf16_optimizer_states="states" in count,
        ),
    )


class Watch:
    """Most anonymous and shared memory of this process at each moment."""

    def __init__(self) -> None:
        self.moment = "idle"
        self.most: dict[str, int] = {}
        self._done = threading.Event()
        sys.setswitchinterval(0.0005)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enter(self, moment: str) -> None:
        """Begin a moment."""
        self._note()
        self.moment = moment
        self._note()

    def close(self) -> dict[str, int]:
        """Return the most of each moment."""
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
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return sum(int(text.partition(key)[2].split()[0]) for key in ("RssAnon:", "RssShmem:")) * 1024


def increase(most: dict[str, int]) -> int:
    """Return the most memory at any moment above that of the idle process."""
    return max(most.values()) - most["idle"]


def watched(watch: Watch, owner: Any, name: str, moment: str, *, after: str) -> None:
    """Have a function's calls count as a moment, and what follows as another."""
    plain = getattr(owner, name)

    def call(*words: Any, **named: Any) -> Any:
        watch.enter(moment)
        found = plain(*words, **named)
        watch.enter(after)
        return found

    setattr(owner, name, call)


def watch_training(inputs: Path, launch: Path, progress: Path, modules: Path) -> dict[str, int]:
    """Train in this process; its most memory at each moment, and before as "idle".

    What it imports is written to the file `modules`; if that is there, it is imported before.
    """
    from zerotrain.training import rank, setup
    from zerotrain.training.checkpointing import saving
    from zerotrain.training.engines.engine import Engine

    known = modules.read_text(encoding="utf-8").split() if modules.is_file() else []
    warm_up(known)
    watch = Watch()
    time.sleep(0.05)
    watch.enter("load")

    plain = setup.build_engine

    def build_engine(*words: Any, **named: Any) -> Engine:
        watch.enter("build")
        opened = plain(*words, **named)
        watch.enter("forward")
        watched(watch, opened, "backward", "backward", after="step")
        watched(watch, opened, "step", "step", after="forward")
        return opened

    vars(setup)["build_engine"] = build_engine
    watched(watch, saving.Saving, "begin", "save", after="forward")
    rank.run(launch, inputs / "base", inputs / "cache", progress)
    found = watch.close()
    if not known:
        modules.write_text(
            "\n".join(sorted(name for name in sys.modules if name != "__main__")), encoding="utf-8"
        )
    return found


def warm_up(modules: list[str]) -> None:
    """Import these, and have the libraries do what they do once."""
    import torch

    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if any(name.startswith("deepspeed") for name in modules):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()
    for dtype in (torch.float32, torch.bfloat16):
        small = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(6, 6)).to(dtype)
        small(torch.zeros(1, 8, 8, 8, dtype=dtype)).square().mean().backward()


def trace(inputs: Path, precision: str) -> int:
    """Bytes of activations of a micro batch: saved for the backward pass, and a gradient."""
    import torch

    from zerotrain.models.families.sdxl import FAMILY

    dtype = {"no": torch.float32, "bf16": torch.bfloat16}[precision]
    model = FAMILY.load_model(inputs / "base").to(dtype).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    added = {"text_embeds": torch.zeros(1, TEXT_WIDTH), "time_ids": torch.zeros(1, 6)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(
            torch.zeros(1, 4, SIDE, SIDE, dtype=dtype),
            torch.zeros(1),
            encoder_hidden_states=torch.zeros(1, TOKENS, TEXT_WIDTH, dtype=dtype),
            added_cond_kwargs={name: value.to(dtype) for name, value in added.items()},
        )
    assert kept is not None
    largest = max(parameter.nbytes for parameter in model.parameters())
    return sum(saved.values()) + largest


def child(*words: object, **environment: str) -> subprocess.Popen[str]:
    """Start this file's sub-command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, words)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def last_line(process: subprocess.Popen[str]) -> Any:
    """Return the last line of a child's output, once it has ended."""
    said = process.communicate()[0]
    if process.returncode:
        sys.exit(said[-6000:])
    return json.loads(said.splitlines()[-1]) if said.strip() else None


def measure(place: Path, inputs: Path, case: str, modules: Path) -> dict[str, int]:
    """Train a case; the increase of memory at each moment of the process that takes most."""
    launch, progress = place / "launch", place / "progress"
    write_launch(launch, case, inputs / "base")
    progress.mkdir()
    world = int([*case.split(":"), "1"][2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [
        child(
            "train", inputs, launch, progress, modules,
            RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for number in range(world)
    ]  # fmt: skip
    found: dict[str, int] = max([last_line(process) for process in started], key=increase)
    return {moment: most - found["idle"] for moment, most in found.items() if moment != "idle"}


def predict(launch: Path, inputs: Path, activations: int) -> dict[str, int]:
    """Return the planner's prediction of a case at each moment."""
    from zerotrain.launch.files import read_run_yaml
    from zerotrain.launch.planner.inputs import ParameterSizes, PlannedLaunch
    from zerotrain.launch.planner.memory_parts import memory_parts
    from zerotrain.models.families.sdxl import FAMILY

    phase = read_run_yaml(launch / "run.yaml")
    zero = {}
    if phase.derived.engine == "deepspeed":
        zero = json.loads((launch / "deepspeed.json").read_text())["zero_optimization"]
    shapes = {n: p.shape for n, p in FAMILY.empty_model(inputs / "base").named_parameters()}
    planned = PlannedLaunch.of(phase, zero, cpu=True)
    parts = memory_parts(planned, ParameterSizes.of(shapes), activations)
    return {
        name: max(sum(part.resident for part in parts if m in part.when) for m in moments)
        for name, moments in MOMENTS.items()
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, nargs="+", default=[256, 640])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        act, *rest = options.child
        if act == "make":
            make_inputs(Path(rest[0]), [int(word) for word in rest[1:]])
        elif act == "trace":
            print("\n" + json.dumps(trace(Path(rest[0]), rest[1])))
        else:
            print("\n" + json.dumps(watch_training(*map(Path, rest))), flush=True)
            os._exit(0)  # gloo's threads need not be waited for
        return
    os.environ.update(compiled_ops.environment(), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.update(ALLOCATOR)
    result: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs, small = folder / "inputs", folder / "small"
        last_line(child("make", inputs, *options.channels))
        last_line(child("make", small, 32, 64))
        columns = " ".join(f"{moment:>15}" for moment in MOMENTS)
        print(f"{'MB, measured/predicted':24} {columns} {'peak':>15}   ratio")
        for case in options.cases:
            place = folder / case.replace(":", "-")
            precision = case.split(":")[1]
            for which in ("first", "second"):
                (place / which).mkdir(parents=True)
            measure(place / "first", small, case, place / "modules")
            found = measure(place / "second", inputs, case, place / "modules")
            activations = last_line(child("trace", inputs, precision))
            said = predict(place / "second" / "launch", inputs, activations)
            most, most_said = max(found.values()), max(said.values())
            ratios[case] = round(most_said / most, 4)
            row = [(found[moment], said[moment]) for moment in MOMENTS] + [(most, most_said)]
            cells = " ".join(f"{a / 1e6:7.1f}/{b / 1e6:7.1f}" for a, b in row)
            print(f"{case:24} {cells}   {ratios[case]:.3f}", flush=True)
            result |= {f"{case}_measured_bytes": most, f"{case}_predicted_bytes": most_said}
            shutil.rmtree(place)
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    interval = [min(ratios.values()), max(ratios.values())]
    for case in [case for case in ratios if case.endswith(":1:states")]:
        if plain := result.get(f"{case.removesuffix(':1:states')}_measured_bytes"):
            result[f"{case}_ratio"] = round(result[f"{case}_measured_bytes"] / plain, 4)
    print(json.dumps({"ratio": worst, "interval": interval, "ratios": ratios, **result}))


if __name__ == "__main__":
    main()
