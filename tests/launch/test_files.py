"""The launch files are what accelerate and DeepSpeed take, with nothing left open."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML
from tests.launch.conftest import FAMILIES, ROOT, resolved

from zerotrain.launch.files import SRUN, accelerate_config, write_launch_files, write_run_yaml
from zerotrain.launch.resolved import ResolvedPhase

GOLDEN = ROOT / "tests" / "golden" / "launch"
PRESETS = sorted(p.stem for p in (ROOT / "config" / "launch").glob("*.yaml") if p.stem != "auto")
ZERO = [name for name in PRESETS if name != "torch"]
RENDERED = [
    *((family, preset) for family in ("sdxl", "sd3") for preset in PRESETS),
    ("flux", "zero3_offload"),
    ("qwen_image", "zero3"),
    ("causal_lm", "torch"),
    ("causal_lm", "zero3"),
    ("seq2seq_lm", "zero2_offload"),
]
"""Every preset of two families; of the others those whose rendering their sizes, adapters or text
can change."""


def write(phase: ResolvedPhase, folder: Path) -> Path:
    """The launch files of a phase, that will be read from results/."""
    folder.mkdir(parents=True)
    write_run_yaml(phase, folder / "run.yaml")
    write_launch_files(phase, folder, Path("results/flowers/a/launch"))
    return folder


@pytest.fixture(params=RENDERED, ids="-".join)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The launch files of a family under a preset."""
    family, preset = request.param
    return write(resolved(preset, family), tmp_path / family / preset)


def test_every_family_and_preset_renders_its_golden_files(
    rendered: Path, generated: Callable[[Path, str], None]
) -> None:
    """A change of what is launched is seen in a diff."""
    golden = GOLDEN / rendered.parent.name / rendered.name
    golden.mkdir(parents=True, exist_ok=True)
    for path in sorted(rendered.iterdir()):
        generated(golden / path.name, path.read_text())
    assert sorted(p.name for p in golden.iterdir()) == sorted(p.name for p in rendered.iterdir())


def test_golden_files_are_of_what_is_shipped() -> None:
    """No file is left of a family or preset that is gone."""
    found = {(path.parent.name, path.name) for path in GOLDEN.glob("*/*")}
    assert found == set(RENDERED)
    assert {family for family, _ in RENDERED} == set(FAMILIES)


def test_nothing_is_auto(rendered: Path) -> None:
    """Every value is written down before a process starts."""
    for path in rendered.iterdir():
        assert not re.search(r"\bauto\b", path.read_text()), path.name


def test_accelerate_takes_its_file(rendered: Path) -> None:
    """Its own parser, which refuses unknown keys; all of ZeRO stands in the file it names."""
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(rendered / "accelerate.yaml"))
    assert (found.num_processes, found.num_machines, found.use_cpu) == (2, 1, False)
    if (rendered / "deepspeed.json").exists():
        assert found.distributed_type == "DEEPSPEED"
        assert found.deepspeed_config == {
            "deepspeed_config_file": "results/flowers/a/launch/deepspeed.json",
            "zero3_init_flag": False,
        }
        # In both files it would be refused or ignored.
        assert "mixed_precision" not in yaml.safe_load((rendered / "accelerate.yaml").read_text())
    else:
        assert found.distributed_type == "MULTI_GPU"
        assert found.deepspeed_config == {}


@pytest.mark.parametrize("preset", ZERO)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_deepspeed_takes_its_file(preset: str, precision: str, monkeypatch) -> None:
    """Its own configuration class reads every value as it was meant."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(comm, "get_rank", lambda group=None: 0)
    phase = resolved(preset, mixed_precision=precision)
    found = DeepSpeedConfig(json.loads(json.dumps(phase.derived.deepspeed)))
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (8, 2)
    assert found.gradient_accumulation_steps == 2
    assert found.gradient_clipping == phase.train.max_grad_norm
    assert found.float16_config.enabled == (precision == "fp16")
    assert found.bfloat16_config.enabled == (precision == "bf16")
    read = found.zero_config.model_dump(by_alias=True, mode="json")
    for key, value in phase.derived.deepspeed["zero_optimization"].items():
        if isinstance(value, dict):
            assert {name: read[key][name] for name in value} == value, key
        else:
            assert read[key] == value, key
    if precision == "fp16":
        for key, value in phase.launch.fp16.model_dump().items():
            assert getattr(found.float16_config, key) == value, key


def test_yaml_1_1_readers_see_the_precision_as_a_string(tmp_path: Path) -> None:
    """`no` without quotes is false to accelerate's reader."""
    for precision in ("no", "bf16"):
        folder = write(resolved("torch", mixed_precision=precision), tmp_path / precision)
        for version in ((1, 1), (1, 2)):
            reader = YAML(typ="safe", pure=True)
            reader.version = version
            accelerate = reader.load((folder / "accelerate.yaml").read_text())
            assert accelerate["mixed_precision"] == precision
            run = reader.load((folder / "run.yaml").read_text())
            assert run["mixed_precision"]["value"] == precision


@pytest.mark.parametrize("preset", ZERO)
def test_clipping_is_always_written(preset: str) -> None:
    """DeepSpeed's default is to clip; 0.0 means none."""
    assert resolved(preset).derived.deepspeed["gradient_clipping"] == 1.0
    assert (
        resolved(preset, train={"max_grad_norm": 0}).derived.deepspeed["gradient_clipping"] == 0.0
    )
    by_value = resolved(preset, train={"grad_clip_method": "value"})
    assert (by_value.derived.deepspeed["gradient_clipping"], by_value.train.max_grad_norm) == (
        0.0,
        1.0,
    )


def test_nvme_gets_its_folder() -> None:
    """In both sections that swap; the preset itself names none."""
    written = resolved("zero3_nvme").derived.deepspeed["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        assert (written[key]["device"], written[key]["nvme_path"]) == ("nvme", "/nvme")


def test_several_processes_of_plain_torch_are_launched_together() -> None:
    """The launcher starts them alike on GPUs and on a CPU."""
    found = accelerate_config(resolved("torch"), Path("deepspeed.json"))
    assert (found["distributed_type"], found["num_processes"]) == ("MULTI_GPU", 2)
    found = accelerate_config(resolved("torch", num_processes=1), Path("deepspeed.json"))
    assert (found["distributed_type"], found["num_processes"]) == ("NO", 1)


@pytest.mark.parametrize("preset", ["torch", "zero2"])
def test_several_machines_are_launched_by_srun(preset: str, tmp_path: Path) -> None:
    """One launcher each, which shares all of its machine's CPUs; DeepSpeed's own would use ssh."""
    phase = resolved(preset, train={"global_batch_size": 16}, machines=2, num_processes=8)
    folder = write(phase, tmp_path / preset)
    found = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (found["num_machines"], found["num_processes"]) == (2, 8)
    inside = found.get("deepspeed_config", {})
    assert inside.get("deepspeed_multinode_launcher") == ("standard" if preset == "zero2" else None)
    line = (folder / SRUN).read_text()
    assert "exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1 " in line
    shown = subprocess.run(
        ["sh", str(folder / SRUN), "launcher", "a b"],
        env={"PATH": f"{fake_srun(tmp_path)}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[-2:] == ["launcher", "a b"]
    assert {"--kill-on-bad-exit=1", "--cpu-bind=none", "--export=ALL"} < set(shown)
    assert not (write(resolved(preset), tmp_path / "alone") / SRUN).exists()


def fake_srun(folder: Path) -> Path:
    """A folder with an srun that shows its arguments, a line each."""
    script = folder / "bin" / "srun"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script.chmod(0o755)
    return script.parent
