"""No combination of keys gives an "auto", a batch that does not multiply out, or a traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.importing.conftest import leaves

from zerotrain.errors import PipelineError
from zerotrain.importers.accelerate import read_accelerate
from zerotrain.importers.deepspeed import read_deepspeed
from zerotrain.importers.diffsynth import read_diffsynth
from zerotrain.importers.imported_config import ImportedConfig, config_text, nest, report
from zerotrain.importers.keys import DIFFSYNTH, SIMPLETUNER, TRAINER
from zerotrain.importers.program import ACCELERATE as PROGRAM
from zerotrain.importers.program import RUN, Part, SurroundingSettings, trainer
from zerotrain.importers.simpletuner import read_simpletuner
from zerotrain.importers.trainer import read_trainer
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED, Key

CONTEXT = SurroundingSettings(
    program=PROGRAM, presets=Path(__file__).parents[2] / "config" / "launch"
)
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


@st.composite
def keys(draw: st.DrawFn, table: Mapping[str, Key]) -> dict[str, Any]:
    """Some keys with values of their kind, some with "auto", seldom one with nonsense."""
    known = [name for name, key in table.items() if key.type != "section" and name[-1] != "*"]
    others = [name for name in known if name not in LIKELY and table[name].fate != "refused"]
    chosen = draw(st.lists(st.sampled_from(others), max_size=8, unique=True))
    values = {name: draw(st.sampled_from(LIKELY[name])) for name in known if name in LIKELY}
    values |= {name: draw(st.sampled_from([*USUAL[table[name].type], "auto"])) for name in chosen}
    if draw(st.integers(0, 9)) == 9:
        values[draw(st.sampled_from([*known, "zero_optimizaton.stge"]))] = draw(
            st.sampled_from(ODD)
        )
    return values


def simpletuner(given: dict[str, Any], result: ImportedConfig, context: Any) -> None:
    """Its settings; with those of DeepSpeed next to them, where they are among the keys."""
    block = {name.partition(":")[2]: given.pop(name) for name in [*given] if name[:3] == "ds:"}
    read_simpletuner({**nest(given), "deepspeed_config": nest(block)}, None, result, context)


READERS: dict[str, tuple[Mapping[str, Key], Callable[..., None]]] = {
    **{
        f"DeepSpeed as {program.name}, {program.known}": (
            DEEPSPEED,
            lambda given, result, context, program=program: read_deepspeed(
                nest(given), "drawn.json", result, replace(context, program=program)
            ),
        )
        for program in (trainer(), trainer({}), PROGRAM, RUN)
    },
    "accelerate": (ACCELERATE, lambda given, *rest: read_accelerate(nest(given), None, *rest)),
    "HF Trainer": (TRAINER, lambda given, *rest: read_trainer(given, "drawn.py", *rest)),
    "SimpleTuner": (SIMPLETUNER, simpletuner),
    "SimpleTuner under DeepSpeed": (
        SIMPLETUNER | {f"ds:{name}": key for name, key in DEEPSPEED.items()},
        simpletuner,
    ),
    "DiffSynth-Studio": (
        DIFFSYNTH,
        lambda given, *rest: read_diffsynth(
            [given], ({"distributed_type": "NO"}, None), "drawn.py", *rest
        ),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_comes_out_of_any_keys_can_be_written_and_multiplies_out(name: str) -> None:
    """Of each table, as each program would read its keys."""
    table, read = READERS[name]
    taken = 0

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        keys(table),
        st.sampled_from([None, "bf16", "fp16", "no"]),
        st.sampled_from([None, 1, 2]),
    )
    def check(given: dict[str, Any], precision: str | None, processes: int | None) -> None:
        nonlocal taken
        result = ImportedConfig()
        context = replace(CONTEXT, precision=precision, processes=Part(processes))
        try:
            read(given, result, context)
        except PipelineError:
            return
        if result.problems:
            return
        taken += 1
        found = nest(result.values)
        assert "auto" not in leaves(found)
        assert yaml.safe_load(config_text(result)) == found
        assert report(result.notes)
        train, launch = found.get("train", {}), found["launch"]
        if "global_batch_size" in train:
            parts = train.get("gradient_accumulation_steps", 1) * launch["num_processes"]
            assert train["global_batch_size"] % parts == 0
            assert train["global_batch_size"] >= parts

    check()
    assert taken >= 5, "too few are right to say anything"
