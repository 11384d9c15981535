"""A run's folder: manifest, records, scores and images, and what of a plan is done already.

The layout is that of results.md. Every record is on the disk before the next image starts, so that nothing finished
is ever lost; the same command continues where it stopped. One process writes to a folder at a time (a lock); reading
needs none. The CSV views are made elsewhere (`report/`), and may be deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import Unit
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.runs.keys import KeyFields, check_same_experiment, check_same_key, record_key
from lantern_bench.schema import READABLE, SCHEMA_VERSION, columns

# ---- Files with one JSON object a line, appended to and never rewritten


class JsonLines:
    """A file opened for appending; a cut last line is removed when it is opened. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab+")
        self._drop_cut_line()

    def _drop_cut_line(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
            os.fsync(self._file.fileno())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and wait until it is on the disk; raises `ValueError` for NaN and infinity."""
        text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of all whole lines; none when there is no file.

    Raises `UserError` with the line's number for a whole line that is no JSON object: something else wrote to it.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"{path} line {number}: damaged, not a JSON object",
                "Remove this line; the same command makes what it held again.",
            )
        rows.append(row)
    return rows


# ----

MANIFEST, RECORDS, SCORES, LOCK = "manifest.json", "records.jsonl", "scores.jsonl", ".lock"


@dataclass(frozen=True)
class RunData:
    """What a run left behind: the manifest, one record an image, all scores."""

    folder: Path
    manifest: dict[str, Any]
    records: list[dict[str, Any]]
    scores: list[dict[str, Any]]


def run_folder(experiment: ResolvedExperiment, root: Path, out: Path | None = None, *, resume: bool = True) -> Path:
    """Return the folder of a run: `out` or `root/<run name>`, with -2, -3, ... when a fresh one is asked for."""
    folder = out if out is not None else root / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    number = 2
    while (folder.with_name(f"{folder.name}-{number}") / RECORDS).exists():
        number += 1
    return folder.with_name(f"{folder.name}-{number}")


class RunStore:
    """A run's folder opened for writing; a context manager that holds the folder's lock.

    Opening raises `UserError` when the folder cannot be written or holds something else, and `RefusedError` when
    another process has it or when it holds images made in another way.
    """

    def __init__(self, folder: Path, experiment: ResolvedExperiment, key: KeyFields) -> None:
        self.folder = folder
        self.key = key
        self._lock = lock_run(folder)
        try:
            self._open(experiment)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, experiment: ResolvedExperiment) -> None:
        asked = _plain(experiment.to_dict())
        finished = sum(1 for row in read_records(self.folder) if row["status"] == "ok")
        self.manifest: dict[str, Any] = {}
        if (self.folder / MANIFEST).exists():
            self.manifest = read_manifest(self.folder)
            if finished:
                check_same_key(self.folder.name, self.manifest.get("key", {}), self.key, finished)
                check_same_experiment(self.folder.name, self.manifest.get("experiment", {}), asked, finished)
        try:
            self._records = JsonLines(self.folder / RECORDS)
            self._scores = JsonLines(self.folder / SCORES)
            self.update_manifest(schema_version=SCHEMA_VERSION, run=self.folder.name, experiment=asked, key=self.key)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        self._latest = {row["record_key"]: row for row in read_records(self.folder)}

    def update_manifest(self, **facts: Any) -> None:
        """Set keys of the manifest and write it as a whole."""
        self.manifest |= facts
        write_manifest(self.folder, self.manifest)

    def note_protocol(self, protocol: Mapping[str, Any]) -> None:
        """Keep what a quality protocol says in the manifest, by name."""
        known = self.manifest.get("protocols", {})
        self.update_manifest(protocols={**known, str(protocol["name"]): dict(protocol)})

    def key_of(self, unit: Unit) -> str:
        """Return the record key of a planned image under this run's settings."""
        return record_key(self.key, unit.cell.settings(), unit.prompt.id, unit.repeat, unit.seed)

    def is_done(self, unit: Unit) -> bool:
        """Return whether the image has a good record; a failed one is to be tried again."""
        return self._latest.get(self.key_of(unit), {}).get("status") == "ok"

    def to_do(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the images that are not done, in their order."""
        return [unit for unit in units if not self.is_done(unit)]

    def append(self, unit: Unit, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append the record of one image and return it complete.

        What follows from the unit (key, cell, prompt, repeat, seed, order) is filled in, the rest is empty where
        `record` does not have it; `status` is `ok` unless given. Raises `ValueError` for a column that
        `schema.py` does not declare.
        """
        names = [column.name for column in columns("records")]
        unknown = set(record) - set(names)
        if unknown:
            raise ValueError(f"records have no column {', '.join(sorted(unknown))}")
        known = {"schema_version": SCHEMA_VERSION, "record_key": self.key_of(unit), **unit.cell.columns()}
        known |= {"prompt_id": unit.prompt.id, "prompt": unit.prompt.text, "repeat": unit.repeat, "seed": unit.seed}
        known |= {"prompt_source": unit.prompt.source or None}
        known |= {"order_index": unit.order_index, "status": "ok", **record}
        row = {name: known.get(name) for name in names}
        self._records.append(row)
        self._latest[row["record_key"]] = row
        return row

    def append_score(self, score: Mapping[str, Any]) -> None:
        """Append a score; raises `ValueError` for a column that `schema.py` does not declare."""
        self._scores.append(completed_score(score))

    def write_image(self, unit: Unit, png: bytes) -> str:
        """Write an image's PNG file; return its path relative to the folder, for the record's `image`."""
        write_atomically(self.folder / unit.image, png)
        return unit.image

    def records(self) -> list[dict[str, Any]]:
        """Return the last word on every image, failed ones included."""
        return list(self._latest.values())

    def close(self) -> None:
        """Close the files and let go of the lock; closing twice does no harm."""
        self._records.close()
        self._scores.close()
        self._lock.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def completed_score(score: Mapping[str, Any]) -> dict[str, Any]:
    """Return a score with every column in order; raises `ValueError` for one that `schema.py` does not declare."""
    names = [column.name for column in columns("scores")]
    unknown = set(score) - set(names)
    if unknown:
        raise ValueError(f"scores have no column {', '.join(sorted(unknown))}")
    known = {"schema_version": SCHEMA_VERSION, **score}
    return {name: known.get(name) for name in names}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a run's manifest as a whole."""
    text = json.dumps(_plain(dict(manifest)), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / MANIFEST, text.encode() + b"\n")


def lock_run(folder: Path) -> FileLock:
    """Take a run folder's lock, making the folder where there is none.

    Raises `UserError` for a folder that holds something else or cannot be written, `RefusedError` for one in use.
    """
    if folder.is_dir() and not (folder / MANIFEST).exists():
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, RECORDS, SCORES))
        if strangers:
            raise UserError(
                f"--out {folder}: the folder holds {strangers[0]} and is no run", "Give a new folder, or a run's own."
            )
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RefusedError(
            f"{folder} is in use: another process is writing to it", "Wait for it to end, or give another --out."
        ) from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return lock


def _cannot_write(folder: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"--out {folder}: cannot be written: {reason}", "Give a folder that you may write to.")


def _plain(value: Any) -> Any:
    """Return the value as JSON gives it back, so that it compares equal to what is read (dates become text)."""
    return json.loads(json.dumps(value, default=str))


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of every record key, in order of first appearance: a retried image counts once."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found[row["record_key"]] = row
    return list(found.values())


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the last word on every image of a run, failed ones included; raises `UserError` for a damaged line."""
    rows = read_lines(folder / RECORDS)
    for number, row in enumerate(rows, start=1):
        if "record_key" not in row or "status" not in row:
            raise UserError(f"{folder / RECORDS} line {number}: not a record", "Remove this line.")
    return latest(_with_all_columns(rows, "records"))


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Return all scores of a run in the order in which they were made; raises `UserError` for a damaged line."""
    return _with_all_columns(read_lines(folder / SCORES), "scores")


def _with_all_columns(rows: Iterable[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """Rows with every column of today; those that their version did not have are empty."""
    empty: dict[str, Any] = dict.fromkeys(column.name for column in columns(table))
    return [empty | row for row in rows]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raises `UserError` when there is none, `RefusedError` for another schema version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: not a run, it has no {MANIFEST}", "Give a folder that a sweep made.") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON", "Restore it, or start a fresh run.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version not in READABLE:
        raise RefusedError(
            f"{path}: schema version {version}, and this program reads {' and '.join(map(str, READABLE))}",
            "Use the release that made the run.",
        )
    return dict(manifest)


def read_run(folder: Path) -> RunData:
    """Return all that a run left behind; raises `UserError` as the single readers do."""
    return RunData(folder, read_manifest(folder), read_records(folder), read_scores(folder))


def done_images(folder: Path) -> set[tuple[str, str, int]]:
    """Return (cell id, prompt id, repeat) of every good record: what a plan made without torch can know."""
    return {(r["cell_id"], r["prompt_id"], r["repeat"]) for r in read_records(folder) if r["status"] == "ok"}


def find_run(name: str | Path, root: Path) -> Path:
    """Return a run's folder by path, by name under `root`, or by the only name there that starts so."""
    for folder in (Path(name), root / name):
        if (folder / MANIFEST).is_file():
            return folder
    there = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    close = [run for run in there if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    listed = ", ".join(close or there) or "none yet"
    wrong = "several runs start so" if close else "no such run"
    raise UserError(f"{name}: {wrong}", f"The runs in {root}: {listed}.")


# ---- A finished run opened for scoring: its records are read, scores are appended, nothing is decoded


class ScoreBook:
    """A run's folder for scoring; a context manager that holds the folder's lock.

    Opening raises `UserError` when the folder is no run or cannot be written, `RefusedError` when another process has
    it or when it holds no finished image.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = read_manifest(folder)
        self._lock = lock_run(folder)
        try:
            self._records = read_records(folder)
            if not any(row["status"] == "ok" for row in self._records):
                raise RefusedError(
                    f"{folder} holds no images to score", "The command that began this run continues it."
                )
            self._scores = JsonLines(folder / SCORES)
        except BaseException:
            self._lock.release()
            raise

    def records(self) -> list[dict[str, Any]]:
        """Return the last word on every image, failed ones included."""
        return self._records

    def append_score(self, score: Mapping[str, Any]) -> None:
        """Append a score; raises `ValueError` for a column that `schema.py` does not declare."""
        self._scores.append(completed_score(score))

    def note_protocol(self, protocol: Mapping[str, Any]) -> None:
        """Keep what a protocol says in the manifest, by name."""
        protocols = {**self._manifest.get("protocols", {}), str(protocol["name"]): dict(protocol)}
        self._manifest |= {"protocols": protocols}
        write_manifest(self.folder, self._manifest)

    def close(self) -> None:
        """Close the file and let go of the lock."""
        self._scores.close()
        self._lock.release()

    def __enter__(self) -> ScoreBook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
