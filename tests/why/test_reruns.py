"""What runs for a target: what is missing or differs, and all after it on the way to the target."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.builders.runs import make_run
from tests.conftest import ROOT

from zerotrain.config.read import parse_config
from zerotrain.errors import PipelineError
from zerotrain.graph.artifacts import Artifacts
from zerotrain.graph.reruns import TARGETS, find_target
from zerotrain.graph.runs import Runs

OF_OFFLOAD = [
    *("render_launch tiny/offload", "train_phase tiny/offload", "export_weights tiny/offload"),
    "evaluate tiny/offload",
]


def test_a_finished_run_has_nothing_to_do(run):
    """For any target."""
    assert [run.running(target) for target in TARGETS] == [[]] * len(TARGETS)


def test_what_comes_after_an_edit_runs(run):
    """As far as the target needs it."""
    run.config["phases"][1]["learning_rate"] = 0.002
    assert run.running() == [*OF_OFFLOAD, "report tiny"]
    assert run.running("offload") == run.running("tiny/offload") == OF_OFFLOAD
    assert run.running("results/tiny/offload") == OF_OFFLOAD
    assert run.running("checkpoints") == OF_OFFLOAD[:2]
    assert run.running("results/tiny/offload/weights") == OF_OFFLOAD[:3]
    assert run.running("results/tiny/offload/metrics.json") == OF_OFFLOAD
    assert run.running("report") == [*OF_OFFLOAD, "report tiny"]
    assert run.running("plain") == run.running("cache") == []


def test_a_base_stays_when_its_dataset_is_made_again(run):
    """The caches and all that reads the dataset are not."""
    Path("photos/cat.txt").write_text("a cat asleep", encoding="utf-8")
    assert run.running("cache") == ["prepare_dataset tiny", "cache_latents tiny 64"]
    assert run.running("base") == ["prepare_dataset tiny"]


def test_a_missing_folder_runs_where_it_is_named_or_read(run):
    """Snakemake does not make an intermediate result that nothing reads."""
    shutil.rmtree("results/tiny/plain/launch")
    assert run.running("results/tiny/plain/metrics.json") == []
    assert run.running("launch") == ["render_launch tiny/plain"]
    assert "render_launch tiny/plain" in run.running()


def test_ranges_of_a_cache_run_only_with_it(run):
    """The whole cache has all of them."""
    run.config["cache"] = {"shards": 2}
    ranges = ["cache_latents tiny 64 0-of-2", "cache_latents tiny 64 1-of-2"]
    assert run.running("cache") == []
    shutil.rmtree("results/data/tiny/cache/64")
    assert run.running("cache") == [*ranges, "cache_latents tiny 64"]


def test_an_unknown_target_is_refused_with_the_nearest_one(run):
    """Of rules and phases."""
    every = [*run.artifacts().planned.values()]
    with pytest.raises(PipelineError) as raised:
        find_target("ofload", every)
    what = "ofload: neither a rule nor a file that a rule makes, nor a phase"
    assert raised.value.what == what
    assert str(raised.value.hint).startswith("did you mean offload? targets: dataset, base, cache,")


def test_the_targets_are_those_of_the_rules():
    """Of rules/targets.smk."""
    text = (ROOT / "rules/targets.smk").read_text()
    rules = [line[5:-1] for line in text.splitlines() if line.startswith("rule ")]
    assert [*TARGETS] == rules


def records_of(*names: str) -> dict[str, str]:
    """The rules of runs that share the dataset `animals`, with their logs; each benchmark has the
    log's place and name."""
    runs = [make_run(run=name, data=ANIMALS) for name in names]
    by_file = {f"config/{one['run']}.yaml": parse_config(one, "test") for one in runs}
    found = {}
    for one in Artifacts(Runs(by_file)).planned.values():
        assert one.benchmark == one.log.parents[1] / "benchmarks" / f"{one.log.stem}.tsv"
        found[one.rule] = str(one.log)
    return found


ANIMALS = {"images": "photos", "name": "animals"}


def test_logs_have_the_names_that_rules_give_them(unmade):
    """Those of a shared dataset are under its name, where several runs are planned."""
    assert records_of("cats", "dogs") == {
        "prepare_dataset": "results/animals/logs/prepare_dataset.log",
        "build_base": "results/dogs/logs/build_base.log",
        "build_shared_base": "results/animals/logs/build_shared_base.log",
        "cache_latents": "results/animals/logs/cache_latents.1024.log",
        "render_launch": "results/dogs/logs/render_launch.a.log",
        "train_phase": "results/dogs/logs/train_phase.a.log",
        "export_weights": "results/dogs/logs/export_weights.a.log",
        "evaluate": "results/dogs/logs/evaluate.a.log",
        "report": "results/dogs/logs/report.log",
    }
    of_one = records_of("cats")
    assert of_one["cache_latents"] == "results/cats/logs/cache_latents.1024.log"
    unmade.config["cache"] = {"shards": 2}
    ranges = [one.log for one in unmade.artifacts().planned.values() if one.rule == "encode_shard"]
    assert ranges == [Path(f"results/tiny/logs/encode_shard.64.{n}-of-2.log") for n in (0, 1)]
