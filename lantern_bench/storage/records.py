"""Rows of records.jsonl and scores.jsonl: a JSON object a line, with a checksum, read as rows or as a DataFrame."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from lantern_bench.config.plan import ImageTask
from lantern_bench.storage.schema import SCHEMA_VERSION, columns
from lantern_bench.utils.errors import RefusedError, UserError

if TYPE_CHECKING:
    import pandas as pd
from lantern_bench.storage.schema import Row

# Every line ends with _CHECKSUM, the first 16 hexadecimal digits of the SHA-256 of what is before it, and _CLOSE.
_CHECKSUM = b', "checksum": "'
_CLOSE = b'"}\n'
_END = len(_CHECKSUM) + 16 + len(_CLOSE)

_KINDS: dict[str, Any] = {
    "string": str | None,
    "int": int | None,
    "float": float | None,
    "bool": bool | None,
}
# of columns; texts and lists are objects
_DTYPES = {"int": "Int64", "float": "float64", "bool": "boolean"}
_ABSENT = {"process": 0}  # runs without this column are of one process
# the columns that every row of a table has
_NEEDED = {"records": ("record_key", "status"), "scores": ()}
_CHUNK = 2_000
_BUFFER = 1 << 20


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line with its checksum last; raises `ValueError` for NaN and infinity."""
    others = {name: value for name, value in row.items() if name != "checksum"}
    return _with_checksum(json.dumps(others, ensure_ascii=False, allow_nan=False).encode()[:-1])


def _with_checksum(line: bytes) -> bytes:
    return line + _CHECKSUM + hashlib.sha256(line).hexdigest()[:16].encode() + _CLOSE


def _is_older(row: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether an earlier version wrote a row without a checksum: its columns have known names."""
    version = row.get("schema_version")
    return row.get("checksum") is None and (
        version != SCHEMA_VERSION or all(name in names for name in row)
    )


class Line(NamedTuple):
    """A line of a file that ends with a line break."""

    number: int  # from 1
    content: bytes  # with the line break
    row: Any | None  # its columns as attributes; None for a damaged line
    problem: str  # what is wrong with a damaged line


def read_lines(path: Path, table: str, wanted: Collection[str] | None = None) -> Iterator[Line]:
    """Yield the lines of a file, none without a file, with the `wanted` columns (None: all)."""
    declared = {column.name: column.dtype for column in columns(table)}
    needed = _NEEDED[table]
    names = _names(table, wanted)
    optional = {name: _KINDS.get(declared[name], list | None) for name in names}
    kinds = [
        (name, str) if name in needed else (name, optional[name], _ABSENT.get(name))
        for name in names
    ]
    row_type = msgspec.defstruct("Row", kinds, gc=False, kw_only=True)
    decode = msgspec.json.Decoder(row_type).decode
    with path.open("rb", buffering=_BUFFER) if path.is_file() else io.BytesIO() as file:
        for number, content in enumerate(file, start=1):
            # being written, or cut off: opening the file for writing removes it
            if not content.endswith(b"\n"):
                return
            row = None
            problem = "damaged, its checksum differs"
            try:
                if content == _with_checksum(content[:-_END]):
                    row = decode(content)
                elif _is_older(
                    values := msgspec.json.decode(content, type=dict[str, Any]), declared
                ):
                    row = msgspec.convert(values, row_type)
            except (ValueError, RecursionError) as error:
                problem = _problem_of(error, declared, needed)
            yield Line(number=number, content=content, row=row, problem=problem)


def _problem_of(error: Exception, declared: Mapping[str, str], needed: Collection[str]) -> str:
    """Say in words what the parser found wrong with a line."""
    _, _, name = str(error).rstrip("`").partition("$.")
    if "missing required field" in str(error) or name in needed:
        return "not a record"
    return (
        f"damaged, {name} is not {declared[name]}"
        if name in declared
        else "damaged, not a JSON object"
    )


def read_rows(path: Path, table: str, wanted: Collection[str] | None = None) -> Iterator[Any]:
    """Yield the rows of `read_lines`; raises `UserError` for a damaged line."""
    for line in read_lines(path, table, wanted):
        if line.row is None:
            command = f"lantern-bench check-run {path.parent} --repair"
            advice = f"`{command}` and the same sweep make its content again."
            raise UserError(f"{path} line {line.number}: {line.problem}", advice)
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
        """Write a row to disk and return it; raises `ValueError` for wrong values, `RefusedError` for a full disk."""
        if unknown := set(values) - set(self._names):
            raise ValueError(f"{self._table} have no column {', '.join(sorted(unknown))}")
        content = line_of({name: values.get(name) for name in self._names})
        end = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(content)
            while rest:  # a write can end early, where the disk fills up
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next start removes the partial line
                self._file.truncate(end)
            raise no_room(self._path, error) from error
        return dict(json.loads(content))

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()


def no_room(path: Path, error: OSError) -> RefusedError:
    """Return the error for a file of a run that cannot be written; the disk is full, as a rule."""
    message = f"{path}: cannot be written: {error.strerror or error}"
    return RefusedError(
        message, "Everything before is kept. Repair the cause; the same command continues."
    )


def read_frame(path: Path, table: str, wanted: Collection[str] | None = None) -> pd.DataFrame:
    """Return the rows of a file as a DataFrame: texts and lists are objects, others `Int64`, `boolean`, `float64`."""
    import pandas as pd

    rows = map(msgspec.structs.astuple, read_rows(path, table, wanted))
    names = _names(table, wanted)
    kinds = {column.name: column.dtype for column in columns(table)}
    dtypes = {name: _DTYPES.get(kinds[name], "object") for name in names}
    chunks = [pd.DataFrame(columns=names, dtype=object).astype(dtypes)]
    texts = dict[Any, Any]()
    collects = gc.isenabled()
    gc.disable()  # the collector would look through the new lists again and again
    try:
        # the objects of all rows would take more room than arrays
        while chunk := list(islice(rows, _CHUNK)):
            series: dict[str, pd.Series] = {}
            for name, values in zip(names, zip(*chunk, strict=True), strict=True):
                # Equal texts become one object.
                shared = (
                    [texts.setdefault(text, text) for text in values]
                    if kinds[name] == "string"
                    else values
                )
                series[name] = pd.Series(shared, dtype=dtypes[name])
            chunks.append(pd.DataFrame(series))
    finally:
        if collects:
            gc.enable()
    return pd.concat(chunks, ignore_index=True)


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a DataFrame as dictionaries of Python values, None where a value is missing."""
    values = frame.astype(object)
    rows: list[Any] = values.where(values.notna(), None).to_dict("records")
    return rows


def _names(table: str, wanted: Collection[str] | None = None) -> list[str]:
    """The columns to read: the `wanted` ones and those that every row has."""
    names = [column.name for column in columns(table)]
    return [name for name in names if wanted is None or name in wanted or name in _NEEDED[table]]


# ---- Record keys: what makes two images the same, and which runs may be continued


# The flag that restores the recorded value; other fields have no flag.
_FLAGS = {name: f"--{name} {{}}" for name in ("dtype", "batch", "seed", "prompts", "threads")}
_FLAGS |= {"device_type": "--device {}", "compile": "--set compile={}"}


def record_key(task: ImageTask, fields: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a SHA-256 of all that an image's tokens and time depend on."""
    covered = {
        "cell": task.cell.settings(),
        "prompt_id": task.prompt.id,
        "repeat": task.repeat,
        "seed": task.seed,
    }
    text = json.dumps(covered | {"run": fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_run(
    folder: str, manifest: Mapping[str, Any], wanted: Mapping[str, Any], finished: int
) -> None:
    """Raise `RefusedError` naming the first of the `wanted` manifest entries that differs in a run with images."""
    recorded = _comparable({name: manifest.get(name) for name in wanted})
    now = _comparable(wanted)
    for name in dict.fromkeys([*recorded, *now]):
        before = recorded.get(name)
        after = now.get(name)
        if before == after or (name == "threads" and None in (before, after)):
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = (
                [x for x in before if x not in after],
                [x for x in after if x not in before],
            )
        advice = "Start a new run beside it with --no-resume, or elsewhere with --out FOLDER."
        if name in _FLAGS:
            advice += f" Or resume with {_FLAGS[name].format(_show(before))}"
        raise RefusedError(
            f"cannot resume {folder}: {name} changed\n  recorded  {_show(before)}\n  now       {_show(after)}\n"
            f"{finished} finished images were made with the recorded value; new images would not be comparable.",
            advice,
        )


def _comparable(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must stay the same; other images and metrics continue a run."""
    settings = dict(entries.get("key") or {})
    named = {
        "weights": "weights of",
        "rules": "code of the rule",
        "draftings": "code of the drafting",
    }
    for field, text in named.items():
        settings |= {f"{text} {name}": value for name, value in settings.pop(field, {}).items()}
    experiment = entries.get("experiment") or {}
    for name in ("model", "prompts", "seed", "batch", "model_defaults", "cells"):
        settings[name] = experiment.get(name)
    return settings | {"threads": entries.get("threads")}


def _show(value: object) -> str:
    if value is None or value == []:
        return "(nothing)"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else text[:297] + "..."
