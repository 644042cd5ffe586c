"""The name of a configuration, a dataset or a clone is a word of a command, and no command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.builders.refusals import refused

from zerotrain.graph.dvc.pipeline import config_of, pipeline
from zerotrain.graph.jobs import option, options

ROOT = Path(__file__).parents[2]
NAMES = ["a;touch ran.yaml", "a $(touch ran) `touch ran`.yaml", 'it\'s "a" $HOME.yaml']
STUB = '#!/bin/sh\nprintf "%s" "${0##*/}"\nprintf " <%s>" "$@"\necho\n'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in a folder with spaces, quotes, accents and a command, whose tools print words."""
    made = tmp_path / 'it\'s an "é" $(touch ran); touch ran'
    tools = made / ".venv" / "bin"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", made)
    (made / "envs").mkdir()
    (made / "envs" / "setup.py").write_text("")
    for name in ("zerotrain", "snakemake"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    return made


@pytest.mark.parametrize("name", [*NAMES, "$(shell touch ran)$$(touch ran).yaml", "a.yaml"])
def test_make_runs_no_name(clone: Path, name: str) -> None:
    """`make train CONFIG=...`, by argument and by environment, in a clone anywhere."""
    own = ("MAKE", "ARGS")  # of the make that calls this test
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    expected = (
        f"zerotrain <check> <{name}>\nsnakemake <--cores> <all> <train> <--configfile> <{name}>\n"
    )
    (clone / name).touch()
    for words, given in (([f"CONFIG={name}"], {}), ([], {"CONFIG": name})):
        done = subprocess.run(
            ["make", "-s", "train", *words],
            cwd=clone, env=environment | given, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    assert not [*clone.parent.rglob("ran*")]


@pytest.mark.parametrize("name", NAMES)
def test_dvc_runs_no_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of stages quote it, and it is found again in them."""
    monkeypatch.chdir(tmp_path)
    config = Path("config") / name
    config.parent.mkdir()
    shutil.copy(ROOT / "config" / "sums.yaml", config)
    for stage in pipeline(config)["stages"].values():
        assert shlex.split(stage["cmd"])[-2:] == ["--configfile", str(config)]
        assert config_of(stage) == config


def test_dvc_inserts_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with `${` would become another: it is refused."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "config" / "sums.yaml", "${a}.yaml")
    assert "holds ${, which DVC would replace" in refused(pipeline, Path("${a}.yaml")).what


def test_rules_quote_optional_files() -> None:
    """A job's shell gets each as one word."""
    files = SimpleNamespace(start="a;b", get=lambda name, other: ["a b", "c"])
    assert option("--start", "start")(None, files) == "--start 'a;b'"
    assert options("--shards", "shards")(None, files) == "--shards 'a b' --shards c"
