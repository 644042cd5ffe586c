"""The built-in example, for real and from nothing, as `make train` runs it."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tests.builders.commands import run_in_project, run_zerotrain
from tests.conftest import copy_project, copy_quick_project

from zerotrain import artifact

pytestmark = pytest.mark.slow

PROGRESS = re.compile(r": step \d+ of|steps to go|\d+ of \d+ \w+ \(\d+%\)")
MOST_LINES = 40
"""What a run of the example prints besides its progress."""


def snakemake(folder: Path, *words: str, target: str = "train") -> str:
    """Run the pipeline in a copy of the project; what it printed."""
    return run_in_project(folder, "snakemake", "--cores", "all", target, *words)


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[Path, str]:
    """A project whose example has been trained, and what that printed: the first phase whole, and a
    quarter of the second one."""
    folder = copy_project(tmp_path_factory.mktemp("example") / "project")
    config = folder / "config/config.yaml"
    text = config.read_text()
    assert text.count("until: 700\n") == 1
    config.write_text(text.replace("until: 700\n", "until: 400\n"))
    return folder, snakemake(folder)


@pytest.mark.soak
def test_example_as_it_is_learns_to_write_digits(private_project):
    """Both phases whole: no value of the shipped configuration is changed."""
    folder = private_project("project")
    check_example(folder, snakemake(folder))


def test_example_learns_to_write_digits(example):
    """Though the second phase is cut short."""
    check_example(*example)


def check_example(folder: Path, printed: str) -> None:
    """After the first phase the judge reads at least 90 of 100 generated digits as what was asked
    for, after the last one 95, and it knows the scans; a second call has nothing to do; diffusers
    loads the weights. The output besides progress fits a screen, and the report 5 MB."""
    shown = [line for line in printed.splitlines() if not PROGRESS.search(line)]
    assert len(shown) <= MOST_LINES, printed
    plain, offload = (
        json.loads((folder / f"results/digits/{phase}/metrics.json").read_text())
        for phase in ("plain", "offload")
    )
    assert plain["prompt_accuracy"] >= 0.9
    assert offload["prompt_accuracy"] >= 0.95
    assert offload["judge_accuracy"] >= 0.95
    assert offload["val_loss"] < plain["val_loss"]
    assert (folder / "results/digits/report/index.html").stat().st_size <= 5_000_000
    assert "Nothing to be done" in snakemake(folder)

    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(folder / "results/digits/offload/weights")
    image = pipeline("a handwritten digit seven", height=32, width=32, num_inference_steps=4)
    assert image.images[0].size == (32, 32)


@pytest.mark.parametrize(
    ("recipe", "phase", "metric", "bound"),
    [
        pytest.param("sd3-digits", "offload", "prompt_accuracy", 0.95, marks=pytest.mark.soak),
        pytest.param("qwen-digits", "offload", "prompt_accuracy", 0.9, marks=pytest.mark.soak),
        pytest.param("sums", "offload", "exact_match", 0.9, marks=pytest.mark.soak),
        pytest.param("complaints", "offload", "exact_match", 0.95, marks=pytest.mark.soak),
        pytest.param("complaints", "plain", "exact_match", 0.95, marks=pytest.mark.soak),
    ],
)
def test_a_recipe_learns_its_task(private_project, recipe, phase, metric, bound):
    """By the same judge as the example's digits; of text, by the answers to held-out questions,
    and already after the first phase."""
    folder = private_project(recipe)
    path = f"results/{recipe}/{phase}/metrics.json"
    snakemake(folder, "--configfile", f"config/{recipe}.yaml", target=path)
    metrics = json.loads((folder / path).read_text())
    assert metrics[metric] >= bound


@pytest.mark.soak
@pytest.mark.parametrize(
    ("recipe", "metric"),
    [
        ("sd3-digits", "prompt_accuracy"),
        ("qwen-digits", "prompt_accuracy"),
        ("sums", "exact_match"),
    ],
)
def test_a_recipe_begins_to_learn(quick_project, recipe, metric):
    """The first tenth of its steps, through both engines to the evaluation: the loss falls."""
    folder = quick_project(recipe)
    config = folder / f"config/{recipe}.yaml"
    tenth = r"\b(until|save_every|lr_warmup_steps|images_per_prompt): (\d+)0\b"
    text = re.sub(tenth, r"\1: \2", config.read_text())
    config.write_text(text)
    results = f"results/{recipe}/offload"
    snakemake(folder, "--configfile", str(config), target=f"{results}/metrics.json")
    lines = (folder / results / "progress/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    assert 0 <= json.loads((folder / results / "metrics.json").read_text())[metric] <= 1


def run_shortly(folder: Path) -> Path:
    """Make the weights of the example in few steps, through both engines, from nothing."""
    config = copy_quick_project(folder) / "config/config.yaml"
    text = config.read_text()
    for long, short in (("300", "6"), ("700", "12"), ("100", "6")):
        text = re.sub(rf"(until|save_every): {long}\b", rf"\1: {short}", text)
    config.write_text(text)
    snakemake(folder, target="weights")
    return folder


WEIGHTS = "results/digits/offload/weights"


@pytest.mark.soak
def test_example_twice_gives_the_same_weights(tmp_path):
    """Two runs from one seed on one machine export the same bytes."""
    hashes = []
    for name in ("first", "second"):
        weights = artifact.read(run_shortly(tmp_path / name) / WEIGHTS, "weights")
        hashes.append({file: entry["sha256"] for file, entry in weights.files.items()})
    assert hashes[0] == hashes[1]
    assert "unet/diffusion_pytorch_model.safetensors" in hashes[0]


def test_example_is_whole_until_a_byte_differs(example):
    """`zerotrain trace`: exit code 0; one byte in the first phase's state, and it is 1."""
    folder, _ = example

    trace = partial(
        run_zerotrain, "trace", WEIGHTS, folder=folder, PYTHONPATH=str(folder / "workflow")
    )
    whole = trace()
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "1,797 samples are what the manifests say" in whole.stdout
    file = folder / "results/digits/plain/state/exp_avg-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    broken = trace()
    content[-1] ^= 1
    file.write_bytes(content)
    assert broken.returncode == 1
    assert "DIFFERENT results/digits/plain/state/exp_avg-00000.safetensors" in broken.stdout
