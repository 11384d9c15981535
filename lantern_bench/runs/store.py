"""A run directory: manifest, records, scores and images; one process at a time writes, reading needs no lock."""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageKey, ImageTask
from lantern_bench.runs.records import (
    Row,
    RowFile,
    check_same_run,
    no_room,
    read_frame,
    read_rows,
    record_key,
)
from lantern_bench.schema import READABLE, SCHEMA_VERSION
from lantern_bench.utils import signals
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import partial_path, write_atomically

if TYPE_CHECKING:
    import pandas as pd
from lantern_bench.utils.files import cannot_write, check_writable

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
SCORES = "scores.jsonl"
LOCK = ".lock"
WRITER = ".writer.json"
# in a manifest: true where a run was copied without them (docs/commit_run.py)
PICTURES_LEFT_OUT = "pictures_left_out"
# What a resumed run needs of its records.
_SCANNED = ("cell_id", "prompt_id", "repeat", "seconds", "pixel_seconds", "disturbed")
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
    """Return the folder of run directories, which need not exist."""
    return Path(os.environ.get(RESULTS_VARIABLE) or "results")


def known_runs() -> list[str]:
    """Return the names of the runs under `results_root()`."""
    return sorted(path.parent.name for path in results_root().glob(f"*/{MANIFEST}"))


def find_run(name: str | Path) -> Path:
    """Return a run directory by path, by name under `results_root()`, or by the start of a name that only one has."""
    root = results_root()
    for folder in (Path(name), root / name):
        if (folder / MANIFEST).is_file():
            return folder
    runs = known_runs()
    close = [run for run in runs if run.startswith(str(name))]
    if len(close) == 1:
        return root / close[0]
    wrong = "several runs start with this" if close else "no such run"
    raise UserError(
        f"{name}: {wrong}", f"The runs in {root}: {', '.join(close or runs) or 'none yet'}."
    )


def run_folder(
    experiment: ResolvedExperiment, out: Path | None = None, *, resume: bool = True
) -> Path:
    """Return `out` or `results/<run name>`; without `resume` the first of -2, -3, ... that is free."""
    folder = out if out is not None else results_root() / experiment.run_name
    if resume or not (folder / RECORDS).is_file():
        return folder
    later = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in later if not (path / RECORDS).exists())


def read_run(folder: Path, wanted: Collection[str] | None = None) -> RunData:
    """Return the contents of a run directory, with the `wanted` columns of its records (None: all)."""
    return RunData(
        folder=folder,
        manifest=read_manifest(folder),
        records=_latest(folder, wanted),
        scores=read_scores(folder),
    )


def without_records(folder: Path) -> RefusedError:
    """Return the error for a run directory that holds no records."""
    if any(folder.glob("*.csv")):
        return RefusedError(
            f"{folder} holds tables only, no records", "`show` and `curves` read its tables."
        )
    return RefusedError(
        f"{folder} holds no records yet", "Resume the run with the command that started it."
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raises `UserError` without one, `RefusedError` for another schema version."""
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
    """Return the last record of every image, also of failed ones."""
    rows = (msgspec.structs.asdict(row) for row in read_rows(folder / RECORDS, "records"))
    return list({row["record_key"]: row for row in rows}.values())


def read_scores(folder: Path) -> list[Row]:
    """Return all scores of a run in the order they were written."""
    return [msgspec.structs.asdict(row) for row in read_rows(folder / SCORES, "scores")]


def _latest(folder: Path, wanted: Collection[str] | None) -> pd.DataFrame:
    """The last record of every image as a DataFrame (`records.read_frame`)."""
    records = read_frame(folder / RECORDS, "records", wanted)
    replaced = records["record_key"].duplicated(keep="last")
    return records[~replaced].reset_index(drop=True) if replaced.any() else records


@functools.lru_cache(maxsize=1)
def _finished(folder: Path, _state: tuple[int, int, int]) -> pd.DataFrame:
    records = _latest(folder, _SCANNED)
    return records[records["status"] == "ok"]


def finished_records(folder: Path) -> pd.DataFrame:
    """Return `_SCANNED` of the records with status `ok`; an unchanged file is not read again."""
    path = folder / RECORDS
    state = path.stat() if path.is_file() else None
    return _finished(
        folder.absolute(), (state.st_ino, state.st_size, state.st_mtime_ns) if state else (0, 0, 0)
    )


def done_images(folder: Path) -> set[ImageKey]:
    """Return the key of every image with status `ok`."""
    finished = finished_records(folder)
    return set(zip(finished["cell_id"], finished["prompt_id"], finished["repeat"], strict=True))


NO_SPEED = "speed cannot be measured now"  # where most images were disturbed


def disturbance(finished: pd.DataFrame) -> str | None:
    """Say in one line how many of these records are of disturbed images; None without any."""
    marks = finished["disturbed"].dropna()
    timed = len(marks)
    count = int(marks.sum())
    if count == 0:
        return None
    text = f"{count} of {timed} images disturbed: their threads lacked a core for more than 5 % of the time"
    return f"{NO_SPEED}: {text}" if 2 * count > timed else text


# ---- Writing runs


class RunStore(AbstractContextManager["RunStore"]):
    """A run directory opened for writing, without `experiment` and `key` for scoring; holds its lock until closed.

    Raises `UserError` when the directory cannot be written or is no run, `RefusedError` when another process uses it,
    when its images were decoded with other settings, and when there are none to score.
    """

    def __init__(
        self,
        folder: Path,
        experiment: ResolvedExperiment | None = None,
        key: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = dict[str, Any]()
        with ExitStack() as opened:
            opened.enter_context(lock_run(folder))
            self._done = done_images(folder)
            if experiment is None or (folder / MANIFEST).exists():
                self.manifest = read_manifest(folder)
            if experiment is None and not self._done:
                message = f"{folder} has no images to score"
                raise RefusedError(message, "Resume the run with the command that started it.")
            if experiment is not None and self._done:
                wanted = {
                    "key": key,
                    "experiment": experiment.to_dict(),
                    "threads": experiment.settings.threads,
                }
                check_same_run(
                    folder=folder.name,
                    manifest=self.manifest,
                    wanted=wanted,
                    finished=self.finished,
                )
            self._records = opened.enter_context(closing(RowFile(folder / RECORDS, "records")))
            self._scores = opened.enter_context(closing(RowFile(folder / SCORES, "scores")))
            if experiment is not None:
                described = {"schema_version": SCHEMA_VERSION, "run": folder.name}
                self.update_manifest(**described, experiment=experiment.to_dict(), key=key)
            self._opened = opened.pop_all()

    @property
    def key(self) -> dict[str, Any]:
        """The fields of the record key that hold for the whole run."""
        return dict(self.manifest["key"])

    def append_score(self, score: Mapping[str, Any]) -> Row:
        """Append a score and return it complete."""
        return self._scores.append({"schema_version": SCHEMA_VERSION, **score})

    def update_manifest(self, **entries: Any) -> None:
        """Set entries of the manifest and write it as a whole."""
        self.manifest |= entries
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        self._write(MANIFEST, text.encode() + b"\n")

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self.folder / name, content)
        except OSError as error:
            raise no_room(self.folder / name, error) from error

    def close(self) -> None:
        """Close the files and release the lock; closing twice does no harm."""
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_done(self, task: ImageTask) -> bool:
        """Return whether the image has a record with status `ok`."""
        return task.key in self._done

    @property
    def finished(self) -> int:
        """How many images are finished."""
        return len(self._done)

    @property
    def threads(self) -> int | None:
        """The number of threads that the finished images were decoded with; None without any."""
        return self.manifest.get("threads") if self.finished else None

    def append(self, task: ImageTask, record: Mapping[str, Any], png: bytes | None = None) -> Row:
        """Write the picture of an image, then its record, by default of status `ok`; return the record."""
        planned = {
            "schema_version": SCHEMA_VERSION,
            "record_key": record_key(task, self.key),
            **task.cell.columns(),
            "prompt_id": task.prompt.id,
            "prompt": task.prompt.text,
            "prompt_source": task.prompt.source or None,
            "repeat": task.repeat,
            "seed": task.seed,
            "order_index": task.order_index,
            "status": "ok",
            "image": None if png is None else task.image,
        }
        with signals.delayed():
            if png is not None:
                self._write(task.image, png)
            row = self._records.append(planned | dict(record))
            (self._done.add if row["status"] == "ok" else self._done.discard)(task.key)
        return row


# ---- The lock of a run directory


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run directory, creating it if needed; the kernel frees the lock when its process ends."""
    check_is_run(folder)
    writer = folder / WRITER
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.acquire(timeout=0):
            try:
                process = {"pid": os.getpid(), "host": socket.gethostname()}
                write_atomically(writer, json.dumps(process).encode() + b"\n")
                yield
            finally:
                writer.unlink(missing_ok=True)
    except Timeout as error:
        message = f"{folder} is in use: {_process_of(writer)} is writing to it"
        raise RefusedError(message, "Wait until it ends, or give another --out.") from error
    except OSError as error:
        raise cannot_write(folder, error) from error


def _process_of(writer: Path) -> str:
    try:
        process = json.loads(writer.read_text(encoding="utf-8"))
        return f"process {process['pid']} on {process['host']}"
    # it has only just begun, or is of an older version
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


def check_folder(folder: Path, experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a folder that is no run directory, `RefusedError` if in use or of other settings."""
    check_writable(folder)
    check_is_run(folder)
    if (folder / LOCK).exists():
        with lock_run(folder):
            pass
    if (folder / MANIFEST).exists() and (finished := len(done_images(folder))):
        wanted = {"experiment": experiment.to_dict(), "threads": experiment.settings.threads}
        check_same_run(
            folder=folder.name, manifest=read_manifest(folder), wanted=wanted, finished=finished
        )


def check_is_run(folder: Path) -> None:
    """Raise `UserError` for a folder that has other contents than a run's."""
    if folder.is_dir() and not (folder / MANIFEST).exists():
        files = {folder / name for name in (LOCK, WRITER, RECORDS, SCORES)}
        # of a sweep killed at its start
        partial = {partial_path(folder / name) for name in (WRITER, MANIFEST)}
        others = {path.name for path in set(folder.iterdir()) - files - partial}
        if others:
            message = f"--out {folder}: contains {min(others)} and is not a run directory"
            raise UserError(message, "Give a new folder, or a run directory.")
