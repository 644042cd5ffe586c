"""Records as columns of a mapped file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from zerotrain.artifact.columns import BLOCK, Columns, read_columns


class Part(NamedTuple):
    """A record in a tuple."""

    name: str
    sha256: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Record:
    """A field of each type that a column has."""

    name: str
    sha256: str
    side: Literal["left", "right"]
    size: tuple[int, int]
    large: int
    weight: float = 1.0
    used: bool = True
    key: str | None = None
    note: str = ""
    keys: tuple[str, ...] | None = None
    words: tuple[str, ...] = ()
    boxes: tuple[tuple[int, int], ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Later(Record):
    """The class of a later version."""

    more: int = 3
    others: tuple[int, ...] = (1, 2)


def sha256(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def record(number: int, **more: Any) -> Record:
    side: Literal["left", "right"] = "right" if number % 3 else "left"
    name = f"été {number}\n'.png"
    return Record(name, sha256(number), side, (number, -number), number * 2**40, **more)


RECORDS = [
    record(0),
    record(1, weight=0.1, used=False, key=sha256(7), note=sha256(1)),
    record(2, keys=(), words=("", "a b"), boxes=((1, 2), (3, 4))),
    record(3, keys=(sha256(1), sha256(2)), note=sha256(3)),
    record(4, words=("c",), boxes=((5, 6),), parts=(Part("p", sha256(8), (1, 2)),)),
    record(5, parts=(Part("", sha256(9), (3, 4)), Part("q", sha256(8), (5, 6)))),
]


def written(path: Path, records: Sequence[Record], of: type[Record] = Record) -> Columns[Record]:
    Columns.of(of, records).write(path)
    return read_columns(path, of)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """One by one, in order, and by slices, with every type of a field and its default."""
    found = written(tmp_path / "a", RECORDS)
    assert [found[i] for i in range(len(found))] == [*found] == RECORDS
    assert found == RECORDS
    assert tuple(RECORDS) == found
    assert found != RECORDS[::-1]
    assert found != RECORDS[:-1]
    assert (found[-1], found[1:3]) == (RECORDS[-1], RECORDS[1:3])
    with pytest.raises(IndexError, match="record 6 of 6"):
        found[6]
    many = [record(number) for number in range(BLOCK + 2)]
    assert [*written(tmp_path / "b", many)] == many
    assert [*written(tmp_path / "c", [])] == []


def test_fields_are_read_without_the_records(tmp_path: Path) -> None:
    found = written(tmp_path / "a", RECORDS)
    for name in Record.__dataclass_fields__:
        read = found.column(name)
        assert [read(i) for i in range(6)] == [getattr(one, name) for one in RECORDS]
    sizes = found.numbers("size")
    assert (sizes.dtype, sizes.tolist()) == (np.int32, [[i, -i] for i in range(6)])
    assert found.numbers("large").tolist() == [i * 2**40 for i in range(6)]
    assert found.places("side", "left").tolist() == [0, 3]
    assert found.places("sha256", sha256(4)).tolist() == [4]
    assert found.places("sha256", "no digest").tolist() == []
    assert found.places("keys", sha256(2)).tolist() == [3]
    assert found.places("words", "a b").tolist() == [2]
    assert found.places("parts.sha256", sha256(8)).tolist() == [4, 5]
    assert found.places("parts.name", "q").tolist() == [5]
    plain = written(tmp_path / "b", RECORDS[:1])
    assert plain.numbers("weight").tolist() == [1.0]
    assert plain.places("used", True).tolist() == [0]
    assert plain.places("words", "a").tolist() == []
    assert plain.places("parts.name", "q").tolist() == []


def test_views_import_no_pandas(tmp_path: Path) -> None:
    """Each training process would hold it, as many of pyarrow's functions import it."""
    written(tmp_path / "a", RECORDS)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.test_columns import Record\n"
        "from zerotrain.artifact.columns import read_columns\n"
        "found = read_columns(Path(sys.argv[1]), Record)\n"
        "names = 'size', 'large', 'weight', 'used'\n"
        "print([found.numbers(name).shape for name in names], found.places('side', 'left'))\n"
        "print(found.column('sha256')(0) and found[1] and 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[(6, 2), (6,), (6,), (6,)] [0 3]\nFalse\n"


def test_another_optional_field_changes_no_file(tmp_path: Path) -> None:
    """Its column is left out where all records have the default; a file without it is read."""
    written(tmp_path / "a", RECORDS)
    later = [Later(**vars(one)) for one in RECORDS]
    assert [*read_columns(tmp_path / "a", Later)] == later
    written(tmp_path / "b", later, Later)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert read_columns(tmp_path / "a", Later).numbers("others").tolist() == 6 * [[1, 2]]


def test_a_file_of_another_class_or_cut_off_is_refused(tmp_path: Path) -> None:
    later = [Later(**vars(RECORDS[0]), more=4)]
    written(tmp_path / "a", later, Later)
    with pytest.raises(ValueError, match="unknown columns more"):
        read_columns(tmp_path / "a", Record)
    data = (tmp_path / "a").read_bytes()
    for length in (0, 5, len(data) // 2, len(data) - 1):
        (tmp_path / "a").write_bytes(data[:length])
        with pytest.raises((ValueError, OSError)):
            read_columns(tmp_path / "a", Later)


class Turn(NamedTuple):
    """A record in a tuple that got optional fields."""

    role: str
    keys: str = ""
    learned: bool = True


@dataclass(frozen=True)
class Talk:
    """A record of them."""

    turns: tuple[Turn, ...]


def test_an_optional_field_of_an_inner_record_is_stored_where_one_is_set(tmp_path: Path) -> None:
    """Elsewhere the file is as it was before the class had the field."""
    plain = [Talk((Turn("a"), Turn("b"))), Talk((Turn("c"),))]
    set_once = [*plain, Talk((Turn("d", learned=False), Turn("e")))]
    for records, stored in ((plain, ["role"]), (set_once, ["role", "learned"])):
        columns = Columns.of(Talk, records)
        columns.write(tmp_path / "talks.arrow")
        again = read_columns(tmp_path / "talks.arrow", Talk)
        assert [*again] == records == [again[place] for place in range(len(records))]
        data = (tmp_path / "talks.arrow").read_bytes()
        assert [name for name in Turn._fields if name.encode() in data] == stored
