"""`zerotrain why`: each cause in its sentence, and what follows from it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.workflow.jobs import raised, refused

from zerotrain.config import MAIN_CONFIG
from zerotrain.config.runs import read_runs
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.runs import Runs

NOTHING = "nothing would run: everything is made from what is there now\n"
RATE = "until: 700\n    learning_rate: 2.0e-3"
THIRD = "launch: zero2_offload\n  - {name: third, until: 900, launch: torch}\n"


def edit_samples(project) -> None:
    (project.folder / "photos/cat.txt").write_text("a cat asleep\n")
    (project.folder / "photos/dog.png").write_bytes(b"other pixels")
    for suffix in ("png", "txt"):
        (project.folder / f"photos/cow.{suffix}").write_text("a cow")


def edit_values(project) -> None:
    project.edit("config/config.yaml", "until: 700", RATE)
    project.edit("config/config.yaml", "guidance_scale: 3.0", "guidance_scale: 2.0")
    project.edit("config/config.yaml", "  resolution: 64", "  resolution: 64\n  max_grad_norm: 2.0")
    project.edit("config/launch/zero2_offload.yaml", "stage: 2", "stage: 1")


def edit_phases(project) -> None:
    project.edit("config/config.yaml", "launch: zero2_offload\n", THIRD)
    project.edit("config/config.yaml", "until: 700", "until: 800")
    raised("report")(project)


def edit_data(project) -> None:
    project.edit("config/config.yaml", "num_workers: 1", "num_workers: 1\n  repeats: 2")
    project.edit("config/config.yaml", "resolution: 64", "resolution: 32")


def damage_results(project) -> None:
    results = project.folder / "results/tiny"
    shutil.rmtree(results / "report")
    (results / "base/payload.bin").write_bytes(bytes(31))
    (results / "offload/checkpoint/checkpoint.json").write_text('{"step": 99999}')


CAUSES = {
    # The fake lists no samples: tests/why/test_causes.py has those of a real dataset.
    edit_samples: [
        "1 caption changed: cat.png",
        "1 image added: cow.png",
        "1 image changed: dog.png",
    ],
    edit_values: [
        "1 file changed: config/launch/zero2_offload.yaml",
        "evaluate.guidance_scale 3 -> 2",
        "train.learning_rate 0.001 -> 0.002 (phase offload)",
        "train.max_grad_norm 1 -> 2",
    ],
    edit_phases: [
        "not made yet: results/tiny/third",
        "report: its stage has version 2, 1 before",
        "until 700 steps -> 800 steps (phase offload)",
    ],
    edit_data: [
        "data.repeats 1 -> 2",
        "not made yet: results/data/tiny/cache/32",
        "train.resolution 64 -> 32",
    ],
    damage_results: [
        "checkpoint edited or damaged: results/tiny/offload/checkpoint/checkpoint.json",
        "damaged: results/tiny/base/payload.bin",
        "removed: results/tiny/report",
    ],
}
"""Edits, and the sentences of their causes, sorted."""


def ask(project, *words: str) -> str:
    return project.must("python", "-m", "zerotrain", "why", *words)


def causes_in(text: str) -> list[str]:
    """The sentences of the causes: those at the margin, without the two lines of the totals, and
    without the planner's own where no trace of the model is stored yet."""
    lines = text.splitlines()[:-2]
    return [line for line in lines if not line.startswith((" ", "planning "))]


def under(text: str, stage: str) -> str:
    """What is said of a stage, without the time."""
    found = re.search(rf"^  {stage}(?:: (.*?))?(?:,? ?(?:about [\d:]+|time unknown))?$", text, re.M)
    assert found, text
    return found[1] or ""


@pytest.mark.slow
@pytest.mark.parametrize("edit", CAUSES, ids=lambda edit: edit.__name__)
def test_why_names_each_cause_in_a_sentence(built, edit):
    """And counts as many stages as a dry run."""
    edit(built)
    text = ask(built)
    assert sorted(causes_in(text)) == CAUSES[edit]
    stages = re.search(r"^(\d+) stages? would run", text, re.M)
    assert stages
    assert int(stages[1]) == sum(built.planned("train").values())
    [time, disk] = text.splitlines()[-2:]
    assert re.search(r" would run in (about \d+:\d\d(:\d\d)?, as |an unknown time: )", time)
    assert re.fullmatch(r"on disk: .+; [\d.]+ [kMG]B are free", disk)


def test_a_dry_run_begins_with_the_causes(built):
    """Once, before its stages; they are not repeated at its end."""
    edit_values(built)
    lines = built.forked("-n", "train")[1].splitlines()
    assert sorted(lines[1:5]) == [f"why: {sentence}" for sentence in CAUSES[edit_values]]
    assert not [line for line in lines[5:] if line.startswith("why")]


def test_why_of_a_finished_run_is_one_sentence(built):
    """And asking needs no Snakemake, and changes no file of the project."""
    assert built.planned("train") == {}  # a copy has other inodes, which planning looks at once
    before = files_of(built)
    snakefile = built.folder / "Snakefile"
    snakefile.write_text("raise SystemExit(1)\n")
    before[str(snakefile)] = snakefile.stat().st_mtime_ns
    assert ask(built) == NOTHING
    assert files_of(built) == before


def files_of(project) -> dict[str, int]:
    """Every file with the time of its last change."""
    files = (path for path in project.folder.rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_stages_write_the_logs_and_benchmarks_that_why_reads(built, monkeypatch):
    """All of a run's."""
    monkeypatch.chdir(built.folder)
    made = Artifacts(Runs(read_runs(MAIN_CONFIG))).planned.values()
    for folder in ("logs", "benchmarks"):
        found = sorted(Path(f"results/tiny/{folder}").iterdir())
        assert found == sorted(one.log if folder == "logs" else one.benchmark for one in made)


@pytest.mark.slow
def test_why_foresees_what_a_training_does(built):
    """Kept, again, from the last step, or refused, and what comes after a refusal."""
    built.edit("config/config.yaml", "dtype: fp32", "dtype: bf16")
    built.append("config/config.yaml", "cache: {shard_size: 1000000}\n")
    text = ask(built)
    for phase in ("plain", "offload"):
        assert under(text, f"train_phase tiny/{phase}") == "is kept: what it trains is the same"
    built.edit("config/config.yaml", "until: 700", RATE)
    again = "trains again from step 300 to 700; its steps up to 700 are set aside"
    assert under(ask(built), "train_phase tiny/offload") == again
    built.edit("config/config.yaml", RATE, "until: 900")
    assert under(ask(built), "train_phase tiny/offload") == "continues from step 700 to 900"
    built.edit("config/config.yaml", "launch: torch", "launch: zero2")
    text = ask(built)
    assert under(text, "train_phase tiny/plain").startswith("is refused: its 300 steps have")
    assert under(text, "export_weights tiny/plain") == "is not reached"


@pytest.mark.slow
def test_why_of_a_failed_job_names_its_error_until_it_succeeds(built):
    """The value that it failed with stays the cause."""
    value = "evaluate.guidance_scale 3 -> 2"
    built.edit("config/config.yaml", "guidance_scale: 3.0", "guidance_scale: 2.0")
    built.snakemake("--cores", "1", "train", FAIL="evaluate")
    built.append("results/tiny/logs/evaluate.plain.log", "ERROR: no memory left\n")
    assert causes_in(ask(built)) == [
        *("evaluate tiny/plain failed before: ERROR: no memory left", value)
    ]
    built.build("train")
    assert ask(built) == NOTHING
    built.edit("config/config.yaml", "guidance_scale: 2.0", "guidance_scale: 4.0")
    assert causes_in(ask(built)) == ["evaluate.guidance_scale 2 -> 4"]


@pytest.mark.slow
def test_why_says_what_is_kept_if_it_comes_out_equal(built):
    """A removed base is built again from the same values."""
    shutil.rmtree(built.folder / "results/tiny/base")
    text = ask(built)
    assert causes_in(text) == ["removed: results/tiny/base"]
    kept = "is kept if what it reads comes out equal"
    assert under(text, "cache_latents tiny 64") == under(text, "report tiny") == kept
    assert under(text, "train_phase tiny/plain") == "is kept: what it trains is the same"


@pytest.mark.slow
def test_why_takes_targets_and_answers_in_json(built):
    """A rule, a file, a phase and an unknown name; numbers are numbers, unknown ones null."""
    built.edit("config/config.yaml", "until: 700", RATE)
    for target in ("dataset", "plain", "results/tiny/plain/metrics.json"):
        assert ask(built, target) == NOTHING
    answer = json.loads(ask(built, "offload", "--json"))
    assert [one["stage"] for one in answer["stages"]] == [
        "render_launch tiny/offload", "train_phase tiny/offload", "export_weights tiny/offload",
        "evaluate tiny/offload",
    ]  # fmt: skip
    assert answer["causes"][0]["kind"] == "value"
    assert answer["seconds"] > 0
    assert answer["unknown_seconds"] == ["train_phase tiny/offload"]
    assert answer["free_bytes"] > 0
    done = built.command("python", "-m", "zerotrain", "why", "ofload")
    assert "did you mean offload?" in refused(done)


@pytest.mark.slow
def test_why_of_a_new_run_names_one_cause(project):
    """Nothing is made yet: one line, and no list of missing folders."""
    text = ask(project)
    assert causes_in(text) == ["nothing is made yet"]
    assert under(text, "cache_latents tiny 64") == "encodes 2 of 2 images and 2 of 2 captions"
    assert under(text, "train_phase tiny/offload") == "trains from step 300 to 700"
