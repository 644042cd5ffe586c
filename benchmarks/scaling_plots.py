"""The plots of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scaling_model import (
    ACCUMULATION,
    DATASET_BYTES,
    GB,
    GIB,
    GPUS,
    INDEX_BYTES,
    NETWORKS,
    PRESETS,
    ROOT,
    SHOWN,
    Model,
)
from scaling_tables import network_model, of_gpus

IMAGES = ROOT / "docs/images"
COLOURS = ("#1f4e8c", "#c2571a", "#3a7d44", "#7b4fa3", "#777777")


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
