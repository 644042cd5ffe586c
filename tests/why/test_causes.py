"""Each cause in a user's words, with the stages that have it themselves."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.why.conftest import BuiltRun

from zerotrain.artifact import stage_versions
from zerotrain.artifact.recipe import Difference

OFFLOAD, PLAIN = ("render_launch tiny/offload", "render_launch tiny/plain")


def edit_samples(run: BuiltRun) -> None:
    Path("photos/cat.txt").write_text("a cat asleep", encoding="utf-8")
    run.draw("cow", 90)


def edit_values(run: BuiltRun) -> None:
    run.config["train"]["max_grad_norm"] = 2.0
    run.config["phases"][1]["learning_rate"] = 0.002
    run.config["evaluate"] = {"num_inference_steps": 9}


def edit_preset(run: BuiltRun) -> None:
    path = Path("config/launch/zero2_offload.yaml")
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def add_a_phase(run: BuiltRun) -> None:
    run.config["phases"].append({"name": "third", "until": 900, "launch": "torch"})


def insert_a_phase(run: BuiltRun) -> None:
    run.config["phases"].insert(0, {"name": "first", "until": 100, "launch": "torch"})


def switch_the_launch(run: BuiltRun) -> None:
    """The first one had the defaults of all keys; the other reads the base, and another file."""
    run.config["phases"][0]["launch"] = "zero2"


def another_resolution(run: BuiltRun) -> None:
    run.config["train"]["resolution"] = 32


def remove_results(run: BuiltRun) -> None:
    shutil.rmtree("results/tiny/report")
    Path("results/tiny/plain/metrics.json").unlink()
    Path("results/tiny/offload/weights/payload.bin").unlink()


def damage_results(run: BuiltRun) -> None:
    for folder in ("base", "offload/checkpoint"):
        Path(f"results/tiny/{folder}/payload.bin").write_bytes(b"more than a payload")
    run.trained = {"offload": [Difference("settings", "until", 99999, 700)]}  # so the file says


def render_again(run: BuiltRun) -> None:
    """The launch files are those of another rate, and a training has not come after them."""
    run.config["phases"][0]["learning_rate"] = 0.002
    run.build("render_launch")
    run.trained = {"plain": [Difference("settings", "learning_rate", 0.001, 0.002)]}


def encode_again(run: BuiltRun) -> None:
    run.trained = {"offload": [Difference("settings", "data", "0" * 64, "1" * 64)]}


CAUSES: dict[Callable[[BuiltRun], None], dict[str, list[str]]] = {
    edit_samples: {
        "1 caption changed: cat.png": ["prepare_dataset tiny"],
        "1 image added: cow.png": ["prepare_dataset tiny"],
    },
    edit_values: {
        "train.max_grad_norm 1 -> 2": [PLAIN, OFFLOAD],
        "train.learning_rate 0.001 -> 0.002 (phase offload)": [OFFLOAD],
        "evaluate.num_inference_steps 30 -> 9": ["evaluate tiny/plain", "evaluate tiny/offload"],
    },
    edit_preset: {"1 file changed: config/launch/zero2_offload.yaml": [OFFLOAD]},
    add_a_phase: {
        "not made yet: results/tiny/third": [
            *("render_launch tiny/third", "train_phase tiny/third", "export_weights tiny/third"),
            "evaluate tiny/third",
        ]
    },
    switch_the_launch: {
        "launch.preset torch -> zero2 (phase plain)": [PLAIN, OFFLOAD],
    },
    insert_a_phase: {
        "phase first is new": [PLAIN, OFFLOAD],
        "not made yet: results/tiny/first": [
            *("render_launch tiny/first", "train_phase tiny/first", "export_weights tiny/first"),
            "evaluate tiny/first",
        ],
    },
    another_resolution: {
        "train.resolution 64 -> 32": ["build_base tiny", PLAIN, OFFLOAD],
        "not made yet: results/data/tiny/cache/32": ["cache_latents tiny 32"],
    },
    remove_results: {
        "removed: results/tiny/offload/weights/payload.bin, results/tiny/plain/metrics.json, "
        "results/tiny/report": [
            *("evaluate tiny/plain", "export_weights tiny/offload", "report tiny")
        ],
    },
    damage_results: {
        "damaged: results/tiny/base/payload.bin": ["build_base tiny"],
        "checkpoint edited or damaged: results/tiny/offload/checkpoint/payload.bin": [
            "train_phase tiny/offload"
        ],
    },
    render_again: {
        "train.learning_rate 0.001 -> 0.002 (phase plain)": ["train_phase tiny/plain"],
        "made again since: results/tiny/offload/launch, results/tiny/plain/launch": ["report tiny"],
    },
    encode_again: {
        "made again since: results/data/tiny/cache/64": ["train_phase tiny/offload"],
    },
}  # fmt: skip


@pytest.mark.parametrize("edit", CAUSES, ids=lambda edit: edit.__name__)
def test_each_cause_is_a_sentence(run, edit):
    """And has the stages that do not only run after others."""
    edit(run)
    assert run.sentences() == CAUSES[edit]


def test_nothing_made_is_one_cause(unmade):
    """Of all stages of the run."""
    assert [(one.kind, one.text) for one in unmade.causes().every] == [
        ("not made", "nothing is made yet")
    ]


def test_a_raised_version_is_a_cause(run, monkeypatch):
    """But not of a training."""
    before = stage_versions.VERSIONS["evaluate"]
    for stage in ("evaluate", "train_phase"):
        monkeypatch.setitem(stage_versions.VERSIONS, stage, before + 1)
    assert run.sentences() == {
        f"evaluate: its stage has version {before + 1}, {before} before": [
            *("evaluate tiny/plain", "evaluate tiny/offload")
        ]
    }


def test_an_input_made_again_is_named_while_its_reader_is_not(run):
    """An earlier call ended between the two."""
    Path("photos/cat.txt").write_text("a cat asleep", encoding="utf-8")
    run.build("prepare_dataset")
    assert run.sentences() == {
        "made again since: results/data/tiny": [
            *("cache_latents tiny 64", PLAIN, "evaluate tiny/plain"),
            *(OFFLOAD, "evaluate tiny/offload"),
        ]
    }
    Path("photos/cat.txt").write_text("a cat on a chair", encoding="utf-8")
    assert run.sentences() == {"1 caption changed: cat.png": ["prepare_dataset tiny"]}


def test_a_failure_is_named_until_the_stage_succeeds(run):
    """By the log, which is older than the benchmark of a success; a training by its own record.
    What a failed stage has lost is no other cause."""
    run.config["evaluate"] = {"num_inference_steps": 9}
    Path("results/tiny/plain/metrics.json").unlink()
    log = Path("results/tiny/logs/evaluate.plain.log")
    log.write_text("ERROR: no memory left\n", encoding="utf-8")
    os.utime(log, (time.time() + 9,) * 2)
    Path("results/tiny/plain/progress").mkdir()
    record = Path("results/tiny/plain/progress/exit.json")
    record.write_text(json.dumps({"code": 85, "reason": "stopped on request"}), encoding="utf-8")
    shutil.rmtree("results/tiny/plain/checkpoint")
    assert [*run.sentences()] == [
        "train_phase tiny/plain ended before: stopped on request",
        "evaluate tiny/plain failed before: ERROR: no memory left",
        "evaluate.num_inference_steps 30 -> 9",
        "removed: results/tiny/plain/checkpoint",
    ]
    os.utime(log, (1, 1))
    record.unlink()
    assert not [text for text in run.sentences() if "before" in text]
