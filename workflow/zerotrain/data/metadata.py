"""Tables of captions: metadata.csv or metadata.jsonl, a row for each image.

Columns are `file_name,text` (as Hugging Face's imagefolder has them) or `image,prompt` (as
DiffSynth-Studio has them); others are left alone. Files are named relative to the image folder.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.data.source import Found
from zerotrain.data.table import csv_rows, jsonl_rows, printable, surplus_cells
from zerotrain.errors import PipelineError

Reader = Callable[[Path], Iterator[tuple[int, dict[Any, Any]]]]
NAMES = ("metadata.csv", "metadata.jsonl")
COLUMNS = (("file_name", "text"), ("image", "prompt"))
EXAMPLE = '{"file_name": "a.png", "text": "a red house"}'
EXPECTED = "file_name,text or image,prompt"


def read_metadata(path: Path, root: Path, images: Collection[str]) -> list[Found]:
    """The images that a table names, and what is wrong with its rows.

    Args:
        path: A .csv or .jsonl file in UTF-8.
        root: The image folder.
        images: The files in it, as names relative to it.

    Returns:
        One entry for each row, in no promised order.

    Raises:
        PipelineError: the table as a whole cannot be read, or lacks the columns.
    """
    rows = list(_reader(path)(path))
    if not rows:
        raise PipelineError(
            f"{path}: holds no rows",
            hint=f"give it the columns {EXPECTED} and a row for each image",
        )
    file_column, text_column = _columns(path, rows[0][1])
    found: list[Found] = []
    first_line: dict[str, int] = {}
    for line, row in rows:
        where = f"{path.name} line {line}"
        file, caption = row.get(file_column), row.get(text_column)
        if not isinstance(file, str) or not file.strip():
            found.append(Found(where, reason=f"no {file_column}"))
            continue
        name = posixpath.normpath(file.strip())
        reason = (
            _wrong_place(name, root, images)
            or surplus_cells(row)
            or _wrong_caption(caption, text_column)
        )
        if not reason and name in first_line:
            reason = f"names the image again, after line {first_line[name]}"
        first_line.setdefault(name, line)
        if reason:
            found.append(Found(printable(name), reason=f"{where}: {reason}"))
        else:
            found.append(Found(name, str(caption).strip()))
    return found


def _wrong_place(name: str, root: Path, images: Collection[str]) -> str | None:
    if name in images:
        return None
    if name.startswith("/") or re.match(r"[A-Za-z]:[\\/]", name):
        return f"absolute path; name files relative to {root}"
    if name == ".." or name.startswith("../"):
        return f"leaves {root}"
    if not os.path.exists(root / name):
        return f"no such file in {root}"
    if not (root / name).resolve().is_relative_to(root.resolve()):
        return f"leaves {root} by a symbolic link (data.follow_symlinks: true would take it)"
    if (root / name).is_dir():
        return "a folder, not an image"
    return "its extension is none of an image"


def _wrong_caption(caption: Any, column: str) -> str | None:
    if caption is None:
        return f"no {column}"
    if not isinstance(caption, str):
        return f"{column} is {type(caption).__name__}, not text"
    if not caption.strip():
        return f"empty {column}"
    return None if printable(caption) == caption else f"{column} is not valid Unicode"


def _reader(path: Path) -> Reader:
    readers: dict[str, Reader] = {
        ".csv": csv_rows,
        ".jsonl": partial(jsonl_rows, example=EXAMPLE),
    }
    if path.suffix.lower() not in readers:
        raise PipelineError(
            f"data.metadata: {path}: the extension is {path.suffix or 'none'}",
            hint="give a .csv with a header line or a .jsonl with one object on each line",
        )
    return readers[path.suffix.lower()]


def _columns(path: Path, row: Mapping[Any, Any]) -> tuple[str, str]:
    for pair in COLUMNS:
        if all(column in row for column in pair):
            return pair
    columns = ",".join(str(column) for column in row if column is not None)
    raise PipelineError(
        f"{path}: has the columns {columns}; {EXPECTED} are needed",
        hint=f"rename the columns of file names and captions to {EXPECTED}",
    )
