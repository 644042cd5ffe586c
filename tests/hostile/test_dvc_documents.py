"""dvc.yaml, dvc.lock and NAME.dvc of a repository from somebody else, which DVC reads after us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders.refusals import refusal

from zerotrain.pipeline.dvc import agreement, commits, storage
from zerotrain.pipeline.dvc.commits import Found
from zerotrain.pipeline.dvc.files import parse_lock
from zerotrain.pipeline.dvc.jobs import config_of
from zerotrain.pipeline.dvc.pipeline import load_pipeline
from zerotrain.pipeline.dvc.restore import check_recorded

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
    agreement.pipeline_here.cache_clear()


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_nesting_ends_no_process(text: str) -> None:
    """Neither in our reader nor in DVC's, which is not called."""
    for name in ("dvc.lock", "dvc.yaml", "photos.dvc"):
        file = Path(name)
        file.write_text(text, encoding="utf-8")
        with pytest.raises(commits.DocumentError) as caught, storage.open_repo():
            pass
        assert str(caught.value).startswith(f"ERROR: {name}: ")
        file.unlink()
    Path("dvc.lock").write_text(text, encoding="utf-8")
    assert refusal(check_recorded).startswith("ERROR: dvc.lock: ")
    assert commits._in_lock(None, text, {MD5}) is None
    Path("dvc.yaml").write_text(text, encoding="utf-8")
    assert refusal(load_pipeline).startswith("ERROR: dvc.yaml: ")
    assert agreement.pipeline_here() == {}


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
    assert commits._in_lock(None, text, {MD5, "1"}) is None


def test_folders_in_the_place_of_documents() -> None:
    """Each is named, or counts as missing."""
    for name in ("dvc.yaml", "dvc.lock"):
        Path(name).mkdir()
    assert refusal(load_pipeline).startswith("ERROR: dvc.yaml: is a folder")
    assert "dvc.lock: not here" in refusal(check_recorded)


@pytest.mark.parametrize(
    "stage",
    [
        1, [], {}, {"cmd": 1}, {"cmd": ["snakemake --cores all"]}, {"cmd": {"a": 1}},
        {"cmd": "snakemake --cores all 'x"}, {"cmd": "snakemake --cores all --configfile"},
        {"cmd": "snakemake --cores all"}, {"cmd": "x zerotrain dvc check 'x"},
    ],
)  # fmt: skip
def test_commands_of_stages(stage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be split into words is no stage of ours."""
    Path(".git").mkdir()
    Path("dvc.yaml").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(agreement, "pipeline_here", lambda: {"stages": {"a": stage}})
    assert not any(agreement.outputs_of(Path("config/config.yaml")).values())
    if isinstance(stage, dict):
        config_of(str(stage.get("cmd")))


def test_stages_that_need_each_other() -> None:
    """Their order ends, also for a chain that is longer than Python's stack."""
    ring: dict[str, Any] = {
        "a": {"deps": [{"path": "y"}], "outs": [{"path": "x"}], "params": {"f": {"d": object()}}},
        "b": {"deps": [{"path": "x"}], "outs": [{"path": "y"}]},
    }
    assert Found(None, "a", "x", ring).made_by() == ["b", "a"]
    assert "  y  md5 unknown" in Found(None, "a", "x", ring).lines()
    chain: dict[str, Any] = {
        str(n): {"deps": [{"path": f"o{n + 1}"}], "outs": [{"path": f"o{n}"}]} for n in range(3000)
    }
    assert Found(None, "0", "o0", chain).made_by()[0] == "2999"
