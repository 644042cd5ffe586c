"""The versions of stages: a result that moves without its number fails a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import stage_results as results
from tests.builders.stage_inputs import FAMILIES, StageInputs
from tests.builders.stored_results import StoredResult, describe, differences

from zerotrain import stages
from zerotrain.artifact.stage_versions import VERSIONS

STORED = Path(__file__).with_name("stored")
Make = Callable[[StageInputs, Path], Any]


@dataclass(frozen=True)
class Case:
    """A result of a stage."""

    stage: str
    name: str
    make: Make
    inputs: tuple[str, ...] = ()
    """The stages that made its inputs."""

    @property
    def file(self) -> Path:
        """Where its result is stored."""
        return STORED / f"{self.stage}-{self.name}.json"


DATA = ("prepare_dataset",)
BASE = (*DATA, "build_base")
CACHE = (*BASE, "cache_latents")
TRAINED = {"sdxl": (), "causal_lm": ("build_base", "cache_latents")}
"""Inputs of the trainings: those of images are made by hand."""


def make_cases() -> list[Case]:
    """All of them, in the graph's order."""
    cases = [
        Case("prepare_dataset", "images", results.prepare_images),
        Case("prepare_dataset", "text", results.prepare_text),
    ]
    for family in FAMILIES:
        build = partial(results.build_result, family=family)
        encode = partial(results.cache_result, family=family)
        cases.append(Case("build_base", family, build, DATA))
        cases.append(Case("cache_latents", family, encode, BASE))
    for preset in ("torch", "zero3_offload"):
        render = partial(results.launch_result, preset=preset)
        cases.append(Case("render_launch", preset, render, DATA))
    cases.append(Case("import_checkpoint", "accelerate", results.import_result))
    for family, inputs in TRAINED.items():
        train = partial(results.train_result, family=family)
        export = partial(results.export_result, family=family)
        evaluate = partial(results.evaluate_result, family=family)
        cases.append(Case("train_phase", family, train, inputs))
        cases.append(Case("export_weights", family, export, (*inputs, "train_phase")))
        cases.append(Case("evaluate", family, evaluate, CACHE))
    cases.append(Case("report", "images", results.report_result))
    return cases


CASES = make_cases()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> StageInputs:
    """The inputs of all cases."""
    return StageInputs(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide accelerators: keys of a cache depend on the kind of the device."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage}-{case.name}")
def test_equal_inputs_give_the_stored_result(
    case: Case, made: StageInputs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Within rounding; another one needs a raised number, and is then stored by --fix."""
    stored = StoredResult(case.file, case.stage, case.inputs)
    problem = stored.problem(
        case.make(made, tmp_path), VERSIONS, fix=request.config.getoption("--fix")
    )
    if problem:
        pytest.fail(problem, pytrace=False)


def test_every_stage_has_a_version_and_a_case() -> None:
    """And no file is stored that is of no case."""
    modules = {file.stem for file in Path(stages.__file__).parent.glob("[!_]*.py")}
    assert set(VERSIONS) == modules
    assert {case.stage for case in CASES} == set(VERSIONS)
    assert {file.name for file in STORED.glob("*")} <= {case.file.name for case in CASES}
    assert all(type(number) is int and number >= 1 for number in VERSIONS.values())


TENSOR = torch.linspace(-1, 2, 30).reshape(5, 6)
RESULT = {"captions": ["a house", "a boat"], "loss": 0.5, "latents": describe(TENSOR)}
MOVED: dict[str, tuple[Any, str]] = {
    "text": ({"captions": ["a house ", "a boat"]}, 'captions[0] was "a house" and is "a house "'),
    "order": ({"captions": ["a boat", "a house"]}, 'captions[0] was "a house" and is "a boat"'),
    "length": ({"captions": ["a house"]}, "the length of captions was 2 and is 1"),
    "absent": ({"loss": None}, "loss was 0.5 and is null"),
    "float": ({"loss": 0.5002}, "loss was 0.5 and is 0.5002"),
    "type": ({"loss": 1}, "loss was 0.5 and is 1"),
    "scale": ({"latents": describe(1.01 * TENSOR)}, "latents: norm was 5.617092 and is 5.673263"),
    "shape": (
        {"latents": describe(TENSOR.T)},
        'latents: dtype and shape was ["float32", [5, 6]] and is ["float32", [6, 5]]',
    ),
    "dtype": (
        {"latents": describe(TENSOR.half())},
        'latents: dtype and shape was ["float32", [5, 6]] and is ["float16", [5, 6]]',
    ),
    "elements": ({"latents": describe(TENSOR.flip(0))}, "latents: elements[0] was -1.0 and is"),
    "new key": ({"more": 1}, "more was absent and is 1"),
}


@pytest.fixture
def stored(tmp_path: Path) -> StoredResult:
    """The stored result of a case whose inputs a stage made."""
    found = StoredResult(tmp_path / "evaluate-x.json", "evaluate", ("build_base",))
    assert found.problem(RESULT, VERSIONS, fix=True) is None
    return found


@pytest.mark.parametrize(("change", "sentence"), MOVED.values(), ids=MOVED)
def test_a_moved_result_is_named_and_not_stored(
    change: dict[str, Any], sentence: str, stored: StoredResult
) -> None:
    """The sentence has the value, stored and now, and what to do; --fix refuses it as well."""
    before = stored.path.read_text()
    for fix in (False, True):
        problem = stored.problem(RESULT | change, VERSIONS, fix=fix)
        assert problem is not None
        assert sentence in problem
        assert "raise the number of evaluate in workflow/zerotrain/artifact/stage_ve" in problem
        assert "add a line to CHANGELOG.md and call `pytest" in problem
        assert ("--fix does not store" in problem) == fix
    assert stored.path.read_text() == before


def test_rounding_moves_nothing(stored: StoredResult) -> None:
    """Other kernels move last bits."""
    near = {"loss": 0.500_001, "latents": describe(TENSOR * (1 + 1e-5))}
    assert stored.problem(RESULT | near, VERSIONS, fix=False) is None


@pytest.mark.parametrize("stage", ["evaluate", "build_base"])
def test_a_raised_number_is_renewed_by_fix(stage: str, stored: StoredResult) -> None:
    """Of the stage or of one that made its inputs; until then the test fails, also if equal."""
    before, after = VERSIONS[stage], VERSIONS[stage] + 1
    raised = {**VERSIONS, stage: after}
    for result in (RESULT, RESULT | {"loss": 0.7}):
        problem = stored.problem(result, raised, fix=False)
        assert f"version of {stage} was raised from {before} to {after}" in str(problem)
    assert stored.problem(RESULT | {"loss": 0.7}, raised, fix=True) is None
    assert stored.problem(RESULT | {"loss": 0.7}, raised, fix=False) is None
    for fix in (False, True):
        problem = stored.problem(RESULT | {"loss": 0.7}, VERSIONS, fix=fix)
        assert "a number is never lowered" in str(problem)


def test_a_missing_file_fails_until_fix_writes_it(stored: StoredResult) -> None:
    """Nothing is compared with nothing."""
    stored.path.unlink()
    assert "evaluate-x.json is missing: `pytest" in str(stored.problem(RESULT, VERSIONS, fix=False))
    assert not stored.path.exists()


def test_the_order_of_names_is_a_result() -> None:
    """Of parameters, shards and files."""
    found = [*differences({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert [str(one) for one in found] == [
        'the order in the result was ["a", "b"] and is ["b", "a"]'
    ]
