"""The launch files are what accelerate and DeepSpeed take, with nothing left open."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from zerotrain.config import read_config
from zerotrain.errors import PipelineError
from zerotrain.launch.files import accelerate_config, deepspeed_config, write_launch_files
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolve import resolve_phase
from zerotrain.launch.resolved import write_run_yaml

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "launch"
CONFIG = read_config(ROOT / "config" / "config.yaml")
PHASES = [phase.name for phase in CONFIG.phases]
PRESETS = sorted((ROOT / "config" / "launch").glob("*.yaml"))
MEMORY_PRESETS = [path for path in PRESETS if path.stem != "zero3_nvme"]
EPOCH_SIZE = 906
"""Half of the scanned digits."""


@pytest.fixture(params=PHASES)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The launch files of a phase of the shipped configuration."""
    name = request.param
    preset = read_preset(ROOT / f"config/launch/{CONFIG.phase(name).launch.preset}.yaml")
    phase = resolve_phase(CONFIG, name, preset, EPOCH_SIZE)
    folder = tmp_path / name
    folder.mkdir()
    write_run_yaml(phase, folder / "run.yaml")
    write_launch_files(phase, preset, folder, Path(f"results/digits/{name}/launch"))
    return folder


def test_shipped_configuration_renders_the_golden_files(
    rendered: Path, generated: Callable[[Path, str], None]
) -> None:
    """A change of what is launched is seen in a diff."""
    golden = GOLDEN / rendered.name
    golden.mkdir(parents=True, exist_ok=True)
    for path in sorted(rendered.iterdir()):
        generated(golden / path.name, path.read_text())
    assert sorted(p.name for p in golden.iterdir()) == sorted(p.name for p in rendered.iterdir())
    assert {path.name for path in GOLDEN.iterdir()} <= set(PHASES)


def test_nothing_is_auto(rendered: Path) -> None:
    """Every value is written down before a process starts."""
    for path in rendered.iterdir():
        assert not re.search(r"\bauto\b", path.read_text()), path.name


def test_accelerate_takes_its_file(rendered: Path, monkeypatch) -> None:
    """Its own parser, which refuses unknown keys; all of ZeRO stands in the file it names."""
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(rendered / "accelerate.yaml"))
    assert (found.num_processes, found.num_machines, found.use_cpu) == (1, 1, False)
    if (rendered / "deepspeed.json").exists():
        assert found.distributed_type == "DEEPSPEED"
        assert found.deepspeed_config == {
            "deepspeed_config_file": f"results/digits/{rendered.name}/launch/deepspeed.json",
            "zero3_init_flag": False,
        }
        # In both files it would be refused or ignored.
        assert "mixed_precision" not in yaml.safe_load((rendered / "accelerate.yaml").read_text())
    else:
        assert found.distributed_type == "NO"
        assert found.deepspeed_config == {}


def test_accelerates_parser_is_a_check(tmp_path: Path) -> None:
    """The parser that accepts our files refuses what it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    (tmp_path / "a.yaml").write_text("distributed_type: NO\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("rendered", ["offload"], indirect=True)
def test_deepspeed_takes_its_file(rendered: Path) -> None:
    """Its own configuration class reads every value as it was meant."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    written = json.loads((rendered / "deepspeed.json").read_text())
    # It passes over unknown keys in silence, so they are compared with its constants.
    known = {value for value in vars(constants).values() if isinstance(value, str)}
    assert set(written) <= {*known, ACT_CHKPT, ZERO_OPTIMIZATION}
    found = DeepSpeedConfig(written)
    assert found.train_batch_size == 64
    assert found.train_micro_batch_size_per_gpu == 64
    assert found.gradient_accumulation_steps == 1
    assert found.gradient_clipping == 1.0
    assert found.zero_config.stage == 2
    assert found.zero_config.offload_optimizer.device == "cpu"
    assert found.zero_config.reduce_bucket_size == 50_000_000
    assert not found.float16_config.enabled
    assert not found.bfloat16_config.enabled


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_yaml_1_1_readers_see_the_precision_as_a_string(tmp_path: Path, precision: Any) -> None:
    """`no` without quotes is false to accelerate's reader."""
    preset = read_preset(ROOT / "config/launch/torch.yaml")
    phase = resolve_phase(CONFIG, "plain", preset, EPOCH_SIZE)
    phase = replace(phase, mixed_precision=precision)
    write_run_yaml(phase, tmp_path / "run.yaml")
    write_launch_files(phase, preset, tmp_path, tmp_path)
    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        accelerate = reader.load((tmp_path / "accelerate.yaml").read_text())
        assert accelerate["mixed_precision"] == precision
        run = reader.load((tmp_path / "run.yaml").read_text())
        assert run["mixed_precision"]["value"] == precision
    assert (
        yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["mixed_precision"] == precision
    )


@pytest.mark.parametrize("path", MEMORY_PRESETS, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_every_preset_renders(path: Path, precision: Any) -> None:
    """Clipping is always written, since DeepSpeed's default is to clip; one precision is on."""
    preset = read_preset(path)
    phase = resolve_phase(CONFIG, "plain", preset, EPOCH_SIZE)
    phase = replace(phase, mixed_precision=precision, max_grad_norm=0.0)
    accelerate = accelerate_config(phase, Path("deepspeed.json"))
    assert ("deepspeed_config" in accelerate) == (preset.engine == "deepspeed")
    written = deepspeed_config(phase, preset)
    assert written["gradient_clipping"] == 0.0
    assert written["bf16"] == {"enabled": precision == "bf16"}
    assert written["fp16"]["enabled"] == (precision == "fp16")
    assert written["zero_optimization"] == preset.zero_optimization


def test_nvme_gets_its_folder() -> None:
    """In both sections that swap; the preset itself names none."""
    preset = read_preset(ROOT / "config/launch/zero3_nvme.yaml")
    phase = resolve_phase(CONFIG, "plain", preset, EPOCH_SIZE)
    phase = replace(phase, offload_path="/fast/swap")
    written = deepspeed_config(phase, preset)["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        assert written[key] == {**preset.zero_optimization[key], "nvme_path": "/fast/swap"}


def test_several_processes_of_plain_torch_are_launched_together() -> None:
    """The launcher starts them alike on GPUs and on a CPU."""
    preset = read_preset(ROOT / "config/launch/torch.yaml")
    phase = resolve_phase(CONFIG, "plain", preset, EPOCH_SIZE)
    found = accelerate_config(replace(phase, num_processes=2), Path("deepspeed.json"))
    assert (found["distributed_type"], found["num_processes"]) == ("MULTI_GPU", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: jax", "engine 'jax', unknown keys []"),
        ("engine: torch\nstage: 2", "engine 'torch', unknown keys ['stage']"),
        ("engine: torch\nzero_optimization: {stage: 2}", "engine torch, zero_optimization {'sta"),
        ("engine: deepspeed", "engine deepspeed, zero_optimization {}"),
        ("engine: deepspeed\nzero_optimization: 2", "engine deepspeed, zero_optimization 2"),
        ("- engine", "holds list, not keys"),
        ("", "holds NoneType, not keys"),
        ("engine: [", "not valid YAML: "),
        (
            "engine: deepspeed\nzero_optimization: {stage: 2, offload_optimizer: {device: auto}}",
            "zero_optimization.offload_optimizer.device is 'auto'",
        ),
        (
            "engine: deepspeed\nzero_optimization: {stage: 2, round_robin_gradients: true}",
            "round_robin_gradients is on",
        ),
    ],
)
def test_bad_presets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Nothing of a preset is passed over in silence."""
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(PipelineError) as caught:
        read_preset(tmp_path / "mine.yaml")
    assert f"{tmp_path / 'mine.yaml'}: {message}" in str(caught.value)


def test_a_missing_preset_is_refused() -> None:
    """Those that there are stand in the hint."""
    with pytest.raises(PipelineError) as caught:
        read_preset(ROOT / "config" / "launch" / "zero9.yaml")
    assert "zero9.yaml: no such launch preset" in str(caught.value)
    assert "torch, zero1, zero2, zero2_offload" in str(caught.value)
