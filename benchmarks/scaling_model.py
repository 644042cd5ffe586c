"""What a training costs by its samples and GPUs: the formulas and assumptions of scaling.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.config.models import Phase
from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner.gpus import Gpu, read_gpu
from zerotrain.launch.planner.inputs import FP32, PlannedLaunch, peak
from zerotrain.launch.planner.planner import RESERVE
from zerotrain.launch.planner.prediction import Mode, Prediction, predict
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.storage import ADAM_BYTES, DISK, cached_bytes, step_time
from zerotrain.launch.planner.trace_store import TracedModel
from zerotrain.launch.preset import read_preset

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks/measured/nvidia-h200.jsonl"
PRESETS = ("torch", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
SAME_SPEED = {
    "`torch`": "torch",
    "`zero1`, `zero2`": "zero1",
    "`zero3`": "zero3",
    "`zero2_offload`": "zero2_offload",
    "`zero3_offload`": "zero3_offload",
}
"""Presets by row, with one of each: without accumulation stages 1 and 2 send as much."""
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = (1, 8, 64, 512)
SAMPLES = (10**5, 10**6, 10**7, 10**8)
NETWORKS = (100, 400, 1600, 3200)
"""Gb/s of a machine."""
BASE = "stabilityai/stable-diffusion-xl-base-1.0"
BATCH, ACCUMULATION = 8, 8
INDEX_BYTES, DATASET_BYTES = 192, 189
"""Of a sample, in a cache's index and in a dataset: python benchmarks/loader.py."""
GB, GIB, HOUR = 10**9, 2**30, 3600


@cache
def measured() -> Mapping[str, Mapping[str, Any]]:
    """Return the measurements on one H200, by name."""
    lines = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines if line["ok"]}


@dataclass(frozen=True)
class Assumptions:
    """What the planner does not know; bandwidths are in bytes a second.

    Attributes:
        gpu: The GPU.
        compute: Seconds of a micro batch on it; None: as the planner estimates.
        start: Seconds from the start of a training to its first step, without what is read.
        gpus_per_machine: GPUs of a machine, which share its host memory and network.
        link: Of one GPU to the others of its machine, each way.
        network: Of a machine to the others, each way.
        disk: Of the folder that all machines share.
        host_memory: Of a machine's memory, for the optimizer on the CPU.
        images_per_second: Encoded by one GPU.
        failure_hours: GPU-hours between two failures.
    """

    gpu: Gpu
    compute: float | None
    start: float
    gpus_per_machine: int = 8
    link: float = 300e9
    network: float = 50e9
    disk: float = DISK
    host_memory: float = 0.0
    images_per_second: float = 0.0
    failure_hours: float = 54 * 24 * 16384 / 419

    def bandwidth(self, gpus: int) -> float:
        """Return that of a ring through so many GPUs, which crosses each machine's border once."""
        return self.link if gpus <= self.gpus_per_machine else min(self.link, self.network)


def default_assumptions() -> Assumptions:
    """Return those of the page: machines of eight H200s."""
    known = measured()
    return Assumptions(
        read_gpu("H200"),
        known["sdxl_torch_1024_8"]["seconds_per_step"],
        known["sdxl_zero2_offload_1024_8"]["seconds_to_first_step"],
        host_memory=1e9 * known["ceilings"]["host_add_gbps"],
        images_per_second=known["encode_1024"]["images_per_second"],
    )


def default_run() -> PlannedRun:
    """Return the run of the page: SDXL's whole U-Net at 1024 pixels in bf16."""
    raw = {
        "run": "scaling", "base": BASE, "data": {"images": "images"},
        "train": {"global_batch_size": BATCH, "gradient_checkpointing": True},
        "launch": {"mixed_precision": "bf16"},
        "phases": [{"name": "train", "until": 1}],
    }  # fmt: skip
    return parse_config(raw, "scaling.py")


@dataclass(frozen=True)
class Step:
    """Seconds of a step by kind of work."""

    compute: float
    communication: float
    other: float
    """Transfers between host and GPU, and the optimizer on the CPU."""

    @property
    def seconds(self) -> float:
        """Return the step's seconds if nothing overlaps."""
        return self.compute + self.communication + self.other

    @property
    def share(self) -> float:
        """Return the share of the time in which the GPU computes."""
        return self.compute / self.seconds


def sent_bytes(launch: PlannedLaunch, trained: int, every: int) -> int:
    """Return the bytes that each process passes on in a step if rings carry them.

    A ring sends a tensor once to reduce it to its owners, and once to gather it. Plain PyTorch: DDP
    reduces and gathers float32 gradients at the last micro batch. Stages 1 and 2 all-reduce each
    bucket of gradients (stage_1_and_2.py: average_tensor, use_multi_rank_bucket_allreduce), stage 2
    at every micro batch, and gather the new weights. Stage 3 reduces gradients to their owners at
    every micro batch, and gathers all weights in its forward pass, and in its backward pass those
    that stage3_max_live_parameters has no room for.

    Args:
        launch: The launch.
        trained: Number of trained parameters.
        every: Number of parameters.
    """
    if launch.engine == "torch":
        return 2 * FP32 * trained
    if launch.stage < 3:
        reduced = launch.accumulation if launch.stage == 2 else 1
        return launch.item * (2 * reduced + 1) * trained
    kept = min(every, int(launch.value("stage3_max_live_parameters")))
    return launch.item * launch.accumulation * (2 * every - kept + trained)


@dataclass(frozen=True)
class Model:
    """A phase on any number of GPUs."""

    run: PlannedRun
    phase: Phase
    traced: TracedModel
    given: Assumptions
    known: dict[tuple[str, int, int], Prediction] = field(default_factory=dict)
    """Predictions, which do not depend on what is given."""

    @property
    def mode(self) -> Mode:
        """Return how the phase keeps activations."""
        train, launch = self.phase.train, self.phase.launch
        if not train.gradient_checkpointing:
            return "plain"
        return "on_host" if launch.cpu_checkpointing else "checkpointed"

    def prediction(self, preset: str, gpus: int, accumulation: int = 1) -> Prediction:
        """Return the planner's prediction for a preset; the micro batch stays."""
        key = (preset, gpus, accumulation)
        if key not in self.known:
            self.known[key] = self._predict(*key)
        return self.known[key]

    def _predict(self, preset: str, gpus: int, accumulation: int) -> Prediction:
        launch = self.phase.launch.model_copy(update={"num_processes": gpus})
        whole = self.traced.batch * gpus * accumulation
        train = self.phase.train.model_copy(update={"global_batch_size": whole})
        phase = self.phase.model_copy(update={"launch": launch, "train": train})
        file = read_preset(ROOT / f"config/launch/{preset}.yaml")
        return predict(self.run, phase, file, self.traced, self.mode)

    def step(self, one: Prediction) -> Step:
        """Return the time of a step under a prediction's launch."""
        given, launch = self.given, one.launch
        gpus, trained = launch.processes, self.traced.model.trained_parameters
        here = min(gpus, given.gpus_per_machine)
        offloaded = launch.offload_optimizer != "none"
        own = trained // gpus if offloaded else 0
        planned = step_time(one.flops, given.gpu, one.traffic, own, here)
        compute = planned.compute
        if given.compute is not None:
            compute = launch.accumulation * given.compute
        sent = sent_bytes(launch, trained, self.traced.model.parameters)
        return Step(
            compute,
            sent * (gpus - 1) / gpus / given.bandwidth(gpus),
            planned.transfer + ADAM_BYTES * own * here / given.host_memory,
        )

    def images_per_second(self, one: Prediction) -> float:
        """Return the samples of all GPUs in a second."""
        samples = one.launch.processes * one.launch.accumulation * self.traced.batch
        return samples / self.step(one).seconds

    def host(self, one: Prediction) -> int:
        """Return the host memory of one machine in bytes, without that of libraries."""
        return min(one.launch.processes, self.given.gpus_per_machine) * peak(one.parts, "host")[0]

    def fits(self, one: Prediction) -> bool:
        """Return whether a GPU holds it."""
        return one.device + RESERVE <= self.given.gpu.memory("")

    def fastest(self, gpus: int) -> Prediction | None:
        """Return the fastest preset that fits; None if none does.

        Stage 3 and offload come after the others: the time of their many transfers of single
        layers is not counted.
        """
        for presets in (PRESETS[:3], PRESETS[3:]):
            found = [self.prediction(preset, gpus) for preset in presets]
            fitting = [one for one in found if self.fits(one) and not one.useless]
            if fitting:
                return min(fitting, key=lambda one: self.step(one).seconds)
        return None

    @property
    def state(self) -> int:
        """Return the bytes of a checkpoint, and of a training state."""
        return self.prediction("torch", 1).disk[1].bytes

    @property
    def weights(self) -> int:
        """Return the bytes of the exported weights."""
        return self.prediction("torch", 1).disk[2].bytes

    def start_seconds(self, gpus: int, disk: float) -> float:
        """Return those of a start: libraries and set-up, the base for each machine, the state."""
        machines = -(-gpus // self.given.gpus_per_machine)
        base = FP32 * self.traced.model.parameters
        return self.given.start + (machines * base + 2 * self.state) / disk

    def switch_seconds(self, gpus: int, disk: float) -> tuple[float, float, float]:
        """Return those of the last checkpoint, of the export, and of the start after it."""
        export = (2 * self.state + self.weights) / disk
        return self.state / disk, export, self.start_seconds(gpus, disk)

    def failures(self, gpus: int) -> tuple[float, float, float]:
        """Return hours between failures, the best save interval in seconds, and the lost share.

        Young, A first order approximation to the optimum checkpoint interval, 1974:
        sqrt(2 * seconds of a save * seconds between failures).
        """
        between = self.given.failure_hours * HOUR / gpus
        interval = math.sqrt(2 * self.state / self.given.disk * between)
        return between / HOUR, interval, self.lost(gpus, interval)

    def lost(self, gpus: int, interval: float) -> float:
        """Return the share that saves, repeated steps and new starts take.

        The first order of Daly, A higher order estimate of the optimum checkpoint interval for
        restart dumps, 2006: a save in each interval, half an interval and a start in each failure.
        """
        between = self.given.failure_hours * HOUR / gpus
        again = interval / 2 + self.start_seconds(gpus, self.given.disk)
        return self.state / self.given.disk / interval + again / between

    def encode_hours(self, samples: int, gpus: int) -> float:
        """Return those in which so many GPUs encode the images."""
        return samples / self.given.images_per_second / gpus / HOUR

    def sample_bytes(self) -> tuple[int, int]:
        """Return those of an image and of a caption in the cache."""
        shape = Shape.of(self.run, self.run.base, 1, self.phase.train.resolution)
        architecture, dtype = self.traced.model.architecture, self.run.resolved_cache.dtype
        return cached_bytes(architecture, shape, dtype, flips=self.run.data.random_flip)

    def bill(self, samples: int, gpus: int) -> tuple[str, float, float] | None:
        """Return preset, hours and GPU-hours of encoding and one epoch; None if nothing fits."""
        best = self.fastest(gpus)
        if best is None:
            return None
        rate = min(self.images_per_second(best), self.given.disk / sum(self.sample_bytes()))
        train = samples / rate / HOUR * (1 + self.failures(gpus)[2])
        train += self.start_seconds(gpus, self.given.disk) / HOUR
        hours = self.encode_hours(samples, gpus) + train
        return best.preset, hours, hours * gpus
