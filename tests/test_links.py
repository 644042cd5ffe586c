"""A run folder from somebody else has no way out of it: jobs write nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.builders.refusals import refused

from zerotrain import artifact
from zerotrain.artifact.links import check_run_links
from zerotrain.artifact.whole_file import write_whole


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a phase, its dataset, and a folder of the user outside."""
    monkeypatch.chdir(tmp_path)
    for folder in ("results/r/p/progress/samples", "results/r/base", "results/data/d", "outside"):
        Path(folder).mkdir(parents=True)
    Path("outside/a").write_text("mine", encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["stop", "p/metrics.json", "p/progress/lock", "p/progress/samples/1.png", "p/base"]
)
@pytest.mark.parametrize("target", ["outside/a", "outside", "missing", "results/data/d"])
def test_a_link_that_leads_out_of_a_run_is_named(name: str, target: str) -> None:
    """A file's or a folder's, also one that leads nowhere yet."""
    link = Path("results/r") / name
    link.symlink_to(Path(target).absolute())
    for runs in (["r"], ["other", "r"]):
        assert refused(check_run_links, *runs).what.startswith(
            f"{link}: a link that leads out of results/r, to {Path(target).absolute()}"
        )


def test_links_inside_to_the_base_and_to_a_larger_disk_are_allowed() -> None:
    """Those of base/ name the files of a model."""
    Path("results/r/base/a").symlink_to(Path("outside/a").absolute())
    Path("results/r/p/newest").symlink_to("progress")
    os.rename("results/r", "outside/r")
    Path("results/r").symlink_to(Path("outside/r").absolute())
    check_run_links("r", "has none yet", data="d")
    write_whole(Path("results/r/p/a.txt"), "new")


def test_the_dataset_of_a_run_is_looked_at_as_well() -> None:
    """Its folder is written by the same jobs."""
    Path("results/data/d/cache").symlink_to(Path("outside").absolute())
    assert "results/data/d/cache: a link" in refused(check_run_links, "r", data="d").what


def test_a_pipe_is_named(tmp_path: Path) -> None:
    """Whoever reads it would wait for ever."""
    os.mkfifo("results/r/p/metrics.json")
    assert "results/r/p/metrics.json: is a pipe" in refused(check_run_links, "r").what


def test_nothing_is_published_through_a_folder_that_is_a_link() -> None:
    """Also by a stage that is called by hand."""
    Path("results/r/q").symlink_to(Path("outside").absolute())

    def publish() -> None:
        with artifact.publish(Path("results/r/q/weights"), "weights"):
            pass

    for write in (publish, lambda: write_whole(Path("results/r/q/metrics.json"), "{}")):
        assert "results/r/q: a link that leads out of results/r" in refused(write).what
    assert sorted(os.listdir("outside")) == ["a"]
