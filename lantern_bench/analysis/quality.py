"""Rows of quality.csv."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    join_notes,
    settings_that_differ,
)
from lantern_bench.analysis.speed import _ratio
from lantern_bench.analysis.statistics import (
    Interval,
    Sums,
    compare_sums,
    detectable,
    sums_per_prompt,
)
from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS, PAIRED
from lantern_bench.storage.schema import (
    ENDS,
    Row,
    columns,
)
from lantern_bench.utils.text import listed

# ---- Quality of a cell: one row for each protocol that scored it

_COLUMNS = frozenset(column.name for column in columns("quality"))

# the spread of ar with other seeds
WITHIN = "within"
OUTSIDE = "outside"


class Scores(NamedTuple):
    """The scores of one protocol."""

    images: dict[str, Row]  # of level `image`, by record key
    cells: dict[str, Row]  # of level `cell`, by cell id
    spreads: dict[str, Row]  # of level `ar_spread`, the spread of ar, by cell id


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
            (scores.spreads if row["level"] == "ar_spread" else scores.cells)[
                str(row["cell_id"])
            ] = row
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
    row: dict[str, Any] = {"ar_spread_sets": spread["ar_spread_sets"]}
    for name in OF_SETS:
        centre, low, high = (spread.get(f"{name}{end}") for end in ENDS)
        row |= Interval(centre, low, high).columns(f"{name}_ar_spread")
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
