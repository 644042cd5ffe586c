"""Files of other programs: finding and loading them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import (
    check_object,
    compose_yaml,
    parse_json,
    parse_toml,
    parse_yaml,
    read_text,
)
from zerotrain.errors import PipelineError

MOST_BYTES = 16 * 2**20
"""Size of a file of another program."""
MOST_ENTRIES = 200_000
"""Of a folder that an import looks through."""
_FOLDER: ContextVar[Path | None] = ContextVar("folder of the only readable files", default=None)


@contextlib.contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """Read no other files in this block than those of a folder, in which named files are found.

    A file that was dropped on a page may name any path of the machine; only what was dropped with
    it is opened.
    """
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def may_look(folder: str) -> bool:
    """Return whether a folder that a file names exists and may be listed."""
    path = Path(folder).expanduser()
    return _FOLDER.get() is None and os.path.isdir(path) and _has_few_entries(path)


def _has_few_entries(folder: Path) -> bool:
    """Return whether a folder is one of images rather than a disk, which takes minutes to list."""
    count = 0
    for _, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > MOST_ENTRIES:
            return False
    return True


def check_may_look(folder: str, key: str) -> None:
    """Check that a folder may be listed, for a key whose meaning depends on what is in it.

    Raises:
        PipelineError: only dropped files may be read, or it has more than MOST_ENTRIES.
    """
    path = Path(folder).expanduser()
    if _FOLDER.get() is None and os.path.isdir(path) and not _has_few_entries(path):
        raise PipelineError(
            f"{key}: depends on all files of {folder}, and it has more than {MOST_ENTRIES:,}",
            hint=f"name the folder of the images alone; or leave {key} out of the import",
        )
    if _FOLDER.get() is not None:
        raise PipelineError(
            f"{key}: depends on the files of {folder}, and a dropped file opens no folder",
            hint=f"`zerotrain data import FILE` looks there; or leave {key} out of the import",
        )


def named_file(file: str) -> Path:
    """Return the path of a file that a command line names, which may be missing.

    Raises:
        PipelineError: only some files may be read, and it is not among them.
    """
    return Path(file) if _FOLDER.get() is None else find_file(file, None)


def cached_config() -> Path | None:
    """Return the file that `accelerate config` wrote last, if it exists and may be read."""
    if _FOLDER.get() is not None:
        return None
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hf_home = os.environ.get("HF_HOME", f"{home}/huggingface")
    path = Path(hf_home).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def find_file(file: str, path: Path | None) -> Path:
    """Find a file from the working directory, or next to the file that names it."""
    if (folder := _FOLDER.get()) is not None:
        if os.path.isfile(place := folder / Path(file).name):
            return place
        raise PipelineError(
            f"{path or 'the command'}: names {file}, which is not among the dropped files",
            hint="drop it together with what names it",
        )
    named = Path(file).expanduser()
    places = [named]
    if path is not None:
        places += [path.parent / named, path.parent / named.name]
    for place in places:
        # isfile, unlike Path.is_file, treats invalid file names as missing files.
        if os.path.isfile(place):
            return place
    looked = ", ".join(dict.fromkeys(str(place) for place in places))
    raise PipelineError(
        f"{path or 'accelerate launch'}: names {file}, which is not there",
        hint=f"put it next to the YAML; looked for {looked}",
    )


def load_yaml(path: Path) -> dict[str, Any]:
    """Load a YAML file of keys, of which the last of several counts, as PyYAML reads it.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is not YAML with keys.
    """
    hint = "name a file that `accelerate config` wrote; check indentation, quotes and doubled keys"
    return check_object(_load(path, partial(parse_yaml, version="1.1"), hint), path, hint=hint)


def find_repeated_keys(path: Path) -> dict[str, int]:
    """Return the line of each key of a YAML file that its section has a second time."""
    found: dict[str, int] = {}

    def visit(node: Any) -> None:
        seen: set[str] = set()
        for key, value in node.value if node.id == "mapping" else ():
            if key.value in seen:
                found[str(key.value)] = key.start_mark.line + 1
            seen.add(key.value)
            visit(value)

    if (root := compose_yaml(load_text(path), path)) is not None:
        visit(root)
    return found


def load_json(path: Path) -> dict[str, Any]:
    """Load a JSON file of keys.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is not JSON with keys, or has a key twice.
    """
    hint = "name a file that holds a configuration; check commas, quotes and brackets"
    return check_object(_load(path, parse_json, hint), path, hint=hint)


COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|(?P<comment>//[^\n]*|#[^\n]*|/\*.*?\*/)', re.S)
TRAILING = re.compile(r'"(?:\\.|[^"\\])*"|(?P<comma>,)(?=\s*[]}])')


def load_deepspeed(file: str, path: Path | None) -> tuple[str, dict[str, Any]]:
    """Load a DeepSpeed configuration, as DeepSpeed does: comments and trailing commas are allowed.

    Args:
        file: Its name, or its whole text in base64.
        path: The file that names it.

    Returns:
        Its name in messages, and its keys.

    Raises:
        PipelineError: it is missing, or not JSON with keys.
    """
    hint = "check commas, quotes and brackets"
    try:
        text = base64.urlsafe_b64decode(file).decode() if len(file) % 4 == 0 else ""
    except ValueError:
        text = ""
    if text.lstrip().startswith("{"):
        where = "the DeepSpeed configuration in base64"
    else:
        where = str(found := find_file(file, path))
        text = load_text(found, hint)
    text = COMMENT.sub(lambda match: " " if match["comment"] else match[0], text)
    text = TRAILING.sub(lambda match: "" if match["comma"] else match[0], text)
    return where, check_object(parse_json(text, where, hint=hint), where, hint=hint)


def load_toml(path: Path) -> dict[str, Any]:
    """Load a TOML file.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is not TOML.
    """
    return check_object(_load(path, parse_toml, "check it there"), path)


def load_text(path: Path, hint: str = "name a file of text") -> str:
    """Load a text file.

    Raises:
        FileError: it is missing, or no file.
        DocumentError: it is too large, or not UTF-8.
    """
    return read_text(path, most=MOST_BYTES, follow_links=True, hint=hint)


def _load(path: Path, parse: Callable[..., Any], hint: str) -> Any:
    return parse(load_text(path, hint), path, hint=hint)
