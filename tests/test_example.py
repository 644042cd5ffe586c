"""The built-in example, for real and from nothing, as `make train` runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain import artifact

pytestmark = pytest.mark.slow


def snakemake(folder: Path, *words: str, target: str = "train") -> str:
    """Run the pipeline in a copy of the project; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "all", target, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "workflow")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_example_learns_to_write_digits(private_project):
    """After the last phase the judge reads at least 95 of 100 generated digits as what was asked
    for, and loses none of its own; a second call has nothing to do; diffusers loads the weights."""
    folder = private_project("project")
    snakemake(folder)
    metrics = json.loads((folder / "results/digits/offload/metrics.json").read_text())
    assert metrics["prompt_accuracy"] >= 0.95
    assert metrics["judge_accuracy"] >= 0.95
    before = json.loads((folder / "results/digits/plain/metrics.json").read_text())
    assert metrics["val_loss"] < before["val_loss"]
    assert "Nothing to be done" in snakemake(folder)

    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(folder / "results/digits/offload/weights")
    image = pipeline("a handwritten digit seven", height=32, width=32, num_inference_steps=4)
    assert image.images[0].size == (32, 32)


@pytest.mark.parametrize(
    ("recipe", "metric", "bound"),
    [
        ("sd3-digits", "prompt_accuracy", 0.95),
        pytest.param("qwen-digits", "prompt_accuracy", 0.9, marks=pytest.mark.soak),
        pytest.param("sums", "exact_match", 0.9, marks=pytest.mark.soak),
        ("complaints", "exact_match", 0.95),
    ],
)
def test_a_recipe_learns_its_task(private_project, recipe, metric, bound):
    """By the same judge as the example's digits; of text, by the answers to held-out questions."""
    folder = private_project(recipe)
    path = f"results/{recipe}/offload/metrics.json"
    snakemake(folder, "--configfile", f"config/{recipe}.yaml", target=path)
    metrics = json.loads((folder / path).read_text())
    assert metrics[metric] >= bound


@pytest.mark.parametrize(
    ("recipe", "metric"), [("qwen-digits", "prompt_accuracy"), ("sums", "exact_match")]
)
def test_a_recipe_begins_to_learn(private_project, recipe, metric):
    """The first tenth of its steps, through both engines to the evaluation: the loss falls."""
    folder = private_project(recipe)
    config = folder / f"config/{recipe}.yaml"
    text = re.sub(r"\b(until|save_every|lr_warmup_steps): (\d+)0\b", r"\1: \2", config.read_text())
    config.write_text(text)
    results = f"results/{recipe}/offload"
    snakemake(folder, "--configfile", str(config), target=f"{results}/metrics.json")
    lines = (folder / results / "progress/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    assert 0 <= json.loads((folder / results / "metrics.json").read_text())[metric] <= 1


def test_example_twice_gives_the_same_weights(private_project):
    """Two runs from one seed on one machine export the same bytes, through both engines."""
    hashes = []
    for name in ("first", "second"):
        folder = private_project(name)
        config = folder / "config/config.yaml"
        text = config.read_text()
        for long, short in (("300", "6"), ("700", "12"), ("100", "6")):
            text = re.sub(rf"(until|save_every): {long}\b", rf"\1: {short}", text)
        config.write_text(text)
        path = "results/digits/offload/weights"
        snakemake(folder, target=f"{path}/manifest.json")
        weights = artifact.read(folder / path, "weights")
        hashes.append({file: entry["sha256"] for file, entry in weights.files.items()})
    assert hashes[0] == hashes[1]
    assert "unet/diffusion_pytorch_model.safetensors" in hashes[0]
