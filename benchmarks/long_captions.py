"""What captions longer than the text encoders take cost in encoding, against short ones.

    python benchmarks/long_captions.py            # SDXL's small model, 674 captions

Two sets of captions, of 15 and of 300 words, are encoded in turns as cache_latents does it, and
once each through the whole command, whose lines on the terminal are counted. Medians over the
rounds, of the wall clock and of all processors; the interval is that of the rounds' cpu ratios. The
small model's encoders take little time, so that the ratio is higher than with real ones. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from PIL import Image
from settings import settings_of

from zerotrain import artifact
from zerotrain.cache.encoding import Encoding
from zerotrain.config.read import read_config
from zerotrain.config.stage_settings import CacheSettings
from zerotrain.models.families import load_family, nano
from zerotrain.models.families.diffusion import DiffusionFamily

WORDS = ("red", "blue", "green", "house", "boat", "cat", "street", "tree", "old", "tall", "and")
LENGTHS = {"short": 15, "long": 300}
SIDE = 16


def prepare(folder: Path, words: int, count: int) -> Path:
    """Write images, captions of so many words and a configuration; returns the latter's path."""
    (folder / "images").mkdir(parents=True)
    draw = random.Random(0)
    for number in range(count):
        image = Image.new("RGB", (SIDE, SIDE), (number % 256, number // 256, 9))
        image.save(folder / "images" / f"{number:04d}.png")
        caption = " ".join([f"{number}", *draw.choices(WORDS, k=words)])
        (folder / "images" / f"{number:04d}.txt").write_text(caption)
    config = {
        "run": "captions",
        "base": "nano",
        "data": {"images": str(folder / "images"), "num_workers": 0},
        "train": {"resolution": SIDE},
        "launch": {"num_cpu_threads_per_process": 1},
        "phases": [{"name": "only", "until": 1}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def run(*words: object) -> str:
    """All that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "zerotrain", *map(str, words)], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def encode(config: Path, base: Path) -> tuple[float, float]:
    """Seconds by the wall and of processors that the captions of a configuration take."""
    run_config = read_config(config)
    model = artifact.read(base, "base")
    family = load_family(run_config.family)
    assert isinstance(family, DiffusionFamily)
    encoding = Encoding(CacheSettings.of(run_config), SIDE, family, model)
    captions = sorted(path.read_text() for path in (config.parent / "images").glob("*.txt"))
    keys = [encoding.text_key(caption) for caption in captions]
    assert encoding.encoders  # loaded before the clock starts
    start, cpu = time.perf_counter(), time.process_time()
    assert sum(1 for _ in encoding.text(keys)) == len(captions)
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=674)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        configs, lines = {}, {}
        for name, words in LENGTHS.items():
            folder = Path(temporary) / name
            configs[name] = config = prepare(folder, words, options.count)
            dataset, base = folder / "dataset", folder / "base"
            made = ("prepare_dataset", "build_base", "cache_latents")
            prepares, builds, caches = (("--settings", settings_of(one, config)) for one in made)
            run("prepare_dataset", *prepares, "--output", dataset)
            run("build_base", *builds, "--dataset", dataset, "--output", base)
            said = run(
                *("cache_latents", *caches, "--size", SIDE, "--dataset", dataset),
                *("--base", base, "--output", folder / "cache"),
            )
            lines[name] = len([line for line in said.replace("\r", "\n").splitlines() if line])
            print(f"{name}: {lines[name]} lines\n{said}")
        base = Path(temporary) / "short" / "base"
        for config in configs.values():
            encode(config, base)
        rounds = [
            {name: encode(config, base) for name, config in configs.items()}
            for _ in range(options.rounds)
        ]
    wall, cpu = (
        {name: statistics.median(one[name][clock] for one in rounds) for name in LENGTHS}
        for clock in (0, 1)
    )
    ratios = sorted(one["long"][1] / one["short"][1] for one in rounds)
    print(f"short {wall['short']:.2f} s, long {wall['long']:.2f} s")
    print(
        json.dumps(
            {
                "time_ratio": round(wall["long"] / wall["short"], 3),
                "cpu_ratio": round(cpu["long"] / cpu["short"], 3),
                "interval": [round(ratios[0], 3), round(ratios[-1], 3)],
                "captions": options.count,
                "tokens": nano.MAX_TOKENS,
                "lines": lines,
            }
        )
    )


if __name__ == "__main__":
    main()
