"""Tables of captions: metadata.csv, .jsonl, .json or .parquet, one row per image.

Columns are `file_name,text` (as in Hugging Face's imagefolder), `image,prompt` (as in
DiffSynth-Studio), or else another pair of them and `caption`; others are left out. Files are named
relative to the image folder, or to the folder of the table that imagefolder has in each split.

The metadata of kohya's scripts is an object with an object for each image, by its path or by its
name without extension, or JSON Lines with `image_path`. Source: finetune/merge_captions_to_metadata
and FineTuningDataset of library/train_util.py of sd-scripts.
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
from zerotrain.config.image_source import UTF_8
from zerotrain.data.caption_file import BadCaptionError, read_caption_cell
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
LATER_NAMES = ("metadata.parquet", "metadata.json", "meta_cap.json")
"""Read in a folder without caption files: other programs leave them next to those."""
COLUMNS = (("file_name", "text"), ("image", "prompt"))
FURTHER_COLUMNS = (
    *(("file_name", caption) for caption in ("caption", "prompt")),
    *(("image", caption) for caption in ("caption", "text")),
)
KOHYA, KOHYA_TEXTS = "image_path", ("caption", "tags")
"""The columns of kohya's scripts: an image's caption is followed by its tags."""
EXAMPLE = '{"file_name": "a.png", "text": "a red house"}'
EXPECTED = "file_name,text or image,prompt"
DRIVE = re.compile(r"[A-Za-z]:[\\/]")


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
    *,
    folder: str = "",
    encoding: str = UTF_8,
    left_out: LeftOut | None = None,
) -> list[Found]:
    """List the images that a table names, and the errors in its rows.

    Args:
        path: A .csv, .jsonl, .json or .parquet file.
        root: The image folder.
        images: The files in the folder, by relative name.
        conditioning_columns: Columns that name conditioning images in the folder.
        folder: The folder in `root` that the table's names are relative to.
        encoding: What data.caption_encoding says of its text.
        left_out: Counts the columns that are not used.

    Returns:
        One entry per row, in unspecified order.

    Raises:
        PipelineError: the table is unreadable as a whole, or lacks the columns.
    """
    rows = list(_reader(path, encoding)(path))
    if not rows:
        raise PipelineError(
            f"{path}: holds no rows",
            hint=f"give it the columns {EXPECTED} and a row for each image",
        )
    file_column, text_column = _columns(path, rows, conditioning_columns)
    texts = KOHYA_TEXTS if file_column == KOHYA else (text_column,)
    suffix = path.suffix.lower()
    kind = {".json": "item", ".parquet": "row"}.get(suffix, "line")
    files = _Files(root, folder, images, by_stem=file_column == KOHYA)
    found: list[Found] = []
    first_line: dict[str, int] = {}
    for line, row in rows:
        where = f"{posixpath.join(folder, path.name)} {kind} {line}"
        if left_out is not None:
            given = (name for name, cell in row.items() if not is_absent(cell) and cell != "")
            names = Names(name for name in given if name is not None)
            names.use(file_column, *texts, *conditioning_columns)
            names.ignore(IRRELEVANT)
            left_out.add("row", names.leftovers())
        file = row.get(file_column)
        if not isinstance(file, str) or not file.strip():
            found.append(Found(where, reason=f"no {file_column}"))
            continue
        name = files.named(file)
        conditioning, wrong_conditioning = _read_conditioning(row, conditioning_columns, files)
        reason = files.wrong_place(name) or surplus_cells(row)
        captions: tuple[str, ...] = ("",)
        try:
            cell = _with_tags(row) if file_column == KOHYA else row.get(text_column)
            captions = read_caption_cell(cell, text_column, in_csv=suffix == ".csv")
        except BadCaptionError as error:
            reason = reason or str(error)
        reason = reason or wrong_conditioning
        if not reason and name in first_line:
            reason = f"names the image again, after {kind} {first_line[name]}"
        first_line.setdefault(name, line)
        if reason:
            found.append(
                Found(printable(name), reason=f"{where}: {reason}", conditioning=conditioning)
            )
        else:
            first, *others = captions
            found.append(Found(name, first, conditioning=conditioning, other_captions=(*others,)))
    return found


class _Files:
    """The files that a table can name.

    Args:
        root: The image folder.
        folder: The folder in it that names are relative to.
        images: The files in `root`, by relative name.
        by_stem: Whether an image may be named without its extension.
    """

    def __init__(
        self, root: Path, folder: str, images: Collection[str], *, by_stem: bool = False
    ) -> None:
        self._root, self._folder, self._images = root, folder, images
        self._stems: dict[str, list[str]] = {}
        for image in sorted(images) if by_stem else ():
            self._stems.setdefault(posixpath.splitext(image)[0], []).append(image)

    def named(self, cell: str) -> str:
        """Return the name in `root` of the file that a cell names, as this system or Windows."""
        own = self._normal(cell.strip())
        if own in self._images or DRIVE.match(own):
            return own
        name = self._normal(cell.strip().replace("\\", "/"))
        if name.startswith("/"):
            start = posixpath.normpath(self._root.absolute().as_posix()) + "/"
            name = name.removeprefix(start)
        same = () if name in self._images else self._stems.get(name, ())
        return same[0] if len(same) == 1 else name

    def wrong_place(self, name: str) -> str | None:
        """Say why a name is not that of an image of the folder; None if it is."""
        root = self._root
        if name in self._images:
            return None
        if name.startswith("/") or DRIVE.match(name):
            return f"absolute path; name files relative to {root}"
        if name == ".." or name.startswith("../"):
            return f"leaves {root}"
        if same := self._stems.get(name):
            return f"several images of this name in {root}: {', '.join(same)}"
        if not os.path.exists(root / name):
            return f"no such file in {root}"
        if not (root / name).resolve().is_relative_to(root.resolve()):
            return f"leaves {root} by a symbolic link (data.follow_symlinks: true would take it)"
        if (root / name).is_dir():
            return "a folder, not an image"
        return "its extension is not that of an image"

    def _normal(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self._folder, name))


def _read_conditioning(
    row: Mapping[Any, Any], columns: Sequence[str], files: _Files
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
        for name in map(files.named, found):
            wrong = files.wrong_place(name)
            reason = reason or (f"{column} {printable(name)}: {wrong}" if wrong else None)
            names.append(name)
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
    return cell


def _with_tags(row: Mapping[Any, Any]) -> Any:
    """Return the caption and the tags of an image as kohya's scripts join them.

    Raises:
        BadCaptionError: the tags are no text.
    """
    caption, tags = (
        None if is_absent(cell) or cell == "" else cell for cell in map(row.get, KOHYA_TEXTS)
    )
    if tags is not None and not isinstance(tags, str):
        raise BadCaptionError(f"tags is {type(tags).__name__}, not text")
    if caption is None or tags is None:
        return tags if caption is None else caption
    if isinstance(caption, list):
        return [f"{one}, {tags}" if isinstance(one, str) else one for one in caption]
    return f"{caption}, {tags}" if isinstance(caption, str) else caption


def _reader(path: Path, encoding: str) -> Reader:
    readers: dict[str, Reader] = {
        ".csv": partial(csv_rows, encoding=encoding),
        ".jsonl": partial(jsonl_rows, example=EXAMPLE, encoding=encoding),
        ".json": partial(json_rows, example=EXAMPLE, encoding=encoding, key_column=KOHYA),
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
    path: Path, rows: Sequence[tuple[int, Mapping[Any, Any]]], conditioning_columns: Sequence[str]
) -> tuple[str, str]:
    row = rows[0][1]
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
    if KOHYA in row and any(not row.keys().isdisjoint(KOHYA_TEXTS) for _, row in rows):
        return KOHYA, KOHYA_TEXTS[0]
    expected = " or ".join(map(",".join, pairs))
    raise PipelineError(
        f"{path}: has the columns {columns}; {expected} are needed",
        hint=f"rename the columns of file names and captions to {expected}",
    )
