"""Traces are made once: equal plans, without torch, whatever happens to the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.builders.runs import make_run

from zerotrain.config.read import parse_config
from zerotrain.config.run import RunConfig
from zerotrain.launch.planner import trace_store, tracing
from zerotrain.launch.planner.options import PlanOptions
from zerotrain.launch.planner.report import plan_report
from zerotrain.launch.planner.tracing import Tracer, trace
from zerotrain.machine.progress_bar import ERASE, progress_line

VALUES = {
    "family": "causal_lm", "base": "nano", "resolution": 64, "max_length": 32, "batch_size": 1,
    "precision": "bf16", "processes": 1, "lora_rank": None, "gradient_checkpointing": False,
}  # fmt: skip
RAW = make_run(
    family="causal_lm", data={"source": "sums"}, train={"max_length": 32, "global_batch_size": 2}
)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trace_store, "folder", lambda: tmp_path / "zerotrain" / "plans")
    return trace_store.folder()


def run(**changes: Any) -> RunConfig:
    """A small run."""
    return parse_config({**RAW, **changes}, "c")


@pytest.mark.slow
def test_the_second_plan_is_the_first_and_imports_no_torch(store: Path) -> None:
    """A process of its own, that finds what this one has written."""
    first = plan_report(PlanOptions(**VALUES, device_memory="24 GiB", host_memory="64 GiB"))
    assert len(list(store.glob("*.json"))) == 1
    code = (
        "import sys\n"
        "from zerotrain.launch.planner.options import PlanOptions\n"
        "from zerotrain.launch.planner.report import plan_report\n"
        f"options = PlanOptions(**{VALUES!r}, device_memory='24 GiB', host_memory='64 GiB')\n"
        "lines = plan_report(options)\n"
        "print(*lines, sep='\\n'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n".join(first) + "\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_a_stored_trace_is_the_one_that_was_made() -> None:
    """Shapes, activations, and the encoders' parameters of a family of images."""
    images = run(family="sd3", data={"images": "i"}, train={"resolution": 32})
    for config in (run(), images):
        first = trace(config, config.phases[0], None)
        again = trace(config, config.phases[0], None)
        assert again is not first
        assert again.engines == first.engines
        assert dict(again.model.shapes) == dict(first.model.shapes)
        assert again.model.trained == first.model.trained
        assert again.sizes == first.sizes
        counts = {name: part.parameters for name, part in again.model.architecture.parts.items()}
        assert all(counts.values())


def alter(text: str) -> str:
    """The same file with another figure of activations."""
    document = json.loads(text)
    document["content"]["engines"]["torch"]["saved"] += 1
    return json.dumps(document)


def test_a_damaged_trace_is_made_again(store: Path) -> None:
    """Empty, cut short, altered, or something else: never a wrong figure, and it is repaired."""
    config = run()
    first = trace(config, config.phases[0], None)
    (file,) = store.glob("*.json")
    whole = file.read_text()
    for damaged in ("", whole[:-9], alter(whole), "[]", "{}"):
        file.write_text(damaged)
        assert trace(config, config.phases[0], None).engines == first.engines
        assert file.read_text() == whole


def test_an_engine_that_is_missing_is_traced_and_joins(store: Path) -> None:
    """A forecast traces one engine; a plan both."""
    config = run(launch={"mixed_precision": "bf16"})
    one = trace(config, config.phases[0], None, engines=["deepspeed"])
    assert set(one.engines) == {"deepspeed"}
    both = trace(config, config.phases[0], None)
    assert set(both.engines) == {"torch", "deepspeed"}
    assert both.engines["deepspeed"] == one.engines["deepspeed"]
    assert len(list(store.glob("*.json"))) == 1


def _without_threads(autocast: bool) -> None:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork")


def test_what_a_fork_cannot_trace_is_traced_here(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second plan of one process, with a GPU: a fork has no autograd threads for it."""
    config = run(launch={"mixed_precision": "bf16"})
    one = trace(config, config.phases[0], None, engines=["torch"])
    store.rename(store.with_name("other"))
    monkeypatch.setattr(tracing, "_trace_in_fork", _without_threads)
    assert trace(config, config.phases[0], None).engines["torch"] == one.engines["torch"]


def test_what_changes_a_trace_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, adapter, what is frozen, tokens and version; not the learning rate."""
    base = trace_store.model_key(run(), "nano", None)
    assert base == trace_store.model_key(run(train={"learning_rate": 1}), "nano", None)
    others = [
        run(base="micro"), run(lora={"rank": 2}), run(frozen_parameters=["embed"]),
        run(trainable_parameters=["embed"]), run(lora={"rank": 2}, base_model_precision="nf4"),
        run(family="seq2seq_lm"),
    ]  # fmt: skip
    for other in others:
        assert trace_store.model_key(other, other.base, None) != base
    monkeypatch.setattr(trace_store, "VERSION", 0)
    assert trace_store.model_key(run(), "nano", None) != base


def test_those_that_were_used_last_stay(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read counts as a use."""
    monkeypatch.setattr(trace_store, "MOST", 2)
    config = run()
    tracer = Tracer(config, config.phases[0], None)
    tracer.trace(1, 8)
    (first,) = store.glob("*.json")
    tracer.trace(1, 16)
    (second,) = set(store.glob("*.json")) - {first}
    for age, path in ((200, first), (100, second)):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    Tracer(config, config.phases[0], None).trace(1, 8)
    tracer.trace(1, 24)
    assert len(list(store.glob("*.json"))) == 2
    assert first.is_file()
    assert not second.exists()


def test_without_a_folder_nothing_is_kept(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file where the folder should be, or no home: a plan is made all the same."""
    (tmp_path / "zerotrain").write_text("a file")
    config = run()
    assert trace(config, config.phases[0], None).batch == 2

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(trace_store, "folder", no_home)
    assert trace_store.read({}) is None


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text in place of the last, cut at the terminal's width."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "8")
    with progress_line() as tell:
        tell("one")
        tell("two and more")
    assert stream.getvalue() == f"{ERASE}one{ERASE}two and{ERASE}"


def test_a_log_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Only where something is traced."""
    with progress_line() as tell:
        tell("one")
        tell("two")
    with progress_line(written=True) as tell:
        tell("three")
    assert capsys.readouterr().err == "one\n"
