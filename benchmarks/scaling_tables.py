"""The tables of docs/scaling.md, as lines of Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from scaling_model import (
    ACCUMULATION,
    DATASET_BYTES,
    GB,
    GIB,
    HOUR,
    INDEX_BYTES,
    NETWORKS,
    PRESETS,
    SAME_SPEED,
    SAMPLES,
    SHOWN,
    Model,
    default_assumptions,
    measured,
)

from zerotrain.launch.planner.gpus import read_gpu
from zerotrain.launch.planner.storage import step_time


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
