"""Records of one dataclass as columns of an Arrow file, which is mapped and read where it is asked.

Each field is a column (https://arrow.apache.org/docs/format/Columnar.html, the IPC file format, one
record batch, uncompressed). sha256 digests take 32 bytes, whole numbers four or eight, a Literal
one; tuples are lists, and records in tuples are structs. A column whose values are all the field's
default is left out, also of records in tuples, and a null is the default: when a class gets another
optional field, files stay readable and equal to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import (
    Any,
    Generic,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zerotrain.errors import PipelineError

T = TypeVar("T")

DIGEST = re.compile(r"[0-9a-f]{64}")
DIGEST_BYTES = 32
DAMAGE = (pa.ArrowException, SystemError, UnicodeError, ValueError, TypeError)
"""What reading a damaged value raises."""
BLOCK = 4096
"""Records that are built at a time in an iteration."""


class Columns(Sequence[T], Generic[T]):
    """The records of a file or of a list; each is built when it is asked for.

    Args:
        record: The dataclass. Tuples may hold records, of a dataclass or NamedTuple without None.
        table: The columns of some of its fields.
        content: The table's name in messages.

    Raises:
        ValueError: the table has a column that is no field, or misses one that has no default.
    """

    def __init__(self, record: type[T], table: pa.Table, content: str = "columns") -> None:
        self._record = record
        self._content = content
        self._table = table
        self._defaults = _defaults(record)
        self._inner = {name: _inner(of) for name, of in get_type_hints(record).items()}
        known = {one.name for one in fields(record)}  # type: ignore[arg-type]
        if unknown := set(table.column_names) - known:
            raise ValueError(f"{content}: unknown columns {', '.join(sorted(unknown))}")
        missing = known - {*table.column_names} - self._defaults.keys()
        if missing and len(table):
            raise ValueError(f"{content}: no columns {', '.join(sorted(missing))}")

    @classmethod
    def of(cls, record: type[T], records: Sequence[T]) -> Columns[T]:
        """Return records as columns; the same object, if they are."""
        if isinstance(records, Columns):
            return records
        return cls(record, _table(record, records))

    def check(self) -> None:
        """Read every value once: Arrow follows the offsets in a damaged file wherever they lead.

        Raises:
            PipelineError: one leads out of its column, or a text is not Unicode.
        """
        try:
            self._table.validate(full=True)
        except DAMAGE as error:
            raise self._damaged(error) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> list[T]: ...

    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"record {place} of {len(self)}")
        return self._record(**{name: read(place) for name, read in self._readers.items()})

    def __iter__(self) -> Iterator[T]:
        for start in range(0, len(self), BLOCK):
            rows = self._table.slice(start, BLOCK)
            try:
                rows.validate(full=True)
                columns = {
                    name: [self._value(name, value) for value in rows.column(name).to_pylist()]
                    for name in rows.column_names
                }
            except DAMAGE as error:
                raise self._damaged(error) from error
            for values in zip(*columns.values(), strict=True):
                yield self._record(**dict(zip(columns, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Columns):
            return self._record is other._record and bool(self._table.equals(other._table))
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> Callable[[int], Any]:
        """Return a function from a record's place to one field's value, without the others."""
        default = self._defaults.get(name)
        if name not in self._table.column_names:
            return lambda place: default
        [array] = self._table.column(name).chunks or [pa.array([])]

        def read(place: int) -> Any:
            try:
                return self._value(name, array[place].as_py())
            except DAMAGE as error:
                raise self._damaged(error) from error

        return read

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a field of numbers, or of equally many numbers in each record, as an array.

        It is a view of the mapped file.

        Returns:
            [N], or [N, n] for tuples.
        """
        if name not in self._table.column_names:
            value = np.asarray(self._defaults[name])
            return np.broadcast_to(value, (len(self), *value.shape))
        [array] = self._table.column(name).chunks or [pa.array([], pa.int32())]
        if pa.types.is_fixed_size_list(array.type):
            return _numpy(array.flatten()).reshape(-1, array.type.list_size)
        return _numpy(array)

    def places(self, name: str, value: Any) -> NDArray[np.int64]:
        """List the places of the records whose field is a value, or a tuple that has it.

        Args:
            name: The field; `field.inner` for the fields of records in a tuple.
            value: The value.
        """
        name, _, inner = name.partition(".")
        if name not in self._table.column_names:
            default = self._defaults.get(name)
            found = value in default if isinstance(default, tuple) else value == default
            return np.arange(len(self) if found else 0)
        [array] = self._table.column(name).chunks or [pa.array([])]
        if not pa.types.is_fixed_size_list(array.type) and not pa.types.is_large_list(array.type):
            return np.flatnonzero(_equal(array, value))
        parents = _numpy(pc.list_parent_indices(array))
        flat = pc.list_flatten(array)
        return np.unique(parents[_equal(pc.struct_field(flat, inner) if inner else flat, value)])

    def write(self, path: Path) -> None:
        """Write the file; equal records give equal bytes."""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._table.schema) as file:
            for batch in self._table.to_batches():
                file.write_batch(batch)

    @cached_property
    def _readers(self) -> dict[str, Callable[[int], Any]]:
        return {name: self.column(name) for name in self._table.column_names}

    def _damaged(self, error: BaseException) -> PipelineError:
        return PipelineError(
            f"{self._content}: damaged: {' '.join(str(error).split())}",
            hint="build its folder again: `zerotrain why` names the rule",
        )

    def _value(self, name: str, value: Any) -> Any:
        return self._defaults.get(name) if value is None else _plain(value, self._inner.get(name))


def read_columns(path: Path, record: type[T]) -> Columns[T]:
    """Map a file; its pages are loaded when they are read.

    Raises:
        OSError: the file is missing.
        ValueError: it is no such file, or not of this class.
    """
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        table.validate()
    except (pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise ValueError(str(error)) from error
    return Columns(record, table, str(path))


def _defaults(record: type[Any]) -> dict[str, Any]:
    """Return the defaults of optional fields, by name."""
    if hasattr(record, "_field_defaults"):
        return dict(record._field_defaults)
    return {one.name: one.default for one in fields(record) if one.default is not MISSING}


def _inner(annotation: Any) -> type[Any] | None:
    """Return the class of the records that a field's tuple holds; None if it holds none."""
    return next((of for of in get_args(annotation) if _is_record(of)), None)


def _is_record(of: Any) -> bool:
    return isinstance(of, type) and (is_dataclass(of) or hasattr(of, "_fields"))


def _table(record: type[T], records: Sequence[T]) -> pa.Table:
    defaults, types = _defaults(record), get_type_hints(record)
    columns = {}
    for name, of in types.items():
        values = [getattr(one, name) for one in records]
        if not values or (name in defaults and all(value == defaults[name] for value in values)):
            continue
        array = _array(values, defaults.get(name, MISSING), name)
        if get_origin(of) is Literal:
            array = array.dictionary_encode().cast(pa.dictionary(pa.int8(), array.type))
        columns[name] = array
    return pa.table(columns)


def _array(values: Sequence[Any], default: Any, name: str) -> pa.Array:
    """Build the smallest column that holds values; None must be the field's default."""
    if default is not None and any(value is None for value in values):
        raise TypeError(f"{name}: None is not its default")
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if kinds == {str}:
        if all(DIGEST.fullmatch(one) for one in known if one != default):
            raw = [None if v in (None, default) else bytes.fromhex(v) for v in values]
            return pa.array(raw, pa.binary(DIGEST_BYTES))
        return pa.array(values, pa.large_string())
    if kinds <= {tuple, list}:
        return _lists(values, name)
    if kinds == {int}:
        most = np.iinfo(np.int32).max
        small = all(-most <= value <= most for value in known)
        return pa.array(values, pa.int32() if small else pa.int64())
    if kinds <= {float, int}:
        return pa.array(values, pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if len(kinds) == 1 and _is_record(of := next(iter(kinds))):
        defaults = _defaults(of)
        inner = {}
        for one in get_type_hints(of):
            found = [getattr(v, one) for v in values]
            if one not in defaults or any(value != defaults[one] for value in found):
                inner[one] = _array(found, MISSING, f"{name}.{one}")
        return pa.StructArray.from_arrays([*inner.values()], [*inner])
    raise TypeError(f"{name}: no column holds {', '.join(sorted(kind.__name__ for kind in kinds))}")


def _lists(values: Sequence[Any], name: str) -> pa.Array:
    counts = {-1 if value is None else len(value) for value in values}
    items = [*chain.from_iterable(value for value in values if value is not None)]
    flat = _array(items, MISSING, name) if items else pa.array([], pa.int32())
    if len(counts) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, counts.pop())
    ends = np.cumsum([0, *(len(value or ()) for value in values)])
    absent = pa.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat, mask=absent)


def _numpy(array: pa.Array) -> NDArray[Any]:
    """Return a column's values; `to_numpy` would import pandas, which takes 0.4 s and 30 MB."""
    if pa.types.is_boolean(array.type):  # packed as bits, which DLPack has no type for
        return np.from_dlpack(array.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(array)


def _equal(array: pa.Array, value: Any) -> NDArray[np.bool_]:
    """Return which values of a column are one value."""
    if pa.types.is_dictionary(array.type):
        # Not by a scalar, which would import pandas: trainings ask for the split.
        known = array.dictionary.to_pylist()
        place = known.index(value) if value in known else -1
        indices = array.indices.fill_null(-1) if array.null_count else array.indices
        found: NDArray[np.bool_] = np.equal(_numpy(indices), place)
        return found
    if pa.types.is_fixed_size_binary(array.type):
        if not DIGEST.fullmatch(value):
            return np.zeros(len(array), dtype=bool)
        value = bytes.fromhex(value)
    found = pc.equal(array, pa.scalar(value, array.type)).fill_null(False)
    return _numpy(found)


def _plain(value: Any, inner: type[Any] | None) -> Any:
    """Convert a value of Arrow to the field's; structs to records of the inner class."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict) and inner is not None:
        return inner(**{name: _plain(one, None) for name, one in value.items()})
    return tuple(_plain(one, inner) for one in value) if isinstance(value, list) else value
