"""Validation while training: the same numbers as an evaluation, and no trained number changed."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training.conftest import Training
from tests.training.inputs import text_inputs
from tests.training.measures import SETTINGS, measured, validations, weights

from zerotrain import artifact
from zerotrain.cache.reader import TokenCache, read_cache
from zerotrain.launch.files import read_run_yaml
from zerotrain.models.families.tokens import IGNORED
from zerotrain.stages import train_phase
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import EMA_SLOT, MASTER
from zerotrain.training.checkpointing.preflight import Inputs
from zerotrain.training.checkpointing.progress_folder import (
    STOP,
    end_step,
    saved_steps,
)
from zerotrain.training.reporting.holdout_loss import HeldOutText
from zerotrain.training.reporting.validation_history import BEST, FINISHED, read_history


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["torch", "zero3_offload"])
def test_validation_finds_what_an_evaluation_finds_and_changes_no_bit(training, preset):
    """val_loss in training equals that of the saved weights to the bit, within and at the end; the
    trained weights are those of a training without validation, dropout of captions and of the
    adapter and all."""
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.3, "target_modules": ["to_q", "to_k", "to_v"]}
    values = {"save_every": 1, "keep": 9, "lora": lora}
    training.run("plain", preset, 5, **values)
    training.run("p", preset, 5, **values, validation=SETTINGS)
    found = {line["step"]: line["val_loss"] for line in validations(training, "p")}
    assert list(found) == [0, 2, 4, 5]
    assert len(set(found.values())) > 1
    for step in (2, 4, 5):
        assert found[step] == measured(weights(training, "sdxl", "p", step), "sdxl", training)
    for step in (3, 5):
        assert training.hashes("p", step) == training.hashes("plain", step)


@pytest.mark.slow
def test_validation_of_averaged_weights(training):
    """val_loss_ema is that of the average, the processes sharing the samples; weights, average and
    moments are those of a training without validation."""
    values = {
        "num_processes": 2, "use_ema": True, "ema_decay": 0.3, "save_every": 2, "keep": 9,
    }  # fmt: skip
    training.run("plain", "zero2_offload", 4, **values)
    chosen = {**SETTINGS, "metric_for_best_model": "val_loss_ema", "batch_size": 8}
    training.run("p", "zero2_offload", 4, **values, validation=chosen)
    assert training.hashes("p", 4) == training.hashes("plain", 4)
    for line in validations(training, "p")[1:]:
        for key, slot in (("val_loss", MASTER), ("val_loss_ema", EMA_SLOT)):
            model = weights(training, "sdxl", "p", line["step"], slot)
            assert line[key] == measured(model, "sdxl", training)
        assert line["val_loss"] != line["val_loss_ema"]


@pytest.mark.parametrize(
    "family", ["causal_lm", pytest.param("seq2seq_lm", marks=pytest.mark.slow)]
)
def test_validation_of_text(family, server, tmp_path):
    """Cross entropy and perplexity over the learned tokens of whole examples, though training packs
    them: what transformers' own loss gives of each, each token counted once."""
    training = Training(tmp_path, text_inputs(family, tmp_path / "inputs", holdout=4), server)
    rows = artifact.read(training.cache, "cache").content["epoch_size"]
    training.run(
        "p", "torch", 4, family=family, objective={}, epoch_size=rows, save_every=2,
        validation={**SETTINGS, "max_samples": 256, "batch_size": 3},
    )  # fmt: skip
    cache = read_cache(training.cache)
    assert isinstance(cache, TokenCache)
    assert len(HeldOutText(cache, 256)) == 4
    for line in validations(training, "p")[1:]:
        model = weights(training, family, "p", line["step"])
        total, count = 0.0, 0
        for i, row in enumerate(cache.entries):
            if row.split == "holdout":
                found = cache.sample(i)
                one = {name: found[name][None] for name in ("input_ids", "labels")}
                learned = int((found["labels"] != IGNORED).sum())
                with torch.no_grad():
                    total += learned * float(model(**one).loss)
                count += learned
        assert line["val_loss"] == pytest.approx(total / count, rel=1e-6)
        assert line["val_perplexity"] == pytest.approx(math.exp(line["val_loss"]), rel=1e-12)


RISING = {"learning_rate": 0.3, "lr_scheduler": "constant", "lr_warmup_steps": 0}
"""Values under which the loss gets worse and worse after the first steps."""
PATIENT = {**SETTINGS, "eval_steps": 1, "early_stopping_patience": 2}


def ending(training: Training, name: str) -> dict[str, Any]:
    """All that a phase that ended early leaves: its weights, what it measured, where it ended."""
    progress = training.progress(name)
    finished = json.loads((progress / FINISHED).read_text())
    last = progress / f"step-{finished['step']:08d}"
    return {
        "weights": training.hashes(name, finished["step"]),
        "finished": finished,
        "best": json.loads((progress / BEST).read_text()),
        "history": read_history(last),
        "log": [
            {
                key: value
                for key, value in line.items()
                if key != "phase" and "second" not in key and "bytes" not in key
            }
            for line in training.log(name)
        ],
        "saved": saved_steps(progress),
    }


def test_validation_ends_a_phase_and_publishes_its_best(training, tmp_path):
    """The phase ends once nothing was better for early_stopping_patience validations. Its best
    checkpoint is kept and published, and its end counts as such until the rule is another."""
    chosen = {**PATIENT, "load_best_model_at_end": True}
    training.run("p", "torch", 40, **RISING, keep=1, validation=chosen)
    values = [line["val_loss"] for line in validations(training, "p")][1:]
    best = min(range(len(values)), key=values.__getitem__) + 1
    found = ending(training, "p")
    assert found["finished"]["step"] == len(values) == best + 2 < 40
    assert found["best"] == {"step": best, "metric": "val_loss", "value": min(values)}
    assert found["saved"] == [best, best + 2]
    phase = read_run_yaml(training.folder / "p" / "launch" / "run.yaml")
    progress = training.progress("p")
    parents = {
        "base": artifact.read(training.base, "base"),
        "cache": artifact.read(training.cache, "cache"),
    }
    train_phase._publish(progress, Inputs(phase, parents), tmp_path / "published")
    published = Checkpoint(tmp_path / "published")
    assert published.position.step == best
    assert published.artifact.content["until"] == 40
    for until, rule, end in (
        (40, chosen, best + 2),
        (50, chosen, best + 2),
        (best + 1, chosen, None),
        (40, PATIENT, None),  # the rule is another: it is looked at anew
        (40, None, None),
    ):
        derived = SimpleNamespace(until_step=until, validation=rule)
        assert end_step(progress, SimpleNamespace(derived=derived)) == end


@pytest.mark.slow
def test_validation_continues_with_more_patience(training):
    """A phase that had ended early continues where it stopped when the rule is relaxed, in the bits
    of one that knew the new rule from the start."""
    patient = {**PATIENT, "early_stopping_patience": 4}
    training.run("whole", "torch", 40, **RISING, validation=patient)
    training.run("p", "torch", 40, **RISING, validation=PATIENT)
    first = ending(training, "p")["finished"]["step"]
    training.run("p", "torch", 40, **RISING, validation=patient)
    whole, found = ending(training, "whole"), ending(training, "p")
    assert found["finished"]["step"] == first + 2
    for key in ("weights", "finished", "best", "history"):
        assert found[key] == whole[key]


@pytest.mark.slow
def test_validation_left_out_by_a_stop_is_made_up_for(training):
    """A stop is obeyed at once, without the validation that is due; the next start begins with it,
    and saves the step if it is the best."""
    values = {**RISING, "save_every": 50, "validation": PATIENT}
    training.run("whole", "torch", 40, **values)
    training.phase("p", "torch", 40, **values)
    training.progress("p").mkdir(parents=True)
    stop = training.progress("p") / STOP
    stop.touch()
    assert ended(training.start("p")) == 0
    assert [line["step"] for line in validations(training, "p")] == [0]
    stop.unlink()
    training.train("p")
    assert ending(training, "p") == ending(training, "whole")


def ended(process: Any) -> int:
    """The exit code of a training process."""
    process.join(120)
    code: int = process.exitcode
    return code
