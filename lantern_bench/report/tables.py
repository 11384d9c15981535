"""Records and scores in, the four tables of a run out.

Pure functions of what was recorded: a table can be rebuilt at will, and one that differs from its file means that the
records changed. Columns, their order and their types are those of `spec/schema.py`, nothing else; rows have a fixed
order. Missing is empty, never 0; inf and nan are not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import UserError
from lantern_bench.report.acceptance import acceptance_rows
from lantern_bench.report.cells import Row, group
from lantern_bench.report.named_runs import read_named
from lantern_bench.report.quality import quality_rows, sort_scores
from lantern_bench.report.speed import speed_row
from lantern_bench.report.summary import summary_rows
from lantern_bench.runs.jsonl import write_atomically
from lantern_bench.runs.store import RunData
from lantern_bench.spec.schema import columns

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["NAMES", "build_tables", "frame", "read_tables", "save_tables", "tables_of", "write_csv", "write_tables"]

NAMES = ("speed", "quality", "acceptance", "summary")
_DTYPES = {"string": "string", "int": "Int64", "float": "float64"}


def build_tables(
    records: Iterable[dict[str, Any]],
    scores: Iterable[Row] = (),
    published: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the tables `NAMES` from the rows of `records.jsonl` and `scores.jsonl`.

    `published` is as in `summary_rows`; a run finds it under `paper: {figures: ...}` of its experiment.
    """
    cells = group(records)
    protocols = sort_scores(scores)
    speed = [speed_row(cell, cells) for cell in cells]
    quality = [row for cell in cells for row in quality_rows(cell, protocols)]
    rows: dict[str, list[dict[str, Any]]] = {
        "speed": speed,
        "quality": quality,
        "acceptance": [row for cell in cells for row in acceptance_rows(cell)],
        "summary": list(summary_rows(speed, quality, published)),
    }
    return {name: frame(name, rows[name]) for name in NAMES}


def read_tables(run: Path) -> dict[str, pd.DataFrame]:
    """Build the tables of a run folder from what it holds, writing nothing.

    Raises `RefusedError` when the folder has no records yet, and `UserError` when it is no run or is damaged.
    """
    (data,) = read_named([run]).values()
    return tables_of(data)


def tables_of(data: RunData) -> dict[str, pd.DataFrame]:
    """Build the tables of a run that was read; without the metric speed its seconds are nobody's measurement."""
    experiment = data.manifest.get("experiment", {})
    records = data.records if "speed" in experiment.get("metrics", ("speed",)) else [_untimed(r) for r in data.records]
    return build_tables(records, data.scores, (experiment.get("paper") or {}).get("figures"))


def _untimed(record: Row) -> dict[str, Any]:
    return {name: None if name.endswith("seconds") else value for name, value in record.items()}


def write_tables(run: Path) -> dict[str, pd.DataFrame]:
    """Rebuild `speed.csv`, `quality.csv`, `acceptance.csv` and `summary.csv` of a run folder and return the tables.

    Raises as `read_tables`, and `UserError` when the folder cannot be written.
    """
    tables = read_tables(run)
    save_tables(tables, run)
    return tables


def save_tables(tables: Mapping[str, pd.DataFrame], run: Path) -> None:
    """Write tables as the CSV files of a run folder; raises `UserError` when it cannot be written."""
    for name, table in tables.items():
        write_csv(table, run / f"{name}.csv")


def frame(table: str, rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a DataFrame with exactly the columns and types that the schema declares for `table`.

    A row may leave columns out; a key that is no column raises `ValueError`.
    """
    import pandas as pd

    listed, declared = list(rows), columns(table)
    if unknown := {key for row in listed for key in row} - {column.name for column in declared}:
        raise ValueError(f"not in the schema of {table}: {', '.join(sorted(unknown))}")
    types: dict[str, Any] = _DTYPES
    values = {c: [row.get(c.name) for row in listed] for c in declared}
    return pd.DataFrame({c.name: pd.Series(values[c], dtype=types[c.dtype]) for c in declared})


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table whole or not at all: 6 significant digits, missing is empty. Raises `UserError` when it cannot."""
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}", "Give a folder that can be written.") from error
