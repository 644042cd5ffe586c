"""A path becomes an open file only where a regular file has the name; nothing else is written."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builders.refusals import refused

from zerotrain.machine.regular_file import (
    FileError,
    MissingFileError,
    open_new,
    open_to_append,
    open_to_change,
    open_to_read,
    touch,
    write_text,
)

VICTIM = "the user's own file\n"


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # a name of a socket has at most 107 bytes
        made.bind(path.name)
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a link": _link,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": _socket,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A name in a folder that has a file of the user as well."""
    (tmp_path / "victim").write_text(VICTIM)
    return tmp_path / "name"


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("call", [open_to_read, open_to_append, open_to_change, touch])
def test_what_is_no_file_is_named_and_not_waited_for(
    place: Path, what: str, call: Callable[[Path], object]
) -> None:
    """A pipe without a writer would wait for ever, a link be written through."""
    SPECIAL[what](place)
    error = refused(call, place)
    assert isinstance(error, FileError)
    assert error.what == f"{place}: is {what}, not a file"
    assert place.with_name("victim").read_text() == VICTIM


def test_a_device_is_no_file() -> None:
    """/dev/zero never ends."""
    assert refused(open_to_read, Path("/dev/zero")).what == "/dev/zero: is a device, not a file"


@pytest.mark.parametrize("what", ["a link", "a pipe", "a socket"])
def test_a_new_file_takes_the_place_of_what_is_none(place: Path, what: str) -> None:
    """The link goes, and its target stays."""
    SPECIAL[what](place)
    write_text(place, "new")
    assert (place.read_text(encoding="utf-8"), place.is_symlink()) == ("new", False)
    assert place.with_name("victim").read_text() == VICTIM


def test_a_new_file_takes_the_place_of_no_folder(place: Path) -> None:
    """It may have anything in it."""
    place.mkdir()
    assert refused(open_new, place).what == f"{place}: is a folder, not a file"


def test_an_exclusive_file_replaces_nothing(place: Path) -> None:
    """Neither a file nor a link to nothing."""
    place.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        open_new(place, replace=False)
    assert place.is_symlink()


def test_links_are_followed_where_the_user_names_the_file(place: Path) -> None:
    """A configuration may be a link to one that several projects share."""
    _link(place)
    with open_to_read(place, follow_links=True) as stream:
        assert stream.read() == VICTIM.encode()


@pytest.mark.parametrize("name", ["missing", "victim/below", "nowhere"])
def test_a_missing_file_is_a_sentence(place: Path, name: str) -> None:
    """Also below a file, and where a followed link leads nowhere."""
    (place.parent / "nowhere").symlink_to("missing")
    error = refused(open_to_read, place.parent / name, follow_links=True)
    assert isinstance(error, MissingFileError)
    assert error.what == f"{place.parent / name}: no such file"


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 300, "its name is too long"), ("a\0b", "is no name of a file")]
)
def test_an_impossible_name_is_a_sentence(tmp_path: Path, name: str, why: str) -> None:
    """A request of the builder's page can hold any."""
    assert why in refused(open_to_read, tmp_path / name).what


def test_an_error_keeps_nothing_of_its_callers_alive(tmp_path: Path) -> None:
    """Such as a lock, which ends with the last reference to it."""

    class Held:
        pass

    def look(held: Held) -> weakref.ref[Held]:
        with contextlib.suppress(FileNotFoundError):
            open_to_read(tmp_path / "missing")
        return weakref.ref(held)

    gc.disable()
    try:
        left = look(Held())
        assert left() is None
    finally:
        gc.enable()
