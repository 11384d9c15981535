"""A run directory: manifest, records, scores and images, and which images of a plan are done.

Every record is on the disk before the next image starts, so an interrupted run loses no finished image and the same
command resumes it. One process at a time writes to a run directory (a lock); reading needs no lock. `report/` writes
the CSV files, which can be rebuilt at any time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageKey, ImageTask
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import draft_of, write_atomically
from lantern_bench.runs.keys import KeyFields, RecordKeys, check_same_experiment, check_same_key
from lantern_bench.schema import READABLE, SCHEMA_VERSION, columns

if TYPE_CHECKING:
    from lantern_bench.runs.columns import Records

MANIFEST, RECORDS, SCORES, LOCK, WRITER = "manifest.json", "records.jsonl", "scores.jsonl", ".lock", ".writer.json"
# What a resumed run needs of its records.
_SCANNED = ("cell_id", "prompt_id", "repeat", "process", "seconds", "pixel_seconds", "disturbed")
RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"

# ---- Finding and reading runs


@dataclass(frozen=True)
class RunData:
    """The contents of a run directory: the manifest, one record an image, all scores."""

    folder: Path
    manifest: dict[str, Any]
    records: Sequence[dict[str, Any]]
    scores: list[dict[str, Any]]


def results_root() -> Path:
    """Return the folder of run directories (`LANTERN_BENCH_RESULTS`, else `results`); it need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def find_run(name: str | Path, root: Path) -> Path:
    """Return a run directory by path, by name under `root`, or by the start of its name if only one matches."""
    for folder in (Path(name), root / name):
        if (folder / MANIFEST).is_file():
            return folder
    there = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    close = [run for run in there if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    wrong = "several runs start with this" if close else "no such run"
    raise UserError(f"{name}: {wrong}", f"The runs in {root}: {', '.join(close or there) or 'none yet'}.")


def run_folder(experiment: ResolvedExperiment, root: Path, out: Path | None = None, *, resume: bool = True) -> Path:
    """Return the run directory: `out` or `root/<run name>`; without `resume` the first of -2, -3, ... that is free."""
    folder = out if out is not None else root / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    later = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in later if not (path / RECORDS).exists())


def read_run(folder: Path, wanted: Collection[str] | None = None) -> RunData:
    """Return the contents of a run directory; raises as `read_manifest`, `read_records` and `read_scores`.

    `wanted` is as in `read_records`.
    """
    return RunData(folder, read_manifest(folder), read_records(folder, wanted), read_scores(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raises `UserError` when there is none, `RefusedError` for another schema version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{folder}: not a run directory, it has no {MANIFEST}"
        raise UserError(what, "Give one that a sweep wrote.") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON", "Restore it, or start a new run.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version not in READABLE:
        what = f"{path}: schema version {version}, and this program reads {' and '.join(map(str, READABLE))}"
        raise RefusedError(what, "Use the release that wrote the run.")
    return dict(manifest)


def read_records(folder: Path, wanted: Collection[str] | None = None) -> Records:
    """Return the last record of every image of a run, failed ones included; raises `UserError` for a damaged line.

    `wanted` leaves out the columns that are not in it.
    """
    from lantern_bench.runs.columns import read_columns

    path = folder / RECORDS
    records = read_columns(path, "records", None if wanted is None else {*wanted, "record_key", "status"})
    for name in ("record_key", "status"):
        if None in (values := records.column(name)):
            line = next(number for number, value in enumerate(values, start=1) if value is None)
            raise UserError(f"{path} line {line}: not a record", "Remove this line.")
    # Runs without this column are of one process.
    return records.filled("process", 0.0).latest()


@functools.lru_cache(maxsize=1)
def _scanned(folder: Path, _state: tuple[int, int, int]) -> Records:
    return read_records(folder, _SCANNED)


def scan_records(folder: Path) -> Records:
    """Return what a resumed run needs of its records; a file that has not changed is not read again.

    Columns `_SCANNED`, record_key and status; raises as `read_records`.
    """
    path = folder / RECORDS
    state = path.stat() if path.is_file() else None
    return _scanned(folder.absolute(), (state.st_ino, state.st_size, state.st_mtime_ns) if state else (0, 0, 0))


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Return all scores of a run in the order they were written; raises `UserError` for a damaged line."""
    return _read_lines(folder / SCORES, "scores")


def _read_lines(path: Path, table: str) -> list[dict[str, Any]]:
    rows = []
    for line in scan_lines(path, table):
        if line.row is None:
            repair = f"`lantern-bench verify {path.parent} --repair` makes its content again."
            raise UserError(f"{path} line {line.number}: {line.problem}", repair)
        rows.append(line.row)
    return rows


class Line(NamedTuple):
    """A whole line of a file: its bytes with the line break, and its row, or what is wrong with it."""

    number: int
    content: bytes
    row: dict[str, Any] | None
    problem: str = ""


def scan_lines(path: Path, table: str) -> Iterator[Line]:
    """Yield all whole lines of a file; rows have every column of the table, None where their version lacked it.

    Runs without the column `process` are of one process, number 0. A line without a checksum is of an older version.
    """
    empty: dict[str, Any] = dict.fromkeys(column.name for column in columns(table))
    empty |= {"process": 0} if "process" in empty else {}
    needed = ("record_key", "status") if table == "records" else ()
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        for number, content in enumerate(file, start=1):
            if not content.endswith(b"\n"):  # cut off: it is removed when the file is opened for writing
                return
            try:
                row = empty | json.loads(content)
            except (ValueError, TypeError, RecursionError):
                yield Line(number, content, None, "damaged, not a JSON object")
                continue
            if not (has_checksum(content) or is_older(row, empty)):
                yield Line(number, content, None, "damaged, its checksum differs")
            elif any(row[name] is None for name in needed):
                yield Line(number, content, None, "not a record")
            else:
                yield Line(number, content, row)


# A line ends with this, 16 digits, and that.
_CHECKSUM, _CLOSE = b', "checksum": "', b'"}\n'
_END = len(_CHECKSUM) + 16 + len(_CLOSE)


def _checksum(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest()[:16].encode()


def has_checksum(line: bytes) -> bool:
    """Whether a line is whole: it ends with the checksum of the bytes in front of it."""
    return line[-_END:] == _CHECKSUM + _checksum(line[:-_END]) + _CLOSE


def is_older(row: Mapping[str, Any], known: Collection[str]) -> bool:
    """Whether a row without a checksum was written so: no column has another name than the `known` ones."""
    version = row.get("schema_version")
    return row.get("checksum") is None and (version != SCHEMA_VERSION or all(name in known for name in row))


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line with its checksum behind all other columns; raises `ValueError` for NaN and infinity."""
    others = {name: value for name, value in row.items() if name != "checksum"}
    line = json.dumps(others, ensure_ascii=False, allow_nan=False).encode()[:-1]
    return line + _CHECKSUM + _checksum(line) + _CLOSE


def done_images(folder: Path) -> set[ImageKey]:
    """Return the key of every image with status `ok`; needs no torch."""
    records = scan_records(folder)
    keys = zip(*(records.column(name) for name in ("cell_id", "prompt_id", "repeat")), strict=True)
    return set(compress(keys, records.is_value("status", "ok")))


def seconds_per_image(folder: Path) -> dict[str, float]:
    """Return mean seconds per image by cell id, pixels included, of the finished images; empty without any."""
    spent: dict[str, list[float]] = defaultdict(list)
    for row in scan_records(folder).rows("cell_id", "status", "seconds", "pixel_seconds"):
        if row["status"] == "ok" and row["seconds"] is not None:
            spent[row["cell_id"]].append(row["seconds"] + (row["pixel_seconds"] or 0.0))
    return {cell_id: sum(values) / len(values) for cell_id, values in spent.items()}


# ---- Writing runs


class _JsonLines:
    """A JSON lines file opened for appending; a partial last line is removed when it is opened."""

    def __init__(self, path: Path, table: str) -> None:
        self._path, self._names, self._table = path, [column.name for column in columns(table)], table
        # Without a buffer: what the disk has no room for must not be written later.
        self._file = path.open("ab+", buffering=0)
        self._file.truncate(whole_lines(self._file))

    def append(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row with every column and wait until it is on the disk; return it.

        Raises `ValueError` for a column that `schema.py` does not declare, and for NaN and infinity; `RefusedError`
        where the disk is full.
        """
        unknown = set(values) - set(self._names)
        if unknown:
            raise ValueError(f"{self._table} have no column {', '.join(sorted(unknown))}")
        content = line_of({name: values.get(name) for name in self._names})
        whole = self._file.seek(0, os.SEEK_END)
        try:
            left = memoryview(content)
            while left:  # a write can end early, where the disk fills up
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # else the part of a line is removed at the next start
                self._file.truncate(whole)
            raise _no_room(self._path, error) from error
        return dict(json.loads(content))

    def close(self) -> None:
        self._file.close()


def whole_lines(file: BinaryIO) -> int:
    """Return the bytes of a file up to its last line break."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - (1 << 16))
        file.seek(start)
        if (at := file.read(end - start).rfind(b"\n")) >= 0:
            return start + at + 1
        end = start
    return 0


class ScoreStore:
    """A finished run opened for scoring; a context manager that holds the lock of the run directory.

    Opening raises `UserError` when the directory is not a run or cannot be written, `RefusedError` when another process
    uses it or when it has no finished image.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self._acquire(folder)

    def _acquire(self, folder: Path) -> None:
        self.folder, self._lock = folder, lock_run(folder)
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        if not scan_records(self.folder).is_value("status", "ok").any():
            what = f"{self.folder} has no images to score"
            raise RefusedError(what, "Resume the run with the command that started it.")
        self._scores = _JsonLines(self.folder / SCORES, "scores")

    def records(self) -> Records:
        """Return the last record of every image, failed ones included."""
        return read_records(self.folder)

    def append_score(self, score: Mapping[str, Any]) -> None:
        """Append a score; raises `ValueError` for a column that `schema.py` does not declare."""
        self._scores.append({"schema_version": SCHEMA_VERSION, **score})

    def update_manifest(self, **facts: Any) -> None:
        """Set keys of the manifest and write it as a whole."""
        self.manifest |= facts
        text = json.dumps(_plain(self.manifest), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            write_atomically(self.folder / MANIFEST, text.encode() + b"\n")
        except OSError as error:
            raise _no_room(self.folder / MANIFEST, error) from error

    def close(self) -> None:
        """Close the files and release the lock; closing twice does no harm."""
        self._scores.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunStore(ScoreStore):
    """A run directory opened for writing records and scores.

    Opening raises `UserError` when the directory cannot be written or has other contents, and `RefusedError` when
    another process uses it or when its finished images were made with other settings.
    """

    def __init__(self, folder: Path, experiment: ResolvedExperiment, key: KeyFields) -> None:
        self.manifest: dict[str, Any] = {}
        self._keys = RecordKeys(key)
        self.key, self._experiment = key, _plain(experiment.to_dict())
        self._acquire(folder)

    def _open(self) -> None:
        records = scan_records(self.folder)
        self._done = set(compress(records.column("record_key"), records.is_value("status", "ok")))
        self._next_process = 1 + int(max(records.floats("process"), default=-1))
        if (self.folder / MANIFEST).exists():
            self.manifest = read_manifest(self.folder)
            finished = len(self._done)
            if finished:
                check_same_key(self.folder.name, self.manifest.get("key", {}), self.key, finished)
                check_same_experiment(self.folder.name, self.manifest.get("experiment", {}), self._experiment, finished)
        try:
            self._records = _JsonLines(self.folder / RECORDS, "records")
            self._scores = _JsonLines(self.folder / SCORES, "scores")
            facts = {"schema_version": SCHEMA_VERSION, "run": self.folder.name}
            self.update_manifest(**facts, experiment=self._experiment, key=self.key)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def key_of(self, task: ImageTask) -> str:
        """Return the record key of a planned image under this run's settings."""
        return self._keys.key_of(task.cell, task.prompt.id, task.repeat, task.seed)

    def is_done(self, task: ImageTask) -> bool:
        """Return whether the image has a record with status `ok`; the runner retries failed images."""
        return self.key_of(task) in self._done

    @property
    def finished(self) -> int:
        """How many images are finished."""
        return len(self._done)

    def next_process(self) -> int:
        """Return the number of a process that begins to make images now: the first that no record has."""
        return self._next_process

    def append(self, task: ImageTask, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append the record of one image and return it complete.

        The task gives key, cell, prompt, repeat, seed and order; other columns that `record` lacks are None; `status`
        is `ok` unless given. Raises `ValueError` for a column that `schema.py` does not declare.
        """
        known = {"schema_version": SCHEMA_VERSION, "record_key": self.key_of(task), **task.cell.columns()}
        known |= {"prompt_id": task.prompt.id, "prompt": task.prompt.text, "repeat": task.repeat, "seed": task.seed}
        known |= {"prompt_source": task.prompt.source or None, "order_index": task.order_index}
        row = self._records.append(known | {"status": "ok"} | dict(record))
        (self._done.add if row["status"] == "ok" else self._done.discard)(row["record_key"])
        self._next_process = max(self._next_process, 1 + (row["process"] or 0))
        return row

    def write_image(self, task: ImageTask, png: bytes) -> str:
        """Write an image's PNG file; return its path relative to the run directory, for the record's `image`."""
        try:
            write_atomically(self.folder / task.image, png)
        except OSError as error:
            raise _no_room(self.folder / task.image, error) from error
        return task.image

    def close(self) -> None:
        """Close the files and release the lock; closing twice does no harm."""
        self._records.close()
        super().close()


class RunLock:
    """The lock of a run directory: of the kernel, which frees it when its process ends, however that ends.

    Beside it `.writer.json` names the process that writes. What a killed process leaves there refuses nothing. On file
    systems without such locks filelock takes one that is stale when its process is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._writer, self._lock = folder / WRITER, FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            what = f"{folder} is in use: {self._holder()} is writing to it"
            raise RefusedError(what, "Wait until it ends, or give another --out.") from error
        try:
            named = {"pid": os.getpid(), "host": socket.gethostname()}
            write_atomically(self._writer, json.dumps(named).encode() + b"\n")
        except BaseException:
            self._lock.release()
            raise

    def _holder(self) -> str:
        try:
            named = json.loads(self._writer.read_text(encoding="utf-8"))
            return f"process {named['pid']} on {named['host']}"
        except (OSError, ValueError, TypeError, KeyError):  # it has only just begun, or is of an older version
            return "another process"

    def release(self) -> None:
        """Release the lock; releasing twice does no harm."""
        if self._lock.is_locked:
            self._writer.unlink(missing_ok=True)
            self._lock.release()


def lock_run(folder: Path) -> RunLock:
    """Lock a run directory, creating it if needed.

    Raises `UserError` for a folder that has other contents or cannot be written, `RefusedError` for one in use.
    """
    check_is_run(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return RunLock(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def check_is_run(folder: Path) -> None:
    """Raise `UserError` for a folder that has other contents than a run's."""
    if folder.is_dir() and not (folder / MANIFEST).exists():
        own = {folder / name for name in (LOCK, WRITER, RECORDS, SCORES)}
        killed = {draft_of(folder / name) for name in (WRITER, MANIFEST)}  # what a sweep killed at its start leaves
        others = {path.name for path in set(folder.iterdir()) - own - killed}
        if others:
            what = f"--out {folder}: contains {min(others)} and is not a run directory"
            raise UserError(what, "Give a new folder, or a run directory.")


def cannot_write(folder: Path, error: OSError | None = None) -> UserError:
    """Return the error for a folder that cannot be written."""
    reason = f": {error.strerror or error}" if error is not None else ""
    return UserError(f"--out {folder}: cannot be written{reason}", "Give a folder that you may write to.")


def _no_room(path: Path, error: OSError) -> RefusedError:
    """Return the error for a file of a run that cannot be written any more; the disk is full, as a rule."""
    what = f"{path}: cannot be written: {error.strerror or error}"
    return RefusedError(what, "Everything before is kept. Repair the cause; the same command continues.")


def _plain(value: Any) -> Any:
    """Return the value as JSON returns it, so that it compares equal to what is read (dates become text)."""
    return json.loads(json.dumps(value, default=str))
