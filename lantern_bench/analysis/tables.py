"""The four tables of a run, built from its records and scores: speed, quality, acceptance and summary.

Columns are those of `schema.py`; rows have a fixed order. A missing figure is empty, never 0, inf or nan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lantern_bench.analysis.cells import (
    COLUMNS_READ,
    join_notes,
    run_cells,
)
from lantern_bench.analysis.labels import parameters
from lantern_bench.analysis.quality import quality_rows, sort_scores
from lantern_bench.analysis.speed import acceptance_rows, speed_row
from lantern_bench.analysis.token_distance import distance_columns, token_rows
from lantern_bench.methods.catalog import IN_SUMMARY, OF_TOKENS
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData, load_runs
from lantern_bench.storage.schema import (
    CELL_COLUMNS,
    columns,
    csv_text,
    frame,
    write_csv,
)

NAMES = ("speed", "quality", "acceptance", "summary")

# Figures that a paper's table may hold.
_PUBLISHED = (
    "speedup",
    "mean_accepted_length",
    *(name for name in IN_SUMMARY if name not in OF_TOKENS),
)


# ---- The summary: one row a cell and protocol, with the published figure beside the measured one


def cells_of(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of the table `quality`, each with the speed of its cell.

    `images`, `failed` and `note` are those of `speed`; `quality_images` and `quality_note` those of `quality`.
    """
    speed = tables["speed"]
    key = ["cell_id", "model"]
    quality = tables["quality"].rename(columns={"images": "quality_images", "note": "quality_note"})
    return quality.drop(
        columns=[name for name in speed if name in quality and name not in key]
    ).merge(speed, on=key)


def summary_rows(
    cells: pd.DataFrame, published: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `summary.csv` from `cells_of`, in that order.

    `published` holds, by cell id, the figures of the paper's table that the experiment names.
    """
    copied = [column.name for column in columns("summary") if column.name in cells]
    rows = rows_of(cells)
    for cell in rows:
        row: dict[str, Any] = {name: cell[name] for name in copied}
        row |= {"method": cell["mode"], "parameters": parameters(cell, rows)}
        for name in _PUBLISHED:
            theirs = published.get(str(cell["cell_id"]), {}).get(name)
            row[f"{name}_published"] = theirs
            row[f"{name}_difference"] = (
                None if theirs is None or row[name] is None else row[name] - theirs
            )
        yield {**row, "note": join_notes([cell["note"], cell["quality_note"]])}


def tables_of(run: RunData) -> dict[str, pd.DataFrame]:
    """Build the tables `NAMES` of a loaded run; without the metric `speed` its seconds are ignored.

    Those of a run without records are read from its CSV files.
    """
    if not len(run.records) and (run.folder / "speed.csv").is_file():
        return _read_tables(run.folder)
    experiment = run.manifest.get("experiment", {})
    if "speed" not in experiment.get("metrics", ("speed",)):
        seconds = [name for name in map(str, run.records) if name.endswith("seconds")]
        run = replace(run, records=run.records.assign(**dict.fromkeys(seconds, np.nan)))
    pool_devices = bool(experiment.get("pool_devices"))
    published = (experiment.get("paper") or {}).get("figures") or {}
    cells = run_cells(run)
    protocols = sort_scores(run.scores)
    of_tokens = distance_columns(cells, token_rows(run.scores))
    tables = {
        "speed": frame("speed", (speed_row(cell, cells, pool_devices) for cell in cells)),
        "quality": frame(
            "quality",
            (
                row
                for cell in cells
                for row in quality_rows(
                    cell=cell, cells=cells, protocols=protocols, of_tokens=of_tokens[cell.cell_id]
                )
            ),
        ),
        "acceptance": frame("acceptance", (row for cell in cells for row in acceptance_rows(cell))),
    }
    return tables | {"summary": frame("summary", summary_rows(cells_of(tables), published))}


def _read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the CSV files of a run directory that has `speed.csv`; other missing tables and columns are empty."""
    tables = {}
    for name in NAMES:
        kinds = {column.name: "string" for column in columns(name) if column.dtype == "string"}
        table = (
            pd.read_csv(path, dtype=kinds)
            if (path := folder / f"{name}.csv").is_file()
            else pd.DataFrame()
        )
        tables[name] = frame(
            name, rows_of(table[[column.name for column in columns(name) if column.name in table]])
        )
    if not len(tables["quality"]):
        tables["quality"] = frame(
            "quality", rows_of(tables["speed"][[column.name for column in CELL_COLUMNS]])
        )
    if not len(tables["summary"]):
        tables["summary"] = frame("summary", summary_rows(cells_of(tables), {}))
    return tables


def write_tables(run: Path) -> dict[str, pd.DataFrame]:
    """Rebuild the CSV files of a run directory and return the tables."""
    (data,) = load_runs([run], COLUMNS_READ).values()
    save_tables(tables := tables_of(data), run)
    return tables


def save_tables(tables: Mapping[str, pd.DataFrame], run: Path) -> None:
    """Write tables as the CSV files of a run directory."""
    for name, table in tables.items():
        write_csv(table, run / f"{name}.csv")


def stale_tables(run: Path) -> list[str]:
    """Return the existing CSV files of a run directory that are not what its records give."""
    (data,) = load_runs([run], COLUMNS_READ).values()
    texts = {
        run / f"{name}.csv": csv_text(table).encode() for name, table in tables_of(data).items()
    }
    return [
        path.name for path, text in texts.items() if path.is_file() and path.read_bytes() != text
    ]
