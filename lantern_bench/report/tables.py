"""Records and scores in, the four tables of a run out.

Pure functions of what was recorded: a table can be rebuilt at will, and one that differs from its file means that the
records changed. Columns, their order and their types are those of `schema.py`, nothing else; rows have a fixed
order. Missing is empty, never 0; inf and nan are not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench.config.methods import MODES, PARAMETERS, SAMPLING
from lantern_bench.errors import UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.report.acceptance import acceptance_rows, walks
from lantern_bench.report.records import (
    NEIGHBOUR_METRIC,
    SAMPLING_DEFAULTS,
    CellRecords,
    Row,
    baseline_of,
    group,
    joined,
    read_named,
    settings_that_differ,
)
from lantern_bench.report.stats import Interval, ratio_of_sums
from lantern_bench.runs.store import RunData
from lantern_bench.schema import columns

if TYPE_CHECKING:
    import pandas as pd


# ---- The summary: the papers' shape, one row a cell, with the published figure beside ours where there is one


PUBLISHED = ("speedup", "mean_accepted_length", "fid", "clip_score", "precision", "recall")
"""Figures that a paper's table may stand beside."""

_FROM_SPEED = ("speedup", "mean_accepted_length")
_FROM_QUALITY = ("fid", "fid_features", "clip_score", "clip_score_low", "clip_score_high", "clip_model")
_FROM_MANIFOLD = ("precision", "recall")
# Sampling settings are named where cells of the run differ in them, and by the cells that depart from the default.
_SAMPLING = {
    "temperature": "T={:g}", "cfg_scale": "cfg={:g}", "top_k": "top_k={:g}", "top_p": "top_p={:g}",
    "batch": "batch={:g}",
}  # fmt: skip


def summary_rows(
    speed: Sequence[Row],
    quality: Sequence[Row],
    published: Mapping[str, Mapping[str, float]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `summary.csv` from those of `speed.csv` and `quality.csv`, in the order of the latter.

    `published` holds, by cell id, the figures (names of `PUBLISHED`) of the paper's table that the experiment names.
    """
    by_cell = {row["cell_id"]: row for row in speed}
    for scored in quality:
        timed = by_cell[scored["cell_id"]]
        row: dict[str, Any] = {name: timed[name] for name in ("cell_id", "model", "images", "failed")}
        row |= {"method": timed["mode"], "parameters": parameters(timed, speed)}
        for name in _FROM_SPEED:
            row |= {key: timed[key] for key in (name, f"{name}_low", f"{name}_high")}
        row |= {name: scored.get(name) for name in (*_FROM_QUALITY, *_FROM_MANIFOLD)}
        row |= _beside(row, (published or {}).get(str(row["cell_id"]), {}))
        notes = [str(part["note"]) for part in (timed, scored) if part.get("note")]
        yield {**row, "note": joined(notes)}


def parameters(cell: Row, cells: Sequence[Row]) -> str:
    """Return what is set beyond the mode, for reading: `small-7 k=10 lambda=2 T=0`."""
    preset = MODES.get(str(cell["mode"]))
    parts = [str(cell[name]) for name in ("drafting", "rule") if preset and cell[name] != getattr(preset, name)]
    parts += [str(cell["tree"])] if cell["tree"] else []
    for name, one in PARAMETERS.items():
        if one.in_id == "always" and name not in SAMPLING and cell.get(name) is not None:
            parts.append(f"{one.short or name}={cell[name]:g}")
    metric = cell.get("neighbour_metric")
    parts += [f"{metric} neighbours"] if metric and metric != NEIGHBOUR_METRIC else []
    parts += ["official residual"] if cell["residual"] == "official" else []
    for name, text in _SAMPLING.items():
        if len({other[name] for other in cells}) > 1 and cell[name] is not None:
            parts += [text.format(cell[name])] if cell[name] != SAMPLING_DEFAULTS.get(name) else []
    return " ".join(parts)


def _beside(row: Row, figures: Mapping[str, float]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for name in PUBLISHED:
        theirs, ours = figures.get(name), row[name]
        columns[f"{name}_published"] = theirs
        columns[f"{name}_difference"] = None if theirs is None or ours is None else ours - theirs
    return columns


# ---- One cell's rows of `quality.csv`: one for each protocol that scored it


_FIDELITY = ("fid", "fid_infinity", "fid_infinity_low", "fid_infinity_high", "kid", "kid_std", "kid_subset")
_OF_CELL = (*_FIDELITY, "precision", "recall", "n_reference", "reference")
_OF_IMAGE = ("clip_score", "prompt_accuracy", "hpsv2", "image_reward")
# Rows from before protocols had versions are of the first.
_FIRST_VERSION = 1


@dataclass
class Scores:
    """What one protocol said: rows of level `image` by record key, rows of level `cell` by cell id."""

    images: dict[str, Row] = field(default_factory=dict)
    cells: dict[str, Row] = field(default_factory=dict)


def sort_scores(rows: Iterable[Row]) -> dict[str, Scores]:
    """Sort the rows of `scores.jsonl` by protocol; of rows that score the same thing the last counts."""
    protocols: dict[str, Scores] = {}
    for row in rows:
        scores = protocols.setdefault(str(row["protocol"]), Scores())
        if row["level"] == "image":
            scores.images[str(row["record_key"])] = row
        else:
            scores.cells[str(row["cell_id"])] = row
    return dict(sorted(protocols.items()))


def quality_rows(cell: CellRecords, protocols: Mapping[str, Scores]) -> Iterator[dict[str, Any]]:
    """Yield the cell's row for each protocol that scored it, or one empty row."""
    scored = 0
    for protocol, scores in protocols.items():
        images = [(row, scores.images[key]) for row in cell.good if (key := str(row["record_key"])) in scores.images]
        whole = scores.cells.get(cell.cell_id, {})
        if images or whole:
            scored += 1
            yield _row(cell, protocol, images, whole)
    if not scored:
        missing = {"images": 0, "failed": cell.failed, "moved_mass": _moved_mass(cell), "note": "not scored"}
        yield {**cell.columns, **missing}


def _row(cell: CellRecords, protocol: str, images: Sequence[tuple[Row, Row]], whole: Row) -> dict[str, Any]:
    count = len(images) or whole.get("n")
    notes = [str(whole["note"])] if whole.get("note") else []
    if count != len(cell.good):
        notes.append(f"{count} of {len(cell.good)} images scored")
    elif images and whole and whole.get("n") != count:
        notes.append(f"fid, kid, precision and recall over {whole.get('n')} images")
    row: dict[str, Any] = {**cell.columns, "images": count, "failed": cell.failed, "protocol": protocol}
    row |= {name: whole.get(name) for name in _OF_CELL}
    scored_by = whole or images[0][1]
    row["protocol_version"] = scored_by.get("protocol_version") or _FIRST_VERSION
    row["fid_features"] = whole.get("extractor")
    row["clip_model"] = next((score["clip_model"] for _, score in images if score.get("clip_model")), None)
    for name in _OF_IMAGE:
        mean = _mean(images, name)
        row |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    row["moved_mass"] = _moved_mass(cell)
    row["note"] = joined(notes)
    return row


def _mean(images: Sequence[tuple[Row, Row]], name: str) -> Interval:
    known = [(score[name], str(row["prompt_id"])) for row, score in images if score.get(name) is not None]
    return ratio_of_sums([value for value, _ in known], [1.0] * len(known), [prompt for _, prompt in known])


def _moved_mass(cell: CellRecords) -> float | None:
    """Mean mass taken per accepted draft; None where no draft was accepted."""
    rows = [row for row in cell.good if row.get("moved_mass") is not None]
    accepted = sum(sum(row.get("accepted_per_step") or ()) for row in rows)
    return sum(row["moved_mass"] for row in rows) / accepted if accepted else None


# ---- One cell's row of `speed.csv`: how fast, and where the speed comes from


_Reader: TypeAlias = Callable[[Row], float | None]

_PHASES = {
    "draft_ms": "draft_seconds",
    "target_ms": "target_seconds",
    "verify_ms": "verify_seconds",
    "other_ms": "other_seconds",
}


def speed_row(cell: CellRecords, cells: Sequence[CellRecords]) -> dict[str, Any]:
    """Return the row of `cell`; `cells` are all cells of the run, among them the baseline."""
    notes: list[str] = []
    row: dict[str, Any] = {**cell.columns, "images": len(cell.good), "failed": cell.failed}
    rows = cell.good
    row |= _figure("latency_s", _estimate(rows, _value("seconds"), _one), notes, "not timed")
    row["tokens_per_s"] = _ratio(rows, _value("tokens"), _value("seconds"))
    row |= _figure("speedup", _speedup(cell, baseline_of(cell, cells), notes), notes, None)
    row |= _figure("step_compression", _estimate(rows, _value("tokens"), _value("target_forwards")), notes, None)
    row |= _figure("mean_accepted_length", _estimate(rows, _sum("committed_per_step"), _steps), notes, "no steps")
    row["mal_uncut"] = _ratio(rows, _uncut, _steps)
    row["accepted_drafts"] = _ratio(rows, _sum("accepted_per_step"), _steps)
    row["acceptance_rate"] = walks(rows, "depth").rate
    row["target_forwards"] = _ratio(rows, _value("target_forwards"), _one)
    row["drafter_forwards"] = _ratio(rows, _value("drafter_forwards"), _one)
    for name, source in _PHASES.items():
        row[name] = _ratio(rows, _milliseconds(source), _steps)
    peaks = [record["peak_memory_bytes"] for record in rows if record.get("peak_memory_bytes") is not None]
    row["peak_memory_mb"] = max(peaks) / 1e6 if peaks else None
    row["note"] = joined(notes)
    return row


def _speedup(cell: CellRecords, base: CellRecords | None, notes: list[str]) -> Interval:
    """Seconds of the baseline over seconds of the cell, over the pairs that both have."""
    if base is None:
        notes.append("no speedup: no ar cell to compare with in this run")
        return Interval(None)
    before = {_pair(row): row["seconds"] for row in base.good if row.get("seconds") is not None}
    timed = [row for row in cell.good if row.get("seconds") is not None]
    shared = [row for row in timed if _pair(row) in before]
    if timed and len(shared) < len(timed):
        notes.append(f"speedup over the {len(shared)} of {len(timed)} images that ar has too")
    if shared and (differing := settings_that_differ(cell, base)):
        notes.append(f"speedup against ar with {', '.join(differing)}")
    seconds = [row["seconds"] for row in shared]
    return ratio_of_sums([before[_pair(row)] for row in shared], seconds, [row["prompt_id"] for row in shared])


def _figure(name: str, interval: Interval, notes: list[str], when_missing: str | None) -> dict[str, float | None]:
    if interval.value is None:
        if when_missing:
            notes.append(when_missing)
    elif interval.note:
        notes.append(interval.note)
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _known(rows: Sequence[Row], over: _Reader, under: _Reader) -> list[tuple[float, float, str]]:
    """Both values and the prompt of the images that have both."""
    read = ((over(row), under(row), str(row["prompt_id"])) for row in rows)
    return [(a, b, prompt) for a, b, prompt in read if a is not None and b is not None]


def _ratio(rows: Sequence[Row], over: _Reader, under: _Reader) -> float | None:
    """Sum of `over` / sum of `under`; None without data."""
    known = _known(rows, over, under)
    total = math.fsum(b for _, b, _ in known)
    return math.fsum(a for a, _, _ in known) / total if total else None


def _estimate(rows: Sequence[Row], over: _Reader, under: _Reader) -> Interval:
    """The same with its interval."""
    known = _known(rows, over, under)
    return ratio_of_sums([a for a, _, _ in known], [b for _, b, _ in known], [prompt for _, _, prompt in known])


def _pair(row: Row) -> tuple[str, int]:
    return str(row["prompt_id"]), int(row["repeat"])


def _one(_row: Row) -> float:
    return 1.0


def _steps(row: Row) -> float:
    return float(len(row.get("committed_per_step") or ()))


def _value(name: str) -> _Reader:
    return lambda row: row.get(name)


def _sum(name: str) -> _Reader:
    return lambda row: float(sum(row.get(name) or ()))


def _milliseconds(name: str) -> _Reader:
    return lambda row: None if row.get(name) is None else 1000.0 * row[name]


def _uncut(row: Row) -> float | None:
    """Tokens of an image with its last step uncut: the mean of the record, times its steps."""
    return None if row.get("mal_uncut") is None else row["mal_uncut"] * _steps(row)


# ----

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
