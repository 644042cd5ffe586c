"""Tables in files: rows of CSV, JSONL, JSON and Parquet with their number, for messages."""

from __future__ import annotations

import codecs
import csv
import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from zerotrain.artifact.documents import FileError, check_object, parse_json, read_bytes
from zerotrain.config.image_source import UTF_8
from zerotrain.data.encodings import WrongEncodingError, decode_text
from zerotrain.errors import PipelineError
from zerotrain.machine.regular_file import open_to_read

MOST_LINE_BYTES = 2**24
"""Length of the longest line and cell, as of a caption file: more than any text encoder reads."""
MOST_TABLE_BYTES = 2**31
"""Size of a .json table, which is read as a whole."""
MOST_EXPANDED, MOST_EXPANSION = 2**28, 100
"""How many bytes a Parquet file holds at most, or how many times its size if it is larger."""
NAMES_IT = "it names the row or the turn, and is no part of the sample"
LABELS_IT = "it says where the row is from or in which language, which the text shows itself"
IRRELEVANT = {
    **dict.fromkeys(("id", "idx", "index", "uuid", "conversation_id"), NAMES_IT),
    **dict.fromkeys(("source", "dataset", "lang", "language"), LABELS_IT),
}
"""Columns that no reader needs, and why."""
BATCH_ROWS = 1024
"""Rows of a Parquet file that are in memory at a time."""


def printable(text: str) -> str:
    r"""Make a name or a cell valid UTF-8; invalid Unicode is shown as \udcXX."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_absent(value: object) -> bool:
    """Return whether a cell has no value: null, or the NaN that pandas and Arrow put for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def csv_rows(path: Path, encoding: str | None = None) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield line number and cells by column of each row; surplus cells are under None.

    Args:
        path: The file.
        encoding: What data.caption_encoding says of it; None for a file in UTF-8.

    Raises:
        PipelineError: the file is in another encoding, or cannot be read as CSV.
    """
    # A carriage return ends a line as well.
    lines = (part for line in _lines(path, encoding) for part in io.StringIO(line, newline=""))
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


def jsonl_rows(
    path: Path, example: str, encoding: str | None = None
) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield line number and object of each non-empty line.

    Args:
        path: The file.
        example: A correct line, for messages.
        encoding: As of csv_rows.

    Raises:
        PipelineError: the file is in another encoding, or a line is not an object.
    """
    for line, text in enumerate(_lines(path, encoding), 1):
        if not text.strip():
            continue
        where, hint = f"{path}, line {line}", f"each line is one object, as {example}"
        yield line, check_object(parse_json(text, where, hint=hint, cells=True), where, hint=hint)


def json_rows(
    path: Path, example: str, encoding: str | None = None, key_column: str | None = None
) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield the number, from 1, and the object of each item of a list.

    Args:
        path: The file.
        example: A correct item, for messages.
        encoding: As of csv_rows.
        key_column: The column of the keys of an object of objects; such a file is refused without.

    Raises:
        PipelineError: the file is in another encoding, or is not a list of objects.
    """
    hint = "one object a line is JSONL: call such a file .jsonl"
    found = parse_json(_text(path, encoding), path, hint=hint, cells=True)
    if key_column and isinstance(found, dict) and all(isinstance(v, dict) for v in found.values()):
        found = [{**row, key_column: key} for key, row in found.items()]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise PipelineError(
            f"{path}: not a list of objects", hint=f"write a list whose items look like {example}"
        )
    yield from enumerate(found, 1)


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield the number, from 1, and the cells by column of each row.

    Raises:
        PipelineError: the file cannot be read as Parquet, or expands to what no such file holds.
    """
    import pyarrow
    import pyarrow.parquet

    check_parquet(path)
    number, left = 0, _room(path)
    try:
        texts = [
            field.name
            for field in pyarrow.parquet.read_schema(path)
            if pyarrow.types.is_string(field.type) or pyarrow.types.is_binary(field.type)
        ]
        # A text that is repeated a million times is a few bytes of the file, and here one text.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                left -= sum(map(_expanded, batch.columns))
                if left < 0:
                    raise _bomb(path)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def check_parquet(path: Path) -> None:
    """Check that a Parquet file is one, and expands to what such a file can hold.

    Raises:
        PipelineError: it is not, or does not.
    """
    import pyarrow
    import pyarrow.parquet

    open_to_read(path, follow_links=True).close()
    try:
        facts = pyarrow.parquet.read_metadata(path)
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    if sum(group.total_byte_size for group in groups) > _room(path):
        raise _bomb(path)


def _room(path: Path) -> int:
    """Return how many bytes a Parquet file may hold."""
    return max(MOST_EXPANDED, MOST_EXPANSION * path.stat().st_size)


def _expanded(column: Any) -> int:
    """Return the bytes of a column whose repeated texts are written out."""
    import pyarrow
    import pyarrow.compute

    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pyarrow.compute.binary_length(column.dictionary)
    return int(pyarrow.compute.sum(lengths.take(column.indices)).as_py() or 0)


def _bomb(path: Path) -> PipelineError:
    return PipelineError(
        f"{path}: its {path.stat().st_size:,} bytes expand to more than {_room(path):,}",
        hint="such a table is damaged or made to harm; write it again, or as .jsonl",
    )


def _unreadable(path: Path, error: Exception) -> PipelineError:
    return PipelineError(
        f"{path}: not readable as Parquet ({error})", hint="write it again, or as .jsonl"
    )


def _lines(path: Path, encoding: str | None) -> Iterator[str]:
    """Yield the lines of a file with their ends.

    Raises:
        PipelineError: the file is unreadable or in another encoding, or a line is too long.
    """
    with _reading(path), open_to_read(path, follow_links=True) as stream:
        start = 0
        for number in count(1):
            line = stream.readline(MOST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                raise PipelineError(
                    f"{path}, line {number}: has more than {MOST_LINE_BYTES:,} bytes",
                    hint="a row is on a line of its own; see whether the file is such a table",
                )
            if start == 0 and line.startswith(codecs.BOM_UTF8):
                encoding = encoding and UTF_8
            yield _decoded(line, path, encoding, start)
            start += len(line)


def _text(path: Path, encoding: str | None) -> str:
    with _reading(path):
        content = read_bytes(path, most=MOST_TABLE_BYTES, follow_links=True)
    return _decoded(content, path, encoding)


def _decoded(content: bytes, path: Path, encoding: str | None, start: int = 0) -> str:
    """Decode what begins at a position of a file."""
    try:
        return decode_text(content, encoding or UTF_8, start)
    except WrongEncodingError as error:
        key = f"data.caption_encoding: {error.readings}; or " if encoding and error.first else ""
        of = f"-f {error.first.replace('-', '')}" if error.first else "-f ENCODING"
        raise PipelineError(
            f"{path}: {error}",
            hint=f"{key}save it as UTF-8, say with: iconv {of} -t utf-8 {path} > new{path.suffix}",
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise PipelineError(
            f"{path}: {os.strerror(error.errno or 0)}", hint="make it readable for you"
        ) from error
