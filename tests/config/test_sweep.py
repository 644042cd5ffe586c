"""`zerotrain sweep` writes a grid of configurations, and the file that plans them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotrain.config.runs import read_runs
from zerotrain.errors import PipelineError
from zerotrain.graph.sweep import sweep

EXAMPLE = Path("config/config.yaml")


def test_sweep_writes_the_grid(tmp_path):
    """A run for each pair of values, named by them; all else, comments too, is the original's."""
    settings = ["train.learning_rate=1e-4,3e-4", "phases.0.launch=torch,{preset: zero2}"]
    together, *files = sweep(EXAMPLE, settings, tmp_path / "lr")
    runs = read_runs(together)
    assert {str(file) for file in files} == set(runs)
    points = {(one.phases[0].train.learning_rate, one.phases[0].launch.preset)
              for one in runs.values()}  # fmt: skip
    assert points == {(1e-4, "torch"), (1e-4, "zero2"), (3e-4, "torch"), (3e-4, "zero2")}
    assert files[0].stem.startswith("lr-learning_rate-0_0001-launch-torch")
    assert "# train on half of the scans" in files[0].read_text()
    assert {run.data_name for run in runs.values()} == {"lr"}


def test_sweep_shares_a_dataset_only_where_it_may(tmp_path):
    """A small base is built from the seed, and its encoders fill the cache: so each seed has its
    own, which its learning rates share."""
    settings = ["train.learning_rate=1e-4,3e-4", "seed=0,1"]
    together, *_ = sweep(EXAMPLE, settings, tmp_path / "lr")
    names = {(run.seed, run.data_name) for run in read_runs(together).values()}
    assert names == {(0, "lr-seed-0"), (1, "lr-seed-1")}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.learning_rate", "is no KEY=VALUE,VALUE"),
        ("train.learning_rat=1", "train.learning_rat: unknown key"),
        ("seed.x=1", "the configuration has no such place"),
        ("seed=1,1", "two points of the grid have one name"),
    ],
)
def test_sweep_that_cannot_be_written_writes_nothing(tmp_path, setting, said):
    """A mistake is a sentence, and leaves no half of a grid."""
    with pytest.raises(PipelineError, match=said):
        sweep(EXAMPLE, [setting], tmp_path / "lr")
    assert list(tmp_path.iterdir()) == []
