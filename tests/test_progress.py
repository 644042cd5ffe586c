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
        "reading: 3 of 6 letters (50%), 0.2 letters/s, 12 s, 12 s left",
        "reading: 6 of 6 letters (100%), 0.2 letters/s, 28 s",
    ]
