"""Artifact folders appear whole or not at all, and are read only as they were written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.builders.processes import DEAD_PID

from zerotrain import artifact
from zerotrain.artifact import MANIFEST, Artifact, leftovers, publication
from zerotrain.artifact.whole_file import exchange
from zerotrain.errors import PipelineError
from zerotrain.machine import processes

KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from zerotrain import artifact
from zerotrain.artifact import publication

publication.exchange = lambda first, second: 95  # a file system that cannot
rename = Path.rename

def die_at_the_second(self, target):
    if ".new-" in self.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

Path.rename = die_at_the_second
with artifact.publish(Path(sys.argv[1]), "weights") as draft:
    (draft.folder / "a.txt").write_text("second")
"""


def publish(folder: Path, text: str = "first", *, kind: str = "weights", **content: object) -> None:
    """Publish a folder of two files and a record."""
    with artifact.publish(folder, kind) as draft:
        (draft.folder / "a.txt").write_text(text)
        (draft.folder / "part").mkdir()
        (draft.folder / "part" / "b.txt").write_text("b")
        (draft.folder / "records").mkdir()
        (draft.folder / "records" / "log.txt").write_text(f"seconds of {os.getpid()}")
        draft.content = content


def refusal(folder: Path, kind: str = "weights") -> str:
    """The message with which a folder is refused."""
    with pytest.raises(PipelineError) as caught:
        artifact.read(folder, kind)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the tests publish; its parent is not there yet."""
    return tmp_path / "run" / "weights"


def test_published_folder_lists_every_file(folder: Path) -> None:
    """Names, sizes and hashes of all files stand in the manifest; nothing else is left over."""
    publish(folder, step=3)
    found = artifact.read(folder, "weights")
    assert sorted(found.files) == ["a.txt", "part/b.txt", "records/log.txt"]
    assert found.files["a.txt"] == {
        "bytes": 5,
        # sha256sum of "first"
        "sha256": "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e",
    }
    assert found.content == {"step": 3}
    assert found.path("part/b.txt").read_text() == "b"
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]


def test_a_known_hash_is_not_computed_again(folder: Path) -> None:
    """A hash that the writer gives is the one in the manifest."""
    with artifact.publish(folder, "weights") as draft:
        (draft.folder / "a.txt").write_text("first")
        draft.known["a.txt"] = "0" * 64
    assert artifact.read(folder, "weights", verify=False).files["a.txt"]["sha256"] == "0" * 64


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_raise_inside_leaves_what_was_there(folder: Path, error: type[BaseException]) -> None:
    """Nothing appears, nothing stays next to it, and an older folder is untouched."""

    def fail() -> None:
        with artifact.publish(folder, "weights") as draft:
            (draft.folder / "a.txt").write_text("second")
            raise error

    with pytest.raises(error):
        fail()
    assert list(folder.parent.iterdir()) == []
    publish(folder)
    with pytest.raises(error):
        fail()
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "first"


def test_a_raise_between_the_renames_brings_the_old_back(folder: Path, monkeypatch) -> None:
    """An interrupt in the short moment without the folder does not lose it."""
    publish(folder)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr(publication, "exchange", lambda first, second: errno.ENOTSUP)
    with pytest.raises(KeyboardInterrupt):
        publish(folder, "second")
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "first"


def test_killed_between_the_renames_the_old_comes_back(folder: Path) -> None:
    """kill -9 with the folder away: the next reader finds the old one, and no left-overs."""
    publish(folder)
    killed = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_THE_RENAMES, str(folder)])
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name.split("-")[0] for path in folder.parent.iterdir()) == [
        ".weights.new",
        ".weights.old",
    ]
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "first"
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]


def test_the_folder_is_there_at_every_moment(folder: Path, monkeypatch) -> None:
    """Names are exchanged at once where the file system can; killed then, the new one is there."""
    if not _exchanges(folder.parent):
        pytest.skip("this file system cannot exchange two names")
    publish(folder)

    def killed(place: Path) -> None:
        if place == folder.parent:
            raise KeyboardInterrupt

    monkeypatch.setattr(publication, "sync", killed)
    monkeypatch.setattr(publication.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        publish(folder, "second")
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "second"
    monkeypatch.undo()
    (left,) = folder.parent.glob(".weights.*")
    assert (left / "a.txt").read_text() == "first"
    left.rename(folder.parent / f".weights.new-{leftovers.HOST}-{DEAD_PID}")
    artifact.recover_interrupted_publish(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]


def test_an_exchange_that_is_not_possible_changes_nothing(tmp_path: Path) -> None:
    """As where one of the two is missing."""
    (tmp_path / "one").write_text("1")
    assert exchange(tmp_path / "one", tmp_path / "two") == errno.ENOENT
    assert (tmp_path / "one").read_text() == "1"


def _exchanges(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    names = folder / "one", folder / "two"
    for name in names:
        name.touch()
    try:
        return exchange(*names) == 0
    finally:
        for name in names:
            name.unlink()


def test_killed_after_the_renames_the_new_stays(folder: Path) -> None:
    """Only the clearing up was left to do: the next call does it."""
    publish(folder, "second")
    old = folder.parent / f".weights.old-{DEAD_PID}"
    publish(old, "first")
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "second"
    assert not old.exists()


def test_killed_while_writing_the_draft_goes(folder: Path) -> None:
    """An unfinished draft of a dead process is removed by the next call."""
    draft = folder.parent / f".weights.new-{DEAD_PID}"
    draft.mkdir(parents=True)
    (draft / "a.txt").write_text("half")
    publish(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]


def test_an_empty_folder_does_not_stand_for_the_old(folder: Path) -> None:
    """Snakemake makes the folder before the job; what a crash left next to it still comes back."""
    publish(folder.parent / f".weights.old-{DEAD_PID}")
    folder.mkdir()
    artifact.recover_interrupted_publish(folder)
    assert (folder / "a.txt").read_text() == "first"


def test_a_living_writer_is_left_alone(folder: Path, sleeper) -> None:
    """Neither draft nor old folder of a running process is touched."""
    for name in ("new", "old"):
        (folder.parent / f".weights.{name}-{sleeper.pid}").mkdir(parents=True)
    artifact.recover_interrupted_publish(folder)
    assert len(list(folder.parent.iterdir())) == 2


def test_a_later_process_of_the_same_pid_is_no_writer(folder: Path, monkeypatch) -> None:
    """In containers pids repeat: a left-over older than the process is not the process's own."""
    publish(folder.parent / f".weights.old-{os.getpid()}")
    started_later = folder.parent.stat().st_ctime + 3600
    monkeypatch.setattr("psutil.Process.create_time", lambda self: started_later)
    artifact.recover_interrupted_publish(folder)
    assert (folder / "a.txt").read_text() == "first"


def test_a_folder_whose_manifest_was_deleted_is_replaced(folder: Path) -> None:
    """Before a rerun Snakemake deletes the declared manifest.json only; nothing old stays."""
    publish(folder)
    (folder / "left.txt").write_text("from the first writing")
    (folder / MANIFEST).unlink()
    assert not artifact.is_published(folder)
    publish(folder, "second")
    assert artifact.read(folder, "weights").path("a.txt").read_text() == "second"
    assert not (folder / "left.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]


@pytest.mark.parametrize("name", ["a.txt", "part/b.txt", "records/log.txt"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    """Which file is missing, and how the folder is rebuilt."""
    publish(folder)
    (folder / name).unlink()
    text = refusal(folder)
    assert f"{folder / name}: listed in manifest.json but missing" in text
    assert "Hint: copy it again from where it came from" in text


def test_changed_files_are_named(folder: Path) -> None:
    """A file of another size and one of other bytes are distinguished."""
    publish(folder)
    (folder / "a.txt").write_text("firs")
    assert f"{folder / 'a.txt'}: 4 bytes, manifest.json says 5" in refusal(folder)
    (folder / "a.txt").write_text("FIRST")
    text = refusal(folder)
    assert f"{folder / 'a.txt'}: sha256 " in text
    assert "manifest.json says a7937b64b8ca" in text
    artifact.read(folder, "weights", verify=False)


def test_unlisted_file_is_refused(folder: Path) -> None:
    """What somebody put into the folder is never read."""
    publish(folder)
    (folder / "c.txt").write_text("c")
    with pytest.raises(PipelineError, match=r"weights: c\.txt is not listed in manifest\.json"):
        artifact.read(folder, "weights").path("c.txt")


def test_folder_without_manifest_is_refused(folder: Path) -> None:
    """A missing folder and an unfinished one: the hint says what builds them."""
    assert f"{folder}: no manifest.json, so this weights folder is missing" in refusal(folder)
    folder.mkdir(parents=True)
    assert "Hint: run `snakemake --cores all train`" in refusal(folder)


def test_other_kinds_and_formats_are_refused(folder: Path) -> None:
    """Both what was found and what was expected are in the message."""
    publish(folder)
    assert "kind 'weights', format 1; expected kind 'state', format 1" in refusal(folder, "state")
    manifest = json.loads((folder / MANIFEST).read_text())
    artifact.write_json(folder / MANIFEST, {**manifest, "format": 2})
    assert "kind 'weights', format 2; expected kind 'weights', format 1" in refusal(folder)
    (folder / MANIFEST).write_text("[]")
    assert "kind None, format None" in refusal(folder)
    (folder / MANIFEST).write_text("{")
    assert f"{folder / MANIFEST}: not valid JSON" in refusal(folder)


def identity(folder: Path, text: str = "first", **changes: object) -> str:
    """The identity of a folder published with these values."""
    made_by = changes.pop("made_by", {})
    kind = str(changes.pop("kind", "weights"))
    record = str(changes.pop("record", "log"))
    with artifact.publish(folder, kind, made_by=made_by) as draft:  # type: ignore[arg-type]
        (draft.folder / "a.txt").write_text(text)
        (draft.folder / "records").mkdir()
        (draft.folder / "records" / record).write_text(record)
        draft.content = changes
    return artifact.read(folder, kind).identity


def test_identity_is_what_a_folder_holds(tmp_path: Path) -> None:
    """Path, maker and records leave it as it is; files, content and kind change it."""
    first = identity(tmp_path / "a", step=1)
    assert first == identity(tmp_path / "b", step=1, made_by={"job": 7}, record="timings")
    others = [
        identity(tmp_path / "c", "other", step=1),
        identity(tmp_path / "c", step=2),
        identity(tmp_path / "c", step=1, kind="state"),
    ]
    assert len({first, *others}) == 4


def test_parents_are_named_by_identity(tmp_path: Path) -> None:
    """From any folder the way back is written down."""
    publish(tmp_path / "a")
    parent = artifact.read(tmp_path / "a", "weights")
    with artifact.publish(tmp_path / "b", "state", parents={"start": parent}):
        pass
    found = artifact.read(tmp_path / "b", "state")
    expected = {"start": {"path": str(tmp_path / "a"), "identity": parent.identity}}
    assert found.parents == expected


def test_manifest_alone_leaves_other_folders(tmp_path: Path) -> None:
    """A dataset's manifest is replaced at once; the caches next to it stay, left-overs go."""
    (tmp_path / "cache").mkdir()
    (tmp_path / f".{MANIFEST}.new-{DEAD_PID}").write_text("half")
    for count in (1, 2):
        artifact.publish_manifest(tmp_path, "dataset", {"count": count})
    found = artifact.read(tmp_path, "dataset")
    assert (found.content, found.files) == ({"count": 2}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", MANIFEST]


def test_links_share_the_bytes(tmp_path: Path) -> None:
    """No second copy where the file system can link, through symbolic links too."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "symbolic").symlink_to("a")
    artifact.link_or_copy(tmp_path / "symbolic", tmp_path / "new" / "b")
    assert (tmp_path / "new" / "b").samefile(tmp_path / "a")
    assert not (tmp_path / "new" / "b").is_symlink()


def test_equal_values_give_equal_bytes(tmp_path: Path) -> None:
    """The order of keys is none of a JSON file's business."""
    artifact.write_json(tmp_path / "a", {"b": 1, "a": [1.5, None]})
    artifact.write_json(tmp_path / "b", {"a": [1.5, None], "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert artifact.digest({"b": 1, "a": 2}) == artifact.digest({"a": 2, "b": 1})
    assert isinstance(Artifact(tmp_path, "x", {}, {}, {}, {}).identity, str)


def test_what_a_library_kept_for_its_owner_becomes_readable(folder: Path, tmp_path: Path) -> None:
    """Every file gets a new file's mode; a link to a user's file leaves that as it is."""
    own = tmp_path / "own.bin"
    own.write_text("private")
    own.chmod(0o600)
    before = os.umask(0o022)
    try:
        with artifact.publish(folder, "base") as draft:
            for name in ("a.safetensors", "part/b.safetensors"):
                path = draft.folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_text("1")
                path.chmod(0o600)
            (draft.folder / "symlink.bin").symlink_to(own)
            os.link(own, draft.folder / "hardlink.bin")
    finally:
        os.umask(before)
    written = ("a.safetensors", "part/b.safetensors", MANIFEST)
    assert {oct((folder / name).stat().st_mode & 0o777) for name in written} == {"0o644"}
    assert own.stat().st_mode & 0o777 == 0o600
    artifact.read(folder, "base")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_manifest_that_was_linked_in_is_not_written_into(link, folder, tmp_path):
    """A base is linked from where it lies: weights of another run keep their own manifest."""
    publish(tmp_path / "others")
    before = (tmp_path / "others" / MANIFEST).read_bytes()
    with artifact.publish(folder, "base") as draft:
        for name in ("a.txt", MANIFEST):
            link(tmp_path / "others" / name, draft.folder / name)
        draft.content = {"step": 2}
    assert (tmp_path / "others" / MANIFEST).read_bytes() == before
    assert list(artifact.read(folder, "base").files) == ["a.txt"]


def test_a_writer_of_another_host_is_left_alone_while_it_writes(folder: Path) -> None:
    """No one here sees its process; a job's draft must not go because the login node reads. What is
    silent for long has been left behind, and is repaired as one of our own."""
    publish(folder.parent / ".weights.old-n_2-1", "first")
    draft = folder.parent / ".weights.new-n_1-1"
    draft.mkdir()
    (draft / "a.txt").write_text("half")
    artifact.recover_interrupted_publish(folder)
    assert (draft / "a.txt").read_text() == "half"
    assert not folder.exists()
    artifact.recover_interrupted_publish(folder, alone=True)
    assert not draft.exists()
    assert (folder / "a.txt").read_text() == "first"


def test_a_writer_of_another_host_that_is_silent_has_ended(folder: Path, monkeypatch) -> None:
    """A day for what is written, a minute for the exchange of two names."""
    publish(folder.parent / ".weights.old-n_2-1", "first")
    draft = folder.parent / ".weights.new-n_1-1"
    draft.mkdir()
    for seconds, left in ((50, True), (70, True), (25 * 3600, False)):
        now = time.time() + seconds
        monkeypatch.setattr(leftovers, "time_there", lambda folder, now=now: now)
        artifact.recover_interrupted_publish(folder)
        assert folder.exists() == (seconds > 60)
        assert draft.exists() == left


@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_clock_that_is_wrong_changes_no_verdict(folder: Path, monkeypatch, skew: int) -> None:
    """Neither of a writer on another machine nor of one of this host: ages are the file
    system's."""
    publish(folder.parent / ".weights.old-n_2-1", "first")
    own = folder.parent / f".weights.new-{leftovers.HOST}-{os.getpid()}"
    own.mkdir()
    now, created = time.time, psutil.Process.create_time
    # Of a host whose clock is wrong both are: the start of a process is counted from its boot.
    monkeypatch.setattr(processes.time, "time", lambda: now() + skew)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + skew)
    artifact.recover_interrupted_publish(folder)
    assert not folder.exists()
    assert own.exists()
    real = leftovers.time_there
    monkeypatch.setattr(leftovers, "time_there", lambda place: real(place) + 61)
    artifact.recover_interrupted_publish(folder)
    assert (folder / "a.txt").read_text() == "first"


def test_a_writer_of_another_container_is_one_of_another_host(folder: Path) -> None:
    """Its pid is a process's of its own; both may have the host's name."""
    draft = folder.parent / f".weights.new-{leftovers.HOST}+0123abcdf0000123-{DEAD_PID}"
    draft.mkdir(parents=True)
    artifact.recover_interrupted_publish(folder)
    assert draft.exists()
