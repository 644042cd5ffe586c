"""DiffSynth-Studio's own scripts, imported and trained at nano size: what trains, and how.

Of each script the base, the data, the resolution, the number of steps and of processes are other
ones; nothing else is. What is expected comes from the words of the script.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.images import make_pictures, prepare_inputs
from tests.builders.phases import PRESETS
from tests.training.conftest import Training

sys.path.append(str(Path(__file__).parents[2]))  # `pytest` alone does not find the benchmarks
from benchmarks.import_cases import PEERS, Case, read_facts

from zerotrain.config.adapters import is_target, stack_of
from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.launch.files import read_run_yaml
from zerotrain.models.families import load_family
from zerotrain.stages.render_launch import LaunchSettings, render_launch
from zerotrain.state.checkpoint import Checkpoint

SIDE, COUNT, STEPS = 16, 4, 2
QWEN, FLUX, SDXL = (
    f"examples/{name}/model_training" for name in ("qwen_image", "flux", "stable_diffusion_xl")
)
SCRIPTS = {
    f"{QWEN}/lora/Qwen-Image.sh": ("torch", "bf16", 0.0, 2.2255),
    f"{QWEN}/special/low_vram_training/Qwen-Image-LoRA.sh": ("zero3_offload", "bf16", 1.0, 2.2255),
    f"{QWEN}/full/Qwen-Image.sh": ("zero2_offload", "bf16", 1.0, 2.2255),
    f"{QWEN}/lora/Qwen-Image-Edit-2511.sh": ("torch", "bf16", 0.0, 2.2255),
    f"{FLUX}/full/FLUX.1-dev.sh": ("zero2", "bf16", 1.0, 3.0),
    f"{FLUX}/lora/FLUX.1-dev.sh": ("torch", "bf16", 0.0, 3.0),
    f"{FLUX}/lora/FLUX.1-Kontext-dev.sh": ("torch", "bf16", 0.0, 3.0),
    f"{SDXL}/full/stable-diffusion-xl-base-1.0.sh": ("torch", "no", 0.0, None),
}
"""Preset, precision, clipping and shift of each: of its YAML, of accelerate where it clips by
itself, and of DiffSynth-Studio's schedules."""
SLOW = f"{QWEN}/lora/Qwen-Image.sh"


def word(case: Case, flag: str) -> str | None:
    """What the script's last command says after a flag."""
    words = case.commands[-1]
    return words[words.index(flag) + 1] if flag in words else None


def at_nano_size(case: Case, folder: Path) -> RunConfig:
    """The imported configuration with a small base and data."""
    (folder / "images").mkdir()
    found: dict[str, Any] = case.read().nested()
    columns = ["image", "prompt", *found["data"].get("conditioning_columns", [])]
    rows = [",".join(columns)]
    for number, image in enumerate(make_pictures(SIDE, COUNT)):
        image.save(folder / "images" / f"{number}.png")
        before = [f"{number}-before.png" for _ in columns[2:]]
        for name in before:
            image.save(folder / "images" / name)
        rows.append(",".join([f"{number}.png", "a boat", *before]))
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    found["base"] = "nano"
    found.pop("cache", None)  # a length that nano's tokenizer does not have
    if targets := found.get("lora", {}).get("target_modules"):
        beyond = re.compile(r"single_transformer_blocks\.([2-9]|\d\d)\.")  # nano has two blocks
        found["lora"]["target_modules"] = [name for name in targets if not beyond.match(name)]
    found["data"] |= {"images": str(folder / "images"), "metadata": str(folder / "metadata.csv")}
    found["train"] |= {"resolution": SIDE, "log_every": 1}
    found["phases"][0]["until"] = STEPS
    found["launch"] |= {"num_processes": 1, "num_cpu_threads_per_process": 1}
    return parse_config(found, case.path)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=pytest.mark.slow if script == SLOW else pytest.mark.soak)
        for script in SCRIPTS
    ],
)
def test_an_imported_script_trains_what_it_trains(script: str, tmp_path: Path, server: Any) -> None:
    """The parameters by name, every step's learning rate, and the numbers of the loss."""
    peer = next(peer for peer in PEERS if peer.program == "DiffSynth-Studio")
    case = next(case for case in read_facts(peer) if case.path == script)
    config = at_nano_size(case, tmp_path)
    family, (phase,) = load_family(config.family), config.phases
    dataset, base = tmp_path / "dataset", tmp_path / "base"
    launch = tmp_path / phase.name / "launch"
    prepare_inputs(config, tmp_path, SIDE, steps=1)
    preset = PRESETS / f"{phase.launch.preset}.yaml"
    render_launch(LaunchSettings.of(config, phase.name), dataset, preset, base, None, launch)
    training = Training(tmp_path, tmp_path, server)
    losses = training.train(phase.name)

    run = read_run_yaml(launch / "run.yaml")
    expected_preset, precision, clipping, shift = SCRIPTS[script]
    assert (run.launch.preset, run.launch.mixed_precision) == (expected_preset, precision)
    assert run.train.max_grad_norm == clipping
    assert run.derived.objective.get("flow_shift") == shift
    assert run.derived.objective.get("weighting_scheme") == (None if shift is None else "gaussian")
    assert (run.train.optimizer, run.train.adam_weight_decay, run.train.lr_scheduler) == (
        "adamw",
        0.01,
        "constant",
    )
    assert run.derived.epoch_size == COUNT * int(word(case, "--dataset_repeat") or 1)
    assert run.train.gradient_checkpointing is ("--use_gradient_checkpointing" in case.commands[-1])

    rate = float(word(case, "--learning_rate") or 0)
    assert [line["learning_rate"] for line in training.log(phase.name) if "loss" in line] == [
        rate
    ] * STEPS
    assert all(0 < loss < 20 for loss in losses)

    rolling = training.rolling(phase.name, STEPS)
    model = family.load_model(base)
    targets = word(case, "--lora_target_modules")
    expected = {name for name, _ in model.named_parameters()}
    if targets is not None:
        layers = [name for name, _ in model.named_modules() if is_target(name, targets.split(","))]
        firsts = layers
        if config.family == "flux":  # its names of all layers in the blocks
            linear = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
            layers = [name for name in linear if "transformer_blocks." in name]
            firsts = [*{stack_of(name): name for name in reversed(layers)}.values()]
        expected = {f"{layer}.lora_A.default.weight" for layer in firsts}
        expected |= {f"{layer}.lora_B.default.weight" for layer in layers}
        adapter = json.loads(json.dumps(run.lora))
        assert (adapter["rank"], adapter["alpha"]) == (int(word(case, "--lora_rank") or 0), 32.0)
    assert {*Checkpoint(rolling).names} == expected
