"""Lines of records.jsonl and scores.jsonl, and the keys of records.

Each line is a JSON object that ends with a checksum. Lines are read as rows or as a DataFrame.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from lantern_bench.config.plan import ImageTask
from lantern_bench.storage.schema import OUTSIDE_COLUMNS, Row, columns
from lantern_bench.utils.errors import RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd

# A line ends with _CHECKSUM, the first 16 hex digits of the SHA-256 of all before it, and _CLOSE.
_CHECKSUM = b', "checksum": "'
_CLOSE = b'"}\n'
_END = len(_CHECKSUM) + 16 + len(_CLOSE)

# Python type of a column, by its type in the schema; other columns are lists
_PYTHON_TYPES: dict[str, Any] = {
    "string": str,
    "int": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    "float": float,
    "bool": bool,
    "object": dict,
}
# Type codes of `array`, by the type of a column in the schema
_NUMBERS = {"int": "q", "float": "d", "bool": "b"}

# columns that every row of a table must have
_NEEDED = {"records": ("record_key", "status"), "scores": ()}

_CHUNK = 200  # rows whose Python objects exist at once
_BUFFER = 1 << 20  # bytes read at once

# ---- Lines


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line with its checksum last; raises `ValueError` for NaN and infinity."""
    values = {name: value for name, value in row.items() if name != "checksum"}
    return _with_checksum(json.dumps(values, ensure_ascii=False, allow_nan=False).encode()[:-1])


def _with_checksum(line: bytes) -> bytes:
    digest = hashlib.sha256(line).hexdigest()[:16]
    return line + _CHECKSUM + digest.encode() + _CLOSE


class Line(NamedTuple):
    """A line of a file that ends with a line break."""

    number: int  # from 1
    content: bytes  # with the line break
    row: Any | None  # its columns as attributes; None for a damaged line
    problem: str = ""  # what is wrong with a damaged line


def read_lines(path: Path, table: str, wanted: Collection[str] | None = None) -> Iterator[Line]:
    """Yield the lines of a file, also damaged ones.

    A last line without a line break is being written or was cut off, and is left out.

    Args:
        path: The file, which need not exist.
        table: `records` or `scores`.
        wanted: The columns to parse, by default all.
    """
    needed = _NEEDED[table]
    types = _types(table, wanted)
    decode = _decoder(types, needed)
    if not path.is_file():
        return
    with path.open("rb", buffering=_BUFFER) as file:
        for number, content in enumerate(file, start=1):
            if not content.endswith(b"\n"):
                return
            if content != _with_checksum(content[:-_END]):
                yield Line(number, content, None, problem="damaged, its checksum differs")
                continue
            try:
                yield Line(number, content, decode(content))
            except (ValueError, RecursionError) as error:
                yield Line(number, content, None, problem=_problem_of(error, types, needed))


def _types(table: str, wanted: Collection[str] | None) -> dict[str, str]:
    """Return the types of the columns to read: of `wanted` ones and those that every row has."""
    read = {*(wanted or ()), *_NEEDED[table]}
    return {
        column.name: column.dtype
        for column in columns(table)
        if wanted is None or column.name in read
    }


def _decoder(types: Mapping[str, str], needed: Collection[str]) -> Callable[[bytes], Any]:
    """Return the parser of a line; runs without a plugin lack the plugin's columns."""
    fields: list[Any] = [
        (name, str) if name in needed else (name, _PYTHON_TYPES.get(kind, list) | None, None)
        for name, kind in types.items()
    ]
    row_type = msgspec.defstruct("Row", fields, gc=False, kw_only=True)
    return msgspec.json.Decoder(row_type).decode


def _problem_of(error: Exception, types: Mapping[str, str], needed: Collection[str]) -> str:
    """Say what the parser found wrong with a line whose checksum is right."""
    _, _, name = str(error).rstrip("`").partition("$.")
    if "missing required field" in str(error) or name in needed:
        return "not a record"
    if name in types:
        return f"damaged, {name} is not {types[name]}"
    return "damaged, not a JSON object"


def read_rows(path: Path, table: str, wanted: Collection[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a file, whose columns are attributes.

    Args:
        path: The file, which need not exist.
        table: `records` or `scores`.
        wanted: The columns to parse, by default all.

    Raises:
        UserError: A line is damaged.
    """
    for line in read_lines(path, table, wanted):
        if line.row is None:
            raise UserError(
                f"{path} line {line.number}: {line.problem}",
                f"`lantern-bench check-run {path.parent} --repair` and the same sweep make its "
                "content again.",
            )
        yield line.row


class RowFile:
    """A file of rows opened for appending; a partial last line is removed when it is opened."""

    def __init__(self, path: Path, table: str) -> None:
        self._path = path
        self._names = [column.name for column in columns(table)]
        self._table = table
        # Without a buffer, because what the disk has no room for must not be written later.
        self._file = path.open("ab+", buffering=0)
        if path.stat().st_size:
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            self._file.truncate(end)

    def append(self, values: Mapping[str, Any]) -> Row:
        """Write a row to disk and return it with all columns.

        Raises `ValueError` for an unknown column, NaN or infinity, `RefusedError` for a full disk.
        """
        unknown = set(values) - set(self._names)
        if unknown:
            raise ValueError(f"{self._table} have no column {', '.join(sorted(unknown))}")
        row = {name: values.get(name) for name in self._names}
        unused = {name for name in OUTSIDE_COLUMNS & row.keys() if row[name] is None}
        content = line_of({name: value for name, value in row.items() if name not in unused})
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(content)
            while rest:  # a write can end early, where the disk fills up
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # If this fails too, the next start removes the partial line.
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise no_room(self._path, error) from error
        return dict(json.loads(content))

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()


def no_room(path: Path, error: OSError) -> RefusedError:
    """Return the error for a file of a run that cannot be written, usually on a full disk."""
    return RefusedError(
        f"{path}: cannot be written: {error.strerror or error}",
        "Everything before is kept. Repair the cause; the same command continues.",
    )


# ---- DataFrames


def read_frame(path: Path, table: str, wanted: Collection[str] | None = None) -> pd.DataFrame:
    """Return the rows of a file as a DataFrame.

    Args:
        path: The file, which need not exist.
        table: `records` or `scores`.
        wanted: The columns to read, by default all.

    Returns:
        Numbers as `Int64` and `float64`, marks as `boolean`, texts and lists as objects.

    Raises:
        UserError: A line is damaged.
    """
    import pandas as pd

    types = _types(table, wanted)
    gathered = [_Column(kind) for kind in types.values()]
    rows = map(msgspec.structs.astuple, read_rows(path, table, wanted))
    while chunk := list(islice(rows, _CHUNK)):
        for column, values in zip(gathered, zip(*chunk, strict=True), strict=True):
            column.extend(values)
    arrays = {name: column.array() for name, column in zip(types, gathered, strict=True)}
    return pd.DataFrame(arrays, copy=False)


class _Column:
    """The values of a column. Numbers are kept without their Python objects, to save room."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._values: Any = array(_NUMBERS[kind]) if kind in _NUMBERS else []
        self._missing = bytearray()
        self._texts = dict[Any, Any]()

    def extend(self, values: Sequence[Any]) -> None:
        """Add values; None is a missing one."""
        if self._kind in _NUMBERS:
            self._missing.extend([value is None for value in values])
            values = [0 if value is None else value for value in values]
        elif self._kind == "string":  # equal texts become one object
            values = [self._texts.setdefault(text, text) for text in values]
        self._values.extend(values)

    def array(self) -> Any:
        """Return all values as a column of a DataFrame."""
        import numpy as np
        import pandas as pd

        if self._kind not in _NUMBERS:
            return pd.Series(self._values, dtype=object)
        missing = np.frombuffer(self._missing, dtype=bool)
        numbers = np.frombuffer(self._values, dtype=self._values.typecode)
        if self._kind == "float":
            return np.where(missing, np.nan, numbers)
        if self._kind == "int":
            return pd.arrays.IntegerArray(numbers, missing)
        return pd.arrays.BooleanArray(numbers.view(bool), missing)


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a DataFrame as dictionaries of Python values; missing values are None."""
    values = frame.astype(object)
    rows: list[Any] = values.where(values.notna(), None).to_dict("records")
    return rows


# ---- Record keys: what makes two images the same, and which runs may be continued

# The flag that restores the recorded value; other fields have no flag.
_FLAGS = {
    "dtype": "--dtype {}",
    "batch": "--batch {}",
    "seed": "--seed {}",
    "prompts": "--prompts {}",
    "prompt_column": "--prompt-column {}",
    "threads": "--threads {}",
    "device_type": "--device {}",
    "compile": "--set compile={}",
}
# How the entries of a field are called that holds several.
_CALLED = {
    "weights": "weights of",
    "rules": "code of the rule",
    "draftings": "code of the drafting",
}
_EXPERIMENT_KEYS = ("model", "prompts", "prompt_column", "seed", "batch", "model_defaults", "cells")
_SHOWN = 300  # characters of a value that an error message shows


def record_key(task: ImageTask, fields: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a SHA-256 of all that an image's tokens and time depend on."""
    covered = {
        "cell": task.cell.settings(),
        "prompt_id": task.prompt.id,
        "repeat": task.repeat,
        "seed": task.seed,
        "run": fields,
    }
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:16]


def check_same_run(
    folder: str, manifest: Mapping[str, Any], wanted: Mapping[str, Any], finished: int
) -> None:
    """Refuse to add images to a run that was decoded with other settings.

    Args:
        folder: How the error names the run.
        manifest: The manifest of the run.
        wanted: The entries of the manifest that new images would have: `key`, `experiment`,
            `threads`, or some of them.
        finished: Number of finished images, for the error.

    Raises:
        RefusedError: A setting differs. The message names the first one and both values.
    """
    recorded = _comparable({name: manifest.get(name) for name in wanted})
    now = _comparable(wanted)
    for name in recorded | now:
        before = recorded.get(name)
        after = now.get(name)
        if before == after or (name == "threads" and None in (before, after)):
            continue
        if isinstance(before, list) and isinstance(after, list):
            only_before = [item for item in before if item not in after]
            after = [item for item in after if item not in before]
            before = only_before
        advice = "Start a new run beside it with --no-resume, or elsewhere with --out FOLDER."
        if name in _FLAGS:
            advice += f" Or resume with {_FLAGS[name].format(shown(before))}"
        raise RefusedError(
            f"cannot resume {folder}: {name} changed\n"
            f"  recorded  {shown(before)}\n"
            f"  now       {shown(after)}\n"
            f"{finished} finished images were made with the recorded value; "
            "new images would not be comparable.",
            advice,
        )


def _comparable(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same; other images and metrics continue a run."""
    settings = dict(entries.get("key") or {})
    for field, text in _CALLED.items():
        for name, value in settings.pop(field, {}).items():
            settings[f"{text} {name}"] = value
    experiment = entries.get("experiment") or {}
    for name in _EXPERIMENT_KEYS:
        settings[name] = experiment.get(name)
    settings["threads"] = entries.get("threads")
    return settings


def shown(value: object) -> str:
    """Return a setting as an error message shows it."""
    if value is None or value == []:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
