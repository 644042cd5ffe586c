"""The time of a training step, and from the start to the first one, against loops written by hand.

    python benchmarks/step.py                    # from the project's root, in its environment
    python benchmarks/step.py --cases torch:small zero2:small --rounds 40

Every case runs in one process on one core with one thread. What zerotrain.training.rank trains, as
users have it (log, TensorBoard, schedule, draws by counter, clipping), takes turns, some steps
each, with

- `bare`: PyTorch, the same model, cached latents in memory, clipping, fused AdamW;
- `example`: a loop that does what diffusers' text-to-image example does, the encoders' outputs in
  memory: accelerate's prepare and accumulate, a loader, clipping, a schedule, a bar;
- `direct`: deepspeed.initialize with the very JSON and the same optimizer.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memory import SIDE, make_inputs, measured_phase, publish_launch, unet_sizes

from zerotrain.machine import compiled_ops
from zerotrain.machine.child_process import SUPERVISOR

SAMPLES, BATCH = 64, 8
SIZES = {"tiny": (32, 64), "small": (32, 96), "large": (96, 320)}
"""Channels of the U-Net."""
CASES = ("torch:small", "torch:large", "zero1:small", "zero2:small", "zero2:large", "zero3:small")
BLOCK = {"tiny": 20, "small": 10, "large": 3}
"""Steps of a turn."""
RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
WARM_UP = 2
"""Turns that do not count."""


def write_launch(
    folder: Path, preset_name: str, base: Path, until: int, log_every: int = 10
) -> Any:
    """Publish the launch files of one process in float32; the phase."""
    phase = measured_phase(
        preset_name,
        unet_sizes(base),
        until,
        epoch_size=SAMPLES,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        learning_rate=RATE,
        adam_weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        log_every=log_every,
    )
    publish_launch(folder, phase)
    return phase


class Loop:
    """A model and its data in memory; each loop by hand adds its step."""

    def __init__(self, inputs: Path) -> None:
        import torch
        from diffusers import DDPMScheduler

        from zerotrain.cache import read_cache
        from zerotrain.models.families.sdxl import FAMILY

        cache = read_cache(inputs / "cache", verify=False)
        samples = [cache.sample(i) for i in range(len(cache.entries))]
        self.data = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        self.data["time_ids"] = torch.cat(
            [self.data.pop(n) for n in ("original_size", "crop_top_left", "target_size")], dim=1
        ).float()
        self.unet = FAMILY.load_model(inputs / "base").train()
        self.scheduler = DDPMScheduler()

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches in a new order each epoch, without an end."""
        import torch

        while True:
            for part in torch.split(torch.randperm(SAMPLES), BATCH):
                yield {name: tensor[part] for name, tensor in self.data.items()}

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the mean squared error of the predicted noise at random timesteps."""
        import torch

        latents = batch["latents"]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(latents),))
        added = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["time_ids"]}
        predicted = model(
            self.scheduler.add_noise(latents, noise, timesteps),
            timesteps,
            encoder_hidden_states=batch["prompt_embeds"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(predicted.float(), noise.float())


def fused_adamw(parameters: Any) -> Any:
    """AdamW as all loops have it."""
    import torch

    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=WEIGHT_DECAY, fused=True)


def bare(inputs: Path, launch: Path) -> Iterator[None]:
    """Plain PyTorch; one step each time it is asked."""
    import torch

    loop = Loop(inputs)
    optimizer = fused_adamw(loop.unet.parameters())
    for batch in loop.batches():
        loss = loop.loss(loop.unet, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loop.unet.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def example(inputs: Path, launch: Path) -> Iterator[None]:
    """Train as diffusers' example does, without its validation and averages."""
    from accelerate import Accelerator
    from diffusers.optimization import get_scheduler
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    loop = Loop(inputs)
    rows = [{name: tensor[i] for name, tensor in loop.data.items()} for i in range(SAMPLES)]
    loader: Any = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
    )
    optimizer = fused_adamw(loop.unet.parameters())
    schedule = get_scheduler("constant", optimizer=optimizer, num_warmup_steps=0)
    unet, optimizer, loader, schedule = accelerator.prepare(loop.unet, optimizer, loader, schedule)
    bar = tqdm(desc="Steps", file=open(os.devnull, "w"))  # noqa: SIM115
    train_loss = 0.0
    while True:
        for batch in loader:
            with accelerator.accumulate(unet):
                loss = loop.loss(unet, batch)
                average = accelerator.gather(loss.repeat(BATCH)).mean()
                train_loss += average.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                accelerator.log({"train_loss": train_loss})
                train_loss = 0.0
            bar.set_postfix(step_loss=loss.detach().item(), lr=schedule.get_last_lr()[0])
            yield


def direct(inputs: Path, launch: Path) -> Iterator[None]:
    """deepspeed.initialize and its engine, by the same JSON."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    loop = Loop(inputs)
    config = json.loads((launch / "deepspeed.json").read_text())
    parameters = list(loop.unet.parameters())
    if "offload_optimizer" in config["zero_optimization"]:
        optimizer = DeepSpeedCPUAdam(parameters, lr=RATE, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = fused_adamw(parameters)
    engine, *_ = deepspeed.initialize(model=loop.unet, optimizer=optimizer, config=config)
    for batch in loop.batches():
        loss = loop.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        loss.item()
        yield


RIVALS: dict[str, tuple[Callable[[Path, Path], Iterator[None]], ...]] = {
    "torch": (bare, example),
    "deepspeed": (direct,),
}


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


def take_turns(place: Path, preset: str, size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by the name of the loop."""
    import torch

    from zerotrain.training import rank

    torch.set_num_threads(1)
    inputs = place.parent / size
    block = BLOCK[size]
    phase = write_launch(
        place / "launch", preset, inputs / "base", (rounds + WARM_UP + 1) * block + 1
    )
    if phase.derived.engine == "deepspeed":
        from zerotrain.training.engines.zero_engine import init_distributed

        init_distributed()
    rivals = {one.__name__: one(inputs, place / "launch") for one in RIVALS[phase.derived.engine]}
    for one in rivals.values():
        next(one)
    turns = Turns(rivals, block, rounds)
    rank.StopRequest = lambda progress: turns  # type: ignore[attr-defined,assignment,misc]
    (place / "progress").mkdir()
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
    from zerotrain.machine.ports import free_port
    from zerotrain.training.reporting.files import LOG

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


def start(folder: Path, preset: str, rounds: int) -> tuple[float, float]:
    """Median seconds to the first step, and of the imports alone, taken by turns."""
    inputs, found = folder / "tiny", []
    for number in range(rounds + 1):
        place = folder / f"start-{preset}-{number}"
        place.mkdir()
        phase = write_launch(place / "launch", preset, inputs / "base", 10**6, log_every=1)
        engine = phase.derived.engine
        found.append((first_step_seconds(place, preset, inputs), import_seconds(engine)))
    ours, imports = zip(*found[1:], strict=True)  # the first fills the page cache
    return statistics.median(ours), statistics.median(imports)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=CASES, help="preset:size")
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
    from zerotrain.machine.ports import free_port

    os.environ.update(compiled_ops.environment(), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", TRANSFORMERS_VERBOSITY="error")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    cores = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        used = {case.partition(":")[2] for case in options.cases}
        for size in used | ({"tiny"} if options.starts else set()):
            make_inputs(folder / size, SIZES[size], SAMPLES)
        os.sched_setaffinity(0, cores[:1])
        for case in options.cases:
            preset, _, size = case.partition(":")
            place = folder / case.replace(":", "-")
            place.mkdir()
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(place), preset, size,
                 str(options.rounds)],
                env={**os.environ, "MASTER_PORT": str(free_port())},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stdout[-6000:])
            found = json.loads(done.stdout.splitlines()[-1])
            ours = found.pop("ours")
            words = [f"{case:14} ours {statistics.median(ours) * 1e3:8.2f} ms"]
            for rival, seconds in found.items():
                ratio, interval = middle([a / b for a, b in zip(ours, seconds, strict=True)])
                key = f"{preset}_{size}_{rival}"
                result |= {f"{key}_time_ratio": round(ratio, 4), f"{key}_interval": interval}
                least = min(ours) / min(seconds)
                words.append(
                    f"{rival} {statistics.median(seconds) * 1e3:8.2f} ms, ratio {ratio:.3f} "
                    f"{interval}, of the fastest turns {least:.3f}"
                )
            print("   ".join(words), flush=True)
        os.sched_setaffinity(0, cores)
        for preset in options.starts:
            ours, imports = start(folder, preset, options.start_rounds)
            print(f"{preset:14} first step after {ours:.2f} s, the imports alone {imports:.2f} s")
            result[f"{preset}_start_seconds"] = round(ours, 3)
            result[f"{preset}_start_beyond_imports_seconds"] = round(ours - imports, 3)
    sizes = {"channels": SIZES, "batch": BATCH, "side": SIDE, "rounds": options.rounds}
    print(json.dumps({**result, **sizes}))


if __name__ == "__main__":
    main()
