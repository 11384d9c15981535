"""Rows of quality.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    join_notes,
    settings_that_differ,
)
from lantern_bench.analysis.statistics import (
    Interval,
    compare_sums,
    detectable,
    ratio_of_images,
    sums_of_images,
    too_few_prompts,
)
from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS, PAIRED, emitted_tv_problem
from lantern_bench.storage.schema import Row, columns
from lantern_bench.utils.text import listed

_COLUMNS = frozenset(column.name for column in columns("quality"))

# What must be the same in a measured spread of ar and in the scores of a cell.
_SAME = ("n", "reference")

OUTSIDE = "outside"  # verdict on a figure outside the spread of ar with other seeds


@dataclass(frozen=True)
class ProtocolScores:
    """The scores of one protocol."""

    image: dict[str, Row]  # by record key
    cell: dict[str, Row]  # by cell id
    category: dict[tuple[str, str], Row]  # by cell id and category, of scorers without images' own
    ar_spread: dict[str, Row]  # by cell id

    @cached_property
    def of_images(self) -> pd.DataFrame:
        """The figures of images, and their `category`, by record key."""
        figures = dict.fromkeys([*OF_IMAGES, *PAIRED], float)
        scores = pd.DataFrame.from_dict(self.image, orient="index")
        return scores.reindex(columns=[*figures, "category"]).astype(figures)

    @cached_property
    def measured(self) -> frozenset[str]:
        """The names of the figures that some image has."""
        return frozenset(map(str, self.of_images.dropna(axis="columns", how="all")))


def sort_scores(rows: Iterable[Row]) -> dict[str, ProtocolScores]:
    """Return the scores of pictures in the rows of `scores.jsonl`, by protocol in sorted order.

    Of rows that score the same thing the last one counts. Older rows have a KID of few images,
    whose FID is withheld; it is left out, because one rule holds for both.
    """
    protocols: dict[str, ProtocolScores] = {}
    for row in rows:
        level = row["level"]
        if level == "tokens":
            continue
        scores = protocols.setdefault(row["protocol"], ProtocolScores({}, {}, {}, {}))
        if level == "category":
            scores.category[row["cell_id"], row["category"]] = row
            continue
        key = row["record_key"] if level == "image" else row["cell_id"]
        getattr(scores, level)[key] = row if level == "image" else _without_small_kid(row)
    return dict(sorted(protocols.items()))


def _without_small_kid(row: Row) -> Row:
    """The scores of a cell; without KID where FID is withheld."""
    if row.get("fid") is not None:
        return row
    return {name: value for name, value in row.items() if not name.startswith("kid")}


def quality_rows(
    cell: CellRecords,
    cells: Sequence[CellRecords],
    *,
    scores: Mapping[str, ProtocolScores],
    of_tokens: Row,
) -> list[Row]:
    """Return the rows of a cell in `quality.csv`, one for each protocol that scored it.

    A cell that no protocol scored has one row. Official scorers add a row for each category.

    Args:
        cell: The cell.
        cells: All cells of the run.
        scores: The scores of the run by protocol.
        of_tokens: Figures of the cell's tokens, which every row gets.
    """
    emitted = _emitted_tv(cell)
    common: Row = {
        **cell.columns,
        "output": cell.output,
        "images": 0,
        "failed": cell.failed,
        **emitted.columns("emitted_tv"),
        # the mean of an accepted draft
        "neighbour_mass": cell.ratio(["neighbour_mass", "accepted"]),
    }
    base = baseline_of(cell, cells)
    rows = []
    for protocol, of_protocol in scores.items():
        images = [
            of_protocol.image[key] for key in cell.images["record_key"] if key in of_protocol.image
        ]
        if not images and cell.cell_id not in of_protocol.cell:
            continue
        row = common | {"protocol": protocol} | _scored(cell, of_protocol, images)
        family = [] if base is None else _sets_of_ar(base, cells)
        if family:
            spread = _ar_spread(cell, family, of_protocol)
            note = join_notes([row["note"], spread.get("note")])
            row |= spread | _differences(cell, family, of_protocol) | {"note": note}
        note = join_notes([row["note"], of_tokens.get("note"), emitted.note])
        rows.append(row | of_tokens | {"images": row["images"], "note": note})
        of_cell = {**cell.columns, "output": cell.output, "protocol": protocol}
        rows += [of_cell | row for row in _category_rows(cell, family, of_protocol)]
    if not rows:
        note = "pictures not scored" if of_tokens else "not scored"
        note = join_notes([note, of_tokens.get("note"), emitted.note])
        rows.append(common | of_tokens | {"note": note})
    return rows


def _emitted_tv(cell: CellRecords) -> Interval:
    """The emitted TV of a cell per token, or why it has none."""
    columns = cell.columns
    problem = emitted_tv_problem(columns["drafting"], columns["rule"], columns)
    if problem is not None:
        return Interval(None, note=f"no emitted TV: {problem}")
    images = cell.images[["emitted_tv", "tokens"]].dropna()
    if images.empty:
        return Interval(None, note="no emitted TV: not recorded by the version that decoded")
    note = None
    if len(images) < len(cell.completed):
        note = f"emitted TV of {len(images)} of {len(cell.completed)} images"
    return ratio_of_images(images)._replace(note=note)


def _scored(cell: CellRecords, scores: ProtocolScores, images: Sequence[Row]) -> Row:
    """The figures of a cell under one protocol; `images` are the scores of its images."""
    of_cell = scores.cell.get(cell.cell_id, {})
    scored = of_cell.get("n")
    count = len(images) or scored
    notes = [of_cell.get("note")]
    if count != len(cell.completed):
        notes.append(f"{count} of {len(cell.completed)} images scored")
    elif images and of_cell and scored != count:
        notes.append(f"{listed(OF_SETS)} over {scored} images")

    clip_models = (image.get("clip_model") for image in images)
    row = {name: value for name, value in of_cell.items() if name in _COLUMNS}
    if images:
        prompts = cell.images.index.get_level_values("prompt_id")
        notes.append(too_few_prompts(prompts.nunique()))
    row |= {
        "images": count,
        "note": join_notes(notes),
        "protocol_version": (of_cell or images[0]).get("protocol_version"),
        "fid_features": of_cell.get("extractor"),
        "clip_model": next(filter(None, clip_models), None),
    }
    for name in scores.measured.intersection(OF_IMAGES):
        row |= ratio_of_images(scored_images(cell, scores, name)).columns(name)
    return row


def _category_rows(
    cell: CellRecords, family: Sequence[CellRecords], scores: ProtocolScores
) -> Iterator[Row]:
    """Yield what a row of each category has beside the columns of the cell and the protocol."""
    own = [scores.image.get(key, {}) for key in cell.images["record_key"]]
    categories = Counter(row["category"] for row in own if row.get("category") is not None)
    for category, images in sorted(categories.items()):
        # The scores of the images of one category, in all cells.
        of_category = {
            key: row for key, row in scores.image.items() if row.get("category") == category
        }
        part = replace(scores, image=of_category)
        row: Row = {"category": category, "images": images}
        for name in OF_IMAGES:
            row |= ratio_of_images(scored_images(cell, part, name)).columns(name)
        yield row | (_differences(cell, family, part) if family else {})
    for (cell_id, category), scored in scores.category.items():
        if cell_id == cell.cell_id:
            figures = {name: scored.get(name) for name in OF_IMAGES}
            yield {"category": category, "images": scored["n"], **figures}


def _sets_of_ar(base: CellRecords, cells: Sequence[CellRecords]) -> list[CellRecords]:
    """The ar cells that differ from `base` at most in their seeds, `base` first."""
    free = {"cell_id": base.cell_id, "seed_set": base.columns["seed_set"]}
    others = [
        cell
        for cell in cells
        if cell.columns | free == base.columns and cell.cell_id != base.cell_id
    ]
    return [base, *others]


def _ar_spread(cell: CellRecords, family: Sequence[CellRecords], scores: ProtocolScores) -> Row:
    """The spread of ar with other seeds, and a verdict on each figure of a cell that drafts."""
    of_cell = scores.cell.get(cell.cell_id, {})
    drafts = cell.columns["mode"] != "ar"
    judged = [name for name in OF_SETS if drafts and of_cell.get(name) is not None]
    measured = [scores.ar_spread.get(ar.cell_id) for ar in family]
    spread = next(filter(None, measured), None)
    if spread is None:
        if not any(METRICS[name].in_summary for name in judged):
            return {}
        return {"note": "no verdicts: this run has no ar cells with other seeds (seed_set)"}

    differing = [f"{name}={spread[name]}" for name in _SAME if spread[name] != of_cell.get(name)]
    settings = settings_that_differ(cell, family[0])
    differing += [text for text in settings if not text.startswith(("batch", "seed_set"))]
    if differing:
        note = f"no verdicts: the spread is measured on ar with {', '.join(differing)}"
        return {"note": note if judged else None}

    row: Row = {"ar_spread_sets": spread["ar_spread_sets"]}
    for name in OF_SETS:
        interval = Interval.read(spread, name)
        row |= interval.columns(f"{name}_ar_spread")
        centre, low, high = interval[:3]
        if centre is None or low is None or high is None:
            continue
        row[f"{name}_detectable"] = detectable(centre, low, high)
        if name in judged:
            row[f"{name}_verdict"] = "within" if low <= of_cell[name] <= high else OUTSIDE
    return row


def _differences(cell: CellRecords, family: Sequence[CellRecords], scores: ProtocolScores) -> Row:
    """The scores of a cell minus the mean scores of the sets of ar, for the same images."""
    row: Row = {}
    if cell.columns["mode"] == "ar":
        return row
    for name in scores.measured.intersection(PAIRED):
        scored = scored_images(cell, scores, name)
        ar, *others = (scored_images(side, scores, name) for side in family)
        shared = ar.index.intersection(scored.index)
        if shared.empty:
            continue
        # A set that lacks a shared image is left out.
        complete = [images for images in others if shared.isin(images.index).all()]
        own, *of_ar = (sums_of_images(images.loc[shared]) for images in (scored, ar, *complete))
        effect = compare_sums(of_ar[0], own, of_ar[1:])
        row |= effect.columns(f"{name}_vs_ar")
        row |= {f"{name}_vs_ar_p": effect.p_value, "ar_sets": len(of_ar)}
    return row


def scored_images(cell: CellRecords, scores: ProtocolScores, name: str) -> pd.DataFrame:
    """Return the scores of the images of a cell by one metric.

    Args:
        cell: The cell.
        scores: The scores of one protocol.
        name: The metric.

    Returns:
        Columns `figure` and `denominator`, indexed by `prompt_id` and `repeat`. The denominator is
        1, or the weight of the image where the figure is the mean over categories.
    """
    keys = cell.images["record_key"]
    own = scores.of_images[[name, "category"]].reindex(keys).set_axis(keys.index)
    table = own[name].dropna().to_frame("figure").assign(denominator=1.0)
    if METRICS[name].by_category:
        categories = own["category"]
        sizes = categories.map(categories.value_counts())
        weights = sizes.count() / (categories.nunique() * sizes.astype(float))
        table = table.mul(weights, axis="index").dropna()
    return table
