"""A sweep: several runs in one graph, each of which can be made alone as before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.workflow.conftest import CONFIG, Project
from tests.workflow.jobs import EVERYTHING, NOTHING, refused, replace, rewrite

SWEEP = ("--configfile", "sweep.yaml")
TWICE = {
    name: count if name in ("prepare_dataset", "cache_latents") else 2 * count
    for name, count in EVERYTHING.items()
} | {"build_shared_base": 1}
"""Two runs of one dataset, which is prepared and encoded once."""


@pytest.fixture
def two(project: Project) -> Project:
    """Two runs that differ in their learning rate, and a file that plans both."""
    text = CONFIG.format(base="nano").replace("photos", "photos\n  name: shared")
    for name, rate in (("slow", "1.0e-4"), ("fast", "2.0e-3")):
        changed = text.replace("run: tiny", f"run: {name}").replace("1.0e-3", rate)
        (project.folder / f"{name}.yaml").write_text(changed)
    (project.folder / "sweep.yaml").write_text("runs: [slow.yaml, f*t.yaml]\n")
    return project


def test_sweep_plans_all_runs_and_encodes_their_dataset_once(two):
    """One call plans every run; what they share is made once."""
    assert two.planned("train", *SWEEP) == TWICE


@pytest.mark.slow
def test_sweep_leaves_nothing_to_do_for_its_runs_alone(two):
    """A run that a sweep has made is made: alone it has no work left, nor has the sweep; and each
    run was made with its own values."""
    two.build("train", *SWEEP)
    for name in ("slow", "fast"):
        assert two.planned("train", "--configfile", f"{name}.yaml") == NOTHING
    assert two.planned("train", *SWEEP) == NOTHING
    rates = [
        (two.folder / f"results/{name}/plain/launch/manifest.json").read_text()
        for name in ("slow", "fast")
    ]
    assert ["0.0001" in text for text in rates] == [True, False]


@pytest.mark.slow
def test_sweep_has_nothing_to_do_after_its_runs_were_made_alone(two):
    """The other way round: runs that were made alone are made for the sweep; an edit of one run
    reruns what is its own."""
    for name in ("slow", "fast"):
        two.build("train", "--configfile", f"{name}.yaml")
    assert two.planned("train", *SWEEP) == NOTHING
    two.edit("fast.yaml", "until: 700", "until: 800")
    planned = two.planned("train", *SWEEP)
    assert planned == two.planned("train", "--configfile", "fast.yaml")
    assert planned["train_phase"] == 1


FAST = partial(replace, "fast.yaml")
FILES = partial(rewrite, "sweep.yaml")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        # One name, or one dataset made in two ways: each is named with both files and the key.
        (FAST("run: fast", "run: slow"), "slow.yaml and fast.yaml: both have the run slow"),
        (FAST("seed: 1", "seed: 2"), "slow.yaml and fast.yaml: seed: 1 and 2, but both have the "
         "data.name shared"),
        (FAST("num_workers: 1", "repeats: 3"), "data.repeats: 1 and 3"),
        (FAST("run: fast", "runs: []"), "runs: fast.yaml has `runs` itself"),
        # What stands in the file of a sweep is files, and nothing else.
        (FILES("runs: [nix*.yaml]"), "sweep.yaml: runs: nix*.yaml: no such file"),
        (FILES("runs: slow.yaml"), "must be a list of files or patterns (found 'slow.yaml')"),
        (FILES("runs: [slow.yaml]\nseed: 1"), "sweep.yaml: seed: not next to `runs`"),
    ],
)  # fmt: skip
def test_sweep_that_cannot_be_planned_is_refused(two, edit, said):
    """Runs that would disturb each other, or a file that is wrong, in one sentence."""
    edit(two)
    assert said in refused(two.snakemake("-n", "train", *SWEEP))


def test_sweep_is_no_run_to_commands_that_want_one(two):
    """A command of one run says what it was given."""
    from zerotrain.config.read import read_config
    from zerotrain.errors import PipelineError

    with pytest.raises(PipelineError, match=r"sweep\.yaml: plans several runs, and this needs one"):
        read_config(Path(two.folder / "sweep.yaml"))


def test_sweep_of_one_run_is_that_run(built):
    """A sweep that names one file plans what the file alone plans."""
    (built.folder / "sweep.yaml").write_text("runs: [config/config.yaml]\n")
    assert built.planned("train", *SWEEP) == NOTHING
