"""Commands by other launchers than accelerate's: deepspeed and plain python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerotrain.errors import PipelineError
from zerotrain.importers.command import parse_commands, without_comments
from zerotrain.importers.command_line import import_command
from zerotrain.importers.reading import ImportOptions

TRAINER = "finetune.py --model_name_or_path a/b --max_steps 9 --output_dir out"


def test_deepspeeds_launcher_starts_one_for_every_gpu(place: Path) -> None:
    """Their number is that of the machine, which the user can say."""
    text = f"deepspeed {TRAINER} --deepspeed ds_config.json --bf16"
    assert import_command(text).values["launch.num_processes"] == 1
    found = import_command(text, ImportOptions(num_processes=8)).values
    assert (found["launch.num_processes"], found["train.global_batch_size"]) == (8, 64)


def test_deepspeeds_own_arguments_name_its_file(place: Path) -> None:
    """Of a script that nothing is known of, as in DeepSpeed's examples."""
    config = {"zero_optimization": {"stage": 1}, "train_batch_size": 8, "bf16": {"enabled": True}}
    (place / "own.json").write_text(json.dumps(config))
    text = "deepspeed --num_gpus 2 cifar.py --deepspeed --deepspeed_config own.json"
    found = import_command(text).values
    assert (found["launch.preset"], found["launch.num_processes"]) == ("zero1", 2)
    assert found["train.global_batch_size"] == 8
    with pytest.raises(PipelineError, match="unknown key epochs"):
        import_command(f"{text} --epochs 3")


def test_python_next_to_a_launcher_prepares(place: Path) -> None:
    """And is no training of its own; a word of another command is no launcher either."""
    commands = parse_commands(f"python download.py --all\ntorchrun {TRAINER} --note python")
    assert [command.launcher for command in commands] == ["torchrun"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a --b # c 'd\ne", "a --b \ne"),
        ("# a\n  # b\nc", "\n  \nc"),
        ('a \'b # c\' "d # \\" e" f#g h\\ #i #j', 'a \'b # c\' "d # \\" e" f#g h\\ #i '),
        ("a;# b", "a;"),
        ("a \\\n# b\n --c", "a \\\n\n --c"),
    ],
)
def test_comments_are_left_out_as_by_bash(text: str, left: str) -> None:
    """One begins where a word could, outside of quotes, and ends with its line."""
    assert without_comments(text) == left


@pytest.mark.parametrize("prompt", ["x; a=b; c && d=e", "two\nA=3; and\nB=4\n", "A=1 && x"])
def test_what_is_quoted_sets_no_variable(prompt: str) -> None:
    """Also at the beginning of a line."""
    (command,) = parse_commands(f"torchrun {TRAINER} --prompt '{prompt}'")
    assert command.arguments["prompt"] == prompt


@pytest.mark.parametrize(
    "script", [f"{TRAINER} --bf16", "train_dreambooth_lora_sd3.py --mixed_precision=bf16"]
)
def test_a_scripts_precision_replaces_accelerates(place: Path, script: str) -> None:
    """As diffusers' flag says of itself, and HF Trainer does; the report names both."""
    (place / "default.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    needed = "" if TRAINER in script else "--pretrained_model_name_or_path a/b"
    command = f"accelerate launch --config_file default.yaml {script} {needed}"
    found = import_command(command)
    assert found.values["launch.mixed_precision"] == "bf16"
    told = [(n.outcome, n.given) for n in found.notes if n.key == "mixed_precision"]
    assert ("changed", "no") in told
    assert ("kept", "no") not in told
