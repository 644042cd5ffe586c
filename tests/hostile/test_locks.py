"""The file of a lock is made, never changed, and never another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.builders.refusals import refused

from zerotrain.machine.file_lock import one_at_a_time
from zerotrain.machine.regular_file import open_to_change
from zerotrain.training.process import lock
from zerotrain.training.process.lock_file import SignsOfLife

VICTIM = "what must stay"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file elsewhere, to which a folder from somebody has links."""
    made = tmp_path / "victim"
    made.write_text(VICTIM)
    return made


def test_a_lock_changes_nothing(victim: Path) -> None:
    """A file that has text keeps it, a missing one is made empty."""
    open_to_change(victim, make=True).close()
    assert victim.read_text(encoding="utf-8") == VICTIM
    open_to_change(victim.with_name("new"), make=True).close()
    assert victim.with_name("new").read_bytes() == b""


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_no_plain_file_is_no_lock(victim: Path, kind: str) -> None:
    """Nothing is followed, made or waited for."""
    place = victim.with_name("lock")
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(victim if kind == "link" else victim.with_name("made"))
    what = {"folder": "a folder", "pipe": "a pipe"}.get(kind, "a link")
    assert refused(open_to_change, place, make=True).what == f"{place}: is {what}, not a file"
    assert victim.read_text(encoding="utf-8") == VICTIM
    assert not victim.with_name("made").exists()


def test_progress_of_others_overwrites_nothing(victim: Path) -> None:
    """A folder whose locks are links."""
    progress = victim.parent / "progress"
    progress.mkdir()
    for name in (lock.TAKING, lock.WRITER):
        (progress / name).symlink_to(victim)
    refused(lock.hold_writer, progress)
    with pytest.raises(Exception, match="is a link"), one_at_a_time(progress / lock.TAKING):
        pass
    (progress / "lock").symlink_to(victim)
    assert refused(SignsOfLife, progress / "lock", 60).what.endswith("is a link, not a file")
    assert victim.read_text(encoding="utf-8") == VICTIM
