"""Two runs of one dataset that is called like one of them: neither makes the other stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.workflow.conftest import CONFIG, Project
from tests.workflow.jobs import EVERYTHING, NOTHING, without_zeros

OTHER = ("--configfile", "config/other.yaml")
SHARED = {"prepare_dataset": 0, "cache_latents": 0}
BOTH = ("--configfile", "both.yaml")


def add_other(project: Project, **changes: str) -> Project:
    """Add a run `other` that trains on the dataset of the run `tiny`."""
    text = CONFIG.format(base="nano").replace("photos", "photos\n  name: tiny")
    for old, new in {"run: tiny": "run: other", "1.0e-3": "2.0e-3", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    (project.folder / "config/other.yaml").write_text(text)
    (project.folder / "both.yaml").write_text("runs: [config/config.yaml, config/other.yaml]\n")
    return project


@pytest.mark.slow
def test_the_other_run_takes_the_cache_as_it_is(built):
    """The run of the dataset's name was made: with it the other one has its own work alone. By
    itself it builds a base for the dataset, which is equal, so that the job of the cache has
    nothing to encode."""
    add_other(built)
    assert built.planned("train", *BOTH) == without_zeros(EVERYTHING | SHARED)
    own = SHARED | {"build_shared_base": 1, "cache_latents": 1}
    assert built.planned("train", *OTHER) == without_zeros(EVERYTHING | own)
    built.build("cache", *OTHER)
    for words in ((), OTHER, BOTH):
        assert built.planned("cache", *words) == NOTHING


@pytest.mark.slow
def test_the_run_of_the_datasets_name_takes_the_cache_as_it_is(project):
    """The other way round: it has its own base to build, and nothing to encode."""
    add_other(project)
    built = {"prepare_dataset": 1, "build_base": 1, "build_shared_base": 1, "cache_latents": 1}
    assert project.planned("cache", *OTHER) == built
    project.build("cache", *OTHER)
    assert project.planned("cache", *OTHER) == NOTHING
    assert project.planned("cache") == {"build_base": 1}
    assert project.planned("cache", *BOTH) == {"build_base": 1}
    project.edit("config/config.yaml", "seed: 1", "seed: 2")
    assert project.planned("base") == {"build_base": 1}


@pytest.mark.slow
def test_two_runs_of_one_dataset_have_nothing_left_to_do(built):
    """Trained one after the other: each then has nothing to do, nor have both."""
    add_other(built)
    built.build("train", *OTHER)
    for words in ((), OTHER, BOTH):
        assert built.planned("train", *words) == NOTHING


def test_a_base_made_otherwise_is_not_taken(built):
    """Values that the encoders depend on differ: the other run's cache has its own base."""
    add_other(built, **{"seed: 1": "seed: 2"})
    planned = built.planned("cache", *OTHER)
    assert planned == {"build_base": 1, "build_shared_base": 1, "cache_latents": 1}


@pytest.mark.slow
def test_a_dataset_with_a_base_of_its_own_keeps_it(project):
    """Whoever made it."""
    add_other(project)
    (project.folder / "results/data/tiny/base").mkdir(parents=True)
    own = {"prepare_dataset": 1, "build_base": 1, "cache_latents": 1}
    for words, bases in (((), 1), (OTHER, 1), (BOTH, 2)):
        planned = project.planned("cache", *words)
        assert planned == own | {"build_base": bases, "build_shared_base": 1}


@pytest.mark.slow
def test_a_run_whose_configuration_was_not_found_keeps_one_path(project):
    """The run of the dataset's name lies outside config/: the dataset gets a base of its own once,
    and nothing goes to and fro."""
    add_other(project)
    Path(project.folder / "config/config.yaml").rename(project.folder / "tiny.yaml")
    tiny = ("--configfile", "tiny.yaml")
    project.build("cache", *tiny)
    assert project.planned("cache", *OTHER) == {
        "build_base": 1,
        "build_shared_base": 1,
        "cache_latents": 1,
    }
    project.build("cache", *OTHER)
    for words in (tiny, OTHER):
        assert project.planned("cache", *words) == NOTHING
