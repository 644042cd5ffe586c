"""A cache that several jobs encode, in the graph and in DVC's pipeline."""

from __future__ import annotations

import pytest
import yaml
from tests.workflow.conftest import Project
from tests.workflow.jobs import CONFIG, EVERYTHING, NOTHING


@pytest.mark.slow
def test_each_range_is_a_job_and_a_failed_one_is_made_alone(project: Project) -> None:
    """DVC keeps what a range's job continues from."""
    project.append(CONFIG, "\ncache: {shards: 4}\n")
    assert project.planned("train") == EVERYTHING | {"encode_shard": 4}
    project.build("cache")
    assert project.planned("cache") == NOTHING
    calls = (project.folder / "calls.txt").read_text().splitlines()
    made = [line.split()[1] for line in calls if "/cache_shards/" in line]
    assert [made[0].split("/")[-2].partition("-")[2], len({*made})] == ["of-4", 4]
    (project.folder / made[2]).unlink()
    assert project.planned("cache") == NOTHING  # a complete cache does not need them
    next(project.folder.glob("results/data/*/cache/*/manifest.json")).unlink()
    assert project.planned("cache") == {"encode_shard": 1, "cache_latents": 1}
    project.must("python", "-m", "zerotrain", "dvc", "generate")
    stages = yaml.safe_load((project.folder / "dvc.yaml").read_text())["stages"]
    [cache] = [stage for name, stage in stages.items() if name.startswith("cache_latents")]
    assert {*made} <= {*cache["deps"]}
    of_ranges = [stage for name, stage in stages.items() if name.startswith("encode_shard")]
    assert len(of_ranges) == 4
    for stage in of_ranges:
        [[out]] = [list(one) for one in stage["outs"]]
        assert f"{out}/manifest.json" in made
        assert stage["outs"] == [{out: {"persist": True}}]
        assert stage.get("params") == cache.get("params")
