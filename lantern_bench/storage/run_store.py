"""The writer of a run directory: one process at a time, records and pictures."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageTask
from lantern_bench.storage.records import (
    RowFile,
    check_same_run,
    no_room,
    record_key,
)
from lantern_bench.storage.run_directory import (
    MANIFEST,
    RECORDS,
    SCORES,
    done_images,
    read_manifest,
)
from lantern_bench.storage.schema import SCHEMA_VERSION, Row
from lantern_bench.utils import signals
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import cannot_write, check_writable, partial_path, write_atomically

LOCK = ".lock"
WRITER = ".writer.json"


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
        raise cannot_write(folder, error, flag="--out") from error


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
