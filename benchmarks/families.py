"""How long each family's small model takes from nothing through the real rules, on a CPU.

    python benchmarks/families.py            # all families, from the project's root
    python benchmarks/families.py sd3 flux   # some

Each family is built from the seed, cached, trained under PyTorch, switched to ZeRO-2 with the
optimizer offloaded, exported and evaluated after both phases, in a copy of the project. Prints a
table and, last, a line of JSON; `limit_ratio` is the slowest family's time over 90 s, which are
meant for two cores of its own. On a busy machine look at `cpu`: seconds of all processes in user
mode.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 90
FAMILIES = ("sdxl", "sd3", "qwen_image", "flux", "causal_lm", "seq2seq_lm")
IMAGES = {
    "data": {"images": "digits", "holdout": 0.25},
    "train": {"resolution": 32, "global_batch_size": 8},
    "evaluate": {"images_per_prompt": 1, "num_inference_steps": 4, "batch_size": 10},
}
TEXT = {
    "train": {"max_length": 64, "global_batch_size": 8},
    "evaluate": {"max_samples": 16, "max_new_tokens": 8},
}
DATA = {"causal_lm": "sums", "seq2seq_lm": "complaints"}
STEPS = 10
"""Of each phase."""
IMAGE_COUNT = 128


def write_images(folder: Path) -> None:
    """Write some of the built-in digits as PNG files with captions."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits = load_digits()
    pairs = zip(digits.images[:IMAGE_COUNT], digits.target, strict=False)
    for number, (scan, digit) in enumerate(pairs):
        image = Image.fromarray((scan * 15).astype("uint8")).resize((32, 32))
        image.convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {digit}")


def config(family: str) -> dict[str, object]:
    """Return a run of two phases on a built-in dataset."""
    held_out = {"data": {"source": DATA.get(family), "holdout": 0.2}}
    return {
        **{"run": "r", "family": family, "base": "nano"},
        **({**TEXT, **held_out} if family in DATA else IMAGES),
        "launch": {"num_cpu_threads_per_process": 1},
        "phases": [
            {"name": "plain", "until": STEPS, "launch": "torch"},
            {"name": "offload", "until": 2 * STEPS, "launch": "zero2_offload"},
        ],
    }


def cpu_seconds() -> float:
    """Of all processes that have ended, in user mode."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def measure(family: str, folder: Path) -> dict[str, float]:
    """CPU seconds and seconds of the whole, and CPU seconds of each rule, which are sampled."""
    path = folder / "config/benchmark.yaml"
    path.write_text(json.dumps(config(family)))  # JSON is YAML
    before, began = cpu_seconds(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "all", "train", "--configfile", path],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "workflow")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    found = {"cpu": cpu_seconds() - before, "wall": time.monotonic() - began}
    for table in sorted(folder.glob("results/**/benchmarks/*.tsv")):
        header, values = (line.split("\t") for line in table.read_text().splitlines()[:2])
        found[table.stem] = float(values[header.index("cpu_time")])
    metrics = json.loads((folder / "results/r/offload/metrics.json").read_text())
    assert metrics["step"] == 2 * STEPS, metrics
    shutil.rmtree(folder / "results")
    return found


def main() -> None:
    """Measure the families and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY")
    chosen = parser.parse_args().families
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "project"
        ignored = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, folder, ignore=ignored)
        write_images(folder / "digits")
        for family in chosen:
            found[family] = measure(family, folder)
            columns = ", ".join(f"{key} {value:.1f}" for key, value in found[family].items())
            print(f"{family:12} {columns}", flush=True)
    slowest = max(values["wall"] for values in found.values())
    rounded = {f: {k: round(v, 1) for k, v in values.items()} for f, values in found.items()}
    facts = {"cores": os.cpu_count(), "steps": 2 * STEPS, "limit_ratio": slowest / LIMIT_SECONDS}
    print(json.dumps({**facts, "seconds": rounded}))


if __name__ == "__main__":
    main()
