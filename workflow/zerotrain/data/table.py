"""Tables in files: rows of CSV, JSONL, JSON and Parquet with their number, for messages."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from zerotrain.errors import PipelineError

MOST_LINE_BYTES = 2**24
"""Length of the longest line and cell, as of a caption file: more than any text encoder reads."""


def printable(text: str) -> str:
    r"""Make a name or a cell valid UTF-8; invalid Unicode is shown as \udcXX."""
    return text.encode("utf-8", "backslashreplace").decode()


def csv_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield line number and cells by column of each row; surplus cells are under None.

    Raises:
        PipelineError: the file cannot be read as UTF-8 or as CSV.
    """
    # A carriage return ends a line as well.
    lines = (part for line in _lines(path) for part in io.StringIO(line, newline=""))
    csv.field_size_limit(MOST_LINE_BYTES)  # a document may exceed the default limit
    reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
    line = 0
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        line = reader.line_num
        for row in reader:
            line = reader.line_num
            yield line, row
    except csv.Error as error:
        raise PipelineError(
            f"{path}, row that begins on line {line + 1}: not valid CSV ({error})",
            hint="check the double quotes from there on; write a quote inside a cell as two",
        ) from error


def surplus_cells(row: Mapping[Any, Any]) -> str | None:
    """Describe a row of csv_rows with more cells than the header has; None for other rows."""
    if row.get(None):
        return "more cells than columns; put text that holds a comma in double quotes"
    return None


def jsonl_rows(path: Path, example: str) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield line number and object of each non-empty line.

    Args:
        path: The file.
        example: A correct line, for messages.

    Raises:
        PipelineError: the file cannot be read as UTF-8, or a line is not an object.
    """
    for line, text in enumerate(_lines(path), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PipelineError(
                f"{path}, line {line}: not valid JSON ({error})",
                hint=f"each line is one object, as {example}",
            ) from error
        if not isinstance(row, dict):
            raise PipelineError(
                f"{path}, line {line}: holds {type(row).__name__}, not an object",
                hint=f"each line is one object, as {example}",
            )
        yield line, row


def json_rows(path: Path, example: str) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield the number, from 1, and the object of each item of a list.

    Args:
        path: The file.
        example: A correct item, for messages.

    Raises:
        PipelineError: the file cannot be read as UTF-8, or is not a list of objects.
    """
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise PipelineError(
            f"{path}: not valid JSON ({error})",
            hint="one object a line is JSONL: call such a file .jsonl",
        ) from error
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise PipelineError(
            f"{path}: not a list of objects", hint=f"write a list whose items look like {example}"
        )
    yield from enumerate(found, 1)


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield the number, from 1, and the cells by column of each row.

    Raises:
        PipelineError: the file cannot be read as Parquet.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise PipelineError(
            f"{path}: not readable as Parquet ({error})", hint="write it again, or as .jsonl"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends.

    Raises:
        PipelineError: the file is unreadable or not UTF-8, or a line is too long.
    """
    with _reading(path), path.open("rb") as stream:
        start, encoding = 0, "utf-8-sig"
        for number in count(1):
            line = stream.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                raise PipelineError(
                    f"{path}, line {number}: has more than {MOST_LINE_BYTES:,} bytes",
                    hint="a row is on a line of its own; see whether the file is such a table",
                )
            yield _decoded(line, path, encoding, start)
            start, encoding = start + len(line), "utf-8"


def _text(path: Path) -> str:
    with _reading(path):
        return _decoded(path.read_bytes(), path, "utf-8-sig")


def _decoded(content: bytes, path: Path, encoding: str, start: int = 0) -> str:
    """Decode what begins at a position of a file."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        position = start + error.start
        raise PipelineError(
            f"{path}: not UTF-8 (byte 0x{error.object[error.start]:02x} at position {position})",
            hint=f"save it as UTF-8, say with: iconv -f latin1 -t utf-8 {path} > new{path.suffix}",
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PipelineError(
            f"{path}: {os.strerror(error.errno or 0)}", hint="make it readable for you"
        ) from error
