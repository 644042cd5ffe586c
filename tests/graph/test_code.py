"""The code of a job is a parameter: a text that changes with the code and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import ROOT

from zerotrain.artifact import sources
from zerotrain.config.read import read_config
from zerotrain.config.run import RunConfig
from zerotrain.pipeline.graph import code
from zerotrain.pipeline.graph.code import (
    KEPT,
    READ_SOURCES,
    Code,
    is_code_changed,
    job_code,
)
from zerotrain.pipeline.job_files import inputs_of

LATER = 1_200_000_000


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stage with its rule, in a package that has nothing else."""
    package = tmp_path / "zerotrain"
    for folder in ("zerotrain", "zerotrain/stages", "rules"):
        (tmp_path / folder).mkdir()
    for folder in (package, package / "stages"):
        (folder / "__init__.py").touch()
    (package / "stages/act.py").write_text("one = 1\n")
    (tmp_path / "rules/act.smk").write_text("rule act:\n    shell: 'zerotrain act'\n")
    monkeypatch.setattr(sources, "PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    return package / "stages/act.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The example; what an earlier test of this process found from another folder is forgotten."""
    monkeypatch.chdir(ROOT)
    for known in (code._encoding, code._training, code._stage, code._file_code):
        known.cache_clear()
    return read_config(Path("config/config.yaml"))


def now() -> Code:
    """The code of the stage, read again by a process that knows nothing yet."""
    code._stage.cache_clear()
    code._file_code.cache_clear()
    sources.READ.tokens.clear()
    sources.READ.imports.clear()
    return code._stage("act")


def test_neither_a_time_nor_a_comment_is_code_and_an_edit_is(stage: Path) -> None:
    """What counts is the content of the tokens."""
    before = now()
    assert before.files[1:] == (
        "zerotrain/stages/__init__.py",
        "zerotrain/stages/act.py",
        "rules/act.smk",
    )
    os.utime(stage, (LATER, LATER))
    assert now() == before
    stage.write_text('"""What it does."""\n\none = 1  # the first\n', encoding="utf-8")
    assert now() == before
    stage.write_text("one = 2\n", encoding="utf-8")
    assert now() != before
    stage.write_text("one = 1\n", encoding="utf-8")
    Path("rules/act.smk").write_text("rule act:\n    shell: 'zerotrain  act'\n", encoding="utf-8")
    assert now() != before


def test_tokens_are_remembered_until_they_are_read_otherwise(stage: Path) -> None:
    """By the content of a file; a store that is torn or of other tokens is as none."""
    before = now()
    assert READ_SOURCES.is_file()
    for content in (
        b"{",
        b"[]",
        b'{"reader": "another", "tokens": {"a": "b"}}',
        b'{"digests": 1}',
    ):
        READ_SOURCES.write_bytes(content)
        assert now() == before


def test_each_job_has_the_code_of_what_its_run_names(run: RunConfig) -> None:
    """Its family, the builder of a small model, the planner for `auto`; none where it is kept."""
    phase = run.phases[0]
    words = {rule: job_code(rule, run, phase).split()[2:] for rule in (
        "prepare_dataset", "build_base", "cache_latents", "render_launch", "train_phase",
        "export_weights", "evaluate", "report",
    )}  # fmt: skip
    assert words == {
        "prepare_dataset": [], "build_base": ["sdxl", "sdxl_nano"], "cache_latents": ["sdxl"],
        "render_launch": [], "train_phase": [], "export_weights": [], "evaluate": ["sdxl"],
        "report": [],
    }  # fmt: skip
    assert job_code("train_phase", run, phase) == job_code("export_weights", run, phase) == KEPT
    asked = phase.model_copy(
        update={
            "train": phase.train.model_copy(update={"code_changes": "rerun"}),
            "launch": phase.launch.model_copy(update={"preset": "auto"}),
        }
    )
    assert job_code("train_phase", run, asked).digest == sources.training_digest("sdxl")
    assert job_code("export_weights", run, asked).split()[2:] == ["sdxl"]
    assert job_code("render_launch", run, asked).split()[2:] == ["planner"]


def test_the_sources_of_a_job_are_among_its_inputs(run: RunConfig) -> None:
    """As DVC takes them: the modules that encode are files, though a class of them counts alone."""
    of_cache = job_code("cache_latents", run)
    rule = SimpleNamespace(name="cache_latents")
    job = SimpleNamespace(rule=rule, input=["a.json"], params={"code": of_cache})
    files = inputs_of(job)
    assert files[0] == "a.json"
    assert "workflow/zerotrain/models/families/sdxl.py" in files[1:]
    job.params = {"code": KEPT}
    assert inputs_of(job) == ["a.json"]


def recorded(**record: Any) -> Any:
    """Snakemake's records of one output."""
    found = SimpleNamespace(params=[], input_checksums={}, **{}) if record else None
    if found:
        vars(found).update(record)
    return SimpleNamespace(metadata=lambda path: found, params=lambda path: found and found.params)


def test_code_is_compared_with_what_is_recorded(run: RunConfig) -> None:
    """With the parameter; an output without a record has nothing to compare."""
    found = job_code("cache_latents", run)
    job = SimpleNamespace(output=["out"], params={"code": found})
    assert not is_code_changed(recorded(params=["'512'", repr(found)]), job)
    assert is_code_changed(recorded(params=[repr(Code("0" * 64, ["sdxl"]))]), job)
    assert is_code_changed(recorded(params=[repr(KEPT)]), job)
    assert is_code_changed(recorded(params=["'512'"]), job)
    assert not is_code_changed(recorded(), job)
    assert not is_code_changed(
        recorded(params=["'512'"]), SimpleNamespace(output=["out"], params={"code": KEPT})
    )
