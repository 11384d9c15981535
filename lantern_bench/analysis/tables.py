"""Build the four tables of a run from its records and scores: speed, quality, acceptance, summary.

The columns are declared in `storage/schema.py`. Rows have a fixed order. A missing figure is empty,
never 0, inf or nan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd

from lantern_bench.analysis.cells import (
    COLUMNS_READ,
    CellRecords,
    baseline_of,
    fastest_lossless,
    join_notes,
    run_cells,
    settings_that_differ,
    timed_images,
)
from lantern_bench.analysis.labels import parameters
from lantern_bench.analysis.quality import quality_rows, sort_scores
from lantern_bench.analysis.statistics import (
    Interval,
    proportion,
    ratio_of_images,
    repeat_interval,
    timing,
)
from lantern_bench.analysis.token_distance import distance_columns
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData, load_runs
from lantern_bench.storage.schema import (
    CELL_NAMES,
    Row,
    columns,
    csv_text,
    frame,
    typed,
    write_csv,
)

NAMES = ("speed", "quality", "acceptance", "summary")

SPEEDUPS = ("speedup", "speedup_over_lossless")

# Columns that are sum over sum of two figures of images.
_RATIOS = {
    "tokens_per_s": ["tokens", "seconds"],
    "mal_uncut": ["uncut", "steps"],
    "accepted_drafts": ["accepted", "steps"],
    "target_forwards": ["target_forwards", "count"],
    "drafter_forwards": ["drafter_forwards", "count"],
    **{phase: [phase, "steps"] for phase in ("draft_ms", "target_ms", "verify_ms", "other_ms")},
}


# ---- Rows of speed.csv and acceptance.csv


def speed_row(cell: CellRecords, cells: Sequence[CellRecords], *, pool_devices: bool) -> Row:
    """Return the row of a cell in `speed.csv`.

    Args:
        cell: The cell.
        cells: All cells of the run.
        pool_devices: Compare seconds of several kinds of device.
    """
    images = cell.images
    half, most = images["seconds"].quantile([0.50, 0.95])
    marks = images["disturbed"].dropna()
    lossless = fastest_lossless(cell, cells)
    row: Row = {
        **cell.columns,
        "output": cell.output,
        "images": len(cell.completed),
        "failed": cell.failed,
        "disturbed": int(marks.sum()) if len(marks) else None,
        "held_up": int((images["kept_fraction"] < 1.0).sum()),
        "lossless_cell": lossless.cell_id if lossless else None,
        "peak_memory_mb": images["peak_memory_bytes"].max() / 1e6,
        "latency_p50_s": half,
        "latency_p95_s": most,
    }
    offers = cell.offers
    if len(offers):
        row["acceptance_rate"] = offers["accepted"].sum() / offers["offered"].sum()
    for name, figures in _RATIOS.items():
        row[name] = cell.ratio(figures)

    latency = Interval(None, note="not timed")
    if len(cell.timed):
        latency = repeat_interval(timing(timed_images(cell)))
    base = baseline_of(cell, cells)
    intervals = {
        "latency_s": latency,
        "speedup": _speedup(cell, base, name="ar", pool_devices=pool_devices),
        "speedup_over_lossless": _speedup(
            cell, lossless, name="lossless_cell", pool_devices=pool_devices
        ),
        "step_compression": ratio_of_images(images[["tokens", "target_forwards"]]),
        "mean_accepted_length": ratio_of_images(images[["committed", "steps"]]),
    }
    notes: list[str | None] = []
    if marks.mean() > 0.5:  # the mean of no marks is nan
        notes.append(
            f"{row['disturbed']} of {len(marks)} images disturbed: seconds of a busy machine"
        )
    fewer = images["decoded_together"][images["decoded_together"] < cell.columns["batch"]]
    for size, count in sorted(Counter(fewer).items()):
        notes.append(f"{count} of {len(images)} images decoded {size:g} at a time")
    if len(cell.devices) > 1:
        devices = ", ".join(f"{count} on {name}" for name, count in sorted(cell.devices.items()))
        notes.append(f"seconds of several kinds of device: {devices}")
    for name, interval in intervals.items():
        row |= interval.columns(name)
        notes.append(interval.note)
    row["note"] = join_notes(notes)
    return row


def _speedup(
    cell: CellRecords, base: CellRecords | None, *, name: str, pool_devices: bool
) -> Interval:
    """Seconds of the baseline over seconds of the cell, over the images that both have.

    `name` is the name of the baseline in notes.
    """
    timed = cell.images["seconds"].count()
    if not timed:
        return Interval(None)
    if base is None:
        missing = name.removesuffix("_cell")
        return Interval(None, note=f"no speedup: no {missing} cell to compare with in this run")
    kinds = len(cell.devices + base.devices)
    if kinds > 1 and not pool_devices:
        return Interval(
            None, note=f"no speedup: images of {kinds} kinds of device; --pool-devices pools them"
        )
    shared = timed_images(cell, base)
    if shared.empty:
        return Interval(None, note=f"no speedup: no image that {name} has too")

    speedup = repeat_interval(timing(shared))
    notes = []
    if len(shared) < timed:
        notes.append(f"speedup over the {len(shared)} of {timed} images that {name} has too")
    differing = settings_that_differ(cell, base)
    if differing:
        notes.append(f"speedup against {name} with {', '.join(differing)}")
    return speedup._replace(note=join_notes([*notes, speedup.note]))


def acceptance_rows(cell: CellRecords) -> Iterator[Row]:
    """Yield the rows of a cell in `acceptance.csv`: by depth from 1, then by position from 0.

    The intervals treat steps as independent, which is an approximation: neighbouring steps are
    correlated.
    """
    for axis in ("depth", "position"):
        sums = cell.offers.groupby(axis)[["offered", "accepted"]].sum()
        for place, offered, accepted in sums.itertuples():
            row = {"axis": axis, "index": place, "offered": offered, "accepted": accepted}
            yield cell.columns | row | proportion(accepted, offered).columns("rate")


# ---- The tables


def quality_with_speed(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of the table `quality`, each with the speed of its cell.

    `images`, `failed` and `note` are taken from `speed`; the columns of `quality` with these names
    become `quality_images` and `quality_note`. Rows of categories are left out.
    """
    key = ["cell_id", "model"]
    speed = tables["speed"]
    quality = tables["quality"]
    if "category" in quality:
        quality = quality[quality["category"].isna()]
    quality = quality.rename(columns={"images": "quality_images", "note": "quality_note"})
    in_both = [name for name in speed if name in quality and name not in key]
    return quality.drop(columns=in_both).merge(speed, on=key)


def one_row_per_cell(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return `quality_with_speed` with each figure from the first protocol that has it."""
    cells = quality_with_speed(tables).groupby(["model", "cell_id"], as_index=False, sort=False)
    return cells.first()


def _summary_of(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The table `summary`, in the order of `quality_with_speed`."""
    copied = [column.name for column in columns("summary")]
    cells = rows_of(quality_with_speed(tables))
    rows = []
    for cell in cells:
        row = {name: cell[name] for name in copied if name in cell}
        row |= {
            "method": cell["mode"],
            "parameters": parameters(cell, cells),
            "note": join_notes([cell["note"], cell["quality_note"]]),
        }
        rows.append(row)
    return frame("summary", rows)


def tables_of(run: RunData, names: Collection[str] = NAMES) -> dict[str, pd.DataFrame]:
    """Build the tables of a loaded run. `acceptance` is built only if it is in `names`.

    A run without the metric `speed` has no seconds in its tables. The tables of a run without
    records are read from its CSV files.
    """
    if not len(run.records) and (run.folder / "speed.csv").is_file():
        return _read_tables(run.folder)

    cells = run_cells(run)
    scores = sort_scores(run.scores)
    of_tokens = distance_columns(cells, run.scores)
    pool_devices = bool(run.manifest.get("experiment", {}).get("pool_devices"))
    quality: list[Row] = []
    for cell in cells:
        quality += quality_rows(cell, cells, scores=scores, of_tokens=of_tokens[cell.cell_id])
    tables = {
        "speed": frame(
            "speed", [speed_row(cell, cells, pool_devices=pool_devices) for cell in cells]
        ),
        "quality": frame("quality", quality),
    }
    if "acceptance" in names:
        rows = chain.from_iterable(map(acceptance_rows, cells))
        tables["acceptance"] = frame("acceptance", rows)
    return tables | {"summary": _summary_of(tables)}


def _read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the CSV files of a run directory; missing columns and missing files are empty."""
    tables = {name: _read_table(name, folder) for name in NAMES}
    if tables["quality"].empty:
        tables["quality"] = typed("quality", tables["speed"][CELL_NAMES])
    if tables["summary"].empty:
        tables["summary"] = _summary_of(tables)
    return tables


def _read_table(name: str, folder: Path) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    return typed(name, pd.read_csv(path, dtype=object) if path.is_file() else pd.DataFrame())


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
    (data,) = load_runs([run], COLUMNS_READ, empty_shards=True).values()
    return tables_of(data)
