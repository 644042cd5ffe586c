"""Whatever is combined: a launch that multiplies out and names every value, or one sentence."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.runs import make_config

from zerotrain.config.stage_settings import LaunchSettings
from zerotrain.errors import PipelineError
from zerotrain.launch.files import read_run_yaml, write_launch_files, write_run_yaml
from zerotrain.launch.keys import ACCELERATE, DEEPSPEED, Key
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import ResolvedPhase, nest_keys
from zerotrain.models.sizes import ModelSizes, model_sizes

PRESETS = Path(__file__).parents[2] / "config" / "launch"
VALUES = st.one_of(
    st.booleans(), st.none(), st.integers(-5, 10**9), st.floats(allow_nan=False), st.just("auto"),
    st.sampled_from(["5e8", "cpu", "fp32", "", "none", "1.5"]), st.just([]), st.just({}),
)  # fmt: skip
COUNTS = st.one_of(st.sampled_from([1, 2, 4]), st.sampled_from([-1, 0, 3, "4", "auto", 0.5, None]))
OF_KIND = {
    "boolean": st.booleans(), "integer": st.integers(2, 10**9), "number": st.floats(0.5, 4.0),
    "string": st.sampled_from(["info", "fp32"]), "block": st.just({"enabled": False}),
    "list": st.just(["all_reduce"]),
}  # fmt: skip


def sections(table: dict[str, Key], *, tame: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """A few keys of a program's file: with a value of the right kind, or with any."""
    free = sorted(name for name, key in table.items() if key.fate == "passed_through")

    def value(name: str) -> st.SearchStrategy[Any]:
        return OF_KIND[table[name].type]

    fitting = st.sampled_from(free).flatmap(lambda name: st.tuples(st.just(name), value(name)))
    others = st.tuples(st.sampled_from([*sorted(table), "zero_optimization.no_such_key"]), VALUES)
    pairs = st.lists(fitting if tame else st.one_of(fitting, others), max_size=3)
    return pairs.map(dict).filter(_is_a_file).map(nest_keys)


def _is_a_file(values: dict[str, Any]) -> bool:
    """No key stands both as a value and as a section."""
    return not any(a != b and b.startswith(f"{a}.") for a in values for b in values)


TAME = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]),
        "num_processes": st.sampled_from([1, 2]),
        "mixed_precision": st.sampled_from(["no", "bf16", "fp16"]),
        "deepspeed": sections(DEEPSPEED, tame=True),
        "accelerate": sections(ACCELERATE, tame=True),
    }
)
PLAIN = st.fixed_dictionaries(
    {"preset": st.just("torch"), "accelerate": sections(ACCELERATE, tame=True)},
    optional={"num_processes": st.sampled_from([1, 2])},
)
WILD = st.fixed_dictionaries(
    {"preset": st.sampled_from([p.stem for p in PRESETS.glob("*.yaml") if p.stem != "auto"])},
    optional={
        "num_processes": COUNTS,
        "mixed_precision": st.sampled_from(["no", "bf16", "fp16", False, "auto"]),
        "offload_optimizer": st.sampled_from(["none", "cpu", "nvme", "auto", None]),
        "offload_param": st.sampled_from(["none", "cpu", "nvme", None]),
        "offload_path": st.sampled_from(["/nvme", "auto", None]),
        "cpu_checkpointing": st.booleans(),
        "partition_activations": st.booleans(),
        "zero3_init": st.booleans(),
        "main_process_port": st.sampled_from([None, 29500, 70000]),
        "device_memory": st.sampled_from([None, None, "24 GiB"]),
        "host_memory": st.sampled_from([None, None, "64 GiB"]),
        "fp16": st.sampled_from([{}, {"hysteresis": 2}, {"scale": 1}, {"loss_scale": "auto"}]),
        "deepspeed": sections(DEEPSPEED),
        "accelerate": sections(ACCELERATE),
    },
)
TRAINS = st.fixed_dictionaries(
    {},
    optional={
        "global_batch_size": COUNTS,
        "gradient_accumulation_steps": COUNTS,
        "gradient_checkpointing": st.booleans(),
        "max_grad_norm": st.sampled_from([0, 1.0, "auto", -1]),
    },
)
MODELS = st.dictionaries(
    st.sampled_from(["a.weight", "b.weight", "c.bias", "d.norm"]),
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    min_size=1,
).map(model_sizes)


@pytest.mark.slow
def test_any_combination_resolves_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, no "auto", no batch that does not multiply out; what is written is read back,
    and DeepSpeed's own parser takes it."""
    refused: list[str] = []
    taken: list[ResolvedPhase] = []

    @settings(max_examples=600, deadline=None, derandomize=True)
    @given(st.one_of(TAME, PLAIN, WILD), TRAINS, MODELS)
    def combine(launch: dict[str, Any], train: dict[str, Any], sizes: ModelSizes) -> None:
        try:
            config = make_config(train=train, launch=launch, phases=[{"name": "a", "until": 10}])
            preset = read_preset(PRESETS / f"{config.phase('a').launch.preset}.yaml")
            phase = resolve_phase(LaunchSettings.of(config, "a"), preset, 100, sizes)
        except PipelineError as error:
            refused.append(str(error))
            return
        monkeypatch.setattr(comm, "get_world_size", lambda group=None: phase.launch.num_processes)
        _check(phase)
        taken.append(phase)

    monkeypatch.setattr(comm, "get_rank", lambda group=None: 0)
    combine()
    assert all("\n  Hint: " in text for text in refused)
    # Neither is an exception, and each engine is met.
    assert len(refused) > 100
    assert {"torch", "deepspeed"} <= {phase.derived.engine for phase in taken}
    assert sum(any(s == "user" and "." in k for k, (s, _) in p.sources.items()) for p in taken) > 50


def _check(phase: ResolvedPhase) -> None:
    parts = phase.train.gradient_accumulation_steps * phase.launch.num_processes
    assert phase.derived.micro_batch_size * parts == phase.train.global_batch_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run_yaml(phase, folder / "run.yaml")
        write_launch_files(phase, folder, folder)
        assert read_run_yaml(folder / "run.yaml") == phase
        for path in folder.iterdir():
            if phase.launch.offload_path != "auto":
                assert not re.search(r'(:\s*|")auto\b', path.read_text()), path.name
        if phase.derived.engine == "deepspeed":
            written = json.loads((folder / "deepspeed.json").read_text())
            micro, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
            whole = written[micro] * written[steps] * phase.launch.num_processes
            assert written["train_batch_size"] == whole
            DeepSpeedConfig(written)
