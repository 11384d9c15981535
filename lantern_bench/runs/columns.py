"""The rows of a JSON lines file as columns: a million records take hundreds of megabytes, and are read in seconds.

Texts are kept once each, numbers as arrays. `Records` looks like a list of rows, each made when it is asked for; what
reads many of them asks for columns.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from lantern_bench.errors import UserError
from lantern_bench.runs.store import has_checksum, is_older
from lantern_bench.schema import CELL_COLUMNS, Column, columns

Row: TypeAlias = dict[str, Any]
Places: TypeAlias = NDArray[np.intp]

_CHUNK, _BUFFER = 1024, 1 << 20
_CELL = frozenset(column.name for column in CELL_COLUMNS)
# Numbers that float64 does not hold exactly stay Python's.
_EXACT = 2**53


class _Texts:
    """A column of texts: the number of each row's text, -1 for none. Texts that hardly repeat are kept as they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] | None = {}
        self.texts: list[str | None] = []
        self._codes: list[NDArray[np.int32]] = []

    def extend(self, values: Sequence[Any]) -> None:
        """Append the texts of a chunk; raises TypeError for what is no text."""
        _check(values, str)
        if (numbers := self._numbers) is None:
            self.texts += values
            return
        codes = [-1 if value is None else numbers.setdefault(value, len(numbers)) for value in values]
        self._codes.append(np.array(codes, dtype=np.int32))
        rows = sum(map(len, self._codes))
        if rows >= 8 * _CHUNK and 2 * len(numbers) > rows:
            known = [*numbers, None]
            self.texts, self._codes, self._numbers = [known[code] for part in self._codes for code in part], [], None

    def finish(self) -> Sequence[Any]:
        """Return the column."""
        if self._numbers is None:
            return self.texts
        return Coded(np.concatenate([*self._codes, np.empty(0, dtype=np.int32)]), [*self._numbers, None])


class Coded(Sequence[Any]):
    """A column whose values repeat: `values`, and the place of each row's value among them (-1: the last, None)."""

    def __init__(self, codes: NDArray[np.int32], values: list[Any]) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self.values[code] for code in self.codes[at]]
        return self.values[self.codes[at]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.values.__getitem__, self.codes.tolist())

    def take(self, places: Places) -> Coded:
        """The rows at `places`."""
        return Coded(self.codes[places], self.values)


class _Numbers:
    """A column of numbers: float64, nan for none; whole numbers that do not fit in stay a list."""

    def __init__(self, kind: Callable[[float], Any]) -> None:
        self._kind, self._parts = kind, list[Any]()

    def extend(self, values: Sequence[Any]) -> None:
        """Append the numbers of a chunk; raises TypeError for what is no number."""
        _check(values, int, float, np.number, np.bool_)
        numbers = np.array(values, dtype=np.float64)
        told = numbers[~np.isnan(numbers)]
        if not np.isfinite(told).all() or (self._kind is not float and (told != np.rint(told)).any()):
            raise ValueError("a number of another kind")
        large = self._kind is int and bool((np.abs(told) > _EXACT).any())
        self._parts.append(list(values) if large else numbers)

    def finish(self) -> Sequence[Any]:
        """Return the column."""
        if any(isinstance(part, list) for part in self._parts):
            return [value for part in self._parts for value in _plain(part, self._kind)]
        return Numbers(np.concatenate([*self._parts, np.empty(0)]), self._kind)


def _plain(numbers: Iterable[Any], kind: Callable[[float], Any]) -> list[Any]:
    listed = numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
    return [None if value is None or value != value else kind(value) for value in listed]


class Numbers(Sequence[Any]):
    """A column of numbers: the array `floats`, and the type of a row's value."""

    def __init__(self, floats: NDArray[np.float64], kind: Callable[[float], Any]) -> None:
        self.floats, self.kind = floats, kind

    def __len__(self) -> int:
        return len(self.floats)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return _plain(self.floats[at], self.kind)
        value = float(self.floats[at])
        return None if value != value else self.kind(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(_plain(self.floats, self.kind))

    def take(self, places: Places) -> Numbers:
        """The rows at `places`."""
        return Numbers(self.floats[places], self.kind)


class _Lists:
    """A column of lists; the empty ones are one list."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def extend(self, values: Sequence[Any]) -> None:
        """Append the lists of a chunk; raises TypeError for what is none."""
        _check(values, list)
        self._values += [value or (None if value is None else _EMPTY) for value in values]

    def finish(self) -> Sequence[Any]:
        """Return the column."""
        return self._values


def _check(values: Sequence[Any], *kinds: type) -> None:
    for kind in set(map(type, values)) - {type(None)}:
        if not issubclass(kind, kinds):
            raise TypeError(f"{kind.__name__} where there should be {kinds[0].__name__}")


_EMPTY: list[Any] = []
_OF_CELLS: dict[str, tuple[type, ...]] = {"string": (str,), "bool": (bool,)}
_KINDS: dict[str, Callable[[], Any]] = {
    "string": _Texts,
    "int": lambda: _Numbers(int),
    "float": lambda: _Numbers(float),
    "bool": lambda: _Numbers(bool),
}


class Records(Sequence[Row]):
    """Rows of a table as columns; a row is a dictionary made when it is asked for.

    `memo` keeps what readers made of all rows.
    """

    def __init__(self, named: Mapping[str, Sequence[Any]], count: int) -> None:
        self._columns, self._count = dict(named), count
        self.memo: dict[str, Any] = {}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], table: str = "records") -> Records:
        """Return rows as columns; raises ValueError or TypeError for a value of another type than its column's."""
        builder = _Builder(columns(table), None)
        waiting = iter(rows)
        while chunk := list(islice(waiting, _CHUNK)):
            builder.extend([tuple(map(row.get, builder.names)) for row in chunk])
        return builder.finish()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        return {name: values[at] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[Row]:
        return self.rows(*self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def rows(self, *names: str) -> Iterator[Row]:
        """Yield the rows with these columns alone."""
        for values in zip(*(self.column(name) for name in names), strict=True):
            yield dict(zip(names, values, strict=True))

    def column(self, name: str) -> Sequence[Any]:
        """The values of a column; None for all where the rows lack it."""
        return self._columns[name] if name in self._columns else [None] * self._count

    def floats(self, name: str) -> NDArray[np.float64]:
        """The numbers of a column, nan for none."""
        values = self.column(name)
        return values.floats if isinstance(values, Numbers) else np.array(values, dtype=np.float64)

    def is_value(self, name: str, value: str) -> NDArray[np.bool_]:
        """Where a column of texts has a value."""
        values = self.column(name)
        if isinstance(values, Coded):
            return np.array([one == value for one in values.values], dtype=bool)[values.codes]
        return np.array([one == value for one in values], dtype=bool)

    def take(self, places: Places) -> Records:
        """The rows at `places`, in that order."""
        listed = places.tolist()

        def taken(values: Sequence[Any]) -> Sequence[Any]:
            return values.take(places) if isinstance(values, Coded | Numbers) else [values[at] for at in listed]

        return Records({name: taken(values) for name, values in self._columns.items()}, len(places))

    def without(self, names: Collection[str]) -> Records:
        """The same rows, with None in these columns."""
        return Records({name: values for name, values in self._columns.items() if name not in names}, self._count)

    def filled(self, name: str, value: float) -> Records:
        """The same rows, with a number where a column of numbers has none."""
        column = self._columns.get(name)
        if not isinstance(column, Numbers):
            return self
        whole = Numbers(np.where(np.isnan(column.floats), value, column.floats), column.kind)
        return Records(self._columns | {name: whole}, self._count)

    def latest(self) -> Records:
        """The last row of every record key, in order of first appearance: a retried image counts once."""
        last = dict(zip(self.column("record_key"), range(self._count), strict=True))
        if len(last) == self._count:
            return self
        return self.take(np.fromiter(last.values(), dtype=np.intp, count=len(last)))

    def order_of(self, name: str) -> NDArray[np.intp]:
        """For each row the place of its text among the sorted texts of a column."""
        values = self.column(name)
        distinct = values.values if isinstance(values, Coded) else sorted(set(map(str, values)))
        place = {text: number for number, text in enumerate(sorted(map(str, distinct)))}
        if isinstance(values, Coded):
            return np.array([place[str(one)] for one in distinct], dtype=np.intp)[values.codes]
        return np.array([place[str(one)] for one in values], dtype=np.intp)


class _Builder:
    """Gathers chunks of rows into columns; the columns of a cell are gathered together, since they repeat together."""

    def __init__(self, declared: Sequence[Column], wanted: Collection[str] | None) -> None:
        kept = [column for column in declared if wanted is None or column.name in wanted]
        self._cell = [column.name for column in kept if column.name in _CELL]
        self._kinds = [_OF_CELLS.get(column.dtype, (int, float)) for column in kept if column.name in _CELL]
        own = [column for column in kept if column.name not in _CELL]
        self._own = {column.name: _KINDS.get(column.dtype, _Lists)() for column in own}
        self.names = [*self._own, *self._cell]
        self._order = [column.name for column in kept]
        self._cells: dict[Any, int] = {}
        self._codes: list[NDArray[np.int32]] = []
        self._count = 0

    def extend(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append a chunk, the columns `names`; raises ValueError or TypeError for a value of another type."""
        own = len(self._own)
        for column, values in zip(self._own.values(), zip(*rows, strict=True), strict=False):
            column.extend(values)
        if self._cell:
            cells, before = self._cells, len(self._cells)
            codes = [cells.setdefault(values[own:], len(cells)) for values in rows]
            self._codes.append(np.array(codes, dtype=np.int32))
            for cell in islice(cells, before, None):
                for value, kinds in zip(cell, self._kinds, strict=True):
                    _check([value], *kinds)
        self._count += len(rows)

    def finish(self) -> Records:
        """Return the rows as columns."""
        named: dict[str, Sequence[Any]] = {name: column.finish() for name, column in self._own.items()}
        if self._cell:
            codes = np.concatenate([*self._codes, np.empty(0, dtype=np.int32)])
            for at, name in enumerate(self._cell):
                named[name] = Coded(codes, [cell[at] for cell in self._cells])
        return Records({name: named[name] for name in self._order}, self._count)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector, which would look through the new dictionaries again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _reader(table: str, names: Sequence[str]) -> Callable[[bytes], tuple[Any, ...] | None]:
    """Return what reads these columns of a line; it raises ValueError or RecursionError for a damaged one.

    The line that is being written, or was cut off, is None.
    """
    known = {column.name: column.dtype for column in columns(table)}
    # Of the other columns no objects are made; told that a value is text, the parser is faster.
    kinds = ((name, str | None if known[name] == "string" else Any, None) for name in names)
    parse = msgspec.json.Decoder(msgspec.defstruct("Row", kinds, gc=False)).decode
    values = msgspec.structs.astuple

    def read(line: bytes) -> tuple[Any, ...] | None:
        if has_checksum(line):
            return values(parse(line))
        if not line.endswith(b"\n"):
            return None
        row = msgspec.json.decode(line, type=dict[str, Any])
        if not is_older(row, known):
            raise ValueError("its checksum differs")
        return tuple(map(row.get, names))

    return read


def read_columns(path: Path, table: str, wanted: Collection[str] | None = None) -> Records:
    """Read the whole lines of a JSON lines file: the columns of a table, or those of them that are `wanted`.

    Columns that the version of a row lacks are None. Raises `UserError` for a line that is not a row.
    """
    builder = _Builder(columns(table), wanted)
    read = _reader(table, builder.names)
    if path.is_file():
        with path.open("rb", buffering=_BUFFER) as file, _without_collector():
            try:
                # Each line is parsed as it is read, while the processor's cache holds it.
                while rows := list(map(read, islice(file, _CHUNK))):
                    builder.extend([row for row in rows if row is not None])
            except (ValueError, TypeError, RecursionError) as error:
                raise _damaged(path, table) from error
    return builder.finish()


def _damaged(path: Path, table: str) -> UserError:
    """The error for the first line of a file that is not a row."""
    with path.open("rb") as file:
        faults = enumerate((_fault(line, columns(table)) for line in file), start=1)
        number, why = next(((number, why) for number, why in faults if why), (0, "it was changed meanwhile"))
    repair = f"`lantern-bench verify {path.parent} --repair` makes its content again."
    return UserError(f"{path} line {number}: damaged, {why}", repair)


def _fault(line: bytes, declared: Sequence[Column]) -> str | None:
    """What is wrong with a line; None where it is a row of these columns."""
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        return "not a JSON object"
    if not (has_checksum(line) or is_older(row, {column.name for column in declared})):
        return "its checksum differs"
    for column in declared:
        try:
            _Builder([column], None).extend([(row.get(column.name),)])
        except (ValueError, TypeError):
            return f"{column.name} is not {column.dtype}"
    return None
