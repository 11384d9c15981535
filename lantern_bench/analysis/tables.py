"""Build the four tables of a run from its records and scores: speed, quality, acceptance, summary.

The columns are declared in `storage/schema.py`. Rows have a fixed order. A missing figure is empty,
never 0, inf or nan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lantern_bench.analysis.cells import COLUMNS_READ, join_notes, run_cells
from lantern_bench.analysis.labels import parameters
from lantern_bench.analysis.quality import quality_rows, sort_scores
from lantern_bench.analysis.speed import acceptance_rows, speed_row
from lantern_bench.analysis.token_distance import distance_columns
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData, load_runs
from lantern_bench.storage.schema import CELL_COLUMNS, Row, columns, csv_text, frame, write_csv

NAMES = ("speed", "quality", "acceptance", "summary")


def cells_of(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of the table `quality`, each with the speed of its cell.

    `images`, `failed` and `note` are taken from `speed`; the columns of `quality` with these names
    become `quality_images` and `quality_note`.
    """
    key = ["cell_id", "model"]
    speed = tables["speed"]
    quality = tables["quality"].rename(columns={"images": "quality_images", "note": "quality_note"})
    in_both = [name for name in speed if name in quality and name not in key]
    return quality.drop(columns=in_both).merge(speed, on=key)


def summary_rows(cells: pd.DataFrame) -> Iterator[Row]:
    """Yield the rows of `summary.csv`, in the order of `cells`, a table that `cells_of` returns."""
    copied = [column.name for column in columns("summary") if column.name in cells]
    rows = rows_of(cells)
    for cell in rows:
        row: Row = {name: cell[name] for name in copied}
        row["method"] = cell["mode"]
        row["parameters"] = parameters(cell, rows)
        row["note"] = join_notes([cell["note"], cell["quality_note"]])
        yield row


def tables_of(run: RunData) -> dict[str, pd.DataFrame]:
    """Build the tables `NAMES` of a loaded run.

    A run without the metric `speed` has no seconds in its tables. The tables of a run without
    records are read from its CSV files.
    """
    if not len(run.records) and (run.folder / "speed.csv").is_file():
        return _read_tables(run.folder)

    experiment = run.manifest.get("experiment", {})
    if "speed" not in experiment.get("metrics", ("speed",)):
        run = _without_seconds(run)

    cells = run_cells(run)
    scores = sort_scores(run.scores)
    of_tokens = distance_columns(cells, scores.tokens)
    speed: list[Row] = []
    quality: list[Row] = []
    acceptance: list[Row] = []
    for cell in cells:
        pool_devices = bool(experiment.get("pool_devices"))
        speed.append(speed_row(cell, cells, pool_devices=pool_devices))
        quality += quality_rows(cell, cells, scores=scores, of_tokens=of_tokens[cell.cell_id])
        acceptance += acceptance_rows(cell)

    tables = {
        "speed": frame("speed", speed),
        "quality": frame("quality", quality),
        "acceptance": frame("acceptance", acceptance),
    }
    tables["summary"] = frame("summary", summary_rows(cells_of(tables)))
    return tables


def _without_seconds(run: RunData) -> RunData:
    seconds = [name for name in map(str, run.records) if name.endswith("seconds")]
    missing: dict[str, Any] = dict.fromkeys(seconds, np.nan)
    return replace(run, records=run.records.assign(**missing))


def _read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the CSV files of a run directory; missing columns and missing files are empty."""
    tables = {name: _read_table(name, folder) for name in NAMES}
    if tables["quality"].empty:
        cell_columns = [column.name for column in CELL_COLUMNS]
        tables["quality"] = frame("quality", rows_of(tables["speed"][cell_columns]))
    if tables["summary"].empty:
        tables["summary"] = frame("summary", summary_rows(cells_of(tables)))
    return tables


def _read_table(name: str, folder: Path) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    if not path.is_file():
        return frame(name, [])
    texts = {column.name: "string" for column in columns(name) if column.dtype == "string"}
    table = pd.read_csv(path, dtype=texts)
    known = [column.name for column in columns(name) if column.name in table]
    return frame(name, rows_of(table[known]))


def write_tables(run: Path) -> dict[str, pd.DataFrame]:
    """Rebuild the CSV files of a run directory and return the tables."""
    tables = _build_tables(run)
    save_tables(tables, run)
    return tables


def save_tables(tables: Mapping[str, pd.DataFrame], run: Path) -> None:
    """Write tables as the CSV files of a run directory."""
    for name, table in tables.items():
        write_csv(table, run / f"{name}.csv")


def stale_tables(run: Path) -> list[str]:
    """Return the names of existing CSV files that differ from the tables of the records."""
    stale = []
    for name, table in _build_tables(run).items():
        path = run / f"{name}.csv"
        if path.is_file() and path.read_bytes() != csv_text(table).encode():
            stale.append(path.name)
    return stale


def _build_tables(run: Path) -> dict[str, pd.DataFrame]:
    (data,) = load_runs([run], COLUMNS_READ).values()
    return tables_of(data)
