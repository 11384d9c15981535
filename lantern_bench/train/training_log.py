"""The course of a training as a CSV, a row every few steps; figures that were not measured there are empty.

Columns: step; epoch; seconds of training; loss, its parts (feature, soft) and 1 - TV on the training batches since the
row before; lr; tokens_per_s; and where the drafter was examined, held-out one_minus_tv, mal and mal_images. A training
that continues drops the rows behind its checkpoint, so that every step has one row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from lantern_bench.errors import RefusedError
from lantern_bench.models.files import write_atomically

__all__ = ["COLUMNS", "TrainingLog"]

COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "feature_loss",
    "soft_loss",
    "train_one_minus_tv",
    "lr",
    "tokens_per_s",
    "one_minus_tv",
    "mal",
    "mal_images",
)


class TrainingLog:
    """The log in a file; with `resume` the rows that are there are kept."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        rows = self._read() if resume and path.is_file() else []
        self.last = _place(rows)
        """Step and seconds of the last row; zeros without one."""
        self._begun = bool(rows)

    def before(self, step: int) -> tuple[int, float]:
        """Step and seconds of the last row before `step`; zeros without one."""
        return self.last if self.last[0] < step else _place(self._rows_before(step))

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a row; rows of its step and behind it are of a training that was cut off, and go."""
        step = int(row["step"] or 0)
        line = {name: _number(row.get(name)) for name in COLUMNS}
        if self._begun and self.last[0] < step:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(line)
        else:
            out = io.StringIO()
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*(self._rows_before(step) if self._begun else []), line])
            write_atomically(self._path, out.getvalue().encode())
            self._begun = True
        self.last = _place([line])

    def _rows_before(self, step: int) -> list[dict[str, str]]:
        return [row for row in self._read() if int(row["step"]) < step]

    def _read(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise RefusedError(
                    f"{self._path}: is no log of a training", "Move it away, or give another folder (--out)."
                )
            # A line that was cut off while it was written lacks its last fields.
            return [row for row in reader if None not in row.values() and row["step"].isdigit()]


def _place(rows: Sequence[Mapping[str, str]]) -> tuple[int, float]:
    return (int(rows[-1]["step"]), float(rows[-1]["seconds"])) if rows else (0, 0.0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
