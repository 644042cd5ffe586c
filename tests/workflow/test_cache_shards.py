"""A cache that several jobs encode."""

from __future__ import annotations

import shutil

import pytest
from tests.workflow.conftest import Project
from tests.workflow.jobs import CONFIG, EVERYTHING, NOTHING


@pytest.mark.slow
def test_each_range_is_a_job_and_a_failed_one_is_made_alone(project: Project) -> None:
    """A complete cache needs no range; one that is made again keeps the ranges that are there."""
    project.append(CONFIG, "\ncache: {shards: 4}\n")
    assert project.planned("train") == EVERYTHING | {"encode_shard": 4}
    project.build("cache")
    assert project.planned("cache") == NOTHING
    calls = (project.folder / "calls.txt").read_text().splitlines()
    made = [line.split()[1] for line in calls if "/cache_shards/" in line]
    assert [made[0].split("/")[-2].partition("-")[2], len({*made})] == ["of-4", 4]
    shutil.rmtree((project.folder / made[2]).parent)
    assert project.planned("cache") == NOTHING  # a complete cache does not need them
    shutil.rmtree(project.folder / "results/data/tiny/cache/64")
    assert project.planned("cache") == {"encode_shard": 1, "cache_latents": 1}
