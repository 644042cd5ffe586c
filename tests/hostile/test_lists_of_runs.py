"""A run or a configuration from somebody else never keeps the other ones from being shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.builders.refusals import refusal
from tests.builders.watched_runs import WatchedRun

from zerotrain.artifact import Artifact
from zerotrain.builder.app import create_app
from zerotrain.builder.pages import BuilderSettings
from zerotrain.config.runs import find_config
from zerotrain.graph.switch.edit import read_note
from zerotrain.run import stages
from zerotrain.run.lineage.chain import facts_of
from zerotrain.run.runs import choose_runs
from zerotrain.run.view import RunView
from zerotrain.run.watch import command, state
from zerotrain.run.watch.state import RunState, read_run_state

SECONDS = 20.0
"""Of a test, after which something waits for ever."""
LINE = '{{"phase": "plain", "step": {step}, "loss": {loss}, "seconds": {seconds}}}\n'


@pytest.fixture(autouse=True)
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedRun]:
    """A finished phase of a run `evil`, next to a run `good` that trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "jobs_here", lambda folder: [])
    good, made = WatchedRun("good"), WatchedRun("evil")
    for run in (good, made):
        run.make_data()
        run.log("plain", *range(10, 100, 10))
    good.lock("plain")
    made.finish("plain", 300)
    former = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


def _late(number: int, frame: object) -> None:
    raise AssertionError(f"longer than {SECONDS} s")


def check_shown(*runs: str) -> None:
    """Check that watch and the pages show these runs, and that names and files are found."""
    assert choose_runs() == ["good"]
    assert find_config("good") == Path("config/good.yaml")
    assert read_run_state("good").state == "running"
    assert command._list(list(runs), as_json=False) == command._list(list(runs), as_json=True) == 0
    settings = BuilderSettings(token="t")
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8417") as client:
        client.get("/", params={"token": "t"})
        for path in ("/", "/runs", *(f"/runs/{run}{part}" for run in runs for part in PARTS)):
            answer = client.get(path)
            assert answer.status_code == 200, path
        assert "50 of 300" not in client.get("/runs/good/live").text
        assert "90 of 300" in client.get("/runs/good/live").text


PARTS = ("", "/live", "/controls", "/pictures")


NUMBERS = [
    ("1", "NaN", "NaN"), ("1", "Infinity", "-Infinity"), ("9" * 400, "1", "1"),
    ("1", "9" * 400, "9" * 400), ("1", "1e308", "1e308"), ("-1", "-1e308", "-1e308"),
    ("18446744073709551615", "1", "1"), ("-9223372036854775808", "5e-324", "5e-324"),
    ("true", "true", "true"), ("1", '"x"', "[]"), ("1.5", "null", "{}"), ("0", "1e30", "0"),
    ("1", "[" * 100_000, "1"),
]  # fmt: skip


def test_numbers_of_metrics(evil: WatchedRun) -> None:
    """Steps, losses and seconds that no training has are passed over, or drawn."""
    file = evil.folder.phase("plain").progress / "metrics.jsonl"
    before = file.read_text()
    for step, loss, seconds in NUMBERS:
        with file.open("a") as stream:
            for number in ("1", step, step):
                line = LINE.format(step=number, loss=loss, seconds=seconds)
                stream.write(line + line.replace('"loss', '"val_'))
                stream.write(LINE.format(step=5, loss="-1e308", seconds="1e-320"))
        assert read_run_state("evil").state != "failed"
    check_shown("good", "evil")
    file.write_text(before)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("plain/progress/lock", _pipe), ("plain/progress/exit.json", Path.mkdir),
        ("plain/progress/metrics.jsonl", _loop), ("plain/progress/ended-0.json", _pipe),
        ("plain/launch/run.yaml", Path.mkdir), ("plain/checkpoint/manifest.json", _loop),
        ("logs/train_phase.plain.log", _pipe), ("logs/builder.train.log", Path.mkdir),
        ("logs/builder.train.json", _loop), (".switch/lock", _pipe),
        ("plain/progress/ranks", Path.mkdir),
    ],
)  # fmt: skip
def test_pipes_folders_and_loops_in_the_place_of_files(
    evil: WatchedRun, name: str, make: Callable[[Path], None]
) -> None:
    """Nothing waits for them, and the page says what is there."""
    path = evil.folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    check_shown("good", "evil")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain/launch/run.yaml", "[ "), ("plain/launch/run.yaml", "- "),
        ("plain/progress/lock", "[ "), ("plain/progress/exit.json", "[ "),
        ("plain/checkpoint/manifest.json", "[ "), ("plain/weights/manifest.json", "- "),
        (".switch/switch.json", "[ "), ("logs/builder.switch.json", "- "),
    ],
)  # fmt: skip
def test_deep_nesting(evil: WatchedRun, name: str, text: str) -> None:
    """libyaml would end the process: of watch, trace, compare, doctor and of the page's server."""
    path = evil.folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text * 50_000)
    check_shown("good", "evil")
    assert read_note(evil.folder.path / ".switch") is None
    launch = evil.folder.phase("plain").launch
    assert "preset" not in facts_of(Artifact(launch, "launch", {}, {}, {}, {}))


CONFIGS = {
    "int": "run: evil\nseed: !!int ''\n",
    "float": "run: evil\nseed: !!float ''\n",
    "bool": "run: evil\nseed: !!bool x\n",
    "tag": "run: !!python/name:os.system evil\n",
    "deep": "run: evil\nx: " + "[" * 50_000,
    "deep blocks": "- " * 50_000,
    "long name": f"run: {'a' * 300}\nbase: x\n",
    "no name": 'run: "a\\0b"\n',
    "list": "run: [evil]\n",
    "date": "run: 2020-13-45\n",
}


def test_configurations_that_cannot_be_read(evil: WatchedRun) -> None:
    """They are offered to be corrected, and the other ones are found."""
    for name, text in CONFIGS.items():
        evil.file.write_text(text)
        (evil.file.parent / f"{name}.yaml").write_text(text)
        check_shown("good", "evil")


def test_a_run_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its reading raises: in the list, on its page, and in watch."""

    def read(view: RunView) -> RunState:
        if view.run == "evil":
            raise ZeroDivisionError("no such luck")
        return original(view)

    original = state._read
    monkeypatch.setattr(state, "_read", read)
    found = read_run_state("evil")
    assert (found.state, found.problem) == (
        "failed",
        "cannot be read: ZeroDivisionError: no such luck",
    )
    check_shown("good", "evil")


def test_unknown_run_is_a_sentence() -> None:
    """Also if a configuration next to it cannot be read."""
    Path("config/evil.yaml").write_text(CONFIGS["int"], encoding="utf-8")
    assert "no file in config has the run other" in refusal(find_config, "other")
