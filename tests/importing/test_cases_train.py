"""Imported cases of SimpleTuner and diffusers train as they say: at nano size, for some steps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.models.families import autoencoders
from zerotrain.stages.build_base import BuildSettings, build_base
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.stages.render_launch import LaunchSettings, render_launch
from zerotrain.stages.train_phase import train_phase
from zerotrain.state.checkpoint import Checkpoint

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.import_cases import PEERS, read_facts, run

PRESETS = Path(__file__).parents[2] / "config" / "launch"
STEPS, SIDE = 4, 32
OF_HUB = ("path", "hub_split", "revision", "image_column", "caption_column")
"""Keys of a dataset of the hub, whose place a folder takes."""
EXAMPLES = "simpletuner/examples"
CASES: dict[str, dict[str, Any]] = {
    f"{EXAMPLES}/sd3.peft-lora/config.json": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "rank": 128, "lr": 1e-4,
    },
    f"{EXAMPLES}/flux.peft-lora/config.json": {
        "layers": {"to_k", "to_q", "to_v", "to_out", "add_k_proj", "add_q_proj", "add_v_proj",
                   "to_add_out"},
        "rank": 16, "lr": 1e-4,
    },
    f"{EXAMPLES}/qwen_image.peft-lora/config.json": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "rank": 8, "lr": 1e-4, "warmup": 10,
    },
    f"{EXAMPLES}/sdxl.lycoris-lokr/config.json": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "lr": 3e-7,
    },
    f"{EXAMPLES}/default.json": {
        "layers": {"to_k", "to_q", "to_v", "to_out", "add_k_proj", "add_q_proj", "add_v_proj",
                   "to_add_out"},
        "rank": 16, "lr": 1e-4,
    },
    "examples/dreambooth/README_flux.md#2": {
        "layers": {"to_k", "to_q", "to_v", "to_out", "add_k_proj", "add_q_proj", "add_v_proj",
                   "to_add_out", "net"},
        "rank": 4, "lr": 1.0,
    },
    "examples/dreambooth/README_flux.md#1": {"lr": 1.0},
    "examples/dreambooth/README_flux.md#4": {
        "layers": {"to_k", "to_q", "to_v", "to_out", "add_k_proj", "add_q_proj", "add_v_proj",
                   "to_add_out", "net", "proj_mlp"},
        "rank": 4, "lr": 1e-4,
    },
    "examples/dreambooth/README_qwen.md#1": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "rank": 4, "lr": 2e-4,
    },
    "examples/dreambooth/README_sd3.md#1": {"lr": 1e-4},
    "examples/dreambooth/README_sd3.md#2": {
        "layers": {"to_k", "to_q", "to_v", "to_out", "add_k_proj", "add_q_proj", "add_v_proj",
                   "to_add_out"},
        "rank": 4, "lr": 4e-4,
    },
    "examples/dreambooth/README_sdxl.md#1": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "rank": 4, "lr": 1e-4,
    },
    "examples/text_to_image/README_sdxl.md#2": {
        "layers": {"to_k", "to_q", "to_v", "to_out"}, "rank": 4, "lr": 1e-4,
    },
}  # fmt: skip
"""What the program itself trains: the last names of its layers, the rank, the rate, and the steps
of its warm-up."""
IN_CI = "examples/dreambooth/README_flux.md#2"
"""CI runs a sample; `make test-soak` has the others."""


def replaced(path: str, images: Path) -> RunConfig:
    """The imported configuration with another model, size, end and images, and nothing else."""
    facts = {case.path: case for peer in PEERS if (peer.program != "DiffSynth-Studio")
             for case in read_facts(peer)}  # fmt: skip
    imported = run(facts[path]).imported
    assert imported is not None
    found = imported.nested()
    assert found["family"]
    found |= {"run": "case", "base": "nano"}
    kept = {key: one for key, one in found.get("data", {}).items() if key not in OF_HUB}
    found["data"] = {**kept, "source": "folder", "images": str(images)}
    found["train"] = {**found["train"], "resolution": SIDE, "log_every": 1}
    if isinstance(found["phases"][0]["until"], int):  # the schedule is that of the whole
        found["train"].setdefault("lr_scheduler_steps", found["phases"][0]["until"])
    found["phases"][0]["until"] = STEPS
    found["launch"]["num_cpu_threads_per_process"] = 1
    found["train"].pop("save_every", None)  # it is beyond that end
    found["train"].pop("report_to", None)
    found.pop("validation", None)
    found.pop("cache", None)  # a length that nano's tokenizer does not have
    return parse_config(found, path)


def train(config: RunConfig, place: Path) -> Path:
    """Its stages one after another; the checkpoint."""
    dataset, base, cache = place / "dataset", place / "base", place / "cache"
    prepare_dataset(config.data, dataset)
    build_base(BuildSettings.of(config), dataset, base)
    cache_latents(CacheSettings.of(config), SIDE, dataset, base, cache)
    phase = config.phases[0]
    preset = PRESETS / f"{phase.launch.preset}.yaml"
    settings = LaunchSettings.of(config, phase.name)
    render_launch(settings, dataset, preset, base, None, place / "launch")
    code = train_phase(
        place / "launch", base, cache, None, place / "progress", place / "checkpoint"
    )
    assert code == 0
    return place / "checkpoint"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path == IN_CI
                     else [pytest.mark.slow, pytest.mark.soak])
        for path in CASES
    ],
)  # fmt: skip
def test_an_imported_case_trains_what_its_program_trains(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parameters by the same rates; the loss is a number and the adapter moves."""
    monkeypatch.setattr(autoencoders, "VAE_STEPS", 2)
    expected, images = CASES[path], tmp_path / "images"
    images.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 36), (40 * number, 90, 200)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"picture {number}")
    config = replaced(path, images)
    if config.train.optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    folder = train(config, tmp_path)
    checkpoint = Checkpoint(folder)
    (group,) = checkpoint.position.param_groups
    names = group["parameters"]
    if "layers" in expected:
        assert {_layer(name) for name in names} == expected["layers"]
        assert all(".lora_" in name or ".lokr_" in name for name in names)
    else:
        assert not any("lora" in name for name in names)
    if "rank" in expected:
        assert config.lora is not None
        assert config.lora.rank == expected["rank"]
    rows = [
        json.loads(line)
        for line in (tmp_path / "progress" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) for loss in losses.values())
    rates = {row["step"]: row["learning_rate"] for row in rows if "learning_rate" in row}
    shares = [min(1.0, step / expected.get("warmup", 1)) for step in range(1, STEPS + 1)]
    assert list(rates.values()) == pytest.approx([expected["lr"] * s for s in shares], rel=1e-9)


def _layer(name: str) -> str:
    """The layer's last name that is no number: `attn.to_out.0.lora_A.weight` is of `to_out`."""
    parts = name.replace("_lora", ".lora").split(".")
    inner = [p for p in parts if not p.isdigit() and not p.startswith(("lora_", "lokr_"))]
    known = {"to_out", "net"}
    return next((part for part in inner if part in known), None) or next(
        part for part in reversed(inner) if part not in ("weight", "default", "proj")
    )
