"""No combination of keys gives an "auto", a batch that does not multiply out, or a traceback."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.importing.conftest import leaves

from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import read_accelerate
from zerotrain.importers.batch import Part
from zerotrain.importers.deepspeed import SurroundingSettings, read_deepspeed
from zerotrain.importers.diffsynth import read_diffsynth
from zerotrain.importers.imported_config import ImportedConfig, nest
from zerotrain.importers.keys import DIFFSYNTH, SIMPLETUNER, TRAINER
from zerotrain.importers.program import ACCELERATE as PROGRAM
from zerotrain.importers.program import RUN, trainer
from zerotrain.importers.simpletuner import read_simpletuner
from zerotrain.importers.trainer import read_trainer
from zerotrain.importers.write import config_text, report
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED, Key

PRESETS = Path(__file__).parents[2] / "config" / "launch"
SEEDS = range(400)
USUAL: dict[str, list[Any]] = {
    "integer": [0, 1, 2, 3, 4, 8, 1e9],
    "number": [0, 1, 1e-4, 0.5, "1e-4"],
    "boolean": [True, False, "true", "no"],
    "string": ["none", "cpu", "nvme", "AdamW", "WarmupLR", "no", "bf16", "DEEPSPEED", "linear"],
    "list": [[0.9, 0.999], [0.9, 0.95]],
    "block": [{}, {"enabled": "auto"}, {"a": {"b": ["auto", 1]}}, 1, [1, "auto"]],
}
ODD = ["auto", None, "", -1, float("nan"), float("inf"), "x", [], {}, {"auto": "auto"}, 10**400]
LIKELY: dict[str, list[Any]] = {
    "optimizer.type": ["AdamW", "Adam", "cpuadam", "Lion", "SGD", "Lamb", "adamv"],
    "scheduler.type": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"],
    "zero_optimization.stage": [0, 1, 2, 3],
    "distributed_type": ["DEEPSPEED", "DEEPSPEED", "MULTI_GPU", "NO", "FSDP"],
    "mixed_precision": ["no", "bf16", "fp16"],
    "deepspeed_config.zero_stage": [0, 1, 2, 3],
    "model_name_or_path": ["a/b"],
    "model_id_with_origin_paths": ["Qwen/Qwen-Image:x"],
    "lr_scheduler_type": ["linear", "cosine", "constant", "inverse_sqrt"],
    "optim": ["adamw_torch", "adafactor", "sgd"],
    "lora_base_model": ["dit"],
    "lora_target_modules": ["to_q,to_k"],
    "task": ["sft:train", "sft"],
    "deepspeed_config.deepspeed_config_file": ["none"],
    "deepspeed": [None],
    "num_processes": [1, 2, 8],
    "model_family": ["sdxl", "sd3", "flux", "qwen_image"],
    "model_flavour": [None],
    "lr_scheduler": ["constant", "sine", "polynomial", "linear", "cosine"],
    "data_backend_config": [None],
    "caption_strategy": ["textfile", "filename"],
    "lora_type": ["standard"],
    "resolution_type": ["pixel", "pixel_area", "area"],
    "grad_clip_method": ["norm", "value"],
    "loss_type": ["l2", "huber"],
    "huber_schedule": ["snr"],
    "base_model_precision": ["no_change"],
}


def drawn(table: Mapping[str, Key], seed: int, oddness: float = 0.1) -> dict[str, Any]:
    """Some keys with values of their kind, some with "auto", a few with nonsense."""
    draw = random.Random(seed)
    share = draw.choice([0.02, 0.1, 0.3])
    names = [
        key.name
        for key in table.values()
        if key.type != "section" and not key.name.endswith("*")
        and (key.fate != "refused" or draw.random() < 0.02)
        and (key.name in LIKELY or draw.random() < share)
    ]  # fmt: skip
    values: dict[str, Any] = {}
    for name in names:
        usual = LIKELY.get(name, USUAL[table[name].type])
        value = "auto" if draw.random() < 0.2 and name not in LIKELY else draw.choice(usual)
        values[name] = draw.choice(ODD) if draw.random() < oddness * draw.random() else value
    if draw.random() < oddness / 2:
        values["zero_optimizaton.stge"] = 1
    return values


def held(result: ImportedConfig) -> None:
    """What holds of everything that comes out."""
    found = nest(result.values)
    assert not [leaf for leaf in leaves(found) if leaf == "auto"], found
    text = config_text(ImportedConfig("a test", result.values, result.notes))
    assert yaml.safe_load(text) == found
    assert report(result.notes)
    train, launch = found.get("train", {}), found["launch"]
    if "global_batch_size" in train:
        parts = train.get("gradient_accumulation_steps", 1) * launch["num_processes"]
        assert train["global_batch_size"] % parts == 0
        assert train["global_batch_size"] >= parts


@pytest.mark.parametrize("program", [trainer(), trainer({}), PROGRAM, RUN], ids=lambda p: p.name)
def test_deepspeeds_keys(program: Any) -> None:
    """As each program would read them."""
    taken = 0
    for seed in SEEDS:
        result = ImportedConfig()
        context = SurroundingSettings(
            program=program, precision=random.Random(seed).choice([None, "bf16", "fp16", "no"]),
            processes=Part(random.Random(-seed).choice([None, 1, 2])), presets=PRESETS,
        )  # fmt: skip
        try:
            read_deepspeed(nest(drawn(DEEPSPEED, seed)), "drawn.json", result, context)
        except PipelineError:
            continue
        if result.problems:
            continue
        taken += 1
        held(result)
    assert taken > len(SEEDS) / 20, "too few are right to say anything"


def test_accelerates_keys() -> None:
    """With its keys for DeepSpeed."""
    taken = 0
    for seed in SEEDS:
        result = ImportedConfig()
        try:
            config = nest(drawn(ACCELERATE, seed))
            read_accelerate(
                config, None, result, SurroundingSettings(program=PROGRAM, presets=PRESETS)
            )
        except PipelineError:
            continue
        if result.problems:
            continue
        taken += 1
        held(result)
    assert taken > len(SEEDS) / 20


@pytest.mark.parametrize("whose", ["trainer", "simpletuner", "diffsynth"])
def test_trainers_arguments(whose: str) -> None:
    """A whole run each."""
    taken = 0
    for seed in SEEDS:
        result, context = ImportedConfig(), SurroundingSettings(program=PROGRAM, presets=PRESETS)
        launch = ({"distributed_type": "NO"}, None)
        try:
            if whose == "trainer":
                read_trainer(drawn(TRAINER, seed), "drawn.py", result, context)
            elif whose == "simpletuner":
                given = nest(drawn(SIMPLETUNER, seed))
                if seed % 2:
                    given["deepspeed_config"] = nest(drawn(DEEPSPEED, seed))
                read_simpletuner(given, None, result, context)
            else:
                read_diffsynth([drawn(DIFFSYNTH, seed)], launch, "drawn.py", result, context)
        except PipelineError:
            continue
        if result.problems:
            continue
        taken += 1
        held(result)
    assert taken > len(SEEDS) / 40
