"""Files with one JSON object a line, appended to and never rewritten.

A line counts when its newline is there. A process that is killed while it writes leaves a cut last line, which is
dropped when reading and removed before anything is appended. Two processes appending to one file are not handled
here: a run's folder is locked (`store.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from lantern_bench.errors import UserError
from lantern_bench.models.files import write_atomically

__all__ = ["JsonLines", "read_lines", "write_atomically"]


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
