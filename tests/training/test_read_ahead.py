"""Batches that threads read are those that the loop would read, and nothing else changes."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders.phases import make_tiny_phase

from zerotrain.cache.reader import read_cache
from zerotrain.training.batches import MOST_AHEAD, READERS, Batches, ReadAhead

CPU = torch.device("cpu")
SIZE, STRIDE = 2, 4
FEWEST_READ = MOST_AHEAD // 2 + 1
"""Batches that are ahead at the least: up to a half are read together, once as many were taken."""

NAMES = {f"read ahead {number}" for number in range(READERS)}


class Counted:
    """Reads numbers, and keeps which and in which thread; a batch in `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.read_first: list[int] = []
        self.threads: set[str] = set()
        self.bad = bad
        self.enough = threading.Semaphore(0)

    def read(self, first: int, size: int, *, pinned: bool) -> dict[str, torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        self.read_first.append(first)
        self.enough.release()
        if first == self.bad:
            raise OSError(f"sample {first}")
        return {"number": torch.arange(first, first + size)}


def ahead(batches: Any) -> ReadAhead:
    return ReadAhead(batches, STRIDE)


def reading() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("read ahead")]


def numbers(batches: ReadAhead, first: int) -> list[int]:
    found: list[int] = batches.batch(first, SIZE, CPU)["number"].tolist()
    return found


def test_the_order_is_the_loops(inputs: Path) -> None:
    """Equal bits, at every place of two epochs; after a batch out of the row, too."""
    cache, phase = read_cache(inputs / "cache"), make_tiny_phase("a", "torch", 4)
    plain = Batches(cache, phase)
    places = [*range(0, 48, STRIDE), 4, 8, 0]
    with ahead(plain) as thread:
        for first in places:
            expected, found = plain.batch(first, SIZE, CPU), thread.batch(first, SIZE, CPU)
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert thread.name(3) == plain.name(3)


def test_a_loop_reads_each_batch_once() -> None:
    """In its threads, FEWEST_READ to MOST_AHEAD before they are asked for."""
    batches = Counted()
    with ahead(batches) as thread:
        for first in range(8, 40, STRIDE):
            assert numbers(thread, first) == [first, first + 1]
            assert len(batches.read_first) <= (first - 8) // STRIDE + 1 + MOST_AHEAD
        for _ in range(8 + FEWEST_READ):  # it reads on without being asked
            assert batches.enough.acquire(timeout=20)
    assert sorted(batches.read_first) == [*range(8, 8 + STRIDE * len(batches.read_first), STRIDE)]
    assert batches.threads <= NAMES
    assert not reading()


def test_the_threads_free_what_the_loop_has_used() -> None:
    """Memory goes back to the system in their time, not in the loop's."""
    freed: list[str] = []

    class Watched(Counted):
        def read(self, first: int, size: int, *, pinned: bool) -> dict[str, torch.Tensor]:
            found = super().read(first, size, pinned=pinned)
            weakref.finalize(found["number"], lambda: freed.append(threading.current_thread().name))
            return found

    batches = Watched()
    with ahead(batches) as thread:
        for first in range(0, 20, STRIDE):
            numbers(thread, first)
        for _ in range(5 + FEWEST_READ):
            assert batches.enough.acquire(timeout=20)
        assert 5 + FEWEST_READ - (MOST_AHEAD + 1) <= len(freed) <= 4
        assert set(freed) <= NAMES


def test_a_repeated_batch_is_read_again() -> None:
    """The first step may be computed twice."""
    with ahead(Counted()) as thread:
        assert [numbers(thread, first) for first in (0, 4, 0, 4, 8)] == [
            [0, 1], [4, 5], [0, 1], [4, 5], [8, 9],
        ]  # fmt: skip


def test_an_error_is_that_of_its_batch() -> None:
    """The batches before it are given; it is raised where it belongs, each time."""
    batches = Counted(bad=8)
    with ahead(batches) as thread:
        assert numbers(thread, 0) == [0, 1]
        assert numbers(thread, 4) == [4, 5]
        for _ in range(2):
            with pytest.raises(OSError, match="sample 8"):
                numbers(thread, 8)
        assert numbers(thread, 12) == [12, 13]


def test_the_end_of_the_block_ends_the_thread() -> None:
    """Also where the loop fails, and where nothing was asked for."""
    with ahead(Counted()):
        pass
    thread = ahead(Counted())
    with contextlib.suppress(ZeroDivisionError), thread:
        numbers(thread, 0)
        raise ZeroDivisionError
    assert not reading()


def test_no_generator_of_the_process_is_drawn_from(inputs: Path) -> None:
    """The model draws from them at the same time."""
    cache, phase = read_cache(inputs / "cache"), make_tiny_phase("a", "torch", 4)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with ahead(Batches(cache, phase)) as thread:
        for first in range(0, 24, STRIDE):
            thread.batch(first, SIZE, CPU)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
