"""Tables of captions: metadata.csv, .jsonl, .json or .parquet, one row per image.

Columns are `file_name,text` (as in Hugging Face's imagefolder), `image,prompt` (as in
DiffSynth-Studio), or else another pair of them and `caption`; others are left out. Files are named
relative to the image folder.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import DocumentError, LeftOut, Names, parse_json
from zerotrain.data.source import Found
from zerotrain.data.table import (
    IRRELEVANT,
    csv_rows,
    is_absent,
    json_rows,
    jsonl_rows,
    parquet_rows,
    printable,
    surplus_cells,
)
from zerotrain.errors import PipelineError

Reader = Callable[[Path], Iterator[tuple[int, dict[Any, Any]]]]
NAMES = ("metadata.csv", "metadata.jsonl")
LATER_NAMES = ("metadata.parquet", "metadata.json")
"""Read in a folder without caption files: other programs leave them next to those."""
COLUMNS = (("file_name", "text"), ("image", "prompt"))
FURTHER_COLUMNS = (
    *(("file_name", caption) for caption in ("caption", "prompt")),
    *(("image", caption) for caption in ("caption", "text")),
)
EXAMPLE = '{"file_name": "a.png", "text": "a red house"}'
EXPECTED = "file_name,text or image,prompt"


def caption_columns(conditioning_columns: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the pairs of columns that may name images and captions next to conditioning images.

    An image never conditions itself: a pair whose files are conditioning images is omitted.
    """
    return [pair for pair in COLUMNS if pair[0] not in conditioning_columns]


def read_metadata(
    path: Path,
    root: Path,
    images: Collection[str],
    conditioning_columns: Sequence[str] = (),
    left_out: LeftOut | None = None,
) -> list[Found]:
    """List the images that a table names, and the errors in its rows.

    Args:
        path: A .csv, .jsonl or .json file in UTF-8, or a .parquet file.
        root: The image folder.
        images: The files in the folder, by relative name.
        conditioning_columns: Columns that name conditioning images in the folder.
        left_out: Counts the columns that are not used.

    Returns:
        One entry per row, in unspecified order.

    Raises:
        PipelineError: the table is unreadable as a whole, or lacks the columns.
    """
    rows = list(_reader(path)(path))
    if not rows:
        raise PipelineError(
            f"{path}: holds no rows",
            hint=f"give it the columns {EXPECTED} and a row for each image",
        )
    file_column, text_column = _columns(path, rows[0][1], conditioning_columns)
    kind = {".json": "item", ".parquet": "row"}.get(path.suffix.lower(), "line")
    found: list[Found] = []
    first_line: dict[str, int] = {}
    for line, row in rows:
        if left_out is not None:
            names = Names(name for name, cell in row.items() if name is not None and cell)
            names.use(file_column, text_column, *conditioning_columns)
            names.ignore(IRRELEVANT)
            left_out.add("row", names.leftovers())
        where = f"{path.name} {kind} {line}"
        file, caption = row.get(file_column), row.get(text_column)
        if not isinstance(file, str) or not file.strip():
            found.append(Found(where, reason=f"no {file_column}"))
            continue
        name = posixpath.normpath(file.strip())
        conditioning, wrong_conditioning = _read_conditioning(
            row, conditioning_columns, root, images
        )
        reason = (
            _wrong_place(name, root, images)
            or surplus_cells(row)
            or _wrong_caption(caption, text_column)
            or wrong_conditioning
        )
        if not reason and name in first_line:
            reason = f"names the image again, after {kind} {first_line[name]}"
        first_line.setdefault(name, line)
        if reason:
            found.append(
                Found(printable(name), reason=f"{where}: {reason}", conditioning=conditioning)
            )
        else:
            found.append(Found(name, str(caption).strip(), conditioning=conditioning))
    return found


def _read_conditioning(
    row: Mapping[Any, Any], columns: Sequence[str], root: Path, images: Collection[str]
) -> tuple[tuple[str, ...], str | None]:
    """List the conditioning images that a row names, and their first error."""
    names: list[str] = []
    reason = None
    for column in columns:
        try:
            found = _named_files(row.get(column))
        except ValueError as error:
            reason = reason or f"{column} {error}"
            continue
        reason = reason or (None if found else f"no {column}")
        for name in found:
            wrong = _wrong_place(name, root, images)
            reason = reason or (f"{column} {printable(name)}: {wrong}" if wrong else None)
        names += found
    return tuple(names), reason


def _named_files(cell: Any) -> list[str]:
    """Parse the file names in a cell: one, or a list of them, which CSV has as JSON.

    Raises:
        ValueError: the cell is neither.
    """
    text = cell.strip() if isinstance(cell, str) else None
    if text and text.startswith("[") and text.endswith("]"):
        try:
            cell = parse_json(text, "the cell")
        except DocumentError as error:
            raise ValueError(f"is not a JSON list ({error.why})") from error
    elif text is not None:
        cell = [text] if text else []
    if is_absent(cell):
        return []
    if not isinstance(cell, list) or not all(isinstance(one, str) and one.strip() for one in cell):
        raise ValueError("is neither a file name nor a list of them")
    return [posixpath.normpath(one.strip()) for one in cell]


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
    return "its extension is not that of an image"


def _wrong_caption(caption: Any, column: str) -> str | None:
    if is_absent(caption):
        return f"no {column}"
    if not isinstance(caption, str):
        return f"{column} is {type(caption).__name__}, not text"
    if not caption.strip():
        return f"empty {column}"
    if "\0" in caption:
        return f"{column} holds a NUL, which no text has"
    return None if printable(caption) == caption else f"{column} is not valid Unicode"


def _reader(path: Path) -> Reader:
    readers: dict[str, Reader] = {
        ".csv": csv_rows,
        ".jsonl": partial(jsonl_rows, example=EXAMPLE),
        ".json": partial(json_rows, example=EXAMPLE),
        ".parquet": parquet_rows,
    }
    if path.suffix.lower() not in readers:
        raise PipelineError(
            f"data.metadata: {path}: the extension is {path.suffix or 'none'}",
            hint="give a .csv with a header line, a .jsonl with one object a line, a .json with a "
            "list of them, or a .parquet",
        )
    return readers[path.suffix.lower()]


def _columns(
    path: Path, row: Mapping[Any, Any], conditioning_columns: Sequence[str]
) -> tuple[str, str]:
    columns = ",".join(str(column) for column in row if column is not None)
    if missing := [column for column in conditioning_columns if column not in row]:
        raise PipelineError(
            f"data.conditioning_columns: {path} has no column {missing[0]!r}; it has {columns}",
            hint="name columns of the table whose cells are files of conditioning images",
        )
    pairs = caption_columns(conditioning_columns)
    if not pairs:
        raise PipelineError(
            f"data.conditioning_columns: {', '.join(conditioning_columns)} leave no column for the "
            "images themselves",
            hint=f"rename a column of conditioning images: {EXPECTED} name images and captions",
        )
    further = () if conditioning_columns else FURTHER_COLUMNS
    for pair in (*pairs, *further):
        if all(column in row for column in pair):
            return pair
    expected = " or ".join(map(",".join, pairs))
    raise PipelineError(
        f"{path}: has the columns {columns}; {expected} are needed",
        hint=f"rename the columns of file names and captions to {expected}",
    )
