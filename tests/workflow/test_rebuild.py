"""A payload that is missing or damaged under its manifest: its folder alone is planned and made."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.workflow.conftest import Project, jobs_of
from tests.workflow.jobs import FROM_LAUNCH, NOTHING

from zerotrain import artifact
from zerotrain.artifact import verdicts
from zerotrain.errors import PipelineError
from zerotrain.pipeline.rebuild import check_not_stored, describe_training, look_at, set_aside

PAYLOAD = "payload.bin"
JOBS = {
    "tiny/base": {"build_base": 1},
    "data/tiny/cache/64": {"cache_latents": 1},
    "tiny/plain/launch": {"render_launch": 1},
    "tiny/plain/checkpoint": {"train_phase": 1},
    "tiny/plain/weights": {"export_weights": 1},
    "tiny/plain/state": {"export_weights": 1},
    # Its metrics hold seconds: the page that shows them follows.
    "tiny/plain/evaluation": {"evaluate": 1, "report": 1},
    "tiny/report": {"report": 1},
}


@pytest.fixture(autouse=True)
def _own_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of other tests' files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def payload(project: Project, folder: str) -> Path:
    """The file that a folder's manifest lists."""
    return project.folder / "results" / folder / PAYLOAD


def contents(project: Project) -> dict[str, bytes]:
    """Manifests and payloads below results/, but for what was set aside."""
    return {
        str(path.relative_to(project.folder)): path.read_bytes()
        for path in sorted((project.folder / "results").rglob("*"))
        if path.name in ("manifest.json", PAYLOAD) and ".damaged-" not in str(path)
    }


@pytest.mark.slow
def test_graph_a_deleted_payload_plans_its_folder_alone(built: Project) -> None:
    """No job that depends on it, and the plan names the file."""
    for folder, jobs in JOBS.items():
        path = payload(built, folder)
        before = path.stat()
        content = path.read_bytes()
        path.unlink()
        said = built.must("snakemake", "-n", "train")
        assert jobs_of(said) == jobs
        name = f"results/{folder}/{PAYLOAD}"
        assert f"{name}: listed in manifest.json but missing: " in said
        assert f": missing: {name}\n" in said
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
def test_graph_damaged_folders_are_made_again_and_nothing_is_left_to_do(built: Project) -> None:
    """A cut payload, a flipped byte and a deleted one: the same bytes are back, what differed is
    kept, and what was intact stays."""
    before = contents(built)
    payload(built, "tiny/base").write_bytes(b"cut")
    flipped = bytearray(payload(built, "tiny/plain/weights").read_bytes())
    flipped[7] ^= 1
    payload(built, "tiny/plain/weights").write_bytes(flipped)
    payload(built, "tiny/offload/checkpoint").unlink()
    payload(built, "data/tiny/cache/64").write_bytes(b"a damaged shard")
    expected = {"build_base": 1, "export_weights": 1, "train_phase": 1, "cache_latents": 1}
    assert built.planned("train") == expected
    built.build("train")
    assert sorted(built.made()) == [
        "results/data/tiny/cache/64/manifest.json",
        "results/tiny/base/manifest.json",
        "results/tiny/offload/checkpoint/manifest.json",
        "results/tiny/plain/weights/manifest.json",
    ]
    assert contents(built) == before
    assert built.planned("train") == NOTHING
    results = built.folder / "results"
    kept = {
        str(path.relative_to(results)): path.read_bytes()
        for path in results.rglob(PAYLOAD)
        if ".damaged-1" in str(path)
    }
    assert kept == {
        f"tiny/base.damaged-1/{PAYLOAD}": b"cut",
        f"tiny/plain/weights.damaged-1/{PAYLOAD}": bytes(flipped),
        f"data/tiny/cache/64.damaged-1/{PAYLOAD}": b"a damaged shard",
    }
    listed = results / "tiny/offload/checkpoint.damaged-1/manifest.json.damaged"
    assert json.loads(listed.read_text())["kind"] == "checkpoint"


def test_graph_a_payload_of_the_same_bytes_is_not_damaged(built: Project) -> None:
    """It is newer than its manifest, as a copy of the folder makes it: its hash decides."""
    for folder in JOBS:
        path = payload(built, folder)
        path.write_bytes(path.read_bytes())
    assert built.planned("train") == NOTHING


@pytest.mark.slow
def test_graph_damage_does_not_hide_what_else_has_changed(built: Project) -> None:
    """Where an input or a value has changed, all that depends on it is planned as ever; a target
    does not make what it does not need; no job follows a damaged folder that runs for itself."""
    payload(built, "tiny/plain/weights").unlink()
    assert built.planned("results/tiny/plain/launch/manifest.json") == NOTHING
    built.edit("config/config.yaml", "guidance_scale: 3.0", "guidance_scale: 2.0")
    expected = {"export_weights": 1, "evaluate": 2, "report": 1}
    assert built.planned("train") == expected
    built.edit("config/config.yaml", "1.0e-3", "2.0e-3")
    assert built.planned("train") == FROM_LAUNCH


def test_graph_a_damaged_folder_whose_input_is_gone_is_made_from_the_start(built: Project) -> None:
    """The export needs the checkpoint, which is trained again, and what depends on that follows."""
    payload(built, "tiny/offload/weights").unlink()
    (built.folder / "results/tiny/offload/checkpoint/manifest.json").unlink()
    target = "results/tiny/offload/weights/manifest.json"
    assert built.planned(target) == {"train_phase": 1, "export_weights": 1}


@pytest.mark.slow
def test_graph_a_failure_leaves_the_damaged_folder_to_the_next_run(built: Project) -> None:
    """The job that fails is planned again, and its sibling folder is back after it."""
    before = contents(built)
    payload(built, "tiny/offload/weights").write_bytes(b"cut")
    code, _ = built.forked("--cores", "2", "train", FAIL="export_weights")
    assert code != 0
    assert built.planned("train")["export_weights"] == 1
    built.build("train")
    assert contents(built) == before
    assert built.planned("train") == NOTHING


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A published checkpoint of step 30, and rolling ones of 20 and 30."""
    for name, step in (("progress/step-00000020", 20), ("progress/step-00000030", 30)):
        with artifact.publish(tmp_path / name, "checkpoint") as draft:
            artifact.write_json(draft.folder / "checkpoint.json", {"step": step})
            (draft.folder / "rank.safetensors").write_bytes(bytes(100))
    with artifact.publish(tmp_path / "checkpoint", "checkpoint") as draft:
        for name in ("checkpoint.json", "rank.safetensors"):
            artifact.link_or_copy(tmp_path / "progress/step-00000030" / name, draft.folder / name)
    return tmp_path / "checkpoint"


def test_a_plan_says_whether_a_checkpoint_is_trained_again(checkpoint: Path) -> None:
    """Only what progress/ does not hold whole is."""
    progress = checkpoint.parent / "progress"
    (checkpoint / "rank.safetensors").unlink()
    assert describe_training(checkpoint) == (
        f"train_phase publishes {progress}/step-00000030 again, no step is trained"
    )
    (progress / "step-00000030" / "rank.safetensors").write_bytes(bytes(99))
    assert describe_training(checkpoint).endswith("the phase is TRAINED AGAIN from step 20")
    (progress / "step-00000020" / "rank.safetensors").unlink()
    assert "holds no whole checkpoint either, so train_phase will refuse" in describe_training(
        checkpoint
    )
    shutil.rmtree(progress)
    assert describe_training(checkpoint).endswith("the phase is TRAINED AGAIN from its start")


def test_a_plan_hashes_newer_and_remembered_files_alone(tmp_path: Path) -> None:
    """A byte that changed under an old time is found by who reads the folder, and then by plans."""
    with artifact.publish(tmp_path / "weights", "weights") as draft:
        (draft.folder / "a.bin").write_bytes(bytes(100))
    path = tmp_path / "weights" / "a.bin"
    stat = path.stat()
    path.write_bytes(bytes(99) + b"x")
    assert [one.path for one in look_at(tmp_path / "weights", {})] == [path]
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert look_at(tmp_path / "weights", {}) == []
    known = {verdicts.key_of(path.stat()): artifact.file_sha256(path)}
    assert [one.path for one in look_at(tmp_path / "weights", known)] == [path]
    path.write_bytes(bytes(100))
    assert look_at(tmp_path / "weights", known) == []


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}'])
def test_a_plan_finds_a_manifest_that_is_cut_or_leads_out(tmp_path: Path, text: str) -> None:
    """No file is looked at by its names, so none outside the folder is moved."""
    folder, outside = tmp_path / "cache", tmp_path / "notes.txt"
    outside.write_text("mine")
    with artifact.publish(folder, "cache") as draft:
        (draft.folder / "a.bin").write_bytes(bytes(100))
    manifest = folder / "manifest.json"
    listed = json.loads(manifest.read_text())
    for content in (
        text,
        json.dumps(listed | {"files": {"../notes.txt": listed["files"]["a.bin"]}}),
    ):
        manifest.write_text(content)
        (damage,) = look_at(folder, {})
        assert (damage.path, damage.differs) == (manifest, True)
    assert set_aside(folder, [damage], "cache_latents") == tmp_path / "cache.damaged-1"
    assert outside.read_text() == "mine"
    assert (folder / "a.bin").is_file()


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    """A file server that answers with an error has damaged nothing: no training is repeated."""
    with artifact.publish(tmp_path / "checkpoint", "checkpoint") as draft:
        (draft.folder / "a.bin").write_bytes(bytes(100))
    for name in ("a.bin", "manifest.json"):
        plain = Path.stat

        def failing(path: Path, *, name: str = name, plain=plain, **options: bool) -> object:
            if path.name == name:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return plain(path, **options)

        monkeypatch.setattr(Path, "stat", failing)
        assert look_at(tmp_path / "checkpoint", {}) == []
        monkeypatch.setattr(Path, "stat", plain)
        assert capsys.readouterr().err == (
            f"{tmp_path}/checkpoint/{name}: cannot be read (Stale file handle): it is left as it "
            "is\n"
        )


def test_files_that_no_manifest_lists_are_kept(tmp_path: Path) -> None:
    """They are the user's, also in a whole folder that the job of a damaged one makes again."""
    for name in ("weights", "state"):
        with artifact.publish(tmp_path / name, name) as draft:
            (draft.folder / "a.bin").write_bytes(bytes(100))
    (tmp_path / "weights/notes.txt").write_text("mine")
    assert set_aside(tmp_path / "state", [], "export_weights") is None
    assert set_aside(tmp_path / "weights", [], "export_weights") == tmp_path / "weights.damaged-1"
    assert (tmp_path / "weights.damaged-1/notes.txt").read_text() == "mine"


def test_a_checkpoint_that_dvc_has_is_not_trained_again(tmp_path: Path, monkeypatch) -> None:
    """It takes seconds to bring back; only who removes its manifest trains again."""
    monkeypatch.chdir(tmp_path)
    folder = Path("results/a/plain/checkpoint")
    with artifact.publish(folder, "checkpoint") as draft:
        artifact.write_json(draft.folder / "checkpoint.json", {"step": 30})
        (draft.folder / "a.bin").write_bytes(bytes(100))
    (folder / "a.bin").unlink()
    damage = look_at(folder, {})
    check_not_stored(folder, damage, "train_phase")
    Path("dvc.lock").write_text(
        f"stages:\n  x:\n    outs:\n    - path: {folder}\n", encoding="utf-8"
    )
    with pytest.raises(
        PipelineError, match=r"TRAINED AGAIN from its start, but dvc\.lock has"
    ) as e:
        check_not_stored(folder, damage, "train_phase")
    assert f"`dvc checkout --force {folder}`" in e.value.hint
    check_not_stored(folder, damage, "export_weights")
