"""Progress without a terminal: few lines, all of them useful."""

from __future__ import annotations

from zerotrain.machine import progress_bar as module
from zerotrain.machine.progress_bar import progress


def test_items_pass_unchanged_and_the_end_is_reported(capsys):
    assert list(progress(iter("abc"), 3, "reading", "letter")) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("reading: 3 of 3 letters (100%), ")


def test_a_line_comes_every_ten_seconds(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    list(progress(range(6), 6, "reading", "letter"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "reading: 3 of 6 letters (50%), 4.0 s/letter, 12 s, 12 s left",
        "reading: 6 of 6 letters (100%), 4.7 s/letter, 28 s",
    ]


def test_a_batch_counts_once_it_is_whole(capsys, monkeypatch):
    """The first item of a batch would forecast hours."""
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    assert list(progress(["abcd", "ef"], 6, "drawing", "letter", count=len)) == ["abcd", "ef"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "drawing: 4 of 6 letters (67%), 5.0 s/letter, 20 s, 10 s left",
        "drawing: 6 of 6 letters (100%), 10.0 s/letter, 60 s",
    ]
