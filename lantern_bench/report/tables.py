"""The four tables of a run, built from its records and scores: speed, quality, acceptance and summary.

Columns are those of `schema.py`; rows have a fixed order. A missing figure is empty, never 0, inf or nan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lantern_bench.errors import UserError
from lantern_bench.files import write_atomically
from lantern_bench.methods.catalog import IN_SUMMARY, METRICS, OF_IMAGES, OF_SETS, OF_TOKENS, PAIRED
from lantern_bench.report.distance import distance_columns, token_rows
from lantern_bench.report.labels import parameters
from lantern_bench.report.records import (
    COLUMNS_READ,
    CellRecords,
    Row,
    baseline_of,
    fastest_lossless,
    join_notes,
    load_runs,
    run_cells,
    settings_that_differ,
    timed_images,
)
from lantern_bench.report.stats import (
    Interval,
    Sums,
    compare_sums,
    detectable,
    proportion,
    ratio_of_sums,
    repeat_interval,
    sums_per_prompt,
    timing,
)
from lantern_bench.runs.records import rows_of
from lantern_bench.runs.store import RunData
from lantern_bench.schema import CELL_COLUMNS, columns
from lantern_bench.text import listed

NAMES = ("speed", "quality", "acceptance", "summary")

# Figures that a paper's table may hold.
_PUBLISHED = (
    "speedup",
    "mean_accepted_length",
    *(name for name in IN_SUMMARY if name not in OF_TOKENS),
)

SPEEDUPS = ("speedup", "speedup_over_lossless")
ENDS = ("", "_low", "_high")  # of the columns of a figure and of its interval

_RATIOS = {
    "tokens_per_s": ("tokens", "seconds"),
    "mal_uncut": ("uncut", "steps"),
    "accepted_drafts": ("accepted", "steps"),
    "target_forwards": ("target_forwards", "count"),
    "drafter_forwards": ("drafter_forwards", "count"),
    **{name: (name, "steps") for name in ("draft_ms", "target_ms", "verify_ms", "other_ms")},
}


def speed_row(
    cell: CellRecords, cells: Sequence[CellRecords], pool_devices: bool = False
) -> dict[str, Any]:
    """Return the row of `cell` in `speed.csv`; `cells` are all cells of the run."""
    images = cell.images
    lossless = fastest_lossless(cell, cells)
    offers = cell.offers
    marks = images["disturbed"].dropna()
    row: dict[str, Any] = {
        **cell.columns,
        "images": len(cell.completed),
        "failed": cell.failed,
        "disturbed": int(marks.sum()) if len(marks) else None,
        "held_up": int((images["kept_share"] < 1.0).sum()),
        "lossless_cell": lossless.cell_id if lossless else None,
        "acceptance_rate": offers["accepted"].sum() / offers["offered"].sum()
        if len(offers)
        else None,
        "peak_memory_mb": images["peak_memory_bytes"].max() / 1e6,
        **{
            f"latency_p{percent}_s": images["seconds"].quantile(percent / 100)
            for percent in (50, 95)
        },
    }
    notes: list[str | None] = []
    if marks.mean() > 0.5:  # the mean of no marks is nan
        notes.append(
            f"{row['disturbed']} of {len(marks)} images disturbed: seconds of a busy machine"
        )
    if len(cell.devices) > 1:
        devices = ", ".join(f"{count} on {name}" for name, count in sorted(cell.devices.items()))
        notes.append(f"seconds of several kinds of device: {devices}")
    timed = timed_images(cell)
    intervals = {
        "latency_s": repeat_interval(timing(timed))
        if len(timed)
        else Interval(None, note="not timed"),
        "speedup": _speedup(
            cell=cell, base=baseline_of(cell, cells), name="ar", pool_devices=pool_devices
        ),
        "speedup_over_lossless": _speedup(
            cell=cell, base=lossless, name="lossless_cell", pool_devices=pool_devices
        ),
        "step_compression": _ratio(images[["tokens", "target_forwards"]]),
        "mean_accepted_length": _ratio(images[["committed", "steps"]]),
    }
    for name, interval in intervals.items():
        row |= interval.columns(name)
        notes.append(interval.note)
    for name, (over, under) in _RATIOS.items():
        sums = images[[over, under]].dropna().sum()
        row[name] = sums[over] / sums[under] if sums[under] else None
    return row | {"note": join_notes(notes)}


def _ratio(images: pd.DataFrame) -> Interval:
    """Sum over sum of both columns, over the images that have them."""
    measured = images.dropna()
    over, under = measured.to_numpy().T
    return ratio_of_sums(over, under, measured.index.get_level_values("prompt_id"))


def _speedup(
    cell: CellRecords, base: CellRecords | None, name: str, pool_devices: bool
) -> Interval:
    """Seconds of the baseline (`name` in notes) over seconds of the cell, over the images that both have."""
    timed = cell.images["seconds"].count()
    if not timed:
        return Interval(None)
    if base is None:
        return Interval(
            None,
            note=f"no speedup: no {name.removesuffix('_cell')} cell to compare with in this run",
        )
    kinds = len(cell.devices + base.devices)
    if kinds > 1 and not pool_devices:
        return Interval(
            None, note=f"no speedup: images of {kinds} kinds of device; --pool-devices pools them"
        )
    shared = timed_images(cell, base)
    if not len(shared):
        return Interval(None, note=f"no speedup: no image that {name} has too")
    speedup = repeat_interval(timing(shared))
    notes = []
    if len(shared) < timed:
        notes.append(f"speedup over the {len(shared)} of {timed} images that {name} has too")
    if differing := settings_that_differ(cell, base):
        notes.append(f"speedup against {name} with {', '.join(differing)}")
    return speedup._replace(note=join_notes([*notes, speedup.note]))


def acceptance_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the rows of `acceptance.csv` of one cell: by depth (from 1), then by position in the image (from 0).

    The interval treats steps as independent, which is approximate for neighbouring ones.
    """
    offers = cell.offers
    for axis in ("depth", "position"):
        for place, offered, accepted in (
            offers.groupby(axis)[["offered", "accepted"]].sum().itertuples()
        ):
            row = {
                **cell.columns,
                "axis": axis,
                "index": place,
                "offered": offered,
                "accepted": accepted,
            }
            yield row | proportion(accepted, offered).columns("rate")


# ---- Quality of a cell: one row for each protocol that scored it

_COLUMNS = frozenset(column.name for column in columns("quality"))

# the spread of ar with other seeds
WITHIN = "within"
OUTSIDE = "outside"


class Scores(NamedTuple):
    """The scores of one protocol."""

    images: dict[str, Row]  # of level `image`, by record key
    cells: dict[str, Row]  # of level `cell`, by cell id
    spreads: dict[str, Row]  # of level `band`, the spread of ar, by cell id


def sort_scores(rows: Iterable[Row]) -> dict[str, Scores]:
    """Sort the rows of `scores.jsonl` that have a protocol by it; of rows that score the same thing the last counts."""
    protocols: dict[str, Scores] = {}
    for row in rows:
        if row["level"] == "tokens":
            continue
        scores = protocols.setdefault(str(row["protocol"]), Scores({}, {}, {}))
        if row["level"] == "image":
            scores.images[str(row["record_key"])] = row
        else:
            (scores.spreads if row["level"] == "band" else scores.cells)[str(row["cell_id"])] = row
    return dict(sorted(protocols.items()))


def quality_rows(
    cell: CellRecords, cells: Sequence[CellRecords], protocols: Mapping[str, Scores], of_tokens: Row
) -> Sequence[Row]:
    """Return the cell's rows of `quality.csv`, one a protocol, or one alone; each has the figures `of_tokens`."""
    measured = cell.images[["neighbour_mass", "accepted"]].dropna()
    accepted = measured["accepted"].sum()
    neighbour_mass = sum(measured["neighbour_mass"]) / accepted if accepted else None
    common = {**cell.columns, "failed": cell.failed, "neighbour_mass": neighbour_mass}
    base = baseline_of(cell, cells)
    rows = []
    for protocol, scores in protocols.items():
        images = [scores.images[key] for key in cell.images["record_key"] if key in scores.images]
        of_cell = scores.cells.get(cell.cell_id, {})
        if not images and not of_cell:
            continue
        row = {
            **common,
            "protocol": protocol,
            **_scored(cell=cell, scores=scores, images=images, of_cell=of_cell),
        }
        if base is not None:
            spread = _spread_of_ar(cell=cell, base=base, cells=cells, scores=scores)
            note = join_notes([row["note"], spread.get("note")])
            row |= {
                **spread,
                **_differences(cell=cell, base=base, cells=cells, scores=scores),
                "note": note,
            }
        rows.append({**row, **of_tokens})
    return rows or [
        {
            **common,
            **of_tokens,
            "images": 0,
            "note": "pictures not scored" if of_tokens else "not scored",
        }
    ]


def _scored(
    cell: CellRecords, scores: Scores, images: Sequence[Row], of_cell: Row
) -> dict[str, Any]:
    """The figures of a cell under one protocol."""
    count = len(images) or of_cell.get("n")
    notes = [of_cell.get("note")]
    if count != len(cell.completed):
        notes.append(f"{count} of {len(cell.completed)} images scored")
    elif images and of_cell and of_cell.get("n") != count:
        notes.append(f"{listed(OF_SETS)} over {of_cell.get('n')} images")
    # Scores without a protocol version were written before protocols had versions.
    version = (of_cell or images[0]).get("protocol_version") or 1
    clip_model = next((image["clip_model"] for image in images if image.get("clip_model")), None)
    row = {name: value for name, value in of_cell.items() if name in _COLUMNS}
    row |= {"images": count, "note": join_notes(notes), "protocol_version": version}
    row |= {"fid_features": of_cell.get("extractor"), "clip_model": clip_model}
    for name in OF_IMAGES:
        row |= _ratio(scored_images(cell, scores, name)).columns(name)
    return row


def _spread_of_ar(
    cell: CellRecords, base: CellRecords, cells: Sequence[CellRecords], scores: Scores
) -> dict[str, Any]:
    """The spread of ar with other seeds, and whether the figures of a cell that drafts lie in it."""
    of_cell = scores.cells.get(cell.cell_id, {})
    judged = [
        name for name in OF_SETS if cell.columns["mode"] != "ar" and of_cell.get(name) is not None
    ]
    family = _sets_of_ar(base, cells)
    spread = next(
        (scores.spreads[ar.cell_id] for ar in family if ar.cell_id in scores.spreads), None
    )
    if spread is None:
        note = "no verdicts: this run has no ar cells with other seeds (seed_set)"
        return {"note": note} if any(METRICS[name].in_summary for name in judged) else {}
    differing = [
        f"{name}={spread[name]}" for name in ("n", "reference") if spread[name] != of_cell.get(name)
    ]
    settings = settings_that_differ(cell, base)
    differing += [setting for setting in settings if not setting.startswith(("batch", "seed_set"))]
    if differing:
        return {
            "note": f"no verdicts: the spread is that of ar with {', '.join(differing)}"
            if judged
            else None
        }
    row: dict[str, Any] = {"band_sets": spread["band_sets"]}
    for name in OF_SETS:
        centre, low, high = (spread.get(f"{name}{end}") for end in ENDS)
        row |= Interval(centre, low, high).columns(f"{name}_band")
        if centre is None or low is None or high is None:
            continue
        row[f"{name}_detectable"] = detectable(centre, low, high)
        if name in judged:
            row[f"{name}_verdict"] = WITHIN if low <= of_cell[name] <= high else OUTSIDE
    return row


def _sets_of_ar(base: CellRecords, cells: Sequence[CellRecords]) -> list[CellRecords]:
    """The ar cells that differ from `base` at most in their seeds, `base` first."""
    settings = [name for name in base.columns if name not in ("cell_id", "seed_set")]
    family = [
        cell for cell in cells if all(cell.columns[name] == base.columns[name] for name in settings)
    ]
    return sorted(family, key=lambda cell: cell.cell_id != base.cell_id)


def scored_images(cell: CellRecords, scores: Scores, name: str) -> pd.DataFrame:
    """Return the scores of a cell's images by a metric, with 1 as their denominator, by prompt and repeat."""
    by_key = {key: image.get(name) for key, image in scores.images.items()}
    figures = cell.images["record_key"].map(by_key).astype(float)
    return figures.to_frame("figure").assign(under=1.0).dropna()


def paired(
    a: pd.DataFrame, b: pd.DataFrame, *others: pd.DataFrame
) -> tuple[list[Sums], pd.Index] | None:
    """Return sums per prompt of tables of numerator and denominator over the images that a and b share, and these.

    None without such images. Of the `others` those that lack one of them are left out.
    """
    shared = a.index.intersection(b.index)
    if not len(shared):
        return None
    prompts = shared.get_level_values("prompt_id")
    tables = [a, b, *(c for c in others if shared.isin(c.index).all())]
    return [
        sums_per_prompt(table.iloc[:, 0][shared], table.iloc[:, 1][shared], prompts)
        for table in tables
    ], shared


def _differences(
    cell: CellRecords, base: CellRecords, cells: Sequence[CellRecords], scores: Scores
) -> dict[str, Any]:
    """The scores of a cell's images minus those of ar, a mean over its sets, for the same prompts and repeats."""
    row: dict[str, Any] = {}
    if cell.columns["mode"] == "ar":
        return row
    family = _sets_of_ar(base, cells)
    for name in PAIRED:
        ar, *others = (scored_images(side, scores, name) for side in family)
        pair = paired(ar, scored_images(cell, scores, name), *others)
        if pair is not None:
            sums, _ = pair
            effect = compare_sums(*sums)
            row |= effect.columns(f"{name}_vs_ar") | {
                f"{name}_vs_ar_p": effect.p_value,
                "ar_sets": len(sums) - 1,
            }
    return row


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


# ---- All tables of a run, as DataFrames and as files

_FORMULA = tuple("=+-@\t\r")


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


def frame(table: str, rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a DataFrame with exactly the columns and types that the schema declares for `table`.

    A row may leave columns out; a key that is no column raises `ValueError`.
    """
    dtypes = {"string": "string", "int": "Int64", "float": "float64"}
    listed = list(rows)
    types = {column.name: dtypes[column.dtype] for column in columns(table)}
    if unknown := {key for row in listed for key in row} - types.keys():
        raise ValueError(f"not in the schema of {table}: {', '.join(sorted(unknown))}")
    return pd.DataFrame(
        {c: pd.Series([row.get(c) for row in listed], dtype=kind) for c, kind in types.items()}
    )


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table whole or not at all, as `csv_text`. Raises `UserError` when it cannot."""
    try:
        write_atomically(path, csv_text(table).encode())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}", "Choose a writable directory."
        ) from error


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV: 6 significant digits, missing is empty.

    A text that a spreadsheet would run as a formula begins with an apostrophe.
    """
    safe = {
        str(name): values.map(_no_formula)
        for name, values in table.items()
        if values.dtype.kind == "O"
    }
    return str(table.assign(**safe).to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in _FORMULA else value
