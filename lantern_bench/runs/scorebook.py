"""A finished run opened for scoring: its records are read, scores are appended, nothing is decoded.

It holds the run's lock as a sweep does, so that two never write to one folder. What is scored is `runs/score.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from lantern_bench.errors import RefusedError
from lantern_bench.runs.jsonl import JsonLines
from lantern_bench.runs.store import SCORES, completed_score, lock_run, read_manifest, read_records, write_manifest

__all__ = ["ScoreBook"]


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
        """Append a score; raises `ValueError` for a column that `spec/schema.py` does not declare."""
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
