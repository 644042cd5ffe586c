"""Every configuration and command of the four guides, with all that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML
from tests.builders.runs import make_run
from tests.importing.conftest import leaves

from zerotrain.config.read import parse_config
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.write import config_text, report
from zerotrain.machine.detect import Device, Machine, choose_precision
from zerotrain.machine.host import detect_host

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "importing"
REFERENCES = Path(__file__).parent / "references"
NAMES = sorted(str(path.relative_to(REFERENCES)) for path in REFERENCES.rglob("*.*"))
ASKS = {
    "diffsynth/commands.sh", "diffsynth/deepspeed_zero3_cpuoffload.yaml",
    "diffsynth/ds_z3_cpuoffload.json", "openmind/precision.json", "openmind/example_zero2.json",
    "openmind/example_zero3.json",
}  # fmt: skip
"""Those that leave the precision open."""


@pytest.mark.parametrize("name", NAMES)
def test_a_guides_snippet_becomes_the_golden_file(
    name: str, imported: Callable[..., ImportedConfig], generated: Callable[[Path, str], None]
) -> None:
    """The configuration, and below it what became of every key."""
    found = imported(name, "bf16" if name in ASKS else None)
    told = "".join(f"# {line}\n" for line in report(found.notes).splitlines())
    golden = GOLDEN / f"{name.replace('/', '-').replace('.', '_')}.yaml"
    generated(golden, f"{config_text(found)}\n# Report:\n{told}")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_it_was_meant(
    name: str, imported: Callable[..., ImportedConfig]
) -> None:
    """By YAML 1.1 and 1.2, without an "auto", and with a batch that multiplies out."""
    found = imported(name, "bf16" if name in ASKS else None)
    text = config_text(found)
    values = YAML(typ="safe").load(text)
    assert values == yaml.safe_load(text) == found.nested()
    assert "auto" not in leaves(values)
    train, launch = values["train"], values["launch"]
    parts = train["gradient_accumulation_steps"] * launch["num_processes"]
    assert train["global_batch_size"] % parts == 0
    assert max(len(line) for line in text.splitlines() if "base:" not in line) <= 240


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "bf16"), ((7, 5), "fp16")])
@pytest.mark.parametrize("name", sorted(ASKS))
def test_the_machine_decides_a_precision_that_nothing_says(
    name: str,
    capability: tuple[int, int],
    expected: str,
    imported: Callable[..., ImportedConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the report says so; DiffSynth-Studio's own commands load their models in bf16."""
    device = Device(name="a GPU", capability=capability)
    machine = Machine(accelerator="cuda", host=detect_host(), devices=(device,))
    monkeypatch.setattr("zerotrain.machine.detect.detect", lambda: machine)
    found = imported(name, choose=choose_precision)
    own = name == "diffsynth/commands.sh"
    assert found.values["launch.mixed_precision"] == ("bf16" if own else expected)
    reasons = [n.reason for n in found.notes if n.ours == "launch.mixed_precision"]
    said = "DiffSynth-Studio loads this model in bf16" if own else "chosen for this machine"
    assert all(said in reason for reason in reasons)
    if (own, expected) == (False, "fp16"):
        assert "compute capability 7.5) does not compute bf16" in reasons[0]


def test_simpletuners_file(imported: Callable[..., ImportedConfig]) -> None:
    """Reference 004: parameters are offloaded at stage 2, which offloads nothing."""
    found = imported("simpletuner/config.json")
    assert found.values == {
        "launch.preset": "zero2_offload",
        "launch.mixed_precision": "bf16",
        "launch.num_processes": 1,
        "train.global_batch_size": 8,
        "train.gradient_accumulation_steps": 4,
        "train.max_grad_norm": 1.0,
        "train.optimizer": "adamw",
        "train.learning_rate": 1e-4,
        "train.adam_beta1": 0.9,
        "train.adam_beta2": 0.999,
        "train.adam_epsilon": 1e-8,
        "train.adam_weight_decay": 0.01,
        "train.lr_scheduler": "WarmupLR",
        "train.lr_scheduler_args": {"warmup_type": "log", "warmup_min_lr": 0},
        "train.lr_warmup_steps": 500,
    }
    left = [note for note in found.notes if note.outcome == "left out"]
    assert [(note.key, note.given) for note in left] == [
        ("zero_optimization.offload_param.device", "cpu")
    ]
    assert left[0].reason == "parameters stay whole below stage 3, so there is nothing to offload"


def test_openminds_command(imported: Callable[..., ImportedConfig]) -> None:
    """Reference 002: 8 NPUs, cosine though the guide says WarmupDecayLR, and a save too late."""
    found = imported("openmind/command.sh")
    nested = found.nested()
    assert nested["phases"] == [{"name": "train", "until": 2000}]
    assert nested["launch"] == {
        "num_processes": 8,
        "preset": "zero2",
        "mixed_precision": "bf16",
        "deepspeed": {
            "communication_data_type": "fp32",
            "zero_optimization": {
                "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000,
            },
        },
    }  # fmt: skip
    train = nested["train"]
    assert (train["global_batch_size"], train["learning_rate"]) == (8, 1e-6)
    assert (train["lr_scheduler"], train["lr_warmup_ratio"]) == ("cosine", 0.03)
    assert (train["adam_weight_decay"], train["keep"], train["log_every"]) == (0.0, 1, 1)
    assert (nested["seed"], nested["family"]) == (1234, "causal_lm")
    assert nested["base"] == "PyTorch-NPU/qwen1.5_7b_chat"
    assert nested["data"]["prompt_template"] == "alpaca"
    assert nested["evaluate"] == {"split": "train"}
    outcomes = {note.key: note.outcome for note in found.notes}
    assert (train["save_every"], outcomes["save_steps"]) == (2000, "changed")
    assert outcomes["master_port"] == "no-op"
    for key in ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis"):
        assert outcomes[f"bf16.{key}"] == "no-op"


def test_diffsynths_two_commands_are_one_run(imported: Callable[..., ImportedConfig]) -> None:
    """Reference 000: the images of the first, the training of the second, ZeRO-3 offload."""
    found = imported("diffsynth/commands.sh", "bf16")
    nested = found.nested()
    assert nested["data"] == {
        "source": "folder",
        "images": "data/example_image_dataset",
        "metadata": "data/example_image_dataset/metadata.csv",
        "repeats": 50,
        "num_workers": 8,
    }
    assert nested["base"].split(",") == [
        "Qwen/Qwen-Image:text_encoder/model*.safetensors",
        "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors",
        "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors",
    ]
    assert (nested["run"], nested["family"]) == ("Qwen-Image_lora", "qwen_image")
    assert (nested["lora"]["rank"], nested["lora"]["alpha"]) == (32, 32.0)
    assert len(nested["lora"]["target_modules"]) == 12
    assert nested["phases"] == [{"name": "train", "until": "5 epochs"}]
    assert nested["launch"] == {
        "preset": "zero3_offload",
        "num_processes": 1,
        "mixed_precision": "bf16",
        "accelerate": {"debug": True},
        "deepspeed": {
            "zero_optimization": {
                "sub_group_size": 1_000_000_000,
                "reduce_bucket_size": 50_000_000,
                "stage3_prefetch_bucket_size": 50_000_000,
                "stage3_param_persistence_threshold": 100_000,
                "stage3_max_live_parameters": 100_000_000,
                "stage3_max_reuse_distance": 100_000_000,
            }
        },
        "zero3_init": True,
    }
    train = nested["train"]
    assert (train["resolution"], train["global_batch_size"]) == (1024, 1)
    assert (train["learning_rate"], train["lr_scheduler"]) == (1e-4, "constant")
    assert train["gradient_checkpointing"] is True


def test_pefts_script_has_its_values_in_its_code(imported: Callable[..., ImportedConfig]) -> None:
    """Reference 003: ZeRO-3 offload in fp32, a LoRA of rank 8 and alpha 32."""
    nested = imported("peft/command.sh").nested()
    assert nested["launch"] == {
        "num_processes": 1, "preset": "zero3_offload", "mixed_precision": "no", "zero3_init": True,
    }  # fmt: skip
    assert nested["lora"] == {
        "rank": 8, "alpha": 32.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert (nested["family"], nested["base"]) == ("seq2seq_lm", "facebook/bart-large")
    assert (nested["train"]["global_batch_size"], nested["train"]["learning_rate"]) == (8, 3e-3)
    assert nested["train"]["lr_scheduler"] == "linear"
    assert nested["evaluate"] == {"split": "train"}


def test_nvme_offload_of_parameters_alone(imported: Callable[..., ImportedConfig]) -> None:
    """Reference 004's second file: no preset is it, so the target stands next to the nearest."""
    launch = imported("simpletuner/config_nvme.json").nested()["launch"]
    assert (launch["preset"], launch["offload_param"]) == ("zero3", "nvme")
    assert launch["offload_path"] == "/path/to/nvme/storage"
    assert launch["deepspeed"]["zero_optimization"]["offload_param"] == {"buffer_size": 100_000_000}


def test_all_of_it_is_what_the_configuration_takes(
    imported: Callable[..., ImportedConfig],
) -> None:
    """Of every guide's file, in a run of the example's data."""
    for name in NAMES:
        nested = imported(name, "bf16" if name in ASKS else None).nested()
        missing = make_run(run="a", data={"source": "digits"})
        config = parse_config({**missing, **nested}, name)
        assert config.phases[0].launch.preset == nested["launch"]["preset"]
