"""Names and captions of others do not command the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotrain.errors import PipelineError, show_controls
from zerotrain.machine.output import LOG, escape_foreign_controls, print_detail, print_message

TITLE, CLEAR, CLIPBOARD = "\x1b]0;owned\x07", "\x1b[2J\x1b[H", "\x1b]52;c;cm0gLXJm\x07"
FOREIGN = f"a{TITLE}b{CLEAR}c{CLIPBOARD}d\x9b2Je\x7f\bf.png"
COLOURED = "\x1b[1;32mgreen\x1b[0m"


class Stream(io.TextIOWrapper):
    """A text stream that is looked into."""

    def __init__(self) -> None:
        self.held = io.BytesIO()
        super().__init__(self.held, encoding="utf-8", write_through=True)

    @property
    def text(self) -> str:
        """What was written."""
        return self.held.getvalue().decode()


def commands(text: str) -> set[str]:
    """The control characters of a text, without line ends and tabs."""
    return {char for char in text if not char.isprintable()} - {"\n", "\t"}


def test_controls_are_shown() -> None:
    """As escapes; text of any script, line ends and tabs stay, and so do bytes of a file's name
    that are no UTF-8."""
    assert not commands(show_controls(FOREIGN))
    assert show_controls("\x1b[2J\x07\udcff\r") == r"\x1b[2J\x07\udcff\r"
    for text in ("Wäsche\t猫\n👩‍👩‍👧 ליד", ""):
        assert show_controls(text) == text


def test_messages_show_them(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path) -> None:
    """Errors with their hints, messages, and details in a log, which a terminal shows later."""
    monkeypatch.delenv(LOG, raising=False)
    error = PipelineError(f"{FOREIGN}: is broken", hint=f"remove {FOREIGN}")
    assert not commands(str(error))
    print_message(error)
    print_message(FOREIGN)
    print_detail(FOREIGN)
    said = capsys.readouterr().err
    assert said.count(r"a\x1b]0;owned\x07b") == 4
    assert not commands(said)
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    print_detail(FOREIGN)
    assert not commands((tmp_path / "log").read_text())


@pytest.mark.parametrize("bars", [False, True])
def test_a_command_prints_only_its_own(bars: bool) -> None:
    """Colours stay, and on stderr the returns and deletions of bars; print() writes in parts."""
    stream: Any = Stream()
    escape_foreign_controls(stream, bars=bars)
    print(FOREIGN, COLOURED, "\r\x1b[K50%", file=stream)
    line = show_controls(FOREIGN)
    assert stream.text == f"{line} {COLOURED} " + (
        "\r\x1b[K50%\n" if bars else r"\r\x1b[K50%" + "\n"
    )


def test_every_command_has_such_streams(tmp_path: Path) -> None:
    """A file name on its way through the command line, to both streams."""
    code = (
        "import sys\nfrom zerotrain import cli\n"
        "def app():\n print(sys.argv[1]); print(sys.argv[1], file=sys.stderr)\n"
        "cli.command_line = lambda words: app\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, FOREIGN], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout == done.stderr == f"{show_controls(FOREIGN)}\n"
