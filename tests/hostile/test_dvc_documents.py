"""dvc.yaml and dvc.lock of a repository from somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders.refusals import refusal

from zerotrain.graph.dvc.files import load_pipeline, parse_lock, recorded_below
from zerotrain.graph.dvc.pipeline import config_of, merged
from zerotrain.graph.dvc.record import record
from zerotrain.graph.dvc.restore import _outputs

MD5 = "0" * 31 + "a"
DEEP = {
    "flow": "[" * 50_000,
    "block": "- " * 50_000,
    "keys": "? " * 50_000,
    "mappings": "{a: " * 50_000,
    "after stages": "schema: '2.0'\nstages:\n  a:\n    cmd: " + "[" * 50_000,
    "bomb": "a0: &a0 [x, x]\n"
    + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)),
}


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".dvc").mkdir()


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_nesting_ends_no_process(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one sentence; after a run a warning."""
    Path("dvc.lock").write_text(text, encoding="utf-8")
    assert refusal(recorded_below, [Path("results")]).startswith("ERROR: dvc.lock: ")
    assert _outputs(text) == []
    Path("dvc.yaml").write_text(text, encoding="utf-8")
    assert refusal(load_pipeline).startswith("ERROR: dvc.yaml: ")
    record(Path("config/config.yaml"), current=(), began=0)
    assert capsys.readouterr().err.startswith("WARNING: DVC: nothing is recorded: dvc.yaml: ")


@pytest.mark.parametrize(
    "stages",
    [
        "[]", "[a]", "a", "7", "{a: 1}", "{a: []}", "{7: {}}", "{a: {deps: {}}}",
        "{a: {deps: [a]}}", "{a: {deps: [{}]}}", "{a: {outs: [{path: 7}]}}", "{a: {outs: 1}}",
        "{a: {params: [a]}}", "{a: {params: {f: [a]}}}", "{a: {outs: [{path: a, md5: [1]}]}}",
        "{a: {outs: [[path, a]]}}", "{[a]: {}}", "{a: {params: {7: {}}}}", "!!python/tuple [a]",
    ],
)  # fmt: skip
def test_another_structure_than_dvc_writes(stages: str) -> None:
    """It is named, and an earlier commit with it is passed over."""
    text = f"schema: '2.0'\nstages: {stages}\n"
    assert refusal(parse_lock, text).startswith("ERROR: dvc.lock: ")
    assert _outputs(text) == []


def test_folders_in_the_place_of_documents() -> None:
    """Each is named, or counts as missing."""
    for name in ("dvc.yaml", "dvc.lock"):
        Path(name).mkdir()
    assert refusal(load_pipeline).startswith("ERROR: dvc.yaml: is a folder")
    assert recorded_below([Path("results")]) == (0, 0)


@pytest.mark.parametrize(
    "stage",
    [
        1, [], {}, {"cmd": 1}, {"cmd": ["snakemake --cores all"]}, {"cmd": {"a": 1}},
        {"cmd": "snakemake --cores all 'x"}, {"cmd": "snakemake --cores all"},
        {"cmd": "snakemake --cores all", "outs": [1, {}, {1: 2}, ["results/a"]]},
        {"cmd": "snakemake --cores all", "outs": "results/a", "metrics": 3},
        {"cmd": "snakemake --cores all --configfile", "outs": {"results/a": {}}},
    ],
)  # fmt: skip
def test_stages_of_others(stage: object) -> None:
    """One that was not generated is the user's own, and stays as it is."""
    config = Path("config/config.yaml")
    assert config_of(stage) is None
    loaded = {"stages": {"a": stage}, "plots": [1, "a", None]}
    assert merged(loaded, {"stages": {}, "plots": []}, config) == loaded
