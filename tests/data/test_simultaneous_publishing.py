"""Two processes that publish one dataset at once, as two runs that share it may."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
from pathlib import Path

import pytest

from zerotrain.data import dataset_folder
from zerotrain.data.conversation import TEXTS, Message, conversation, read_conversations
from zerotrain.data.dataset_folder import compute_identity, publish_dataset, read_bad
from zerotrain.errors import PipelineError

FORKS = multiprocessing.get_context("fork")
SECONDS = 60


def publish(folder: Path, writer: str) -> None:
    """Publish a dataset whose sample and refused sample name their writer."""
    sample = conversation(writer, [Message("user", "1+1="), Message("assistant", "2")], 0)
    publish_dataset(folder, TEXTS, [sample], repeats=1, bad=[{"file": writer, "reason": "torn"}])


def publish_at_once(folder: Path, *, locks: bool) -> None:
    """Publish from two processes; the second starts between the first's columns and manifest.

    The first goes on when the second waits for it, or has ended.
    """
    columns_written, first_may_end = FORKS.Event(), FORKS.Event()
    wait_for_lock = fcntl.flock

    def first() -> None:
        def pause(path: Path) -> None:
            columns_written.set()
            assert first_may_end.wait(SECONDS)

        dataset_folder.sync = pause
        publish(folder, "one")

    def second() -> None:
        assert columns_written.wait(SECONDS)
        publish(folder, "two")
        first_may_end.set()

    def lock(file: object, how: int) -> None:
        if not locks:
            raise OSError(errno.ENOLCK, "no locks")
        if columns_written.is_set():
            first_may_end.set()
        wait_for_lock(file, how)

    writers = [FORKS.Process(target=target) for target in (first, second)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        for writer in writers:
            writer.start()
    for writer in writers:
        writer.join(2 * SECONDS)
        assert writer.exitcode == 0


def test_a_dataset_is_of_one_of_two_simultaneous_writers(tmp_path: Path) -> None:
    """Its manifest, samples and refused samples are those of the last."""
    publish_at_once(tmp_path, locks=True)
    found = read_conversations(tmp_path)
    assert [sample.file for sample in found.samples] == ["two"]
    assert [bad["file"] for bad in read_bad(found.artifact)] == ["two"]
    assert compute_identity(found.artifact, TEXTS, found.samples) == found.artifact.identity


def test_without_locks_a_mixed_dataset_is_refused(tmp_path: Path) -> None:
    """Its manifest has the hashes of its writer's files, not of those that it finds."""
    publish_at_once(tmp_path, locks=False)
    with pytest.raises(PipelineError, match=r"samples/.* sha256 \w+, manifest\.json says "):
        read_conversations(tmp_path)
