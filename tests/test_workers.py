"""Results come in order, and memory stays bounded."""

from __future__ import annotations

import threading

import pytest

from zerotrain.machine.ordered_pool import in_order


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_results_come_in_order_and_errors_come_out(num_workers):
    assert list(in_order(lambda n: n * n, range(50), num_workers)) == [n * n for n in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda n: 1 // n, [1, 0], num_workers))


def test_at_most_four_results_a_worker_wait():
    begun: list[int] = []
    lock = threading.Lock()

    def note(n: int) -> int:
        with lock:
            begun.append(n)
        return n

    results = in_order(note, range(1000), 2)
    assert next(results) == 0
    results.close()
    assert len(begun) <= 8
