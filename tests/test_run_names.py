"""Every command takes a run in one way: its name or its configuration, as the first word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.builders.watched_runs import WatchedRun
from typer.testing import CliRunner

from zerotrain import cli
from zerotrain.config.command_options import config_of
from zerotrain.errors import PipelineError
from zerotrain.graph.why.report import split_words
from zerotrain.run.caches import find_caches
from zerotrain.run.runs import find_trained

APP = cli.command_line()
ROOT = Path(__file__).parents[1]
COMMANDS: Any = typer.main.get_command(APP)
TAKE_A_RUN = [
    *("check RUN", "plan RUN", "sweep RUN --set seed=1,2 --output config/s", "fetch RUN"),
    *("data show RUN", "cluster check RUN --no-job", "doctor RUN", "watch RUN --once"),
    *("report RUN", "why RUN train", "verify resume RUN", "cache show RUN", "cache prune RUN"),
    *("cache verify RUN", "dvc generate RUN", "switch RUN --to zero2"),
    "export results/cats/plain/checkpoint --config RUN --output o",
]


def called(words: str) -> str:
    """What a command refuses with, in this process."""
    result = CliRunner().invoke(APP, words.split())
    assert isinstance(result.exception, PipelineError), (result.output, result.exception)
    return str(result.exception)


def all_commands(group: Any, above: str = "") -> dict[str, Any]:
    """All commands by their words."""
    found = {}
    for name, one in group.commands.items():
        words = f"{above} {name}".strip()
        found |= all_commands(one, words) if hasattr(one, "commands") else {words: one}
    return found


@pytest.fixture
def cats(tmp_path: Path, monkeypatch) -> WatchedRun:
    """A run whose file has another name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Snakefile").touch()
    (tmp_path / "config/launch").mkdir(parents=True)
    shutil.copy(ROOT / "config/launch/zero2.yaml", "config/launch")
    run = WatchedRun("cats")
    run.file = run.file.rename("config/mine.yaml")
    return run


@pytest.mark.parametrize("words", TAKE_A_RUN)
def test_a_typo_gets_the_same_sentence_in_every_command(cats, words):
    """Of a name and of a file; what is found is the run's file in both."""
    name = called(words.replace("RUN", "catz"))
    assert name.startswith("ERROR: no file in config has the run catz\n  Hint: did you mean cats? ")
    assert "runs here: cats (config/mine.yaml)" in name
    file = called(words.replace("RUN", "config/minx.yaml"))
    assert file.startswith("ERROR: config/minx.yaml: no such configuration file")


def test_a_name_finds_the_file_and_a_file_itself(cats):
    assert config_of("cats") == config_of("config/mine.yaml") == Path("config/mine.yaml")
    Path("config/copy.yaml").write_text(cats.file.read_text(), encoding="utf-8")
    with pytest.raises(PipelineError) as caught:
        config_of("cats")
    assert str(caught.value) == (
        "ERROR: several files have the run cats: config/copy.yaml, config/mine.yaml\n"
        "  Hint: name one of these files instead"
    )


def test_only_commands_of_rules_and_export_have_an_option_for_it():
    """The page of its rule names the file; export's first word is the checkpoint."""
    having = {
        words
        for words, command in all_commands(COMMANDS).items()
        if any("--config" in one.opts for one in command.params)
    }
    assert having == {"report", "export"}


def test_commands_of_weights_take_a_configuration_too(cats):
    """As they take the run's name."""
    cats.make(cats.folder.phase("plain").weights, step=3)
    by_name, by_file = (find_trained(Path(name)) for name in ("cats", "config/mine.yaml"))
    assert by_name == by_file
    assert by_file is not None
    assert by_file.folder == Path("results/cats/plain/weights")


def test_commands_of_caches_take_a_folder_or_a_run(cats):
    for name in ("cats", "dogs"):
        cache = Path(f"results/data/{name}/cache/32")
        (cache / "partial").mkdir(parents=True)
    mine = [Path("results/data/cats/cache/32")]
    assert find_caches("cats") == find_caches("config/mine.yaml") == mine
    assert find_caches("results/data/dogs/cache/32/manifest.json") == [cache]
    assert len(find_caches(None)) == 2


def test_why_takes_a_run_a_target_or_both(cats):
    """A phase of a run and its results name the run themselves; a bare target is of the default."""
    default, mine = Path("config/config.yaml"), Path("config/mine.yaml")
    assert split_words([]) == (default, None)
    assert split_words(["cats"]) == split_words(["config/mine.yaml"]) == (mine, None)
    assert split_words(["cats", "cache"]) == (mine, "cache")
    assert split_words(["cats/plain"]) == (mine, "cats/plain")
    path = "results/cats/plain/metrics.json"
    assert split_words([path]) == (mine, path)
    assert split_words(["offload"]) == (default, "offload")
    with pytest.raises(PipelineError, match="no file in config has the run catz"):
        split_words(["catz", "cache"])
