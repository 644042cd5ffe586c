"""A schedule of the DeepSpeed file that HF Trainer's arguments complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerotrain.importers.command_line import import_command
from zerotrain.importers.reading import ImportOptions

AUTO_PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
PRESETS = Path(__file__).parents[2] / "config" / "launch"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_steps": 1000, "warmup_steps": 0.03}, {"lr_warmup_steps": 30}),
        ({"max_steps": 1000, "warmup_steps": 7.9}, {"lr_warmup_steps": 7}),
        ({"num_train_epochs": 3, "warmup_steps": 0.03}, {"lr_warmup_ratio": 0.03}),
        ({"num_train_epochs": 3, "warmup_ratio": 0.03}, {"lr_warmup_ratio": 0.03}),
    ],
)
def test_a_schedule_of_the_file_takes_the_warm_up(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Where the file says auto; the number of steps is known without epochs alone."""
    schedule = {"type": "WarmupDecayLR", "params": dict.fromkeys(AUTO_PARAMS, "auto")}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"scheduler": schedule, "zero_optimization": {"stage": 2}}))
    words = " ".join(f"--{name} {value}" for name, value in given.items())
    text = f"torchrun finetune.py --model_name_or_path a/b --data_path a.json --deepspeed {file}"
    train = import_command(f"{text} {words}", ImportOptions(presets=PRESETS)).nested()["train"]
    names = ("lr_warmup_steps", "lr_warmup_ratio")
    assert {name: train[name] for name in names if name in train} == expected
