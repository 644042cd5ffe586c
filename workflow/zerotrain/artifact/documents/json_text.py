"""JSON and JSON Lines, and the types that their values should have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from zerotrain.artifact.documents.limits import (
    AGAIN,
    DEEP,
    MOST_BITS,
    DocumentError,
    check_levels,
    check_text,
    decode,
    read_bytes,
    read_lines,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, *, follow_links: bool = False, hint: str = AGAIN) -> Any:
    """Read a JSON file; see read_bytes and parse_json."""
    data = read_bytes(path, follow_links=follow_links, hint=hint)
    return parse_json(data, path, hint=hint)


def read_object(path: Path, *, follow_links: bool = False, hint: str = AGAIN) -> dict[str, Any]:
    """Read a JSON file that holds keys with values.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: it is no JSON, or holds something else.
    """
    return check_object(read_json(path, follow_links=follow_links, hint=hint), path, hint=hint)


def read_record(path: Path, kind: type[T], *, hint: str = AGAIN) -> T:
    """Read a JSON file of a dataclass, a TypedDict or a pydantic model; see check_type."""
    return check_type(read_json(path, hint=hint), kind, path, hint=hint)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file; empty lines are passed over.

    Raises:
        FileError: it is missing, or is a link, a folder, a pipe or a device.
        DocumentError: a line is no JSON object; the message names its number.
    """
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            source = f"{path}: line {number}"
            yield check_object(parse_json(line, source), source)


def parse_json(text: str | bytes, source: object, *, hint: str = AGAIN, cells: bool = False) -> Any:
    """Parse JSON.

    Args:
        text: The text; bytes are UTF-8.
        source: What messages call it.
        hint: Of the error.
        cells: Whether it is a table, most of whose values are not read: its numbers may be NaN,
            infinite or of any size, and its texts invalid Unicode. Who reads a cell checks it.

    Raises:
        DocumentError: it is no JSON or nested too deeply, a key is repeated, a number is not finite
            or has more than MOST_BITS, or a text is not valid Unicode.
    """
    if isinstance(text, bytes):
        text = decode(text, source, hint)
    try:
        found = (_CELLS if cells else _JSON).decode(text)
        check_levels(found)
        if not cells and SURROGATE.search(text):  # half of a pair has no digest
            check_text(json.dumps(found, ensure_ascii=False))
    except json.JSONDecodeError as error:
        why = f"not valid JSON: {error.msg}, line {error.lineno}, column {error.colno}"
        raise DocumentError(source, why, hint=hint) from error
    except RecursionError as error:
        raise DocumentError(source, DEEP, hint=hint) from error
    except ValueError as error:
        raise DocumentError(source, str(error), hint=hint) from error
    return found


def check_object(found: Any, source: object, *, hint: str = AGAIN) -> dict[str, Any]:
    """Check that a parsed document holds keys with values.

    Raises:
        DocumentError: it holds something else.
    """
    if isinstance(found, dict):
        return found
    raise DocumentError(source, f"holds {describe_kind(found)}, not keys with values", hint=hint)


def check_type(found: Any, kind: type[T], source: object, *, hint: str = AGAIN) -> T:
    """Check a parsed document against a type, and return it as that type.

    Args:
        found: The document.
        kind: A dataclass, a TypedDict or a pydantic model. Its fields are all that is read of the
            document: keys that it does not have belong to programs of another version.
        source: What messages call it.
        hint: Of the error.

    Raises:
        DocumentError: a value has another type or is missing; the message names the first.
    """
    from pydantic import ValidationError

    try:
        adapter: TypeAdapter[T] = _adapter(cast(Hashable, kind))
        checked = adapter.validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "its values"
        why = first["msg"].removeprefix("Value error, ")
        if not isinstance(first["input"], dict | list):
            why += f" (found {first['input']!r:.80})"
        raise DocumentError(source, f"{key}: {why}", hint=hint) from error
    return checked


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def describe_kind(value: Any) -> str:
    """Return what a parsed value is, with its article."""
    kinds = {
        dict: "keys with values", list: "a list", str: "a string", bool: "a boolean",
        int: "a number", float: "a number", type(None): "null",
    }  # fmt: skip
    return kinds.get(type(value), type(value).__name__)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands twice")
    return found


def _whole(text: str) -> int:
    if len(text) > MOST_BITS or (number := int(text)).bit_length() > MOST_BITS:
        raise ValueError(f"the number {text[:40]} has more than {MOST_BITS} bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


_JSON = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_no_constant
)
_CELLS = json.JSONDecoder(object_pairs_hook=_unique)
