"""The table of keys is complete: held against the classes that read the files themselves."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from zerotrain.config.lr_scheduler import ARGUMENTS
from zerotrain.importers.command import parse_commands
from zerotrain.importers.keys import DIFFSYNTH, SIMPLETUNER, TRAINER
from zerotrain.importers.schedule import DEEPSPEED_HAS, DEEPSPEED_NAMES
from zerotrain.launch.keys import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_ALIASES,
    DEEPSPEED_FLAGS,
    LAUNCH_FLAGS,
    Key,
    read_tables,
    unknown_key,
)

REFERENCES = Path(__file__).parent / "references"


def test_every_field_of_accelerates_file_is_there() -> None:
    """Those of ClusterConfig, and the old names that it still takes."""
    from accelerate.commands.config.config_args import ClusterConfig

    names = {field.name for field in fields(ClusterConfig)}
    assert names == {n for n in ACCELERATE if "." not in n} - {"fp16", "dynamo_backend"}


def test_every_deepspeed_key_of_accelerates_file_is_there() -> None:
    """Its launcher has a flag for each, under the heading of DeepSpeed."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    group = next(g for g in parser._action_groups if g.title == "DeepSpeed Arguments")
    assert {action.dest for action in group._group_actions} == set(DEEPSPEED_FLAGS)


def test_every_flag_of_accelerates_launcher_is_there() -> None:
    """But those of launchers that are refused as a whole (FSDP, Megatron-LM, fp8, TPU, AWS)."""
    from accelerate.commands.launch import launch_command_parser

    refused = (
        r"fsdp_|megatron_lm_|fp8_|parallelism_config_|aws_|tpu|no_tpu|vm$|env$|mpirun|help$|"
        r"training_script"
    )
    known = {*ACCELERATE, *DEEPSPEED_FLAGS, *LAUNCH_FLAGS}
    names = {action.dest for action in launch_command_parser()._actions}
    assert not {name for name in names - known if not re.match(refused, name)}


class Watched(dict[str, Any]):
    """A dictionary that remembers which keys were asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self


def test_every_key_that_deepspeed_looks_for_is_there() -> None:
    """Its parser is watched while it reads."""
    from deepspeed.runtime.config import DeepSpeedConfig

    watched = Watched(train_batch_size=1, zero_optimization={"stage": 2})
    DeepSpeedConfig(watched)
    assert len(watched.asked) > 50
    top = {name.partition(".")[0] for name in DEEPSPEED}
    assert watched.asked - top - set(DEEPSPEED_ALIASES) == set()


def models() -> list[tuple[str, Any]]:
    """DeepSpeed's models of its sections."""
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    return [
        ("fp16", precision_config.DeepSpeedFP16Config),
        ("bf16", precision_config.DeepSpeedBF16Config),
        ("zero_optimization", config.DeepSpeedZeroConfig),
        ("zero_optimization.offload_param", offload_config.DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.offload_optimizer", offload_config.DeepSpeedZeroOffloadOptimizerConfig),
    ]


def test_every_field_of_deepspeeds_models_is_there_with_its_default() -> None:
    """A default that DeepSpeed changes is seen here."""
    seen = 0
    for name, model in models():
        for field, info in model.model_fields.items():
            key = DEEPSPEED[f"{name}.{info.alias or field}"]
            seen += 1
            if key.default is not None and info.default is not None:
                default = getattr(info.default, "value", info.default)
                assert key.default == default, key.name
    assert seen == 73


def test_every_key_of_activation_checkpointing_and_aio_is_there() -> None:
    """Sections that DeepSpeed reads without a model."""
    from deepspeed.runtime.activation_checkpointing import config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    found = config.DeepSpeedActivationCheckpointingConfig({})
    for name in vars(found):
        assert f"activation_checkpointing.{name}" in DEEPSPEED
    for name, default in AIO_DEFAULT_DICT.items():
        assert DEEPSPEED[f"aio.{name}"].default == default


def test_schedules_have_deepspeeds_parameters() -> None:
    """By name, and with its defaults."""
    from deepspeed.runtime import lr_schedules

    for name in DEEPSPEED_NAMES:
        signature = inspect.signature(getattr(lr_schedules, name).__init__).parameters
        own = set(signature) - {"self", "optimizer", "last_batch_iteration"}
        assert own == set(ARGUMENTS[name].model_fields), name
        for parameter, default in DEEPSPEED_HAS.get(name, {}).items():
            assert signature[parameter].default == default, (name, parameter)


def test_no_default_of_the_trainer_has_changed() -> None:
    """What an "auto" becomes where a command says nothing."""
    from transformers import TrainingArguments

    known = {field.name: field for field in fields(TrainingArguments)}
    for name in (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
        "max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size",
        "gradient_accumulation_steps", "seed", "save_steps", "logging_steps",
    ):  # fmt: skip
        assert TRAINER[name].default == known[name].default, name
    assert str(known["lr_scheduler_type"].default).endswith("LINEAR") or (
        known["lr_scheduler_type"].default == TRAINER["lr_scheduler_type"].default
    )


def test_every_flag_of_the_guides_is_there() -> None:
    """The commands, as the guides have them."""
    tables = {"diffsynth": DIFFSYNTH, "openmind": TRAINER}
    seen = 0
    for guide, table in tables.items():
        for path in (REFERENCES / guide).glob("*.sh"):
            for command in parse_commands(path.read_text()):
                assert set(command.arguments) <= set(table)
                seen += len(command.arguments)
    assert seen == 16 + 16 + 17
    assert "offload_param_path" in SIMPLETUNER


def test_a_name_stands_once(tmp_path: Path) -> None:
    """A second row of a name would hide the first."""
    file = tmp_path / "keys.toml"
    row = 'a = { type = "boolean", fate = "ignored_no_effect", reason = "nothing" }\n'
    file.write_text(f"[table]\n{row}")
    assert read_tables(file) == {
        "table": {"a": Key("a", "boolean", "ignored_no_effect", reason="nothing")}
    }
    file.write_text(f"[table]\n{row}{row}")
    with pytest.raises(tomllib.TOMLDecodeError):
        read_tables(file)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.stage3_prefetch_bucket", "stage3_prefetch_bucket_size"),
        ("reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
        ("train_micro_batch_size_per_gpus", "train_micro_batch_size_per_gpu"),
    ],
)
def test_an_unknown_key_names_the_nearest(name: str, near: str) -> None:
    """Also where it stands in the wrong section."""
    assert near in str(unknown_key("file", name, list(DEEPSPEED)))
