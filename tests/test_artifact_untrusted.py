"""A folder from somewhere else names only files of its own, and overwrites or shows no other."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.builders.refusals import refused
from tests.builders.states import make_position

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, link_or_copy
from zerotrain.cache.layout import listed_shards
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.run.lineage.chain import UnreadableError, load
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.external.accelerate import find_weights
from zerotrain.state.external.ranks import find_tag_folder
from zerotrain.state.state import State

SHA256 = "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e"  # of "first"
HOSTILE = {
    "../victim": "leaves the folder",
    "part/../../victim": "leaves the folder",
    "..": "leaves the folder",
    "/etc/hostname": "is absolute",
    "C:victim": "is absolute",
    "c:/victim": "is absolute",
    "part\\..\\victim": "holds a backslash",
    "a\0b": "holds a control character",
    "a\nb": "holds a control character",
    "a\u2028b": "holds a control character",
    "a\x1b[2J": "holds a control character",
    "": "has an empty part",
    "part//b": "has an empty part",
    "part/": "has an empty part",
    "./a.txt": "has an empty part",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published folder with one file."""
    made = tmp_path / "folder"
    with artifact.publish(made, "weights") as draft:
        (draft.folder / "a.txt").write_text("first")
    return made


def change(folder: Path, **parts: Any) -> None:
    """Change parts of a manifest."""
    found = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**found, **parts}))


def refusal(folder: Path, kind: str = "weights", *, verify: bool = True) -> str:
    """The message with which a folder is refused."""
    error = refused(artifact.read, folder, kind, verify=verify)
    return error.what


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    """Whoever reads a manifest gets no path outside of its folder, with or without hashing."""
    change(
        folder,
        files={"a.txt": {"sha256": SHA256, "bytes": 5}, name: {"sha256": SHA256, "bytes": 5}},
    )
    said = f"files: the name {name!a} {HOSTILE[name]}"
    for verify in (True, False):
        assert refusal(folder, verify=verify) == f"{folder / MANIFEST}: {said}"
    with pytest.raises(UnreadableError, match="files: the name"):
        load(folder)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"files": []}, "files is a list, not an object"),
        ({"files": {"a.txt": None}}, "files: 'a.txt' has no sha256 or no bytes"),
        ({"files": {"a.txt": {"sha256": SHA256}}}, "files: 'a.txt' has no sha256 or no bytes"),
        (
            {"files": {"a.txt": {"sha256": "/etc", "bytes": 5}}},
            "files: 'a.txt' has the sha256 '/etc', not 64 hexadecimal digits",
        ),
        (
            {"files": {"a.txt": {"sha256": 7, "bytes": 5}}},
            "files: 'a.txt' has the sha256 7, not 64 hexadecimal digits",
        ),
        (
            {"files": {"a.txt": {"sha256": SHA256, "bytes": "5"}}},
            "files: 'a.txt' has the size '5', not a number of bytes",
        ),
        (
            {"files": {"a.txt": {"sha256": SHA256, "bytes": True}}},
            "files: 'a.txt' has the size True, not a number of bytes",
        ),
        (
            {"files": {"a.txt": {"sha256": SHA256, "bytes": 10**400}}},
            f"the number 1{'0' * 39} has more than 128 bits",
        ),
        (
            {"files": {"a.txt": {"sha256": SHA256, "bytes": -1}}},
            "files: 'a.txt' has the size -1, not a number of bytes",
        ),
        (
            {"files": {key: {"sha256": SHA256, "bytes": 5} for key in ("a", "a/b")}},
            "files: 'a' is listed as a file and as a folder",
        ),
        ({"files": {"a\ud800": {}}}, "has text that is not valid Unicode"),
        ({"content": None}, "content is null, not an object"),
        ({"made_by": "me"}, "made_by is a string, not an object"),
        ({"parents": {"base": "results"}}, "parents: 'base' has no path or no identity"),
        (
            {"parents": {"base": {"path": 3, "identity": SHA256}}},
            "parents: 'base' has no path or no identity",
        ),
        (
            {"parents": {"base": {"path": "a\0b", "identity": SHA256}}},
            "parents: the path 'a\\x00b' holds a control character",
        ),
    ],
)
def test_a_manifest_of_wrong_types_is_one_sentence(
    folder: Path, parts: dict[str, Any], said: str
) -> None:
    """Well-formed JSON of another shape is a user error in every reader, never a traceback."""
    change(folder, **parts)
    assert refusal(folder) == f"{folder / MANIFEST}: {said}"
    with pytest.raises(UnreadableError) as caught:
        load(folder)
    assert str(caught.value).removeprefix("what cannot be read: ") == said


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000])
def test_a_manifest_that_is_no_object_is_one_sentence(folder: Path, text: str) -> None:
    """Neither a list nor endless brackets end in a traceback."""
    (folder / MANIFEST).write_text(text)
    assert str(folder / MANIFEST) in refusal(folder)


def test_a_link_out_of_a_published_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A listed file, or a folder of it, that leads to another place is refused by every reader."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a.txt").write_text("first")
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(secret / "a.txt")
    said = f"{folder / 'a.txt'}: a link that leads out of the folder, to {secret / 'a.txt'}"
    assert refusal(folder) == said
    assert refusal(folder, verify=False) == said
    (folder / "part").symlink_to(secret)
    change(folder, files={"part/a.txt": {"sha256": SHA256, "bytes": 5}})
    assert "part/a.txt: a link that leads out of the folder" in refusal(folder)


def test_links_within_a_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    """A link to another file of the folder stays readable, and so does a linked folder."""
    (folder / "b.txt").symlink_to("a.txt")
    entry = {"sha256": SHA256, "bytes": 5}
    change(folder, files={"a.txt": entry, "b.txt": entry})
    (tmp_path / "name").symlink_to(folder)
    assert artifact.read(tmp_path / "name", "weights").path("b.txt").read_text() == "first"


def test_a_base_links_to_models_and_to_nothing_else(tmp_path: Path) -> None:
    """A base is made of links to a model's files; such a link never leads to a file of another
    kind, and one into the hub's cache is known by its blob."""
    blob = tmp_path / "models--me--cats" / "blobs" / ("0" * 40)
    model, token = tmp_path / "model" / "config.json", tmp_path / "token"
    for path in (blob, model, token):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first")
    for target, allowed in ((blob, True), (model, True), (token, False)):
        base = tmp_path / f"base-{target.name}"
        with artifact.publish(base, "base") as draft:
            (draft.folder / "config.json").symlink_to(target)
        if allowed:
            assert artifact.read(base, "base").path("config.json").read_text() == "first"
        else:
            assert "a link that leads out of the folder" in refusal(base, "base")


def test_a_link_never_takes_the_place_of_a_file(tmp_path: Path) -> None:
    """What is there already keeps its bytes, and the sentence names it."""
    source, victim = tmp_path / "source", tmp_path / "victim"
    source.write_text("new")
    victim.write_text("mine")
    with pytest.raises(PipelineError) as caught:
        link_or_copy(source, victim)
    assert caught.value.what == f"{victim}: exists already, and nothing is overwritten"
    assert victim.read_text() == "mine"
    victim.unlink()
    victim.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PipelineError):
        link_or_copy(source, victim)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS]
)
def test_a_file_system_without_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Where no link can be made the bytes are copied, to a new file only."""

    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.link", link)
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    source.write_text("new")
    link_or_copy(source, target)
    assert target.read_text() == "new"
    assert target.stat().st_ino != source.stat().st_ino
    target.write_text("mine")
    with pytest.raises(PipelineError, match="exists already"):
        link_or_copy(source, target)
    assert target.read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO])
def test_any_other_error_of_a_link_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A full or read-only disk is no reason to try a copy."""

    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.link", link)
    (tmp_path / "source").write_text("new")
    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        link_or_copy(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_index_of_shards_stays_in_its_folder(tmp_path: Path) -> None:
    """The shards that model.safetensors.index.json and a cache's index.json name are their own."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors", "c": "../b.safetensors"}}))
    with pytest.raises(PipelineError) as caught:
        find_weights(tmp_path)
    assert caught.value.what == f"{index}: the name '../b.safetensors' leaves the folder"
    index.write_text("[]")
    with pytest.raises(PipelineError, match="holds a list, not keys with values"):
        find_weights(tmp_path)
    series = {"count": 1, "tensors": [], "shards": [{"file": "/victim", "sha256": SHA256}]}
    (tmp_path / "index.json").write_text(json.dumps({"format": 2, "tokens": series}))
    assert refused(listed_shards, tmp_path).what == "index.json: the name '/victim' is absolute"


def test_a_tag_that_leaves_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """`latest` names a folder of the checkpoint, not one next to it."""
    for tag in ("checkpoint/global_step1", "other/global_step2"):
        (tmp_path / tag).mkdir(parents=True)
        (tmp_path / tag / "mp_rank_00_model_states.pt").write_bytes(b"")
    for named in ("../other/global_step2", str(tmp_path / "other" / "global_step2")):
        (tmp_path / "checkpoint" / "latest").write_text(named)
        with pytest.raises(PipelineError, match="no folder of that name holds a checkpoint"):
            find_tag_folder(tmp_path / "checkpoint")


def test_an_export_of_hostile_weights_overwrites_no_file(tmp_path: Path) -> None:
    """A weights folder that lists `../../profile`, which its archive brings along: an export to
    another place leaves the user's file of that name alone."""
    archive, home = tmp_path / "archive", tmp_path / "home"
    weights = archive / "a" / "weights"
    with artifact.publish(weights, "weights") as draft:
        (draft.folder / "model_index.json").write_text("{}")
        draft.content = {"family": "sdxl", "step": 1, "dtype": "fp32"}
    (archive / "profile").write_text("first")
    home.mkdir()
    (home / "profile").write_text("mine")
    change(weights, files={"../../profile": {"sha256": SHA256, "bytes": 5}})
    with pytest.raises(PipelineError, match=r"the name '../../profile' leaves the folder"):
        convert(weights, "diffusers", home / "b" / "out")
    assert (home / "profile").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("state", {"step": "many"}, "step: Input should be a valid integer (found 'many')"),
        ("state", {"slots": []}, "slots: Input should be a valid dictionary"),
        ("state", {"engine": None}, "engine: Input should be a valid dictionary (found None)"),
        ("checkpoint", {"fragments": 3}, "fragments: Input should be a valid dictionary (found 3)"),
        (
            "checkpoint",
            {"parameters": None},
            "parameters: Input should be a valid dictionary (found None)",
        ),
    ],
)
def test_a_position_of_wrong_types_is_one_sentence(
    tmp_path: Path, kind: str, change: dict[str, Any], said: str
) -> None:
    """state.json and checkpoint.json with intact hashes and other values: no traceback."""
    position = asdict(make_position())
    parts = {"shapes": {}, "slots": {}, "parameters": {}, "fragments": {}}
    if kind == "checkpoint":
        parts["slots"] = []
    with artifact.publish(tmp_path / kind, kind) as draft:
        (draft.folder / f"{kind}.json").write_text(json.dumps(position | parts | change))
    with pytest.raises(PipelineError) as caught:
        {"state": State, "checkpoint": Checkpoint}[kind](tmp_path / kind)
    assert caught.value.what == f"{tmp_path / kind / kind}.json: {said}"
