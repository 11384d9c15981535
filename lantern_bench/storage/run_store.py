"""Write a run directory: one process at a time adds records, pictures and scores."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.plan import ImageTask
from lantern_bench.storage.records import RowFile, check_same_run, no_room, record_key
from lantern_bench.storage.run_directory import (
    MANIFEST,
    RECORDS,
    SCORES,
    done_images,
    manifest_bytes,
    read_manifest,
)
from lantern_bench.storage.schema import SCHEMA_VERSION, Row
from lantern_bench.utils import signals
from lantern_bench.utils.clock import stamp
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import cannot_write, check_writable, partial_path, write_atomically

LOCK = ".lock"
WRITER = ".writer.json"
# What flock answers on network file systems without locks, or whose lock server is away.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESTALE)


class RunStore(AbstractContextManager["RunStore"]):
    """A run directory opened for writing. It is locked until the store is closed.

    `RunStore.open` adds images to it, `RunStore.to_score` adds scores only.
    """

    def __init__(self, folder: Path) -> None:
        """Lock a run and open its files."""
        self.folder = folder
        with ExitStack() as opened:
            opened.enter_context(lock_run(folder))
            self.manifest = read_manifest(folder) if (folder / MANIFEST).exists() else {}
            self._done = done_images(folder)
            self._records = opened.enter_context(closing(RowFile(folder / RECORDS, "records")))
            self._scores = opened.enter_context(closing(RowFile(folder / SCORES, "scores")))
            # After an error above, the lock and the files are closed. From here `close` does it.
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, folder: Path, experiment: ResolvedExperiment, key: dict[str, Any]) -> Self:
        """Open a run directory to decode images, or create it.

        Args:
            folder: The run directory.
            experiment: The experiment whose images are decoded.
            key: The fields of the record key that hold for the whole run.

        Raises:
            UserError: The directory cannot be written, or is no run.
            RefusedError: Another process uses it, or its images were decoded with other settings.
        """
        store = cls(folder)
        try:
            if store.finished:
                check_same_run(
                    folder.name,
                    manifest=store.manifest,
                    wanted=_wanted(experiment) | {"key": key},
                    finished=store.finished,
                )
            store.update_manifest(
                schema_version=SCHEMA_VERSION,
                run=folder.name,
                experiment=experiment.to_dict(),
                key=key,
            )
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def to_score(cls, folder: Path) -> Self:
        """Open a run directory to add scores to its images.

        Raises:
            UserError: The directory cannot be written, or is no run.
            RefusedError: Another process uses it, or it has no images.
        """
        if not done_images(folder):
            raise RefusedError(
                f"{folder} has no images to score",
                "Resume the run with the command that started it.",
            )
        return cls(folder)

    @property
    def finished(self) -> int:
        """The number of finished images."""
        return len(self._done)

    @property
    def threads(self) -> int | None:
        """The number of threads that decoded the finished images; None without any."""
        return self.manifest.get("threads") if self.finished else None

    def is_done(self, task: ImageTask) -> bool:
        """Return whether the image has a record with status `ok`."""
        return task.key in self._done

    def missing(self, tasks: Iterable[ImageTask]) -> list[ImageTask]:
        """Return the images without a record of status `ok`."""
        return [task for task in tasks if not self.is_done(task)]

    def append(self, task: ImageTask, record: Mapping[str, Any], png: bytes | None = None) -> Row:
        """Write the picture of an image, then its record.

        Args:
            task: The image.
            record: Columns that do not follow from the task. `status` is `ok` by default.
            png: The PNG file; None for an image that failed.

        Returns:
            The record with all columns.

        Raises:
            RefusedError: The disk is full. The run is unchanged.
        """
        values = {
            "schema_version": SCHEMA_VERSION,
            "record_key": record_key(task, self.manifest["key"]),
            **task.cell.columns(),
            "prompt_id": task.prompt.id,
            "prompt": task.prompt.text,
            "prompt_source": task.prompt.source or None,
            "prompt_metadata": dict(task.prompt.metadata) or None,
            "repeat": task.repeat,
            "seed": task.seed,
            "order_index": task.order_index,
            "status": "ok",
            "image": None if png is None else task.image,
            **record,
        }
        with signals.delayed():
            if png is not None:
                self._write(task.image, png)
            row = self._records.append(values)
            if row["status"] == "ok":
                self._done.add(task.key)
            else:
                self._done.discard(task.key)
        return row

    def append_score(self, score: Mapping[str, Any]) -> Row:
        """Append a score and return it with all columns."""
        return self._scores.append({"schema_version": SCHEMA_VERSION, **score})

    def begin_session(self, **entries: Any) -> dict[str, Any]:
        """Add the session of a process that begins to decode to the manifest.

        Returns the entry, which stays part of the manifest. The next update writes its changes.
        """
        sessions = self.manifest.get("sessions", [])
        session: dict[str, Any] = {
            "started": stamp(),
            "ended": None,
            "complete": False,
            "images": 0,
            "failed": 0,
            "first_seconds": 0.0,  # of first attempts
            "again_seconds": 0.0,  # of further attempts at disturbed images
            "process": len(sessions),
            "prepare_seconds": 0.0,
            "warm_up": [],
            **entries,
        }
        self.update_manifest(sessions=[*sessions, session])
        return session

    def update_manifest(self, **entries: Any) -> None:
        """Set entries of the manifest and write it as a whole."""
        self.manifest |= entries
        self._write(MANIFEST, manifest_bytes(self.manifest))

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self.folder / name, content)
        except OSError as error:
            raise no_room(self.folder / name, error) from error

    def close(self) -> None:
        """Close the files and release the lock. A second call does nothing."""
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- Checks and the lock


def check_folder(folder: Path, experiment: ResolvedExperiment) -> None:
    """Check before models are loaded that a run directory can be opened for an experiment.

    Raises `UserError` for a folder that is no run directory or cannot be written, `RefusedError`
    for a run that is in use or whose images were decoded with other settings.
    """
    check_writable(folder)
    check_is_run(folder)
    if (folder / LOCK).exists():
        with lock_run(folder):
            pass
    finished = len(done_images(folder))
    if finished:
        check_same_run(folder.name, read_manifest(folder), _wanted(experiment), finished=finished)


def _wanted(experiment: ResolvedExperiment) -> dict[str, Any]:
    """Return the entries that a manifest must have to continue its run, without the key."""
    return {"experiment": experiment.to_dict(), "threads": experiment.settings.threads}


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run directory and create it if needed. The kernel frees the lock of an ended process.

    Raises `UserError` for a folder that is no run or cannot be written, `RefusedError` for a run
    that another process has locked, and for a file system without locks.
    """
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
    except NotImplementedError as error:  # of older versions of filelock, for ENOSYS
        raise _without_locks(folder, os.strerror(errno.ENOSYS)) from error
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise _without_locks(folder, os.strerror(error.errno)) from error
        raise cannot_write(folder, error, flag="--out") from error


def _without_locks(folder: Path, reason: str) -> RefusedError:
    """Return the error for a folder on a file system that cannot lock files."""
    return RefusedError(
        f"--out {folder}: its file system has no working locks: {reason}",
        "A lock keeps two processes from writing one run. Give --out on a local disk and copy the "
        "run afterwards, or mount this file system with locks (NFS: with lockd, without `nolock`; "
        "Lustre: `-o flock`).",
    )


def _process_of(writer: Path) -> str:
    try:
        process = json.loads(writer.read_text(encoding="utf-8"))
        return f"process {process['pid']} on {process['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # it has only just begun
        return "another process"


def check_is_run(folder: Path) -> None:
    """Raise `UserError` for a folder that holds files and is no run directory."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return
    # A sweep that is killed at its start leaves these files.
    expected = {folder / name for name in (LOCK, WRITER, RECORDS, SCORES)}
    expected |= {partial_path(folder / name) for name in (WRITER, MANIFEST)}
    others = {path.name for path in set(folder.iterdir()) - expected}
    if others:
        raise UserError(
            f"--out {folder}: contains {min(others)} and is not a run directory",
            "Give a new folder, or a run directory.",
        )
