"""HF Trainer's arguments: schedules with arguments, compilation, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.importers.command_line import import_command
from zerotrain.importers.imported_config import ImportedConfig
from zerotrain.importers.reading import ImportOptions

AUTO_PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
PRESETS = Path(__file__).parents[2] / "config" / "launch"


def trained(**given: Any) -> ImportedConfig:
    """A command with these flags."""
    words = " ".join(f"--{name} '{value}'" for name, value in given.items())
    command = "torchrun finetune.py --model_name_or_path a/model --data_path a.json --max_steps 100"
    return import_command(f"{command} {words}", ImportOptions(presets=PRESETS))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("inverse_sqrt", {"timescale": 30}),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "num_cycles": 0.5}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "min_lr_ratio": 0.1}),
        ("polynomial", {"lr_end": 1e-6, "power": 2.0}),
        ("cosine_with_restarts", {"num_cycles": 2}),
    ],
)
def test_schedules_with_their_arguments(name: str, arguments: dict[str, Any]) -> None:
    """lr_scheduler_kwargs is JSON, and its names are ours."""
    found = trained(
        lr_scheduler_type=name, lr_scheduler_kwargs=json.dumps(arguments), warmup_steps=10
    )
    train = found.nested()["train"]
    assert (train["lr_scheduler"], train["lr_warmup_steps"]) == (name, 10)
    assert train["lr_scheduler_args"] == arguments
    assert "lr_scheduler_kwargs" in {note.key for note in found.notes if note.outcome == "kept"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr_scheduler_kwargs": "min_lr=1"}, "lr_scheduler_kwargs: 'min_lr=1' is not JSON"),
        ({"lr_scheduler_kwargs": "[1]"}, "lr_scheduler_kwargs: '[1]' is not JSON"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs num_decay_steps"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "is not one of zerotrain's"),
    ],
)
def test_schedules_that_cannot_be(given: dict[str, Any], message: str) -> None:
    """With the reason."""
    assert message in refusal(trained, **given)


def test_a_warm_up_below_one_step_is_a_share() -> None:
    """As TrainingArguments.get_warmup_steps reads it; the new spelling of warmup_ratio."""
    found = trained(lr_scheduler_type="cosine", warmup_steps=0.03)
    train = found.nested()["train"]
    assert train["lr_warmup_ratio"] == 0.03
    assert "lr_warmup_steps" not in train
    assert "warmup_steps" in {note.key for note in found.notes if note.outcome == "kept"}


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


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_norms_and_biases_do_not_decay(optim: str) -> None:
    """Trainer.create_optimizer groups parameters so; without decay the groups say nothing."""
    found = trained(weight_decay=0.1, optim=optim).values
    assert found["train.no_decay_norm_bias"] is True
    assert "train.no_decay_norm_bias" not in trained().values


def test_adafactor_is_another() -> None:
    """transformers' own, with scale_parameter=False, takes steps that torch's cannot."""
    assert "optim: HF Trainer's adafactor is transformers' own" in refusal(
        trained, optim="adafactor"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_compile": "True"}, ("inductor", None)),
        ({"torch_compile_mode": "max-autotune"}, ("inductor", "max-autotune")),
        ({"torch_compile": "True", "torch_compile_backend": "aot_eager"}, ("aot_eager", None)),
        ({"torch_compile": "False"}, (None, None)),
    ],
)
def test_compilation(given: dict[str, Any], expected: tuple[str | None, str | None]) -> None:
    """A backend or a mode turns it on, as in transformers; inductor is its default."""
    found = trained(**given)
    own = tuple(found.values.get(f"launch.dynamo_{key}") for key in ("backend", "mode"))
    assert own == expected
    assert {note.outcome for note in found.notes if note.key in given} == {"kept"}


@pytest.mark.parametrize(
    ("given", "outcome", "reason"),
    [
        ({"eval_strategy": "no"}, "kept", "asks for nothing more"),
        (
            {"eval_strategy": "steps", "eval_steps": 20},
            "left out",
            "the script's evaluation set is not known: data.holdout keeps a share of the samples, "
            "and validation.eval_steps: 20 measures them",
        ),
        (
            {"evaluation_strategy": "epoch"},
            "left out",
            "the script's evaluation set is not known: data.holdout keeps a share of the samples, "
            "and validation.eval_steps, the steps of an epoch, measures them",
        ),
        (
            {"eval_strategy": "steps"},
            "left out",
            "the script's evaluation set is not known: data.holdout keeps a share of the samples, "
            "and validation.eval_steps: 500 measures them",
        ),
    ],
)
def test_evaluation_says_what_to_set(given: dict[str, Any], outcome: str, reason: str) -> None:
    """No key of the command names held-out rows, so that none can be measured yet."""
    found = trained(**given)
    note = next(note for note in found.notes if note.key.endswith("strategy"))
    assert (note.outcome, note.reason) == (outcome, reason)
    assert "validation" not in found.nested()
    assert set(given) <= {note.key for note in found.notes}
