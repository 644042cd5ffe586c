"""Encoding of photographs, against a loop that decodes, encodes and saves one image after another.

    python benchmarks/cache.py [--images 128] [--resolution 512] [--encoder autoencoder]

The photographs are JPEGs of 1.6 megapixels, of structure and noise. In turns, each into a new
folder:

    naive      one image a call, one file an image, in one thread
    1, 4       the stage's encoding and shards, with data.num_workers 1 and 4

The autoencoder has SDXL's blocks with fewer channels and drawn weights, and is on the GPU. Without
a GPU, its place is taken by an encoder that needs no CPU, as a GPU: it waits, for each image as
long as the naive loop takes to decode one, once warm. `--encoder autoencoder` computes on the CPU.

With that encoder, best is a ratio of 2N / (N + B / cores), for N images in batches of B: nothing is
encoded before the first batch is decoded. For 128 images on two cores this is 1.97 at 512 pixels,
of which a batch has 4, and 1.78 at 128, of which it has 32.

Idle is the share of time, from the first batch to the end of the last, in which the encoder does
not compute: it waits for pixels or for the disk. On a CPU the threads that decode take their time
from the encoder, which is then slower and not idle: nothing is gained but by another size of
batches. The last line is JSON: medians and ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file

from zerotrain import artifact
from zerotrain.cache.encoding import Encoding
from zerotrain.cache.layout import LATENTS
from zerotrain.cache.writer import StoredShards, write_series
from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.data.buckets import centre_crop, choose_views, crop_and_resize, to_pixels
from zerotrain.data.dataset import read_dataset
from zerotrain.data.decode import decode
from zerotrain.machine.device import device_type
from zerotrain.stages.prepare_dataset import prepare_dataset

REPEATS, WARM_UP = 5, 2
WORKERS = (1, 4)
GOAL_RATIO, GOAL_IDLE = 1.8, 0.05
PHOTOGRAPH = (1536, 1024)
SHARD_SIZE = 256 * 1024
"""Of four images at 512 pixels, so that shards are written while images are encoded."""
CHANNELS = (32, 64, 64, 64)


@dataclass
class Timed:
    """A family of which only images are encoded, and whose calls are timed."""

    name = "sdxl"
    image_parts = ("vae",)
    text_parts = ()

    encode: Callable[[torch.Tensor], torch.Tensor]
    calls: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each call, in seconds."""

    def load_encoders(self, *given: Any, **named: Any) -> Timed:
        """Return itself."""
        return self

    @torch.inference_mode()
    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels [n, 3, H, W] to latents on the CPU."""
        begin = time.perf_counter()
        found = self.encode(pixels)
        self.calls.append((begin, time.perf_counter()))
        return found

    def idle(self) -> float:
        """Return the share of time, from the first call to the last, without a call."""
        whole = self.calls[-1][1] - self.calls[0][0]
        return 1 - sum(end - begin for begin, end in self.calls) / whole


def autoencoder() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an encoder of SDXL's blocks, on the GPU if there is one."""
    torch.manual_seed(0)
    device = device_type()
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * len(CHANNELS),
        up_block_types=["UpDecoderBlock2D"] * len(CHANNELS),
        block_out_channels=CHANNELS,
        layers_per_block=2,
        latent_channels=4,
    ).to(device)
    return lambda pixels: model.encode(pixels.to(device)).latent_dist.mode().cpu()


def stand_in(seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an encoder that takes so many seconds an image, and no CPU.

    numpy copies in this thread; torch would wait for a thread of its own, behind those that decode.
    """

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds * len(pixels))
        return torch.from_numpy(pixels.numpy()[:, :, ::8, ::8].copy())

    return encode


def read_pixels(path: Path, resolution: int) -> torch.Tensor:
    """Decode an image and cut its centre square."""
    image = decode(path.read_bytes())
    return torch.from_numpy(to_pixels(crop_and_resize(image, centre_crop(image.size), resolution)))


def write_photographs(folder: Path, count: int) -> None:
    """Write JPEGs of PHOTOGRAPH's size: coloured structure with a sensor's noise."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    width, height = PHOTOGRAPH
    for number in range(count):
        structure = draw.integers(0, 256, (24, 36, 3), dtype=np.uint8)
        large = Image.fromarray(structure).resize(PHOTOGRAPH, Image.Resampling.BICUBIC)
        pixels = np.asarray(large) + draw.normal(0, 8, (height, width, 3))
        photograph = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        photograph.save(folder / f"{number:04d}.jpg", quality=90)


def encode_naively(images: Path, resolution: int, family: Timed, output: Path) -> float:
    """Encode one image after another into a file each; return the median seconds of a decode."""
    output.mkdir()
    took = []
    for path in sorted(images.iterdir()):
        start = time.perf_counter()
        pixels = read_pixels(path, resolution)
        took.append(time.perf_counter() - start)
        save_file({LATENTS: family.encode_images(pixels[None])[0]}, output / f"{path.stem}.latents")
    return statistics.median(took)


def encode(
    settings: CacheSettings, resolution: int, family: Timed, folder: Path, output: Path
) -> None:
    """Encode as the stage does, into shards."""
    found = read_dataset(folder / "dataset").samples
    base = artifact.read(folder / "base", "base")
    encoding = Encoding(settings, resolution, family, base)  # type: ignore[arg-type]
    entries = map(encoding.entry, found, choose_views(found, resolution, None))
    keys = [entry.latents for entry in entries]
    stored = StoredShards(output)
    written = write_series(
        LATENTS, keys, encoding.latents, stored, folder=output, shard_size=SHARD_SIZE
    )
    assert written.encoded == len(keys)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--resolution", type=int, default=512)
    default = "stand-in" if device_type() == "cpu" else "autoencoder"
    parser.add_argument("--encoder", choices=("autoencoder", "stand-in"), default=default)
    given = parser.parse_args()
    took: dict[str, list[float]] = {name: [] for name in ("naive", *map(str, WORKERS))}
    idle: dict[str, list[float]] = {name: [] for name in took}
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place)
        write_photographs(folder / "images", given.images)
        with artifact.publish(folder / "base", "base") as draft:
            draft.content = {"parts": {"vae": "drawn"}}
        settings = {}
        for workers in WORKERS:
            config = parse_config(
                {
                    "run": "photographs",
                    "base": "nano",
                    "data": {
                        "images": str(folder / "images"),
                        "caption_strategy": "instanceprompt",
                        "instance_prompt": "a photograph",
                        "num_workers": workers,
                    },
                    "train": {"resolution": given.resolution},
                    "phases": [{"name": "only", "until": 1, "launch": "torch"}],
                },
                "benchmark",
            )
            settings[str(workers)] = CacheSettings.of(config)
        prepare_dataset(config.data, folder / "dataset", given.resolution)
        family = Timed(autoencoder() if given.encoder == "autoencoder" else stand_in(0.0))
        for turn in range(WARM_UP + REPEATS):
            for name in took:
                family.calls.clear()
                output, start = folder / f"{name}-{turn}", time.perf_counter()
                if name == "naive":
                    images = folder / "images"
                    seconds = encode_naively(images, given.resolution, family, output)
                    if turn < WARM_UP and given.encoder == "stand-in":
                        family.encode = stand_in(seconds)
                else:
                    encode(settings[name], given.resolution, family, folder, output)
                if turn >= WARM_UP:
                    took[name].append(time.perf_counter() - start)
                    idle[name].append(family.idle())
    medians = {name: statistics.median(values) for name, values in took.items()}
    waits = {name: statistics.median(values) for name, values in idle.items()}
    ratios = {name: medians["naive"] / medians[name] for name in medians}
    for name in took:
        print(
            f"{name:>6}: {1000 * medians[name] / given.images:6.1f} ms an image, "
            f"{ratios[name]:.2f} times the naive loop, encoder idle {waits[name]:.1%}"
        )
    print(f"goals: {GOAL_RATIO} times the naive loop, idle {GOAL_IDLE:.0%}")
    most = str(WORKERS[-1])
    print(json.dumps({
        "encoder": given.encoder,
        "device": device_type(),
        "images": given.images,
        "resolution": given.resolution,
        "naive_seconds": round(medians["naive"], 3),
        "encoding_seconds": round(medians[most], 3),
        "time_ratio": round(ratios[most], 3),
        "time_ratio_of_1_worker": round(ratios[str(WORKERS[0])], 3),
        "interval": [round(a / b, 3) for a, b in (
            (min(took["naive"]), max(took[most])), (max(took["naive"]), min(took[most])),
        )],
        "idle": round(waits[most], 4),
        "naive_idle": round(waits["naive"], 4),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
