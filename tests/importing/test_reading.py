"""Files and commands that are wrong, habits that are faulty, and files that a run points at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.builders.refusals import refusal

from zerotrain.errors import PipelineError
from zerotrain.importers.command import parse_commands
from zerotrain.importers.command_line import import_command
from zerotrain.importers.reading import ImportOptions, import_file, launch_from_file

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "config" / "launch"
ZERO2 = {"zero_optimization": {"stage": 2}}
YAML_OF_ACCELERATE = {"distributed_type": "DEEPSPEED", "num_processes": 2}


def read(place: Path, config: Any, name: str = "ds.json", **options: Any) -> dict[str, Any]:
    """The values of a file."""
    (place / name).write_text(json.dumps(config))  # JSON is YAML
    return import_file(Path(name), ImportOptions(presets=PRESETS, **options)).values


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4,
             "gradient_accumulation_steps": 2},
            "train_batch_size 10 is not 4 (micro batch) x 2 (accumulation) x ? (processes)",
        ),
        (ZERO2 | {"optimizer": {"type": "AdamQ", "params": {"lr": 1}}}, "Adam"),
        (ZERO2 | {"optimizer": {"type": "Lamb", "params": {"lr": 1}}}, "works: adamw"),
        (ZERO2 | {"scheduler": {"type": "WarmupRL"}}, "the nearest: WarmupLR"),
        (ZERO2 | {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
         "did you mean scheduler.params.warmup_num_steps"),
        (ZERO2 | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        (ZERO2 | {"zero_optimisation": {}}, "did you mean zero_optimization"),
        (ZERO2 | {"pipeline": {"stages": 2}}, "pipeline: {'stages': 2} cannot be honoured"),
        ({"zero_optimization": {"stage": 4}}, "there are stages 0, 1, 2 and 3"),
        ({"zero_optimization": {"stage": "two"}}, "must be a whole number (found 'two')"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
         "zero_optimization.offload_param.nvme_path is missing"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
         "one of none, cpu, nvme"),
        (ZERO2 | {"gradient_clipping": -1}, "gradient_clipping is -1"),
        (ZERO2 | {"optimizer": {"type": "Adam", "params": {"lr": 0}}},
         "a.json, in our form: train.learning_rate: must be above 0 (found 0)"),
        (YAML_OF_ACCELERATE | {"num_machines": 3}, "no multiple of num_machines 3"),
        (YAML_OF_ACCELERATE | {"distributed_type": "FSDP"}, "distributed_type is FSDP"),
        (YAML_OF_ACCELERATE | {"num_proceses": 2}, "did you mean num_processes"),
        (YAML_OF_ACCELERATE | {"deepspeed_config": {"deepspeed_config_file": "no.json"}},
         "names no.json, which is not there"),
        ([1], "holds a list, not keys"),
    ],
)  # fmt: skip
def test_mistakes_are_named(place: Path, config: Any, message: str) -> None:
    """With the value and what to do."""
    name = "a.yaml" if isinstance(config, dict) and "distributed_type" in config else "a.json"
    assert message in refusal(read, place, config, name)


def test_numbers_that_do_not_multiply_out_are_named(place: Path) -> None:
    """All three, where the processes are known too."""
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
             "gradient_accumulation_steps": 4}  # fmt: skip
    assert read(place, ZERO2 | batch)["launch.num_processes"] == 1
    assert read(place, ZERO2 | batch | {"train_batch_size": 32})["launch.num_processes"] == 4
    with pytest.raises(PipelineError, match=r"8 is not 2 .* x 4 .* x 2 \(processes\): .* make 16"):
        read(place, ZERO2 | batch, num_processes=2)


def test_old_and_replaced_names(place: Path) -> None:
    """DeepSpeed's Adam is AdamW, implementations are what they compute, cpu_offload is a device."""
    params = {"lr": 1e-3, "weight_decay": 0.1}
    config = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    for name, mode, ours in (
        ("Adam", None, "adamw"), ("Adam", False, "adam"), ("cpuadam", None, "adamw"),
        ("FusedAdam", None, "adamw"), ("LION", None, "lion"),
    ):  # fmt: skip
        given = params if mode is None else params | {"adam_w_mode": mode}
        found = read(place, config | {"optimizer": {"type": name, "params": given}})
        assert (found["train.optimizer"], found["launch.preset"]) == (ours, "zero2_offload")
        assert found["train.adam_weight_decay"] == 0.1
    assert found["train.learning_rate"] == 1e-3


def test_fp16_has_deepspeeds_loss_scale(place: Path) -> None:
    """Where the file says nothing of it; and loss_scale without fp16 is nothing."""
    found = read(place, ZERO2 | {"fp16": {"enabled": True, "initial_scale_power": 12}})
    scale = {key: value for key, value in found.items() if key.startswith("launch.fp16")}
    assert scale == {
        "launch.fp16.initial_scale_power": 12,
        "launch.fp16.loss_scale_window": 1000,
        "launch.fp16.hysteresis": 2,
    }
    for config in (ZERO2 | {"loss_scale": 0}, ZERO2 | {"fp16": {"loss_scale": 128}}):
        found = read(place, config)
        assert found["launch.mixed_precision"] == "no"
        assert not [key for key in found if "loss_scale" in key]


def test_round_robin_gradients_are_left_out(place: Path) -> None:
    """The rest of the file is taken."""
    (place / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    )
    found = import_file(Path("ds.json"), ImportOptions(presets=PRESETS))
    left = [note.key for note in found.notes if note.outcome == "left out"]
    assert left == ["zero_optimization.round_robin_gradients"]
    assert found.values["launch.preset"] == "zero2"


def test_what_no_launch_has_is_left_out_of_the_file(place: Path) -> None:
    """contiguous_memory_optimization changes no number, and a stage would refuse it."""
    section = {"partition_activations": True, "contiguous_memory_optimization": True}
    (place / "ds.json").write_text(json.dumps({**ZERO2, "activation_checkpointing": section}))
    found = import_file(
        Path("ds.json"), ImportOptions(num_processes=1, precision="no", presets=PRESETS)
    )
    left = [note.key for note in found.notes if note.outcome == "left out"]
    assert left == ["activation_checkpointing.contiguous_memory_optimization"]
    assert "contiguous_memory_optimization" not in str(found.values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sh train.sh", "none of accelerate launch, torchrun, deepspeed and python"),
        ("accelerate config --config_file a.yaml", "launch import FILE"),
        ("accelerate launch", "no script"),
        ("accelerate launch --num_proceses 2 train.py", "did you mean num_processes"),
        ("torchrun --nproc_per_node=gpu f.py --model_name_or_path a/b --max_steps 3", "gpu"),
        ("torchrun --nnodes=2 f.py --model_name_or_path a/b --max_steps 3", "set launch.machines"),
        ("torchrun f.py --model_name_or_path a/b --bf16 --max_step 3", "did you mean max_steps"),
        ("torchrun f.py --model_name_or_path a/b --bf16 maybe", "must be true or false"),
        ("torchrun f.py 'open", "closing quotation"),
    ],
)
def test_commands_that_are_wrong(place: Path, text: str, message: str) -> None:
    """No traceback, and the nearest name."""
    with pytest.raises(PipelineError) as caught:
        import_command(text, ImportOptions(presets=PRESETS))
    assert message in str(caught.value)


def test_a_command_is_taken_apart() -> None:
    """Joined lines, redirections, values behind = and without, flags without a value."""
    (command,) = parse_commands(
        "# train\naccelerate launch --num-processes=2 --use_deepspeed --zero_stage 3 \\\n"
        "  train.py --a 1 --b=x --c > log.txt 2>&1 &\n"
    )
    assert command.flags == {"num_processes": "2", "use_deepspeed": True, "zero_stage": "3"}
    assert (command.script, command.log) == ("train.py", "log.txt")
    assert command.arguments == {"a": "1", "b": "x", "c": True}


def test_a_run_points_at_a_file(place: Path) -> None:
    """What the file leaves open the run says; what both say has to agree."""
    path = place / "ds.json"
    path.write_text(json.dumps(ZERO2 | {
        "bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }))  # fmt: skip
    run = {"mixed_precision": "bf16"}, {"global_batch_size": 8}
    launch, train = launch_from_file(path, *run, PRESETS)
    assert launch == {"preset": "zero2", "mixed_precision": "bf16"}
    assert train == {"max_grad_norm": 0.5}
    with pytest.raises(PipelineError, match="mixed_precision next to it"):
        launch_from_file(path, {}, {}, PRESETS)
    with pytest.raises(PipelineError, match=r"max_grad_norm 0.5, but the run says 1.0"):
        launch_from_file(path, {"mixed_precision": "bf16"}, {"max_grad_norm": 1.0}, PRESETS)


def test_pointing_at_a_file_imports_no_torch(place: Path) -> None:
    """The configuration is read while Snakemake draws its graph."""
    (place / "ds.json").write_text(json.dumps(ZERO2))
    code = (
        "import sys; from pathlib import Path\n"
        "from zerotrain.importers.reading import launch_from_file\n"
        f"launch_from_file(Path('ds.json'), presets=Path({str(PRESETS)!r}))\n"
        "print([name for name in ('torch', 'deepspeed', 'accelerate') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_command_writes_and_reports(place: Path) -> None:
    """The configuration on standard output, the report next to it."""
    (place / "config").symlink_to(ROOT / "config")
    config = ZERO2 | {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    (place / "ds.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "zerotrain", "launch", "import", "ds.json"]
    quiet = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run([*words, "--precision", "fp16"], **quiet)  # type: ignore[call-overload]
    assert YAML(typ="safe").load(done.stdout)["launch"]["mixed_precision"] == "fp16"
    assert "resolved  fp16.enabled auto -> launch.mixed_precision: fp16" in done.stderr


def test_onecycles_second_beta_is_what_deepspeed_would_have_trained_with(place: Path) -> None:
    """It sets both betas where it moves the first; where it does not, they stay."""
    cycle = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4}
    betas = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}

    def imported(**params: Any) -> dict[str, Any]:
        scheduler = {"type": "OneCycle", "params": {**cycle, **params}}
        micro = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
        config = ZERO2 | micro | {"optimizer": betas, "scheduler": scheduler}
        return read(place, config, num_processes=1)

    found = imported()
    assert "train.adam_beta1" not in found
    assert found["train.adam_beta2"] == 0.99
    found = imported(cycle_momentum=False)
    assert (found["train.adam_beta1"], found["train.adam_beta2"]) == (0.9, 0.95)
