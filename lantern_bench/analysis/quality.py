"""Rows of quality.csv."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    join_notes,
    settings_that_differ,
)
from lantern_bench.analysis.statistics import (
    Interval,
    Sums,
    compare_sums,
    detectable,
    ratio_of_images,
    sums_per_prompt,
)
from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS, PAIRED
from lantern_bench.storage.schema import Row, columns
from lantern_bench.utils.text import listed

_COLUMNS = frozenset(column.name for column in columns("quality"))

# Verdicts on a figure, by the spread of ar with other seeds.
WITHIN = "within"
OUTSIDE = "outside"


class ProtocolScores(NamedTuple):
    """The scores of one protocol."""

    images: dict[str, Row]  # rows of level `image`, by record key
    cells: dict[str, Row]  # rows of level `cell`, by cell id
    ar_spreads: dict[str, Row]  # rows of level `ar_spread`, by cell id


class RunScores(NamedTuple):
    """The scores of a run."""

    protocols: dict[str, ProtocolScores]  # by name, in sorted order
    tokens: dict[str, Row]  # rows of level `tokens`, by record key


def sort_scores(rows: Iterable[Row]) -> RunScores:
    """Sort the rows of `scores.jsonl`; of rows that score the same thing the last one counts."""
    protocols: dict[str, ProtocolScores] = {}
    tokens: dict[str, Row] = {}
    for row in rows:
        if row["level"] == "tokens":
            tokens[str(row["record_key"])] = row
            continue
        scores = protocols.setdefault(str(row["protocol"]), ProtocolScores({}, {}, {}))
        if row["level"] == "image":
            scores.images[str(row["record_key"])] = row
        elif row["level"] == "ar_spread":
            scores.ar_spreads[str(row["cell_id"])] = row
        else:
            scores.cells[str(row["cell_id"])] = row
    return RunScores(dict(sorted(protocols.items())), tokens)


def quality_rows(
    cell: CellRecords, cells: Sequence[CellRecords], *, scores: RunScores, of_tokens: Row
) -> list[Row]:
    """Return the rows of a cell in `quality.csv`, one for each protocol that scored it.

    A cell that no protocol scored has one row.

    Args:
        cell: The cell.
        cells: All cells of the run.
        scores: The scores of the run.
        of_tokens: Figures of the cell's tokens, which every row gets.
    """
    common = {**cell.columns, **of_tokens, "failed": cell.failed}
    common["neighbour_mass"] = _neighbour_mass(cell)
    base = baseline_of(cell, cells)
    rows = []
    for protocol, of_protocol in scores.protocols.items():
        images = _scored_rows(cell, of_protocol)
        of_cell = of_protocol.cells.get(cell.cell_id, {})
        if not images and not of_cell:
            continue
        row = common | {"protocol": protocol} | _scored(cell, of_protocol, images)
        if base is not None:
            family = _sets_of_ar(base, cells)
            spread = _ar_spread(cell, family, of_protocol)
            note = join_notes([row["note"], spread.get("note")])
            row |= spread | _differences(cell, family, of_protocol)
            row["note"] = note
        rows.append(row | of_tokens)
    if not rows:
        note = "pictures not scored" if of_tokens else "not scored"
        rows.append(common | {"images": 0, "note": note})
    return rows


def _neighbour_mass(cell: CellRecords) -> float | None:
    """The mean neighbour mass of an accepted draft."""
    measured = cell.images[["neighbour_mass", "accepted"]].dropna()
    accepted = measured["accepted"].sum()
    return sum(measured["neighbour_mass"]) / accepted if accepted else None


def _scored_rows(cell: CellRecords, scores: ProtocolScores) -> list[Row]:
    """The scores of the images of a cell."""
    keys = cell.images["record_key"]
    return [scores.images[key] for key in keys if key in scores.images]


def _scored(cell: CellRecords, scores: ProtocolScores, images: Sequence[Row]) -> Row:
    """The figures of a cell under one protocol; `images` are the scores of its images."""
    of_cell = scores.cells.get(cell.cell_id, {})
    scored = of_cell.get("n")
    count = len(images) or scored
    notes = [of_cell.get("note")]
    if count != len(cell.completed):
        notes.append(f"{count} of {len(cell.completed)} images scored")
    elif images and of_cell and scored != count:
        notes.append(f"{listed(OF_SETS)} over {scored} images")

    row = {name: value for name, value in of_cell.items() if name in _COLUMNS}
    row["images"] = count
    row["note"] = join_notes(notes)
    row["protocol_version"] = (of_cell or images[0]).get("protocol_version")
    row["fid_features"] = of_cell.get("extractor")
    clip_models = (image.get("clip_model") for image in images)
    row["clip_model"] = next(filter(None, clip_models), None)
    for name in OF_IMAGES:
        row |= ratio_of_images(scored_images(cell, scores, name)).columns(name)
    return row


def _sets_of_ar(base: CellRecords, cells: Sequence[CellRecords]) -> list[CellRecords]:
    """The ar cells that differ from `base` at most in their seeds, `base` first."""
    settings = [name for name in base.columns if name not in ("cell_id", "seed_set")]
    others = []
    for cell in cells:
        is_alike = all(cell.columns[name] == base.columns[name] for name in settings)
        if is_alike and cell.cell_id != base.cell_id:
            others.append(cell)
    return [base, *others]


def _ar_spread(cell: CellRecords, family: Sequence[CellRecords], scores: ProtocolScores) -> Row:
    """The spread of ar with other seeds, and a verdict on each figure of a cell that drafts."""
    of_cell = scores.cells.get(cell.cell_id, {})
    judged: list[str] = []
    if cell.columns["mode"] != "ar":
        judged = [name for name in OF_SETS if of_cell.get(name) is not None]
    measured = [scores.ar_spreads.get(ar.cell_id) for ar in family]
    spread = next(filter(None, measured), None)
    if spread is None:
        if not any(METRICS[name].in_summary for name in judged):
            return {}
        return {"note": "no verdicts: this run has no ar cells with other seeds (seed_set)"}

    differing = _unlike(cell, family[0], spread=spread, of_cell=of_cell)
    if differing:
        note = f"no verdicts: the spread is measured on ar with {', '.join(differing)}"
        return {"note": note if judged else None}

    row: Row = {"ar_spread_sets": spread["ar_spread_sets"]}
    for name in OF_SETS:
        centre = spread.get(name)
        low = spread.get(f"{name}_low")
        high = spread.get(f"{name}_high")
        row |= Interval(centre, low, high).columns(f"{name}_ar_spread")
        if centre is None or low is None or high is None:
            continue
        row[f"{name}_detectable"] = detectable(centre, low, high)
        if name in judged:
            row[f"{name}_verdict"] = WITHIN if low <= of_cell[name] <= high else OUTSIDE
    return row


def _unlike(cell: CellRecords, base: CellRecords, *, spread: Row, of_cell: Row) -> list[str]:
    """What forbids to judge a cell by the spread of ar, as `name=value` of ar."""
    settings = settings_that_differ(cell, base)
    return [
        *(
            f"{name}={spread[name]}"
            for name in ("n", "reference")
            if spread[name] != of_cell.get(name)
        ),
        *(setting for setting in settings if not setting.startswith(("batch", "seed_set"))),
    ]


def _differences(cell: CellRecords, family: Sequence[CellRecords], scores: ProtocolScores) -> Row:
    """The scores of a cell minus the mean scores of the sets of ar, for the same images."""
    row: Row = {}
    if cell.columns["mode"] == "ar":
        return row
    for name in PAIRED:
        ar, *others = (scored_images(side, scores, name) for side in family)
        pair = paired(ar, scored_images(cell, scores, name), others)
        if pair is None:
            continue
        effect = compare_sums(pair.a, pair.b, pair.others)
        row |= effect.columns(f"{name}_vs_ar")
        row[f"{name}_vs_ar_p"] = effect.p_value
        row["ar_sets"] = 1 + len(pair.others)
    return row


def scored_images(cell: CellRecords, scores: ProtocolScores, name: str) -> pd.DataFrame:
    """Return the scores of the images of a cell by one metric.

    Args:
        cell: The cell.
        scores: The scores of one protocol.
        name: The metric.

    Returns:
        Columns `figure` and `denominator`, its denominator 1, indexed by `prompt_id` and `repeat`.
    """
    by_key = {key: image.get(name) for key, image in scores.images.items()}
    figures = cell.images["record_key"].map(by_key).astype(float)
    return figures.to_frame("figure").assign(denominator=1.0).dropna()


class Paired(NamedTuple):
    """Sums per prompt of several sets over the images that they share."""

    images: pd.Index
    a: Sums
    b: Sums
    others: list[Sums]


def paired(a: pd.DataFrame, b: pd.DataFrame, others: Sequence[pd.DataFrame] = ()) -> Paired | None:
    """Return sums per prompt over the images that two sets share; None where they share none.

    Args:
        a: Numerator and denominator of each image, indexed by `prompt_id` and `repeat`.
        b: The same of the other set.
        others: Further sets. A set that lacks a shared image is left out.
    """
    shared = a.index.intersection(b.index)
    if not len(shared):
        return None
    prompts = shared.get_level_values("prompt_id")

    def sums(table: pd.DataFrame) -> Sums:
        chosen = table.loc[shared]
        return sums_per_prompt(chosen.iloc[:, 0], chosen.iloc[:, 1], prompts)

    complete = [table for table in others if shared.isin(table.index).all()]
    return Paired(images=shared, a=sums(a), b=sums(b), others=[sums(table) for table in complete])
