"""A run directory: manifest, records, scores and images, and which images of a plan are done.

Every record is on the disk before the next image starts, so an interrupted run loses no finished image and the same
command resumes it. One process at a time writes to a run directory (a lock); reading needs no lock. `report/` writes
the CSV files, which can be rebuilt at any time.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageKey, ImageTask
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import draft_of, write_atomically
from lantern_bench.runs.records import (
    KeyFields,
    RecordKeys,
    Row,
    RowFile,
    check_same_experiment,
    check_same_key,
    no_room,
    read_frame,
    read_rows,
)
from lantern_bench.schema import READABLE, SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd

MANIFEST, RECORDS, SCORES, LOCK, WRITER = "manifest.json", "records.jsonl", "scores.jsonl", ".lock", ".writer.json"
# What a resumed run needs of its records.
_SCANNED = ("cell_id", "prompt_id", "repeat", "process", "seconds", "pixel_seconds", "disturbed")
RESULTS_VARIABLE = "LANTERN_BENCH_RESULTS"

# ---- Finding and reading runs


@dataclass(frozen=True, eq=False)
class RunData:
    """The contents of a run directory."""

    folder: Path
    manifest: dict[str, Any]
    records: pd.DataFrame  # one row an image, as `records.read_frame`
    scores: list[Row]


def results_root() -> Path:
    """Return the folder of run directories (`LANTERN_BENCH_RESULTS`, else `results`); it need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def find_run(name: str | Path, root: Path) -> Path:
    """Return a run directory by path, by name under `root`, or by the start of its name if only one matches."""
    for folder in (Path(name), root / name):
        if (folder / MANIFEST).is_file():
            return folder
    runs = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    close = [run for run in runs if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    wrong = "several runs start with this" if close else "no such run"
    raise UserError(f"{name}: {wrong}", f"The runs in {root}: {', '.join(close or runs) or 'none yet'}.")


def run_folder(experiment: ResolvedExperiment, root: Path, out: Path | None = None, *, resume: bool = True) -> Path:
    """Return the run directory: `out` or `root/<run name>`; without `resume` the first of -2, -3, ... that is free."""
    folder = out if out is not None else root / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    later = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in later if not (path / RECORDS).exists())


def read_run(folder: Path, wanted: Collection[str] | None = None) -> RunData:
    """Return the contents of a run directory; raises as `read_manifest` and `read_rows`.

    `wanted` leaves out the columns of records that are not in it.
    """
    return RunData(folder, read_manifest(folder), _latest(folder, wanted), read_scores(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raises `UserError` when there is none, `RefusedError` for another schema version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{folder}: not a run directory, it has no {MANIFEST}"
        raise UserError(message, "Give one that a sweep wrote.") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON", "Restore it, or start a new run.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version not in READABLE:
        message = f"{path}: schema version {version}, and this program reads {' and '.join(map(str, READABLE))}"
        raise RefusedError(message, "Use the release that wrote the run.")
    return dict(manifest)


def read_records(folder: Path) -> list[Row]:
    """Return the last record of every image, failed ones included; raises `UserError` for a damaged line."""
    rows = (msgspec.structs.asdict(row) for row in read_rows(folder / RECORDS, "records"))
    return list({row["record_key"]: row for row in rows}.values())


def read_scores(folder: Path) -> list[Row]:
    """Return all scores of a run in the order they were written; raises `UserError` for a damaged line."""
    return [msgspec.structs.asdict(row) for row in read_rows(folder / SCORES, "scores")]


def _latest(folder: Path, wanted: Collection[str] | None) -> pd.DataFrame:
    """The last record of every image as a DataFrame (`records.read_frame`)."""
    records = read_frame(folder / RECORDS, "records", wanted)
    replaced = records["record_key"].duplicated(keep="last")
    return records[~replaced].reset_index(drop=True) if replaced.any() else records


@functools.lru_cache(maxsize=1)
def _scanned(folder: Path, _state: tuple[int, int, int]) -> pd.DataFrame:
    return _latest(folder, _SCANNED)


def scan_records(folder: Path) -> pd.DataFrame:
    """Return what a resumed run needs of its records; a file that has not changed is not read again.

    Columns `_SCANNED`, record_key and status; raises as `read_rows`.
    """
    path = folder / RECORDS
    state = path.stat() if path.is_file() else None
    return _scanned(folder.absolute(), (state.st_ino, state.st_size, state.st_mtime_ns) if state else (0, 0, 0))


def finished_records(folder: Path) -> pd.DataFrame:
    """Return the records of `scan_records` with status `ok`."""
    records = scan_records(folder)
    return records[records["status"] == "ok"]


def done_images(folder: Path) -> set[ImageKey]:
    """Return the key of every image with status `ok`; needs no torch."""
    if not (folder / RECORDS).is_file():
        return set()
    finished = finished_records(folder)
    return set(zip(finished["cell_id"], finished["prompt_id"], finished["repeat"], strict=True))


def seconds_per_image(folder: Path) -> dict[str, float]:
    """Return mean seconds per image by cell id, pixels included, of the finished images; empty without any."""
    finished = finished_records(folder)
    seconds = finished["seconds"] + finished["pixel_seconds"].fillna(0.0)
    return {str(cell_id): float(mean) for cell_id, mean in seconds.groupby(finished["cell_id"]).mean().dropna().items()}


# ---- Writing runs


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
        if not len(finished_records(self.folder)):
            message = f"{self.folder} has no images to score"
            raise RefusedError(message, "Resume the run with the command that started it.")
        self._scores = RowFile(self.folder / SCORES, "scores")

    def records(self) -> list[Row]:
        """Return the last record of every image, failed ones included."""
        return read_records(self.folder)

    def append_score(self, score: Mapping[str, Any]) -> None:
        """Append a score; raises `ValueError` for a column that `schema.py` does not declare."""
        self._scores.append({"schema_version": SCHEMA_VERSION, **score})

    def update_manifest(self, **entries: Any) -> None:
        """Set entries of the manifest and write it as a whole."""
        self.manifest |= entries
        text = json.dumps(_as_json(self.manifest), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            write_atomically(self.folder / MANIFEST, text.encode() + b"\n")
        except OSError as error:
            raise no_room(self.folder / MANIFEST, error) from error

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
    another process uses it or when its finished images were decoded with other settings.
    """

    def __init__(self, folder: Path, experiment: ResolvedExperiment, key: KeyFields) -> None:
        self.manifest: dict[str, Any] = {}
        self.key, self._keys, self._experiment = key, RecordKeys(key), _as_json(experiment.to_dict())
        self._acquire(folder)

    def _open(self) -> None:
        self._done = set(finished_records(self.folder)["record_key"])
        processes = scan_records(self.folder)["process"]
        self._next_process = 1 + int(processes.max()) if len(processes.dropna()) else 0
        if (self.folder / MANIFEST).exists():
            self.manifest = read_manifest(self.folder)
            if self.finished:
                name, recorded = self.folder.name, self.manifest.get("experiment", {})
                check_same_key(name, self.manifest.get("key", {}), self.key, self.finished)
                check_same_experiment(name, recorded, self._experiment, self.finished)
        try:
            self._records = RowFile(self.folder / RECORDS, "records")
            self._scores = RowFile(self.folder / SCORES, "scores")
            described = {"schema_version": SCHEMA_VERSION, "run": self.folder.name}
            self.update_manifest(**described, experiment=self._experiment, key=self.key)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def key_of(self, task: ImageTask) -> str:
        """Return the record key of a planned image under this run's settings."""
        return self._keys.key_of(task)

    def is_done(self, task: ImageTask) -> bool:
        """Return whether the image has a record with status `ok`; the runner retries failed images."""
        return self.key_of(task) in self._done

    @property
    def finished(self) -> int:
        """How many images are finished."""
        return len(self._done)

    def next_process(self) -> int:
        """Return the number of a process that begins to decode images now: the first that no record has."""
        return self._next_process

    def append(self, task: ImageTask, record: Mapping[str, Any]) -> Row:
        """Append the record of one image and return it complete.

        The task gives key, cell, prompt, repeat, seed and order; other columns that `record` lacks are None; `status`
        is `ok` unless `record` has another. Raises `ValueError` for a column that `schema.py` does not declare.
        """
        planned = {
            "schema_version": SCHEMA_VERSION,
            "record_key": self.key_of(task),
            **task.cell.columns(),
            "prompt_id": task.prompt.id,
            "prompt": task.prompt.text,
            "prompt_source": task.prompt.source or None,
            "repeat": task.repeat,
            "seed": task.seed,
            "order_index": task.order_index,
            "status": "ok",
        }
        row = self._records.append(planned | dict(record))
        (self._done.add if row["status"] == "ok" else self._done.discard)(row["record_key"])
        self._next_process = max(self._next_process, 1 + (row["process"] or 0))
        return row

    def write_image(self, task: ImageTask, png: bytes) -> str:
        """Write an image's PNG file; return its path relative to the run directory, for the record's `image`."""
        try:
            write_atomically(self.folder / task.image, png)
        except OSError as error:
            raise no_room(self.folder / task.image, error) from error
        return task.image

    def close(self) -> None:
        """Close the files and release the lock; closing twice does no harm."""
        self._records.close()
        super().close()


# ---- The lock of a run directory


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
            message = f"{folder} is in use: {self._holder()} is writing to it"
            raise RefusedError(message, "Wait until it ends, or give another --out.") from error
        try:
            process = {"pid": os.getpid(), "host": socket.gethostname()}
            write_atomically(self._writer, json.dumps(process).encode() + b"\n")
        except BaseException:
            self._lock.release()
            raise

    def _holder(self) -> str:
        try:
            process = json.loads(self._writer.read_text(encoding="utf-8"))
            return f"process {process['pid']} on {process['host']}"
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
        files = {folder / name for name in (LOCK, WRITER, RECORDS, SCORES)}
        drafts = {draft_of(folder / name) for name in (WRITER, MANIFEST)}  # what a sweep killed at its start leaves
        others = {path.name for path in set(folder.iterdir()) - files - drafts}
        if others:
            message = f"--out {folder}: contains {min(others)} and is not a run directory"
            raise UserError(message, "Give a new folder, or a run directory.")


def cannot_write(folder: Path, error: OSError | None = None) -> UserError:
    """Return the error for a folder that cannot be written."""
    reason = f": {error.strerror or error}" if error is not None else ""
    return UserError(f"--out {folder}: cannot be written{reason}", "Give a folder that you may write to.")


def _as_json(value: Any) -> Any:
    """Return the value as JSON returns it, so that it compares equal to what is read (dates become text)."""
    return json.loads(json.dumps(value, default=str))
