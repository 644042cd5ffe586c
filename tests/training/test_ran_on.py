"""What a training records of what it ran on, and how it resumes where that has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.artifact.recipe import Difference
from zerotrain.cache.layout import drawn_digest, read_index
from zerotrain.state.position import read_position
from zerotrain.state.ran_on import RanOn
from zerotrain.training.checkpointing import conditions
from zerotrain.training.checkpointing.provenance import continue_history

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["to_q", "to_k", "to_v"]}
KEYS = {"version", "cache", "threads", "device", "versions.torch", "versions.diffusers"} | {
    "versions.python", "gradient_checkpointing", "micro_batch_size", "gradient_accumulation_steps",
}  # fmt: skip
TOLERANCE = 2e-5


def rolling(training: Any, name: str, step: int) -> artifact.Artifact:
    """A rolling checkpoint."""
    return artifact.read(training.rolling(name, step), "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_half_trained_run_resumes_after_the_advice_against_out_of_memory(
    ranks: int, training: Any
) -> None:
    """gradient_checkpointing and half the micro batch, with fp32, an average and an adapter: it
    resumes at its step, with the same samples; losses are those without the change up to rounding.
    The state says when what changed."""
    common = {"num_processes": ranks, "use_ema": True, "lora": LORA, "global_batch_size": 8}
    whole = training.run("whole", "torch", 8, **common)
    training.run("changed", "torch", 4, **common)
    advised = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    training.phase("changed", "torch", 8, **common, **advised)
    training.prepare("changed")
    found = training.train("changed")

    assert [line["step"] for line in training.log("changed")] == list(range(1, 9))
    same = ("step", "samples", "learning_rate")
    logs = [[{k: line[k] for k in same} for line in training.log(n)] for n in ("whole", "changed")]
    assert logs[0] == logs[1]
    assert found[:4] == whole[:4]
    assert found[4:] == pytest.approx(whole[4:], rel=TOLERANCE)

    checkpoint = rolling(training, "changed", 8)
    position = read_position(checkpoint, "checkpoint.json")
    assert position.history == [
        {"step": 4, "key": "gradient_accumulation_steps", "old": 1, "new": 2},
        {"step": 4, "key": "gradient_checkpointing", "old": False, "new": True},
        {"step": 4, "key": "micro_batch_size", "old": 8 // ranks, "new": 4 // ranks},
    ]
    assert position.ran_on.keys() >= KEYS
    assert position.ran_on["versions.torch"] == torch.__version__
    assert checkpoint.content["trains"] == rolling(training, "whole", 8).content["trains"]
    made_by = json.loads(checkpoint.path("records/made_by.json").read_text())
    assert made_by.keys() == {"commit", "version"}
    assert made_by["version"] == position.ran_on["version"]
    said = training.output.read_text()
    line = "changed: from step 4 on something else than before, recorded: gradient_accumulation"
    assert said.count(line) == 1


def with_ran_on(training: Any, name: str, step: int, **changes: Any) -> None:
    """Rewrite what a checkpoint ran on, as if another machine or version had written it."""
    found = rolling(training, name, step)
    document = json.loads(found.path("checkpoint.json").read_text())
    document["ran_on"] |= changes
    with artifact.publish(found.folder, "checkpoint") as draft:
        for file in found.files:
            artifact.link_or_copy(found.folder / file, draft.folder / file)
        (draft.folder / "checkpoint.json").unlink()
        artifact.write_json(draft.folder / "checkpoint.json", document)
        draft.content = found.content


@pytest.mark.slow
def test_other_versions_and_code_resume_and_are_recorded(training: Any) -> None:
    """The same step, one line, an entry each; a second resume on the same records nothing."""
    training.run("plain", "torch", 3)
    before = {"versions.torch": "2.9.1", "versions.diffusers": "0.30", "version": 0}
    with_ran_on(training, "plain", 3, **before, device="NVIDIA H100 80GB HBM3")
    training.phase("plain", "torch", 5)
    training.prepare("plain")
    training.train("plain")
    assert len(training.losses("plain")) == 5
    position = training.checkpoint("plain", 5).position
    assert [one["key"] for one in position.history] == [
        "device", "version", "versions.diffusers", "versions.torch",
    ]  # fmt: skip
    assert {one["key"]: one["old"] for one in position.history}["versions.torch"] == "2.9.1"
    said = training.output.read_text()
    assert "version 0 -> 1" in said
    assert "versions.torch 2.9.1 -> " in said
    training.run("plain", "torch", 6)
    assert training.checkpoint("plain", 6).position.history == position.history


def test_a_continued_edit_is_recorded(training: Any) -> None:
    """train.on_change: continue: the entry has the key and both values."""
    training.run("plain", "torch", 3)
    training.phase("plain", "torch", 5, learning_rate=2e-3, on_change="continue")
    training.prepare("plain")
    training.train("plain")
    found = rolling(training, "plain", 5)
    assert read_position(found, "checkpoint.json").history == [
        {"step": 3, "key": "learning_rate", "old": 1e-3, "new": 2e-3}
    ]
    assert found.content["trains"]["learning_rate"] == 2e-3


def test_only_what_matters_of_a_cache_is_data(training: Any) -> None:
    """Keys, which follow the code that encodes, and held-out samples are no part of it; a caption,
    the order and a mirror image are."""
    found = artifact.read(training.cache, "cache")
    index = read_index(found.folder)
    entries = list(index.entries)

    def changed(**values: Any) -> str:
        return drawn_digest([replace(entries[0], **values), *entries[1:]], index.dtype, None)

    plain = conditions.data_digest(found)
    assert plain == index.data_sha256 == changed()
    assert changed(latents="another", text="another") == plain
    for values in (
        {"caption_sha256": "another"}, {"flipped": "a key"}, {"crop_top_left": (1, 0)},
        {"split": "holdout"}, {"conditioning_sha256": ("a",)},
    ):  # fmt: skip
        assert changed(**values) != plain
    entries[-1] = replace(entries[-1], caption_sha256="of a held-out sample")
    assert changed() == plain
    entries[:2] = entries[1::-1]
    assert changed() != plain


def test_a_phase_that_starts_from_a_state_compares_what_it_ran_on(tmp_path: Path) -> None:
    """Versions and device; not what each phase has set for itself."""
    then = {"versions.torch": "1", "device": "cpu", "micro_batch_size": 4, "cache": "a"}
    now = then | {
        "versions.torch": "2", "micro_batch_size": 2, "cache": "b", "env.NCCL_ALGO": "Ring",
        "deepspeed.zero_optimization.sub_group_size": 3,
    }  # fmt: skip
    changed = conditions.environment_changes(then, now, same_phase=False)
    assert [(one.key, one.old, one.new) for one in changed] == [
        ("env.NCCL_ALGO", None, "Ring"), ("versions.torch", "1", "2"),
    ]  # fmt: skip
    assert len(conditions.environment_changes(then, now)) == 5
    assert conditions.environment_changes({}, now) == []


@pytest.mark.parametrize(
    ("step", "ran_on", "entries"),
    [
        (12, {}, [{"step": 12, "key": "recorded", "old": None, "new": "from here"}]),
        (12, {"versions.torch": "2"}, []),
        (0, {}, []),
    ],
)
def test_steps_of_which_nothing_is_known_are_not_taken_for_exact(
    step: int, ran_on: dict[str, Any], entries: list[dict[str, Any]]
) -> None:
    """Of another program's checkpoint: an entry says where records begin, and the report counts
    from there."""
    history = [{"step": 3, "key": "threads", "old": 1, "new": 2}] if ran_on else []
    changed = [Difference("settings", "device", "cpu", "mps")] if step else []
    position = make_position(step, ran_on=ran_on, history=history)
    of_change = conditions.history_entries(step, changed)
    assert continue_history(position, changed) == history + entries + of_change
    found = RanOn.of(replace(position, step=20, ran_on={"device": "cpu"}, history=entries))
    assert (found.exact == "all steps") == (not entries)
    if entries:
        assert found.exact.endswith("after step 12: records none → from here")
