"""A document of somebody else becomes values of known types, or one sentence that names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field
from tests.builders.refusals import refused

from zerotrain.artifact import documents
from zerotrain.artifact.documents import (
    DocumentError,
    LeftOut,
    Names,
    parse_json,
    parse_toml,
    parse_yaml,
    read_header,
    read_json_lines,
    read_record,
    read_text,
    read_weight_map,
)
from zerotrain.artifact.documents.limits import MOST_LEVELS

NO_UNICODE = "has text that is not valid Unicode"
TOO_DEEP = f"its values are nested more than {MOST_LEVELS} deep"
NO_TAG = "not valid YAML: a value does not fit its tag"


@pytest.mark.parametrize(
    ("parse", "text", "why"),
    [
        (parse_json, "", "not valid JSON: Expecting value, line 1, column 1"),
        (parse_json, b"\xff", "byte 1 is not UTF-8: save the file as UTF-8"),
        (parse_json, '{"a": 1, "a": 2}', "a stands twice"),
        (parse_json, "[NaN]", "NaN is no finite number"),
        (parse_json, "[-Infinity]", "-Infinity is no finite number"),
        (parse_json, "[1e999]", "the number 1e999 is too large"),
        (parse_json, f"[{'9' * 400}]", f"the number {'9' * 40} has more than 128 bits"),
        (parse_json, f"[{'9' * 5000}]", f"the number {'9' * 40} has more than 128 bits"),
        (parse_json, '["\\ud800"]', NO_UNICODE),
        (parse_json, '{"\\udfff": 1}', NO_UNICODE),
        (parse_json, "[" * 100_000, TOO_DEEP),
        (parse_json, '{"a":' * 60 + "1" + "}" * 60, TOO_DEEP),
        (parse_yaml, "a: .nan", "a: nan is no finite number"),
        (parse_yaml, "a: {b: [-.inf]}", "a.b[0]: -inf is no finite number"),
        (parse_yaml, "a: 1e999", "a: inf is no finite number"),
        (parse_yaml, f"a: {'9' * 400}", "a: a whole number of 1,329 bits, more than 128"),
        (parse_yaml, "a: !!int ''", NO_TAG),
        (parse_yaml, "a: !!float ''", NO_TAG),
        (parse_yaml, "a: !!bool x", NO_TAG),
        (parse_yaml, "a: !!float .", "not valid YAML: could not convert string to float: '.'"),
        (parse_yaml, "a: 2024-13-45", "not valid YAML: month must be in 1..12"),
        (parse_yaml, "a: !!binary aGk=", "a: is of the type bytes, which is not read"),
        (parse_yaml, "a: !!set {b}", "a: is of the type set, which is not read"),
        (parse_yaml, "? [a]\n: 1", "is of the type tuple, which is not read"),
        (parse_yaml, "[" * 50_000, TOO_DEEP),
        (parse_yaml, "- " * 50_000, TOO_DEEP),
        (parse_toml, "a = ", "not valid TOML: Invalid value (at end of document)"),
        (parse_toml, "a = nan", "a: nan is no finite number"),
        (parse_toml, f"a = {'[' * 100}{']' * 100}", TOO_DEEP),
        (parse_toml, f"a = {'[' * 5000}", TOO_DEEP),
    ],
)  # fmt: skip
def test_what_no_reader_can_use_is_one_sentence(
    parse: Callable[..., Any], text: str | bytes, why: str
) -> None:
    """It names the document and, where one value is wrong, its key; nothing else is raised."""
    error = refused(parse, text, "that.file", hint="do this")
    assert isinstance(error, DocumentError)
    assert (error.what, error.hint) == (f"that.file: {why}", "do this")


def test_odd_values_that_programs_write_are_read() -> None:
    """transformers' length without limit, pairs of surrogates, brackets in a text, merged keys."""
    assert parse_json('{"a": 1000000000000000019884624838656}', "a")["a"] > 10**30
    assert parse_json('["\\ud83d\\ude00", "[[[", 18446744073709551615, 1e-320]', "a") == [
        "😀", "[[[", 2**64 - 1, 1e-320,
    ]  # fmt: skip
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2024-02-03}\nc: no", "a")["c"] == "no"
    assert parse_yaml("c: no", "a", version="1.1") == {"c": False}


@dataclass(frozen=True)
class Process:
    """A record as the package has them."""

    pid: Annotated[int, Field(gt=0)]
    names: list[str]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"pid": -1, "names": []}', "pid: Input should be greater than 0 (found -1)"),
        ('{"pid": 1, "names": [2]}', "names.0: Input should be a valid string (found 2)"),
        ('{"pid": 1}', "names: Field required"),
        ("[]", "its values: Input should be a dictionary or an instance of Process"),
    ],
)
def test_a_record_has_the_types_of_its_class(tmp_path: Path, text: str, why: str) -> None:
    """The first value that has not is named."""
    path = tmp_path / "record.json"
    path.write_text(text)
    assert refused(read_record, path, Process).what == f"{path}: {why}"
    path.write_text('{"pid": 1, "names": ["a"], "later": 1}')
    assert read_record(path, Process) == Process(1, ["a"])


def test_a_file_is_not_read_beyond_its_limit(tmp_path: Path) -> None:
    """Whatever its size is said to be."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 11)
    assert refused(read_text, path, most=10).what == f"{path}: has more than 10 bytes"
    assert read_text(path, most=11) == "x" * 11


def test_lines_are_objects_and_named_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones are passed over."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    lines = read_json_lines(path)
    assert next(lines) == {"a": 1}
    assert refused(next, lines).what == f"{path}: line 3: holds a list, not keys with values"
    monkeypatch.setattr(documents.limits, "MOST_LINE_BYTES", 5)
    assert refused(next, read_json_lines(path)).what == f"{path}: has a line of over 5 bytes"


def _write_header(path: Path, header: Any, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)
    return path


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "change",
    [
        *({"shape": shape} for shape in (None, "ab", [[1]], [0], [2.0, 3.0], [-2, -3], [True, 6])),
        *({"data_offsets": found} for found in (None, [0], [0, 23], [-24, 0], [0, 24, 48], "ab")),
        *({"dtype": found} for found in (None, "F99", ["F32"], 3)),
    ],
    ids=str,
)
def test_an_entry_of_a_header_names_bytes_of_its_shape(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Otherwise the tensor is named; sizes are added up and memory is planned by them."""
    path = _write_header(tmp_path / "a.safetensors", {"x": GOOD, "y": {**GOOD, **change}})
    assert refused(read_header, path).what == f"{path}: header: the entry of y is damaged"


@pytest.mark.parametrize("header", [[], [1], "x", None, {"x": None}, {"x": []}, {"x": {}}])
def test_a_header_of_another_shape_is_one_sentence(tmp_path: Path, header: Any) -> None:
    """Whatever JSON it is."""
    path = _write_header(tmp_path / "a.safetensors", header)
    assert f"{path}: header: " in refused(read_header, path).what


def test_a_cut_or_endless_header_is_one_sentence(tmp_path: Path) -> None:
    """Its stated length is not believed."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"abc")
    assert "no safetensors file" in refused(read_header, path).what
    _write_header(path, {}, length=2**40)
    assert f"no safetensors file (a header of {2**40})" in refused(read_header, path).what
    _write_header(path, {}, length=10)
    assert refused(read_header, path).what == f"{path}: its header ends after 2 of 10"


def test_a_header_is_read_without_its_tensors(tmp_path: Path) -> None:
    """With their places from the beginning of the file."""
    header = {"__metadata__": {"k": "v"}, "x": GOOD, "": {**GOOD, "shape": [6]}}
    path = _write_header(tmp_path / "a.safetensors", header)
    found, base = read_header(path), path.stat().st_size
    assert found.metadata == {"k": "v"}
    assert found.shapes == {"x": (2, 3), "": (6,)}
    assert (found.tensors["x"].start, found.tensors["x"].end) == (base, base + 24)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"a": "../b"}}, "the name '../b' leaves the folder"),
        ({"weight_map": {"a": 3}}, "the name 3 is not a string"),
        ({"weight_map": ["b"]}, "weight_map: holds a list, not keys with values"),
        ({"weight_map": {}}, "weight_map names no tensor"),
        ({}, "weight_map: holds null, not keys with values"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, index: Any, why: str) -> None:
    """Before any of them is opened."""
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert refused(read_weight_map, path).what == f"{path}: {why}"


def test_a_name_is_used_or_irrelevant_or_left_over() -> None:
    """In the order of the document; what it does not have is neither."""
    names = Names({"role": 1, "id": 2, "foo": 3, "bar": 4})
    names.use("role", "content")
    assert names.ignore({"id": "it only names it", "index": "so does this"}) == {
        "id": "it only names it"
    }
    assert names.leftovers() == ["foo", "bar"]


def test_what_is_left_over_is_counted_for_each_kind_of_record() -> None:
    """A count is the same after a way through JSON; nothing is left out of nothing."""
    counted, more = LeftOut(), LeftOut()
    counted.add("turn", ["foo", "bar"])
    more.add("turn", ["foo"], records=1200)
    more.add("row", ["foo"])
    counted.update(more)
    again = LeftOut(json.loads(json.dumps(counted.counts())))
    assert counted.lines() == again.lines() == [
        "left out: key foo of 1 row",
        "left out: key foo of 1,201 turns",
        "left out: key bar of 1 turn",
    ]  # fmt: skip
    assert (LeftOut().lines(), LeftOut().counts()) == ([], {})


def test_of_many_names_the_most_frequent_are_listed() -> None:
    """Short, and in valid Unicode: a document of somebody else chose them."""
    counted = LeftOut()
    counted.add("row", ["\ud800" + "x" * 200], records=2)
    counted.add("row", [f"key{n}" for n in range(30)])
    lines = counted.lines()
    assert lines[0] == f"left out: key \\ud800{'x' * 79} of 2 rows"
    assert lines[-1] == "left out: 11 further keys of rows"
    assert len(lines) == 21
