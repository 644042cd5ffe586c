"""Experiments of DVC: what runs in a copy of the project, and what is left when one is applied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from dvc.utils.serialize import modify_yaml
from tests.builders.git import init_repository

from zerotrain.config.read import read_config

CONFIG = "config/config.yaml"


@pytest.mark.slow
def test_a_copy_of_the_project_runs_its_own_code(project):
    """Not that of the checkout which the environment was installed from, neither in the plan nor
    in the jobs. DVC runs `dvc exp run --temp` and its queue in such copies."""
    (project.folder / "bin" / "zerotrain").unlink()  # the real command, as the environment has it
    package = project.folder / "workflow" / "zerotrain"
    (package / "stages" / "prepare_dataset.py").write_text("raise SystemExit('edited here')\n")
    done = project.snakemake("--cores", "1", "dataset", PYTHONPATH="")
    assert done.returncode == 1
    assert "edited here" in done.stdout


def test_experiments_leave_the_examples_pointer_as_it_is(tmp_path):
    """DVC writes each .dvc file again: one that it would lay out otherwise is left to commit."""
    shipped = Path("data/digits.csv.gz.dvc")
    shutil.copy(shipped, tmp_path)
    with modify_yaml(tmp_path / shipped.name):
        pass
    assert (tmp_path / shipped.name).read_text() == shipped.read_text(encoding="utf-8")


@pytest.mark.soak
def test_an_experiment_in_a_copy_is_applied(project):
    """`--temp` changes nothing here; applied, it leaves nothing to do. Its value, which DVC writes
    as YAML 1.1 reads text, is a number to us."""

    must = project.must

    def nothing_to_do() -> None:
        assert "up to date" in must("dvc", "status")
        assert project.planned("train") == {}

    must("python", "-m", "zerotrain", "dvc", "generate")
    project.append(".gitignore", "/calls.txt\n")
    init_repository(must)
    project.build("train")
    must("git", "add", ".")
    must("git", "commit", "-q", "-m", "begin")
    project.calls()
    must(
        "dvc", "exp", "run", "--temp", "-n", "small", "-S", f"{CONFIG}:evaluate.guidance_scale=1e-5"
    )
    assert project.calls() == []
    assert must("git", "status", "--short") == ""
    nothing_to_do()
    must("dvc", "exp", "apply", "small")
    nothing_to_do()
    config = project.folder / CONFIG
    assert read_config(config).evaluate.guidance_scale == 1e-5
    assert yaml.safe_load(config.read_text())["evaluate"]["guidance_scale"] == "1e-05"
