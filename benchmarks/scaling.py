"""What a training costs by its samples and GPUs: the tables and plots of docs/scaling.md.

    python benchmarks/scaling.py            # from the project's root, in its environment
    python benchmarks/scaling.py --config config/cats.yaml --gpu "RTX 4090" --step-seconds 1.9 \
        --gpus-per-machine 4 --link 12e9 --network 1.2e9
    python benchmarks/scaling.py --write    # writes the tables and plots of the page

Memory, operations, transfers between host and GPU, and bytes on disks are the planner's. Seconds of
a micro batch, of a start and of encoding are those of measured/nvidia-h200.jsonl unless options
give others. What GPUs send one another is counted from the code of DeepSpeed 0.19 and DDP; rings
send it. See the page for each assumption.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from zerotrain.config.models import Phase
from zerotrain.config.read import parse_config, read_config
from zerotrain.config.stage_settings import PlannedRun
from zerotrain.launch.planner.cache_size import cached_bytes
from zerotrain.launch.planner.gpus import Gpu, read_gpu
from zerotrain.launch.planner.inputs import FP32, PlannedLaunch
from zerotrain.launch.planner.parts import peak
from zerotrain.launch.planner.planner import RESERVE
from zerotrain.launch.planner.prediction import Mode, Prediction, predict
from zerotrain.launch.planner.shape import Shape
from zerotrain.launch.planner.storage import ADAM_BYTES, DISK, step_time
from zerotrain.launch.planner.traced import TracedModel
from zerotrain.launch.planner.tracing import micro_batch, trace
from zerotrain.launch.preset import read_preset

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks/measured/nvidia-h200.jsonl"
PAGE, IMAGES = ROOT / "docs/scaling.md", ROOT / "docs/images"
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
COLOURS = ("#1f4e8c", "#c2571a", "#3a7d44", "#7b4fa3", "#777777")


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
        architecture, dtype = self.traced.model.architecture, self.run.cache.dtype
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


def number(value: float, digits: int = 2) -> str:
    """Format a number with so many significant digits, without an exponent."""
    if value == 0:
        return "0"
    after = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, after):,.{max(0, after)}f}"


def span(seconds: float) -> str:
    """Format a time in its unit."""
    for size, unit in ((24 * HOUR, "d"), (HOUR, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds)} s"


def share(value: float) -> str:
    """Format a share."""
    return f"{number(100 * value)} %"


def of_gpus(gpus: int) -> str:
    """Format a number of GPUs."""
    return f"{gpus} GPU{'s' * (gpus > 1)}"


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table of a page."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def assumptions_table(model: Model) -> list[str]:
    """Return each assumption, where it comes from, and the option that changes it."""
    given, usual = model.given, default_assumptions()
    step = "planned" if given.compute is None else f"{number(given.compute, 3)} s"
    body = (
        ("micro batch on one GPU", "compute", f"{model.traced.batch} samples, {step}",
         "measured, `torch`", "`--step-seconds`"),
        ("start without reading", "start", f"{number(given.start, 3)} s",
         "measured, `zero2_offload`", ""),
        ("encoding", "images_per_second", f"{number(given.images_per_second, 3)} images/s a GPU",
         "measured, fp32", "`--images-per-second`"),
        ("host memory", "host_memory", f"{number(given.host_memory / GB, 3)} GB/s a machine",
         "measured", "`--host-memory`"),
        ("GPUs of a machine", "gpus_per_machine", str(given.gpus_per_machine), "assumed",
         "`--gpus-per-machine`"),
        ("between GPUs of a machine", "link", f"{number(given.link / GB)} GB/s each way",
         "assumed: two thirds of NVLink 4", "`--link`"),
        ("between machines", "network", f"{number(given.network / GB)} GB/s each way",
         "assumed: one port of 400 Gb/s a machine", "`--network`"),
        ("shared folder", "disk", f"{number(given.disk / GB)} GB/s for all",
         "assumed: the planner's NVMe disk", "`--disk`"),
        ("failures", "failure_hours", f"one in {number(given.failure_hours)} GPU-hours",
         "[Llama 3](https://arxiv.org/abs/2407.21783): 419 in 54 days of 16,384 GPUs",
         "`--failure-hours`"),
    )  # fmt: skip
    cells = [
        (what, value, source if getattr(given, name) == getattr(usual, name) else "given", option)
        for what, name, value, source, option in body
    ]
    return rows(("what", "value", "source", "option"), cells)


def speed_against_measured(model: Model) -> list[str]:
    """Compare the planner's time of a step with each measured training."""
    body = []
    for name, line in measured().items():
        if "case" not in line:
            continue
        case = line["case"]
        planned = replace(
            model.prediction(case["preset"], 1),
            flops=1e12 * measured()[f"{name}:planner"]["tflop_per_step"],
        )
        own = model.traced.model.trained_parameters
        own *= planned.launch.offload_optimizer != "none"
        found = step_time(planned.flops, read_gpu("H200"), planned.traffic, own, 1).seconds
        took = line["seconds_per_step"]
        body.append(
            (f"`{case['preset']}`", f"{case['size']} px", str(case["batch"]), number(found, 3),
             number(took, 3), number(found / took))
        )  # fmt: skip
    head = ("launch", "size", "batch", "planned, s", "measured, s", "planned / measured")
    return rows(head, body)


def memory_table(model: Model) -> list[str]:
    """Return GiB of a GPU by preset, and of a machine's host."""
    body = []
    for preset in PRESETS:
        found = [model.prediction(preset, gpus) for gpus in SHOWN]
        cells = [
            f"{one.device / GIB:.1f}"
            + (f" ({host / GIB:.0f})" if (host := model.host(one)) > 4 * GIB else "")
            for one in found
        ]
        body.append((f"`{preset}`", *cells))
    return rows(("GiB of a GPU (of a host)", *map(of_gpus, SHOWN)), body)


def speed_table(model: Model) -> list[str]:
    """Return images a second, the share of the time in which GPUs compute, and what is read."""
    body = []
    for label, preset in SAME_SPEED.items():
        cells = []
        for gpus in SHOWN:
            one = model.prediction(preset, gpus)
            cells.append(f"{number(model.images_per_second(one))} ({share(model.step(one).share)})")
        body.append((label, *cells))
    read = [model.images_per_second(model.prediction("zero1", gpus)) for gpus in SHOWN]
    sizes = [f"{number(rate * sum(model.sample_bytes()) / GB)} GB/s" for rate in read]
    body.append(("cache read under `zero1`", *sizes))
    return rows(("images/s (computing)", *map(of_gpus, SHOWN)), body)


def network_model(model: Model, gigabits: float) -> Model:
    """Return the model with another network between machines."""
    return replace(model, given=replace(model.given, network=gigabits * GB / 8))


LINES = (
    ("torch", 1), ("zero1", 1), ("zero3", 1), ("torch", ACCUMULATION), ("zero1", ACCUMULATION),
    ("zero2", ACCUMULATION), ("zero3", ACCUMULATION),
)  # fmt: skip
"""Preset and accumulated micro batches of the table of networks."""


def network_table(model: Model, gpus: int = 64) -> list[str]:
    """Return the share of the time in which GPUs compute, by network."""
    body = []
    for preset, accumulation in LINES:
        one = model.prediction(preset, gpus, accumulation)
        cells = [share(network_model(model, net).step(one).share) for net in NETWORKS]
        name = "`zero1`, `zero2`" if (preset, accumulation) == ("zero1", 1) else f"`{preset}`"
        body.append((name, str(accumulation), *cells))
    head = ("launch", "micro batches", *(f"{net:,} Gb/s" for net in NETWORKS))
    return rows(head, body)


def cache_table(model: Model) -> list[str]:
    """Return bytes of a cache, its index and its dataset, and the hours of encoding."""
    body = []
    image, text = model.sample_bytes()
    for samples in SAMPLES:
        hours = [span(HOUR * model.encode_hours(samples, gpus)) for gpus in SHOWN]
        sizes = [
            f"{number(samples * (image + text) / GB)} GB",
            f"{number(samples * (INDEX_BYTES + DATASET_BYTES) / GB)} GB",
        ]
        body.append((f"{samples:,}", *sizes, *hours))
    head = ("samples", "cache", "indices", *map(of_gpus, SHOWN))
    return rows(head, body)


def checkpoint_table(model: Model) -> list[str]:
    """Return seconds of a save, an export, a start and a switch by bandwidth of the disk."""
    body = []
    for gpus in (1, 64, 512):
        for disk in (1, 3, 10, 100):
            if gpus == 1 and disk > 10:
                continue
            save, export, start = model.switch_seconds(gpus, disk * GB)
            whole = save + export + start
            body.append(
                (f"{gpus}", f"{disk} GB/s", *map(span, (save, export, start, whole)),
                 number(gpus * (save + start) / HOUR))
            )  # fmt: skip
    head = ("GPUs", "disk", "save", "export", "start", "switch", "GPU-hours")
    return rows(head, body)


def failure_table(model: Model) -> list[str]:
    """Return the best save interval, what is lost with it, and with 10 times of it."""
    body = []
    for gpus in SHOWN:
        between, interval, lost = model.failures(gpus)
        body.append(
            (f"{gpus}", span(HOUR * between), span(interval), share(lost),
             share(model.lost(gpus, 10 * interval)))
        )  # fmt: skip
    head = ("GPUs", "between failures", "best `save_every`", "lost", "lost with 10 times of it")
    return rows(head, body)


def bill_table(model: Model) -> list[str]:
    """Return wall time and GPU-hours of encoding and one epoch."""
    body = []
    for samples in SAMPLES:
        cells = []
        for gpus in SHOWN:
            found = model.bill(samples, gpus)
            cells.append(
                f"{span(HOUR * found[1])} ({number(found[2])})" if found else "does not fit"
            )
        body.append((f"{samples:,}", *cells))
    best = [f"{of_gpus(gpus)}: {made.preset if (made := model.fastest(gpus)) else 'none'}"
            for gpus in SHOWN]  # fmt: skip
    return rows(("samples", *best), body)


TABLES: dict[str, Callable[[Model], list[str]]] = {
    "assumptions": assumptions_table,
    "bill": bill_table,
    "planned": speed_against_measured,
    "memory": memory_table,
    "speed": speed_table,
    "network": network_table,
    "cache": cache_table,
    "checkpoint": checkpoint_table,
    "failures": failure_table,
}


def marks(name: str) -> tuple[str, str]:
    """Return what encloses a table in the page."""
    return f"<!-- {name}: benchmarks/scaling.py -->\n", "\n<!-- end -->"


def in_page(text: str, name: str) -> list[str]:
    """Return the lines of a table in the page."""
    begin, end = marks(name)
    return text.partition(begin)[2].partition(end)[0].splitlines()


def write_page(model: Model) -> None:
    """Write the tables between their marks in the page, and the plots."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        begin, end = marks(name)
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = before + begin + "\n".join(table(model)) + end + after
    PAGE.write_text(text, encoding="utf-8")
    plot(model)


def plot(model: Model) -> None:
    """Draw the plots of the page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    def figure(name: str, panels: int, draw: Callable[[Sequence[Any]], None]) -> None:
        made, axes = pyplot.subplots(
            1, panels, figsize=(4.6 * panels, 3.4), dpi=110, layout="constrained", squeeze=False
        )
        draw(axes[0])
        for one in axes[0]:
            one.grid(color="#dddddd", linewidth=0.6)
            one.spines[["top", "right"]].set_visible(False)
            one.legend(frameon=False, fontsize=8)
        made.savefig(IMAGES / f"scaling-{name}.png", metadata={"Software": None})
        pyplot.close(made)

    def by_gpus(axis: Any, label: str) -> None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(GPUS, [str(gpus) for gpus in GPUS], fontsize=8)
        axis.set_xlabel("GPUs")
        axis.set_title(label, fontsize=10, loc="left")

    def memory(axes: Sequence[Any]) -> None:
        for preset, colour in zip(PRESETS[:5], COLOURS, strict=True):
            found = [model.prediction(preset, gpus).device / GIB for gpus in GPUS]
            axes[0].plot(GPUS, found, color=colour, marker="o", markersize=3, label=preset)
        by_gpus(axes[0], "GiB of each GPU")
        axes[0].set_ylim(0, 100)
        for gib in (24, 80):
            axes[0].axhline(gib, color="#999999", linestyle=":", linewidth=1)
            axes[0].annotate(f"{gib} GB", (512, gib), fontsize=8, ha="right", va="bottom")

    def speed(axes: Sequence[Any]) -> None:
        alone = model.images_per_second(model.prediction("torch", 1))
        axes[0].plot(GPUS, [gpus * alone for gpus in GPUS], color="#999999", linestyle=":",
                     label="as fast as one GPU each")  # fmt: skip
        for net, colour in zip((3200, 400, 100), COLOURS, strict=False):
            known = network_model(model, net)
            found = [known.images_per_second(known.prediction("zero1", gpus)) for gpus in GPUS]
            axes[0].plot(GPUS, found, color=colour, marker="o", markersize=3,
                         label=f"zero1, {net:,} Gb/s")  # fmt: skip
        axes[0].plot([1], [alone], "k*", markersize=9, label="measured")
        axes[0].set_yscale("log")
        by_gpus(axes[0], "images a second")
        nets = [25 * 2 ** (step / 2) for step in range(15)]
        for (preset, accumulation), colour in zip(
            (("torch", 1), ("zero1", 1), ("zero1", ACCUMULATION), ("zero2", ACCUMULATION)),
            COLOURS, strict=False,
        ):  # fmt: skip
            one = model.prediction(preset, 64, accumulation)
            found = [network_model(model, net).step(one).share for net in nets]
            label = preset + f", {accumulation} micro batches" * (accumulation > 1)
            axes[1].plot(nets, found, color=colour, label=label)
        axes[1].set_xscale("log")
        axes[1].set_xticks(NETWORKS, [f"{net:,}" for net in NETWORKS])
        axes[1].minorticks_off()
        axes[1].set_xlabel("Gb/s between machines of 8 GPUs")
        axes[1].set_ylim(0, 1)
        axes[1].yaxis.set_major_formatter(PercentFormatter(1))
        axes[1].set_title("share of the time in which 64 GPUs compute", fontsize=10, loc="left")

    def cached(axes: Sequence[Any]) -> None:
        image, text = model.sample_bytes()
        counts = [10 ** (5 + step / 4) for step in range(13)]
        for gpus, colour in zip(SHOWN, COLOURS, strict=False):
            hours = [model.encode_hours(int(samples), gpus) for samples in counts]
            axes[0].plot(counts, hours, color=colour, label=of_gpus(gpus))
        axes[0].set_title("hours of encoding", fontsize=10, loc="left")
        for label, each, colour in (
            ("latents and captions", image + text, COLOURS[0]),
            ("latents, one caption", image, COLOURS[1]),
            ("index and dataset", INDEX_BYTES + DATASET_BYTES, COLOURS[2]),
        ):
            sizes = [samples * each / GB for samples in counts]
            axes[1].plot(counts, sizes, color=colour, label=label)
        axes[1].set_title("GB", fontsize=10, loc="left")
        for axis in axes:
            axis.loglog()
            axis.set_xlabel("samples")

    def failing(axes: Sequence[Any]) -> None:
        minutes = [2 ** (step / 4) for step in range(45)]
        for gpus, colour in zip((8, 64, 512), COLOURS, strict=False):
            lost = [model.lost(gpus, 60 * one) for one in minutes]
            axes[0].plot(minutes, lost, color=colour, label=f"{gpus} GPUs")
            _, interval, least = model.failures(gpus)
            axes[0].plot([interval / 60], [least], "o", color=colour, markersize=5)
        axes[0].loglog()
        axes[0].yaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_xlabel("minutes between saves")
        axes[0].set_title("time lost to saves and failures", fontsize=10, loc="left")

    figure("memory", 1, memory)
    figure("speed", 2, speed)
    figure("cache", 2, cached)
    figure("failures", 1, failing)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a run's configuration; default: SDXL")
    parser.add_argument("--phase", help="one of its phases; default: the first")
    parser.add_argument("--gpu", help="as 'RTX 4090'; default: H200")
    parser.add_argument("--step-seconds", type=float, help="of a micro batch on one GPU")
    parser.add_argument("--gpus-per-machine", type=int)
    parser.add_argument("--link", type=float, help="bytes/s of a GPU within its machine")
    parser.add_argument("--network", type=float, help="bytes/s of a machine to the others")
    parser.add_argument("--disk", type=float, help="bytes/s of the shared folder")
    parser.add_argument("--host-memory", type=float, help="bytes/s of a machine's memory")
    parser.add_argument("--images-per-second", type=float, help="encoded by one GPU")
    parser.add_argument("--failure-hours", type=float, help="GPU-hours between two failures")
    parser.add_argument("--write", action="store_true", help="write the page and its plots")
    options = parser.parse_args()
    names = ("gpus_per_machine", "link", "network", "disk", "host_memory", "images_per_second",
             "failure_hours")  # fmt: skip
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    given = replace(default_assumptions(), **values)
    if options.gpu or options.config or options.step_seconds:
        gpu = read_gpu(options.gpu) if options.gpu else given.gpu
        given = replace(given, gpu=gpu, compute=options.step_seconds)
    run: PlannedRun = read_config(options.config) if options.config else default_run()
    phase = run.phase(options.phase or run.phases[0].name)
    if run.is_text:
        parser.error("--config: a run of images is needed: encoding is a part of the tables")
    model = Model(run, phase, trace(run, phase, None), given)
    if options.write:
        write_page(model)
        return
    print(f"{run.family} {run.base}, micro batch {micro_batch(phase)}, {given.gpu.name}")
    for name, table in TABLES.items():
        if name == "planned" and options.config:
            continue
        print("", name, *table(model), sep="\n")


if __name__ == "__main__":
    main()
