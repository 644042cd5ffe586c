"""The measurements of gpu.py, each run in a process of its own.

A training runs in zerotrain.training.rank, as a user's. It ends in the middle of a step, where the
loop asks whether to stop, and so writes no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_inputs import BASES, NANO_SIZE, SEED, Training, draw_weights, prepare, raw_config
from gpu_processes import fork

MIB = 2**20
RESULT = "result.json"
"""File in which a process leaves what it has measured."""
NANO_STEPS = 2
FALLBACK = "GPU_BENCHMARK_WITHOUT_CPU_ADAM"


class Watch:
    """Most memory of host and device, looked at every 20 ms."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self._first = available()
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def note(self) -> None:
        """Look once."""
        now = {"host_available_fell_by": self._first - available(), "host_anonymous": anonymous()}
        if cuda := on_gpu():
            free, total = cuda.mem_get_info()
            now["device_driver"] = total - free
        for key, value in now.items():
            self.most[key] = max(self.most.get(key, 0), value)

    def _run(self) -> None:
        while not self._done.wait(0.02):
            self.note()

    def close(self) -> dict[str, float]:
        """Return the most of each in MiB, with the peak resident memory of the process."""
        self.note()
        self._done.set()
        found = {f"{key}_mib": round(value / MIB, 1) for key, value in self.most.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {**found, "host_rss_peak_mib": round(peak, 1)}


def available() -> int:
    """Memory that the host can still give, in bytes."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def anonymous() -> int:
    """Anonymous and shared resident memory of this process in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return sum(int(text.partition(key)[2].split()[0]) for key in ("RssAnon:", "RssShmem:")) * 1024


def on_gpu() -> Any:
    """Return torch.cuda once this process uses a GPU; else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def device_peaks() -> dict[str, float]:
    """Return the peaks of torch's allocator since the last call in MiB, and reset them."""
    cuda = on_gpu()
    if cuda is None:
        return {"allocated_mib": 0.0, "reserved_mib": 0.0}
    cuda.synchronize()
    found = {
        "allocated_mib": round(cuda.max_memory_allocated() / MIB, 1),
        "reserved_mib": round(cuda.max_memory_reserved() / MIB, 1),
    }
    cuda.reset_peak_memory_stats()
    return found


CONTINUED = ("phase0", "phase1")
"""Phases of a switch whose state the next one starts from."""


class MeasuredError(Exception):
    """Ends a training that has been measured."""


class Clock:
    """In the place of the question whether to stop, which training asks once a step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.times: list[float] = []

    def __call__(self) -> bool:
        if cuda := on_gpu():
            cuda.synchronize()
        self.times.append(time.perf_counter())
        if len(self.times) > self._steps:
            raise MeasuredError
        return False

    def seconds(self) -> list[float]:
        """Return the seconds of each step after the first."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def measure_training(folder: Path, case: Training, nano: bool) -> dict[str, Any]:
    """Train some steps; return time and memory."""
    steps = NANO_STEPS if nano else case.steps
    began = time.perf_counter()
    adapt_to_machine()
    phase, _ = prepare(folder, case, nano, steps + 5)
    from zerotrain.artifact.layout import LOG
    from zerotrain.training import batches, rank

    vars(batches).update(case.reading)
    set_up, setup_seconds, setup_peaks, parameters = vars(rank)["set_up_phase"], 0.0, {}, [0, 0]

    def timed_set_up(*words: Any) -> Any:
        nonlocal setup_seconds, setup_peaks
        start = time.perf_counter()
        found = set_up(*words)
        setup_seconds, setup_peaks = time.perf_counter() - start, device_peaks()
        setup_peaks["driver_mib"] = round(watch.most.pop("device_driver", 0) / MIB, 1)
        for parameter in found.model.parameters():
            count = getattr(parameter, "ds_numel", parameter.numel())
            parameters[0] += count
            parameters[1] += count * parameter.requires_grad
        return found

    clock, watch = Clock(steps), Watch()
    vars(rank)["set_up_phase"] = timed_set_up
    vars(rank)["StopRequest"] = lambda progress: clock
    progress = folder / "progress"
    progress.mkdir(exist_ok=True)
    with contextlib.suppress(MeasuredError):
        rank.run(folder / "launch", folder / "base", folder / "cache", progress)
    peaks = device_peaks()
    lines = [json.loads(line) for line in (progress / LOG).read_text().splitlines()]
    parts = {
        key: round(statistics.median([line[key] for line in lines[1:] or lines]), 4)
        for key in lines[-1]
        if key.startswith("seconds_")
    }
    seconds = clock.seconds()
    return {
        "case": {**vars(case), "nano": nano},
        "full_determinism": phase.launch.full_determinism,
        "parameters": parameters[0],
        "trained_parameters": parameters[1],
        "seconds_per_step": round(statistics.median(seconds[1:] or seconds), 4),
        "seconds_of_steps": [round(one, 4) for one in seconds],
        "seconds_of_parts": parts,
        "seconds_to_first_step": round(clock.times[0] - began, 2),
        "seconds_of_set_up": round(setup_seconds, 2),
        "losses": [line["loss"] for line in lines if "loss" in line],
        "device_setup": setup_peaks,
        "device": peaks,
        **watch.close(),
    }


def adapt_to_machine() -> None:
    """Train with torch's optimizer where DeepSpeed's is not compiled, so that the rest is measured.

    A line with `optimizer` tells of it.
    """
    if os.environ.get(FALLBACK):
        from zerotrain.config import optimizers

        optimizers.is_plain_adam = lambda *_: False


def train_to_end(
    folder: Path, inputs: Path, span: tuple[int, int], start: Path | None, continues: bool
) -> dict[str, Any]:
    """Train a phase between two steps; write its state; return its losses and times."""
    from memory import publish_launch

    from zerotrain.artifact.layout import LOG
    from zerotrain.export.export import export
    from zerotrain.launch.files import read_run_yaml
    from zerotrain.state.checkpoint import Checkpoint
    from zerotrain.training import rank
    from zerotrain.training.checkpointing import progress_folder

    phase = read_run_yaml(inputs / "launch" / "run.yaml").with_values(
        start_step=span[0], until_step=span[1], keep=1, lr_scheduler="constant"
    )
    publish_launch(folder / "launch", phase)
    progress = folder / "progress"
    progress.mkdir()
    began = time.perf_counter()
    rank.run(folder / "launch", inputs / "base", inputs / "cache", progress, start=start)
    trained = time.perf_counter()
    checkpoint = progress_folder.step_folder(progress, span[1])
    state = folder / "state"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    if continues:
        export(Checkpoint(checkpoint), checkpoint, None, state)
    lines = [json.loads(line) for line in (progress / LOG).read_text().splitlines()]
    return {
        "losses": {line["step"]: line["loss"] for line in lines if "loss" in line},
        "seconds_of_training": round(trained - began, 2),
        "seconds_of_state": round(time.perf_counter() - trained, 2),
        "checkpoint_mib": round(size / MIB, 1),
        "device": device_peaks(),
    }


def measure_ceilings(folder: Path, nano: bool) -> dict[str, Any]:
    """Measure what the card, its link and the host's memory can do."""
    import torch

    from zerotrain.machine.device import process_device

    device = process_device()
    gpu = device.type == "cuda"
    sync: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None

    def seconds(work: Callable[[], Any], rounds: int = 5) -> float:
        found = []
        for _ in range(rounds + 1):
            sync()
            began = time.perf_counter()
            work()
            sync()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    side = 256 if nano else 8192
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    twin = torch.randn_like(matrix)
    result: dict[str, Any] = {
        "matmul_bf16_tflops": round(2 * side**3 / seconds(lambda: matrix @ twin, 20) / 1e12, 2)
    }
    matrix = twin = torch.empty(0)
    count = 2**20 if nano else 2**30
    on_device = torch.zeros(count, dtype=torch.uint8, device=device)
    for name, pinned in (("pageable", False), ("pinned", True)):
        host = torch.ones(count, dtype=torch.uint8, pin_memory=pinned and gpu)
        for key, work in (
            ("h2d", lambda host=host: on_device.copy_(host, non_blocking=True)),
            ("d2h", lambda host=host: host.copy_(on_device, non_blocking=True)),
        ):
            result[f"{key}_{name}_gbps"] = round(count / seconds(work, 3) / 1e9, 2)
    twin = torch.zeros_like(on_device)
    result["device_copy_gbps"] = round(2 * count / seconds(lambda: twin.copy_(on_device)) / 1e9, 1)
    one, two = (torch.ones(count // 4) for _ in range(2))
    result["host_copy_gbps"] = round(2 * count / seconds(lambda: one.copy_(two)) / 1e9, 2)
    result["host_add_gbps"] = round(3 * count / seconds(lambda: one.add_(two)) / 1e9, 2)
    block = bytes(2**20) * (4 if nano else 1024)
    began = time.perf_counter()
    with (folder / "disk").open("wb") as stream:
        stream.write(block)
        os.fsync(stream.fileno())
    result["disk_write_gbps"] = round(len(block) / (time.perf_counter() - began) / 1e9, 2)
    (folder / "disk").unlink()
    return {**result, **machine()}


def machine() -> dict[str, Any]:
    """Describe the machine."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    for name in ("torch", "deepspeed", "diffusers", "transformers", "accelerate", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_mib": round(torch.cuda.mem_get_info()[1] / MIB),
        }
    found["host_mib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB)
    return found


def measure_encoding(folder: Path, nano: bool, batch_size: int | None = None) -> dict[str, Any]:
    """Encode images to latents as cache_latents does, by SDXL's autoencoder; return the rate.

    `batch_size` is cache.batch_size; None: the default.
    """
    import numpy as np
    import torch
    from PIL import Image

    from zerotrain import artifact
    from zerotrain.cache.encoding import Encoding
    from zerotrain.config.read import parse_config
    from zerotrain.config.stage_settings import CacheSettings
    from zerotrain.data.buckets import choose_source_views
    from zerotrain.data.dataset import read_dataset
    from zerotrain.launch.planner.architecture import find_architecture
    from zerotrain.machine.device import process_device
    from zerotrain.models.families import load_family
    from zerotrain.models.families.diffusion import DiffusionFamily
    from zerotrain.stages.prepare_dataset import prepare_dataset

    count, side = (4, NANO_SIZE) if nano else (96, 1024)
    images = folder / "images"
    images.mkdir()
    draw = np.random.default_rng(SEED)
    for number in range(count):
        small = draw.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side)).save(images / f"{number:03d}.jpg")
        (images / f"{number:03d}.txt").write_text(f"picture {number}")
    case = Training("sdxl", "torch", side, 1)
    raw = raw_config(case, nano, 10)
    raw["data"] = {"images": str(images), "num_workers": os.cpu_count()}
    raw["cache"] = {"dtype": "fp32", **({"batch_size": batch_size} if batch_size else {})}
    config = parse_config(raw, "gpu.py")
    prepare_dataset(config.data, folder / "dataset")
    base = "nano" if nano else BASES["sdxl"]
    with artifact.publish(folder / "base", "base") as draft:
        draft.content = {"parts": {"vae": "1", "text_encoder": "1"}}
    from diffusers import AutoencoderKL

    part = find_architecture("sdxl", base, side).parts["vae"]
    with torch.device("meta"):
        empty = AutoencoderKL(**{k: v for k, v in part.config.items() if not k.startswith("_")})
    vae = draw_weights(empty).eval().to(process_device())
    family = load_family("sdxl")
    assert isinstance(family, DiffusionFamily)
    module = sys.modules[type(family).__module__]

    class Drawn(module.SdxlEncoders):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            pass

        vae = property(lambda self: made)

    made = vae
    family.load_encoders = lambda *words, **named: Drawn()  # type: ignore[method-assign]
    samples = read_dataset(folder / "dataset")
    encoding = Encoding(
        CacheSettings.of(config), side, family, artifact.read(folder / "base", "base")
    )
    views = choose_source_views(
        samples.samples, side, config.data.aspect_buckets, config.data.resolutions
    )
    keys = [
        encoding.entry(sample, view).latents
        for sample, view in zip(samples.samples, views, strict=True)
    ]
    watch = Watch()
    batch = encoding._batch_size((side, side))
    times = []
    for _ in encoding.latents(keys):
        times.append(time.perf_counter())
    # A batch's latents are given together: the first batch warms up.
    warm = times[batch:] or times
    rate = (len(warm) - batch) / (warm[-1] - warm[0]) if len(warm) > batch else None
    return {
        "images": count,
        "side": side,
        "batch": batch,
        "dtype": "fp32",
        "images_per_second": round(rate, 3) if rate else None,
        "device": device_peaks(),
        **watch.close(),
    }


def measure_switch(folder: Path, nano: bool, change: dict[str, Any]) -> dict[str, Any]:
    """Train torch, zero2_offload, torch; compare with plain PyTorch throughout.

    Each phase is a process of its own, as in a user's run.
    """
    found: dict[str, Any] = {}
    third = 2 if nano else 4
    route = [
        ("torch", 0, third),
        ("zero2_offload", third, 2 * third),
        ("torch", 2 * third, 3 * third),
    ]
    words: list[tuple[str, str, int, int, str | None]] = [("plain", "torch", 0, 3 * third, None)]
    start = None
    for number, (preset, begin, end) in enumerate(route):
        words.append((f"phase{number}", preset, begin, end, start))
        start = f"phase{number}/state"
    for name, preset, begin, end, before in words:
        fork(run_phase, folder, name, preset, (begin, end), before, nano, change)
        found[name] = json.loads((folder / name / RESULT).read_text(encoding="utf-8"))
        if before:
            shutil.rmtree(folder / before)
        shutil.rmtree(folder / name / "progress")
    whole = found["plain"]["losses"]
    parts = {k: v for n in ("phase0", "phase1", "phase2") for k, v in found[n]["losses"].items()}
    return {
        "phases": found,
        "precision": "no",
        "change": change,
        "parameters": found["plain"]["parameters"],
        "largest_loss_deviation": max(abs(whole[step] - parts[step]) for step in whole),
        "steps_compared": len(whole),
    }


def run_phase(
    folder: Path,
    name: str,
    preset: str,
    span: tuple[int, int],
    before: str | None,
    nano: bool,
    change: dict[str, Any],
) -> None:
    """Run one phase of the switch in this process; write its result."""
    adapt_to_machine()
    case = Training("sdxl", preset, 256, 2, precision="no", checkpointing=False, change=change)
    inputs = folder / "inputs"
    shutil.rmtree(inputs / "launch", ignore_errors=True)
    _, family = prepare(inputs, case, nano, span[1])
    (folder / name).mkdir(exist_ok=True)
    start = folder / before if before else None
    found = train_to_end(folder / name, inputs, span, start, name in CONTINUED)
    shapes = family.empty_model(inputs / "base").parameters()
    found["parameters"] = sum(one.numel() for one in shapes)
    (folder / name / RESULT).write_text(json.dumps(found), encoding="utf-8")
