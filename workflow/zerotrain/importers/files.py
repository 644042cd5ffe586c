"""Files of other programs: finding and loading them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from zerotrain.artifact import yaml_text
from zerotrain.errors import PipelineError

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
    return _FOLDER.get() is None and Path(folder).expanduser().is_dir()


def check_may_look(folder: str, key: str) -> None:
    """Check that a folder may be listed, for a key whose meaning depends on what is in it.

    Raises:
        PipelineError: only dropped files may be read.
    """
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
    """Load a YAML file of keys.

    Raises:
        PipelineError: it is missing, or not YAML with keys.
    """
    hints = "indentation, quotes and doubled keys near that line", "`accelerate config` wrote"
    return _load(path, "YAML", yaml_text.load_yaml, *hints)


def load_json(path: Path) -> dict[str, Any]:
    """Load a JSON file of keys.

    Raises:
        PipelineError: it is missing, not JSON, or has a duplicate key.
    """

    def parse(text: str) -> Any:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_doubles(path, pairs))

    return _load(path, "JSON", parse, "commas, quotes and brackets", "holds a configuration")


def _load(
    path: Path, form: str, parse: Callable[[str], Any], syntax: str, wanted: str
) -> dict[str, Any]:
    """Load the keys of a file; `syntax` and `wanted` are hints."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(
            f"{path}: cannot be read: {error.strerror}", hint="name a file that is there"
        ) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise PipelineError(
            f"{path}: not valid {form}: {' '.join(str(error).split())}", hint=f"check {syntax}"
        ) from error
    if not isinstance(found, dict):
        raise PipelineError(
            f"{path}: holds {type(found).__name__}, not keys with values",
            hint=f"name a file that {wanted}",
        )
    return found


def _without_doubles(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PipelineError(f"{path}: {twice} stands twice", hint="take one of them out")
    return found
