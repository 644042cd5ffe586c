"""The process that traces a model for the forecast: one, for the newest form."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.builders.traced_models import traced_model

from zerotrain.builder.draft import read_draft
from zerotrain.builder.traces import Traces, Tracing
from zerotrain.launch.planner import trace_store
from zerotrain.launch.planner.architecture import (
    Architecture,
    find_architecture,
    read_shipped,
)
from zerotrain.launch.planner.trace_store import ModelShapes, TracedModel
from zerotrain.launch.planner.tracing import Tracer

FULL = "config/sdxl-full-24gb.yaml"
CARD = {"machine.gpu": "RTX 4090", "machine.host_memory": "64 GiB"}
TRACED = TracedModel(ModelShapes(Architecture("sdxl", FULL, {}), {}, (), 0), {})


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Traces of which none is in the store."""
    monkeypatch.setattr(Tracer, "known", lambda _: None)
    found = Traces()
    yield found
    found.close()


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the place of Python; its calls are lines of the returned file."""

    def replace(script: str) -> Path:
        program, calls = tmp_path / "python", tmp_path / "calls"
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return calls

    return replace


def find(traces: Traces, **values: str) -> Tracing:
    """Ask for the trace of a form."""
    draft = read_draft({"from": FULL, **{k.replace("__", "."): v for k, v in values.items()}})
    assert draft.run is not None
    found = traces.find(draft, draft.run, draft.run.phases[0], cpu=False)
    assert isinstance(found, Tracing)
    return found


def wait_for(done: Callable[[], object]) -> None:
    """Wait until something is true; a machine under load takes seconds to start a process."""
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_plan_runs_for_the_newest_form(traces: Traces, planner) -> None:
    """The same form waits for it, another one ends it; its file goes with it."""
    calls = planner("exec sleep 60")
    assert find(traces) == Tracing("sdxl, micro batch 8 at 1024 px")
    wait_for(calls.exists)
    first, file = traces._process, traces._file
    assert first is not None
    assert "global_batch_size: 8" in file.read_text()
    assert find(traces, train__learning_rate="1e-4") == Tracing("sdxl, micro batch 8 at 1024 px")
    assert traces._process is first
    assert find(traces, train__global_batch_size="4").what == "sdxl, micro batch 4 at 1024 px"
    assert first.poll() is not None
    assert not file.exists()
    wait_for(lambda: len(calls.read_text().splitlines()) == 2)
    called = calls.read_text().splitlines()[1].split()
    assert called[:3] == ["-m", "zerotrain", "plan"]
    assert called[4:] == ["--phase", "offload", "--device-memory", "24", "GiB"]
    second = traces._process
    traces.close()
    assert second is not None
    assert second.poll() is not None
    assert not Path(called[3]).exists()


def test_a_plan_that_fails_is_not_repeated(traces: Traces, planner) -> None:
    """Its sentence is shown each time; another form is tried."""
    calls = planner("echo 'ERROR: base: no such model' >&2; exit 2")
    assert find(traces).error == ""
    wait_for(lambda: traces._process is not None and traces._process.poll() is not None)
    for _ in range(2):
        assert find(traces).error == "base: no such model"
    assert len(calls.read_text().splitlines()) == 1
    assert find(traces, train__global_batch_size="4").error == ""


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("kill -9 $$", "the plan was ended by signal 9 (SIGKILL)"),
        ("echo 'planning sdxl' >&2", "the model was traced, but its trace is not in "),
        ("echo 'no module' >&2; exit 3", "the plan failed with exit code 3: no module"),
    ],
)
def test_a_plan_without_a_trace_says_how_it_ended(
    traces: Traces, planner, script: str, sentence: str
) -> None:
    """Killed, without a store that can be written, or without a sentence of its own."""
    planner(script)
    find(traces)
    wait_for(lambda: traces._process is not None and traces._process.poll() is not None)
    assert find(traces).error.startswith(sentence)


def test_a_trace_written_since_the_store_was_read_is_found(
    traces: Traces, planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan writes it and ends between the look into the store and the look at the process."""
    planner("exit 0")
    find(traces)
    wait_for(lambda: traces._process is not None and traces._process.poll() is not None)
    draft = read_draft({"from": FULL})
    assert draft.run is not None
    seen = iter([None, TRACED])
    monkeypatch.setattr(Tracer, "known", lambda _: next(seen))
    assert traces.find(draft, draft.run, draft.run.phases[0], cpu=False) is TRACED


def test_what_was_shown_before_is_not_traced(client: TestClient, traces: Traces, planner) -> None:
    """Only to mark what a change made: it would end the plan that the page waits for."""
    calls = planner("exec sleep 60")
    before = str(client.get("/build", params={"from": FULL}).url)
    form = {"from": FULL, "train.global_batch_size": "4"}
    for _ in range(3):
        assert client.post("/build", data=form, headers={"HX-Current-URL": before}).is_success
    wait_for(lambda: len(calls.read_text().splitlines()) >= 2)
    assert len(calls.read_text().splitlines()) == 2


def write_folder(folder: Path) -> Path:
    """The configurations of an SDXL's parts, without any weights."""
    (known,) = read_shipped("sdxl")
    index: dict[str, object] = {"_class_name": "StableDiffusionXLPipeline"}
    for name, part in known.parts.items():
        index[name] = [part.library, part.class_name]
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(part.config))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_header(file: Path, count: int) -> Path:
    """A file of safetensors that ends after its header, of so many parameters of a denoiser."""
    entry = {"dtype": "F16", "shape": [count], "data_offsets": [0, 2 * count]}
    header = json.dumps({"model.diffusion_model.a": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return file


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_base_of_the_user_is_planned_without_its_weights(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """By config.json files, or by the header of one file; one that no model has is a sentence."""
    bases: list[Architecture] = []

    def known(tracer: Tracer) -> TracedModel:
        bases.append(find_architecture("sdxl", tracer._base))
        return traced_model(batch=8)

    monkeypatch.setattr(Tracer, "known", known)
    (sdxl,) = read_shipped("sdxl")
    count = sdxl.trained.parameters
    assert count is not None
    base = (
        write_folder(tmp_path / "own")
        if kind == "folder"
        else write_header(tmp_path / "own.safetensors", count)
    )
    form = {"from": FULL, **CARD, "base": str(base), "revision": ""}
    text = client.post("/build", data=form).text
    assert text.count('<li class="preset') == 7, text
    assert {one.source for one in bases} == {str(base)}
    assert {one.trained.config["cross_attention_dim"] for one in bases} == {2048}
    other = write_header(tmp_path / "other.safetensors", 31)
    text = client.post("/build", data={**form, "base": str(other)}).text
    assert "31 parameters of a denoiser are in its header" in text
    assert '<li class="preset' not in text


@pytest.mark.slow
def test_a_small_model_is_traced_for_the_page(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a form whose model nobody has planned, to bars."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The planner's tests in the same process have a store of their own.
    monkeypatch.setattr(trace_store, "folder", lambda: tmp_path / "zerotrain" / "plans")
    form = {"from": "config/config.yaml", **CARD, "launch.preset": "zero2"}
    text = client.get("/build", params=form).text
    assert "is traced at this size" in text

    def shown() -> bool:
        text = client.post("/build", data=form).text
        assert 'class="problem"' not in text
        return 'class="preset' in text

    wait_for(shown)
    assert '"reduce_bucket_size"' in client.post("/build", data=form).text.replace("&#34;", '"')
