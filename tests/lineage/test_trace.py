"""A trace walks from weights to their images, and names whatever is not what it was."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders.datasets import edit_samples
from tests.lineage import conftest
from tests.lineage.conftest import trace

from zerotrain import artifact, cli
from zerotrain.cache.record import Record, write_record
from zerotrain.config.data import DataConfig
from zerotrain.data.conversation import TEXTS
from zerotrain.data.dataset import IMAGES
from zerotrain.data.source import DIGITS
from zerotrain.run.lineage.chain import Files, facts_of
from zerotrain.stages.prepare_dataset import prepare_dataset

PROJECT = Path(__file__).parents[2]
WEIGHTS = "results/cats/offload/weights"
RUN = "results/cats"
PHASES = ("plain", "offload")
PHOTOS = ("cat", "dog", "fox", "more/owl")
FOLDERS = (
    *(f"{RUN}/{phase}/{name}" for phase in PHASES for name in ("checkpoint", "launch")),
    *(f"{RUN}/plain/state", f"{RUN}/base", "results/data/cats", "results/data/cats/cache/64"),
)  # fmt: skip
"""Every folder above the weights of the second phase."""
FILES = (
    *(f"{WEIGHTS}/unet/model.safetensors", f"{WEIGHTS}/model_index.json"),
    *(f"{RUN}/{phase}/checkpoint/{name}" for phase in PHASES
      for name in ("checkpoint.json", "rank.safetensors")),
    *(f"{RUN}/{phase}/launch/run.yaml" for phase in PHASES),
    *(f"{RUN}/plain/state/state.json", f"{RUN}/plain/state/master.safetensors"),
    *(f"{RUN}/base/unet/config.json",),
    *(f"results/data/cats/cache/64/{name}"
      for name in ("index.json", "index.arrow", "latents.safetensors")),
    "results/data/cats/samples/samples.arrow",
    *(f"photos/{name}.{end}" for name in PHOTOS for end in ("ppm", "txt")),
)  # fmt: skip
"""Every file that the chain of those weights rests on, but for manifests."""


def document(weights: str = WEIGHTS) -> dict[str, Any]:
    """The JSON of a trace; it says the same as the exit code."""
    code, said = trace(weights, "--format", "json")
    found: dict[str, Any] = json.loads(said)
    assert found["whole"] == (code == 0)
    return found


def named(weights: str = WEIGHTS) -> list[tuple[str, str]]:
    """Problem and path of each finding, sorted."""
    return sorted((one["problem"], one["path"]) for one in document(weights)["findings"])


def edit(manifest: str, **parts: Any) -> None:
    """Change parts of a manifest."""
    path = Path(manifest, "manifest.json")
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **parts}), encoding="utf-8"
    )


def test_a_whole_chain_reaches_the_images(chain: Path) -> None:
    """Every folder and file is counted, by kind and in a tree; the last line sums up."""
    code, said = trace(WEIGHTS)
    assert code == 0
    assert said.splitlines()[-1] == (
        "whole: 9 folders, 15 files (7.4 kB) and 4 samples are what the manifests say"
    )
    found = document()
    kinds = [entry["kind"] for entry in found["artifacts"]]
    assert kinds == [
        *("weights", "checkpoint", "launch", "cache", "dataset", "source", "base"),
        *("state", "checkpoint", "launch"),
    ]
    assert sum(entry["files"] for entry in found["artifacts"]) == 15
    assert found["artifacts"][1]["facts"] == {
        **{"run": "cats", "phase": "offload", "step": 7, "samples": 14, "optimizer": "adamw"},
        "ran_on": {"cache": artifact.read(Path(FOLDERS[-1]), "cache").identity},
        **{"learning_rate": 0.001, "preset": "torch"},
    }
    assert "├─ launch: results/cats/offload/launch" in said
    assert "source: photos  folder, 4 samples" in said


def test_a_base_that_was_built_for_the_dataset_before_an_edit_breaks_no_chain(chain: Path) -> None:
    """A base of a preset stays as it is built; a note says for which dataset that was."""
    earlier = {"dataset": {"path": "results/data/cats", "identity": "0" * 64}}
    edit("results/cats/base", parents=earlier)
    code, said = trace(WEIGHTS)
    assert code == 0
    note = (
        "results/cats/base: built for an earlier state of results/data/cats, dataset 000000000000"
    )
    assert note in said
    edit("results/data/cats/cache/64", parents=earlier)
    assert ("different", "results/data/cats") in named()


def recorded(step: int, *versions: str) -> dict[str, Any]:
    """What a phase that ended at a step recorded; each version came 1 step before the end."""
    pairs = itertools.pairwise(versions)
    history = [
        {"step": step - 1, "key": "versions.torch", "old": old, "new": new} for old, new in pairs
    ]
    ran_on = {"versions.torch": versions[-1], "device": "cpu", "threads": 2}
    return {"ran_on": ran_on, "history": history}


def test_a_trace_says_what_each_phase_and_the_cache_ran_on(tmp_path, monkeypatch) -> None:
    """In the text once for each phase; in the document for each folder that says it."""
    monkeypatch.chdir(tmp_path)
    plain = conftest.position

    def position(phase: str, step: int, **_: Any) -> str:
        versions = ("2.12.0",) if phase == "plain" else ("2.12.0", "2.13.0")
        return json.dumps({**json.loads(plain(phase, step)), **recorded(step, *versions)})

    monkeypatch.setattr(conftest, "position", position)
    conftest.build()
    encoded = {"versions.torch": "2.11.0", "versions.diffusers": "0.36.0", "device": "cpu"}
    cache = Path("results/data/cats/cache/64")
    write_record(tmp_path / "encoding.json", Record(encoded))
    text = (tmp_path / "encoding.json").read_bytes()
    (cache / "records").mkdir()
    (cache / "records" / "encoding.json").write_bytes(text)
    entry = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    files = json.loads((cache / "manifest.json").read_text())["files"]
    edit(str(cache), files=files | {"records/encoding.json": entry})
    edit(WEIGHTS, made_by=recorded(7, "2.12.0", "2.13.0"))
    code, said = trace(WEIGHTS)
    assert code == 0
    assert said.count("torch 2.13.0, cpu, 2 threads, after step 6: torch 2.12.0 → 2.13.0") == 1
    assert said.count("torch 2.12.0, cpu, 2 threads") == 1
    assert said.count("torch 2.11.0, diffusers 0.36.0, cpu") == 1
    facts = {one["path"]: one["facts"] for one in document()["artifacts"]}
    for folder in (WEIGHTS, f"{RUN}/offload/checkpoint"):
        assert facts[folder]["history"] == recorded(7, "2.12.0", "2.13.0")["history"]
    for folder in (f"{RUN}/plain/state", f"{RUN}/plain/checkpoint"):
        assert facts[folder]["ran_on"] == recorded(3, "2.12.0")["ran_on"]
        assert "history" not in facts[folder]
    assert facts["results/data/cats/cache/64"]["ran_on"] == encoded
    assert document(f"{RUN}/plain/state")["artifacts"][0]["facts"]["ran_on"]["threads"] == 2


def test_the_commit_of_a_checkpoint_is_in_its_records(chain: Path) -> None:
    """The source that published it."""
    facts = {one["path"]: one["facts"] for one in document()["artifacts"]}
    assert "commit" not in facts[f"{RUN}/plain/checkpoint"]
    said = {"commit": "0123456789abcdef", "version": 7}
    folder = Path("results/hand")
    with artifact.publish(folder, "checkpoint") as draft:
        (draft.folder / "checkpoint.json").write_text(conftest.position("plain", 3))
        (draft.folder / "records").mkdir()
        artifact.write_json(draft.folder / "records" / "made_by.json", said)
    found = artifact.read(folder, "checkpoint")
    assert {key: facts_of(found)[key] for key in said} == said


def broken(file: Path) -> Iterator[str]:
    """Flip a byte of a file, truncate it, remove it; then put it back."""
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    yield "different"
    file.write_bytes(content[:middle])
    yield "different"
    file.unlink()
    yield "missing"
    file.write_bytes(content)


def test_every_file_of_the_chain_is_among_those_below(chain: Path) -> None:
    """All that lies there, but for what other weights were made from."""
    others = re.compile(rf"{RUN}/(plain/weights|offload/state|\w+/progress)/|results/single/")
    hidden = re.compile(r"(^|/)\.(files/|publishing\.lock$)")
    there = {path.as_posix() for path in Path().rglob("*") if path.is_file()}
    there = {name for name in there if not hidden.search(name)}
    manifests = {f"{folder}/manifest.json" for folder in (WEIGHTS, *FOLDERS)}
    assert {name for name in there if not others.match(name)} == {*FILES} | manifests


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_not_what_it_was_is_named(chain: Path, file: str) -> None:
    """It alone, with what was expected and found; exit code 1, and all the rest is reached."""
    for problem in broken(Path(file)):
        found = document()
        (finding,) = found["findings"]
        assert (finding["problem"], finding["path"]) == (problem, file)
        assert finding["expected"] != finding["found"]
        assert len(found["artifacts"]) == 10
    assert document()["whole"]


def test_a_finding_ends_the_text(chain: Path) -> None:
    """In capitals, and the last line counts them."""
    for problem in broken(Path(FILES[0])):
        code, said = trace(WEIGHTS)
        assert code == 1
        assert f"{problem.upper()} {FILES[0]}: expected" in said
        assert said.splitlines()[-1] == "NOT WHOLE: 1 finding, named above"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers and words of a JSON document stand."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


@pytest.mark.parametrize(
    "many", [pytest.param(2, id="two"), pytest.param(1000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("folder", [WEIGHTS, *FOLDERS])
def test_a_manifest_that_says_anything_else_is_named(chain: Path, folder: str, many: int) -> None:
    """Itself, or its folder, for each word of what it binds; but what made it, by nothing bound,
    and of weights, from which nothing was made yet, the type."""
    path = Path(folder, "manifest.json")
    text = path.read_text(encoding="utf-8")
    bound = [
        leaf
        for leaf in leaves(json.loads(text))
        if leaf[0] != "made_by" and (folder, leaf) != (WEIGHTS, ("content", "dtype"))
    ]
    chosen = random.Random(folder).sample(bound, min(many, len(bound)))
    for leaf, wrong in itertools.product(chosen, ("x", 10**6)):
        found = json.loads(text)
        place = found
        for key in leaf[:-1]:
            place = place[key]
        place[leaf[-1]] = wrong
        path.write_text(json.dumps(found), encoding="utf-8")
        code, said = trace(WEIGHTS)
        assert code == 1, leaf
        assert re.search(rf"(DIFFERENT|MISSING|UNKNOWN|as) {folder}\b", said), (leaf, said)
    path.write_text(text, encoding="utf-8")
    assert trace(WEIGHTS)[0] == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "what cannot be read: not valid JSON: Expecting"),
        ("[]", "format None, of which this version knows 1"),
        ('{"format": 2}', "format 2, of which this version knows 1"),
        ('{"format": 1, "kind": "base", "content": {}, "files": {}, "parents": {}}', "no made_by"),
    ],
)
def test_a_manifest_that_is_none_is_named(chain: Path, text: str, found: str) -> None:
    """With what is wrong with it."""
    Path(RUN, "base/manifest.json").write_text(text, encoding="utf-8")
    (finding,) = document()["findings"]
    assert (finding["problem"], finding["path"]) == ("different", f"{RUN}/base/manifest.json")
    assert finding["found"].startswith(found)


def test_who_says_otherwise_is_named(chain: Path) -> None:
    """Once for all children that say the same; a single one that says another identity is."""
    base, cache, state = (Path(folder) for folder in (FOLDERS[5], FOLDERS[7], FOLDERS[4]))
    before = artifact.read(base, "base").identity
    edit(str(base), content={"family": "sdxl", "x": 1})
    after = artifact.read(base, "base").identity
    (finding,) = document()["findings"]
    assert finding["expected"] == f"base {before[:12]}, as {cache}/manifest.json says"
    assert finding["found"] == f"base {after[:12]}"
    edit(str(base), content={"family": "sdxl"})
    parents = artifact.read(state, "state").parents
    edit(str(state), parents={**parents, "base": {**parents["base"], "identity": after}})
    (finding,) = document()["findings"]
    assert finding["expected"] == f"base {after[:12]}, as {state}/manifest.json says"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_another_is_named(chain: Path, folder: str) -> None:
    """Its identity is held to what its child says."""
    edit(
        folder,
        content={
            **json.loads(Path(folder, "manifest.json").read_text(encoding="utf-8"))["content"],
            "x": 1,
        },
    )
    assert named() == [("different", folder)]


@pytest.mark.parametrize("how", ["folder", "manifest", "not JSON"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_walk_continues_past_a_folder_that_is_gone(chain: Path, folder: str, how: str) -> None:
    """What lies next to it tells of its parents: the images are reached, and no other is named."""
    manifest = Path(folder, "manifest.json")
    if how == "folder" and folder != "results/data/cats":
        shutil.rmtree(folder)
    elif how == "not JSON":
        manifest.write_text("{", encoding="utf-8")
    else:
        manifest.unlink()
    found = document()
    gone = how == "folder" and folder != "results/data/cats"
    problem = "different" if how == "not JSON" else "missing"
    assert {(one["problem"], one["path"]) for one in found["findings"]} == {
        (problem, folder if gone else f"{folder}/manifest.json")
    }
    reached = {entry["path"] for entry in found["artifacts"]}
    assert {"results/data/cats", f"{RUN}/plain/state", f"{RUN}/base"} <= reached
    if folder != "results/data/cats":
        assert "photos" in reached


def test_the_weights_own_manifest_may_be_gone(chain: Path) -> None:
    """Their place tells of the checkpoint, from which the walk continues."""
    Path(WEIGHTS, "manifest.json").unlink()
    found = document()
    assert named() == [("missing", f"{WEIGHTS}/manifest.json")]
    assert "photos" in {entry["path"] for entry in found["artifacts"]}


@pytest.mark.parametrize(
    ("folder", "parent"),
    [
        (WEIGHTS, "checkpoint"), (WEIGHTS, "base"), (f"{RUN}/plain/state", "checkpoint"),
        *((f"{RUN}/offload/checkpoint", name) for name in ("base", "cache", "start")),
        *(("results/data/cats/cache/64", name) for name in ("dataset", "base")),
    ],
)  # fmt: skip
def test_a_parent_that_is_not_named_any_more_is_asked_for(
    chain: Path, folder: str, parent: str
) -> None:
    """Identities do not bind parents, so a chain must not end where one was struck out."""
    parents = json.loads(Path(folder, "manifest.json").read_text(encoding="utf-8"))["parents"]
    del parents[parent]
    edit(folder, parents=parents)
    assert named() == [("unknown", f"{folder}/manifest.json")]


def test_a_checkpoint_that_says_what_it_trained_names_no_launch(chain: Path) -> None:
    """Launch files are rendered again without training: they are found by their place, and nothing
    is missing where they are gone. What it started from is still asked for."""
    folder = f"{RUN}/offload/checkpoint"
    manifest = json.loads(Path(folder, "manifest.json").read_text(encoding="utf-8"))
    parents = {name: said for name, said in manifest["parents"].items() if name != "launch"}
    trains = {"start": parents["start"]["identity"]}
    edit(folder, parents=parents, content={"trains": trains})
    again = artifact.read(Path(folder), "checkpoint").identity
    for child in (f"{RUN}/offload/weights", f"{RUN}/offload/state"):
        named_by = json.loads(Path(child, "manifest.json").read_text(encoding="utf-8"))["parents"]
        edit(child, parents={**named_by, "checkpoint": {"path": folder, "identity": again}})
    found = document()
    assert found["whole"], found["findings"]
    (checkpoint,) = [entry for entry in found["artifacts"] if entry["path"] == folder]
    how = {parent["name"]: parent["how"] for parent in checkpoint["parents"]}
    assert how == {"launch": "place", **dict.fromkeys(("base", "cache", "start"), "stated")}
    shutil.rmtree(f"{RUN}/offload/launch")
    assert document()["whole"]
    del parents["start"]
    edit(folder, parents=parents)
    assert named() == [("unknown", f"{folder}/manifest.json")]


def test_weights_say_the_step_of_their_checkpoint(chain: Path) -> None:
    """Nothing was made from the last weights, so that no child knows their identity."""
    edit(WEIGHTS, content={"family": "sd3", "step": 9, "dtype": "fp32"})
    findings = document()["findings"]
    assert [one["found"] for one in findings] == ["step 9", "family sd3"]
    assert [one["expected"].split(",")[0] for one in findings] == ["step 7", "family sdxl"]
    edit(WEIGHTS, content={"dtype": "fp32"})
    assert [one["found"] for one in document()["findings"]] == ["step None", "family None"]


def test_a_folder_of_the_same_identity_stands_in_for_one_that_is_gone(chain: Path) -> None:
    """The rolling checkpoint serves where the published one was removed, which is still
    named."""
    shutil.rmtree(f"{RUN}/offload/checkpoint")
    found = document()
    assert named() == [("missing", f"{RUN}/offload/checkpoint")]
    parents = {parent["name"]: parent for parent in found["artifacts"][0]["parents"]}
    assert parents["checkpoint"]["how"] == "copy"
    assert parents["checkpoint"]["path"] == f"{RUN}/offload/progress/step-7"


def test_all_findings_are_reported_at_once(chain: Path) -> None:
    """Of every level, not the first alone."""
    Path("photos/cat.ppm").unlink()
    Path(f"{RUN}/base/unet/config.json").write_text("[]", encoding="utf-8")
    shutil.rmtree(f"{RUN}/plain/checkpoint")
    assert named() == [
        ("different", f"{RUN}/base/unet/config.json"),
        ("missing", "photos/cat.ppm"),
        ("missing", f"{RUN}/plain/checkpoint"),
    ]
    assert trace(WEIGHTS)[1].splitlines()[-1] == "NOT WHOLE: 3 findings, named above"


def test_a_run_that_moved_is_still_whole(chain: Path) -> None:
    """Parents that moved along are known by their identity, and where they lay is reported."""
    Path("results/cats").rename("results/dogs")
    found = document("results/dogs/offload/weights")
    assert found["whole"]
    assert len(found["artifacts"]) == 10
    assert f"{RUN}/offload/checkpoint: no such folder; the same checkpoint is at " in str(
        found["notes"]
    )


def test_a_project_is_traced_from_another_folder(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths count from the project that holds the weights, not from the working directory."""
    monkeypatch.chdir(tmp_path)
    (chain / "results/single").rename(chain / "single")
    for folder in (WEIGHTS, "single"):
        code, said = trace(str(chain / folder))
        assert (code, said.splitlines()[0]) == (0, f"in {chain}:")


def test_a_link_leads_into_its_project(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To weights or to a file of theirs; and results may lie on another disk."""
    (tmp_path / "folder").symlink_to(chain / WEIGHTS)
    (tmp_path / "file").symlink_to(chain / WEIGHTS / "unet/model.safetensors")
    (chain / "results").rename(tmp_path / "disk")
    (chain / "results").symlink_to(tmp_path / "disk")
    assert document()["whole"]
    monkeypatch.chdir(tmp_path)
    assert document(str(chain / WEIGHTS))["whole"]
    (chain / "results").unlink()
    (tmp_path / "disk").rename(chain / "results")
    assert document("folder")["whole"]
    assert document("file")["whole"]


def test_weights_made_from_own_weights_are_traced_through_them(chain: Path) -> None:
    """A base names a folder of the project's by its path, and shares its tensors."""
    weights = artifact.read(Path(WEIGHTS), "weights")
    for name, tensors in (("dogs", weights.path("unet/model.safetensors").read_text()), ("x", "x")):
        with artifact.publish(Path(f"results/{name}/base"), "base") as draft:
            (draft.folder / "model.safetensors").write_text(tensors)
            draft.content = {"family": "sdxl", "base": WEIGHTS}
    found = document("results/dogs/base")
    assert found["whole"]
    assert found["notes"] == []
    assert [entry["path"] for entry in found["artifacts"][:2]] == ["results/dogs/base", WEIGHTS]
    Path("photos/cat.ppm").unlink()
    assert named("results/dogs/base") == [("missing", "photos/cat.ppm")]
    assert document("results/x/base")["notes"] == [
        f"{WEIGHTS}: none of results/x/base's tensors is in it any more"
    ]
    Path(WEIGHTS, "manifest.json").write_text("{", encoding="utf-8")
    assert ("different", f"{WEIGHTS}/manifest.json") in named("results/dogs/base")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o400])
@pytest.mark.parametrize("path", [f"{RUN}/base", f"{RUN}/base/unet", "photos"])
def test_what_may_not_be_read_is_named(chain: Path, path: str, mode: int) -> None:
    """It, or what is in it."""
    Path(path).chmod(mode)
    try:
        findings = named()
    finally:
        Path(path).chmod(0o755)
    assert findings
    assert all(where.startswith(path) for _, where in findings)


def test_an_interrupt_does_not_wait_for_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the threads that read."""
    large = tmp_path / "large"
    with large.open("wb") as stream:
        stream.truncate(2**34)  # a hole, which takes many seconds
    said = {"large": {"sha256": "", "bytes": 2**34}}
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Files().check(artifact.Artifact(tmp_path, "base", {}, said, {}, {}), "base")
    assert time.monotonic() - start < 4


def test_a_file_of_weights_leads_to_its_folder(chain: Path, tmp_path: Path) -> None:
    """In its folder, or copied away, where its hash leads there."""
    file = f"{WEIGHTS}/unet/model.safetensors"
    copied = shutil.copy(file, tmp_path / "mine.safetensors")
    assert document(file)["weights"] == document(str(copied))["weights"] == WEIGHTS


def test_a_file_that_no_manifest_lists_is_reported(chain: Path) -> None:
    """In weights it is a finding, since programs load what lies there; in other places a note. The
    settings files in a dataset's folder are neither."""
    settings = Path("results/data/cats/settings/prepare_dataset.json")
    settings.parent.mkdir()
    settings.write_text("{}", encoding="utf-8")
    Path(f"{RUN}/base/stray.bin").write_text("stray", encoding="utf-8")
    assert document()["notes"] == [f"{RUN}/base/stray.bin: not listed, never read"]
    assert named() == []
    Path(WEIGHTS, "stray.bin").write_text("stray", encoding="utf-8")
    assert named() == [("unknown", f"{WEIGHTS}/stray.bin")]


def test_exported_files_and_rolling_checkpoints_are_traced(chain: Path) -> None:
    """An export by its weights; a rolling checkpoint by what it records."""
    assert len(document("results/single")["artifacts"]) == 11
    rolling = f"{RUN}/offload/progress"
    found = document(f"{rolling}/step-7")
    assert found["whole"]
    assert {parent["name"]: parent["how"] for parent in found["artifacts"][0]["parents"]} == {
        "launch": "place", "base": "place", "cache": "place", "start": "place",
    }  # fmt: skip


def test_a_rolling_checkpoint_says_itself_what_it_was_trained_on(chain: Path) -> None:
    """The start among what it trains, the cache among what it ran on; a published one whose
    manifest is gone is known by the newest that lies there."""
    cache = artifact.read(Path("results/data/cats/cache/64"), "cache").identity
    start = artifact.read(Path(f"{RUN}/plain/state"), "state").identity
    progress = Path(f"{RUN}/offload/progress")
    said = {**json.loads(conftest.position("offload", 7)), "ran_on": {"cache": cache}}
    with artifact.publish(progress / "step-7", "checkpoint") as draft:
        (draft.folder / "checkpoint.json").write_text(json.dumps(said))
        draft.content = {"trains": {"start": start, "data": "0" * 64}}
    found = document(f"{progress}/step-7")
    assert found["whole"], found["findings"]
    parents = {one["name"]: one["path"] for one in found["artifacts"][0]["parents"]}
    assert parents["cache"] == "results/data/cats/cache/64"
    assert parents["start"] == f"{RUN}/plain/state"
    Path(f"{RUN}/offload/checkpoint/manifest.json").unlink()
    found = document()
    assert [one["problem"] for one in found["findings"]] == ["missing"]
    assert f"{RUN}/plain/state" in {one["path"] for one in found["artifacts"]}
    with artifact.publish(progress / "step-7", "checkpoint") as draft:
        (draft.folder / "checkpoint.json").write_text(conftest.position("offload", 7))
        draft.content = {"trains": {"start": "0" * 64}}
    checkpoint = f"{progress}/step-7/checkpoint.json"
    manifest = f"{progress}/step-7/manifest.json"
    assert named(f"{progress}/step-7") == [("unknown", checkpoint), ("unknown", manifest)]


def test_an_external_checkpoint_is_known_by_its_sizes(chain: Path) -> None:
    """Where no manifest was, names and sizes are what an export remembers."""
    from zerotrain.export.export import lineage

    Path("foreign").mkdir()
    Path("foreign/model.bin").write_text("abc", encoding="utf-8")
    _, others = lineage({"checkpoint": Path("foreign")})
    base = artifact.read(Path(f"{RUN}/base"), "base")
    with artifact.publish(Path("w"), "weights", parents={"base": base}, made_by=others) as draft:
        draft.content = {"family": "sdxl", "step": 1}
    assert named("w") == []
    Path("foreign/model.bin").write_text("abcd", encoding="utf-8")
    assert named("w") == [("different", "foreign")]
    shutil.rmtree("foreign")
    assert named("w") == [("missing", "foreign")]


def test_captions_of_a_table_are_held_to_their_hashes(chain: Path) -> None:
    """Each row that differs is named with its table, and a table that is gone once."""
    table = Path("captions.csv")
    rows = "file_name,text\ncat.ppm,a cat\ndog.ppm,a dog\nfox.ppm,a fox\nmore/owl.ppm,an owl\n"
    table.write_text(rows, encoding="utf-8")
    prepare_dataset(DataConfig(images="photos", metadata="captions.csv"), Path("results/data/t"))
    assert named("results/data/t") == []
    table.write_text(
        rows.replace("a dog", "a wolf").replace("fox.ppm,a fox\n", ""), encoding="utf-8"
    )
    assert named("results/data/t") == [
        ("different", "captions.csv: dog.ppm"), ("missing", "captions.csv: fox.ppm"),
    ]  # fmt: skip
    table.unlink()
    assert named("results/data/t") == [("missing", "captions.csv")]


def test_a_caption_that_cannot_be_used_is_named_with_the_reason(chain: Path) -> None:
    """As a preparation would refuse it; the caption of an image that is gone is not asked for."""
    Path("photos/cat.txt").write_bytes(b"a\0b")
    Path("photos/fox.txt").unlink()
    for end in ("ppm", "txt"):
        Path(f"photos/dog.{end}").unlink()
    found = document()["findings"]
    assert [(one["problem"], one["path"], one["found"]) for one in found] == [
        ("missing", "photos/dog.ppm", "nothing"),
        ("different", "photos/cat.txt",
         "caption cat.txt holds a NUL byte at position 1, which no text has"),
        ("missing", "photos/fox.txt", "no caption: no fox.txt next to it"),
    ]  # fmt: skip


def test_conditioning_images_are_held_to_their_hashes(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of folders and of columns; one that samples share is reported once."""
    shutil.copytree("photos", "before", ignore=shutil.ignore_patterns("*.txt"))
    data = {"images": "photos", "conditioning_images": ["before", "photos"]}
    prepare_dataset(DataConfig.model_validate(data), Path("results/data/folders"))
    rows = [
        {"file_name": f"{name}.ppm", "text": "a pet", "with": "more/fox.ppm"}
        for name in ("cat", "dog")
    ]
    Path("pets/more").mkdir(parents=True)
    for name in ("cat", "dog", "more/fox"):
        shutil.copy(f"before/{Path(name).name}.ppm", f"pets/{name}.ppm")
    Path("pets/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"images": "pets", "conditioning_columns": ["with"]}
    prepare_dataset(DataConfig.model_validate(data), Path("results/data/columns"))
    monkeypatch.chdir("photos")
    for dataset, file in (("folders", "before/cat.ppm"), ("columns", "pets/more/fox.ppm")):
        for problem in broken(chain / file):
            assert named(f"../results/data/{dataset}") == [(problem, file)]
        found = document(f"../results/data/{dataset}")
        assert (found["findings"], found["notes"]) == ([], [])


def test_rows_of_text_are_held_to_their_hashes(chain: Path) -> None:
    """A row that changed is named, one that moved is not, and a file that is gone is."""
    turns = [
        json.dumps({"instruction": f"What is {n}+{n}?", "input": "", "output": str(2 * n)})
        for n in range(4)
    ]
    Path("sums.jsonl").write_text("\n".join(turns) + "\n", encoding="utf-8")
    prepare_dataset(DataConfig(source="text", path="sums.jsonl"), Path("results/data/sums"))
    Path("sums.jsonl").write_text("\n".join(reversed(turns)) + "\n", encoding="utf-8")
    assert named("results/data/sums") == []
    changed = [turns[0].replace('"0"', '"1"'), *turns[1:]]
    Path("sums.jsonl").write_text("\n".join(changed) + "\n", encoding="utf-8")
    assert named("results/data/sums") == [("different", "sums.jsonl: sums.jsonl line 1")]
    Path("sums.jsonl").unlink()
    assert named("results/data/sums") == [("missing", "sums.jsonl")]


@pytest.mark.parametrize("source", ["digits", "sums"])
def test_built_in_data_is_made_again_and_compared(chain: Path, source: Any) -> None:
    """A sample that the manifest has otherwise is named."""
    prepare_dataset(DataConfig(source=source), Path("results/data/own"))
    assert named("results/data/own") == []
    of, name = (TEXTS, "sha256") if source == "sums" else (IMAGES, "image_sha256")

    def other(samples: Sequence[Any]) -> Sequence[Any]:
        return [samples[0], replace(samples[1], **{name: "0" * 64}), *samples[2:]]

    edit_samples(Path("results/data/own"), other, of)
    where = "sums: sums 2" if source == "sums" else "digits: scan-0001"
    assert named("results/data/own") == sorted(
        [("different", where), ("different", "results/data/own")]
    )


def test_the_examples_file_is_named(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory; scikit-learn's own stands for one that DVC never had."""
    DIGITS.parent.mkdir()
    for name in (DIGITS.name, f"{DIGITS.name}.dvc"):
        shutil.copy(PROJECT / "data" / name, "data")
    prepare_dataset(DataConfig(source="digits"), Path("results/data/own"))
    monkeypatch.chdir("photos")
    for problem in broken(chain / DIGITS):
        assert named("../results/data/own") == [(problem, "data/digits.csv.gz")]
    assert document("../results/data/own")["artifacts"][1]["path"] == "data/digits.csv.gz"
    shutil.rmtree(chain / "data")
    assert named("../results/data/own") == []


def test_an_image_that_came_later_breaks_nothing(chain: Path) -> None:
    """It is mentioned, since the next preparation takes it in."""
    shutil.copy("photos/cat.ppm", "photos/zebra.ppm")
    found = document()
    assert found["whole"]
    assert found["notes"] == ["photos: 1 images are not in the dataset, such as zebra.ppm"]


def test_the_flowchart_has_a_box_and_an_arrow_for_each(chain: Path) -> None:
    """Boxes with findings are marked, and no name of a user's ends a label."""
    Path(f"{RUN}/base/unet/config.json").write_text("[]", encoding="utf-8")
    code, said = trace(WEIGHTS, "--format", "mermaid")
    assert code == 1
    assert said.startswith("flowchart TB\n")
    assert len(re.findall(r'^  n\d+\["[^"]+"\](:::broken)?$', said, re.M)) == 10
    assert len(re.findall(r"^  n\d+ -->\|\w+\| n\d+$", said, re.M)) == 14
    (broken,) = re.findall(r"n\d+\[\"(\w+)<br>.*:::broken", said)
    assert broken == "base"


def test_a_trace_changes_nothing(chain: Path) -> None:
    """Not even what a killed writer left, which reading otherwise repairs."""
    shutil.copytree(f"{RUN}/base", f"{RUN}/.base.new-1")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*"))
    assert trace(WEIGHTS)[0] == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        ([RUN], f"zerotrain trace {RUN}/plain/weights"),
        ([f"{RUN}/plain"], f"zerotrain trace {RUN}/plain/weights"),
        ([f"{RUN}/plain/progress"], f"zerotrain trace {RUN}/plain/progress/step-3"),
        (["photos/cat.ppm"], "photos/cat.ppm: not in a published folder"),
        ([], "trace takes weights, or an image"),
        ([WEIGHTS, "--image", "photos/cat.ppm"], "trace takes weights, or an image"),
        ([WEIGHTS, "--format", "yaml"], "--format: 'yaml' is not known"),
        (["--image", "nowhere.ppm"], "--image: nowhere.ppm: no such file"),
    ],
)
def test_a_users_mistake_is_a_sentence(
    chain: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a hint and exit code 2, as in every command."""
    monkeypatch.setattr(sys, "argv", ["zerotrain", "trace", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert said in error
    assert "Hint: " in error
