"""Recommend the fastest cell whose output keeps a condition, beside the fastest lossless cell.

A condition is kept when the whole interval of a figure keeps it. Too few images therefore settle
nothing, whereas a test that finds no difference passes because of too few images.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from lantern_bench.analysis.cells import join_notes
from lantern_bench.analysis.compare import check_comparability, differences
from lantern_bench.analysis.labels import sampling
from lantern_bench.analysis.statistics import Interval, settle
from lantern_bench.analysis.tables import SPEEDUPS, one_row_per_cell
from lantern_bench.methods.catalog import METRICS, PAIRED
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import ENDS, Row, frame
from lantern_bench.utils.errors import RefusedError, UserError

MAX_DISTANCE = 0.01
"""Default condition: a shift of 0.1 standard deviations per token.

The bundled model passes it between lambda 2 and lambda 3.
"""

KEEPS = "keeps"
BREAKS = "breaks"
LOSSLESS = "lossless"

_MISS = 0.025  # probability that an interval of a figure beyond the limit keeps the limit

# Figures beside every recommendation, whatever its condition is.
_OF_TOKENS = ("distance", "emitted_tv")

_COPIED = ["model", "cell_id", "images", "impossible"]
for _name in (*SPEEDUPS, *_OF_TOKENS):
    _COPIED += [f"{_name}{_end}" for _end in ENDS]


class Condition(NamedTuple):
    """Limits of a figure."""

    quantity: str  # a column of the table `quality`
    low: float
    high: float

    def __str__(self) -> str:
        """`distance <= 0.01`."""
        if math.isinf(self.low):
            return f"{self.quantity} <= {self.high:g}"
        return f"{self.quantity} >= {self.low:g}"


def condition_of(
    *,
    max_distance: float | None = None,
    max_emitted_tv: float | None = None,
    within: tuple[str, float] | None = None,
) -> Condition:
    """Return the condition of the flags, by default a distance of at most 0.01.

    Args:
        max_distance: Largest distance.
        max_emitted_tv: Largest emitted TV.
        within: A score, and how much worse than the score of ar it may be.

    Raises:
        UserError: `within` names no score of images, or several flags are given.
    """
    flags = {
        "--max-distance": max_distance,
        "--max-emitted-tv": max_emitted_tv,
        "--within": within,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one limit", "Type the command once for each.")
    if max_emitted_tv is not None:
        return Condition(quantity="emitted_tv", low=-math.inf, high=max_emitted_tv)
    if within is None:
        high = MAX_DISTANCE if max_distance is None else max_distance
        return Condition(quantity="distance", low=-math.inf, high=high)
    name, margin = within
    if name not in PAIRED:
        raise UserError(
            f"--within {name}={margin:g}: {name} is no score of single images",
            f"Scores: {', '.join(PAIRED)}.",
        )
    quantity = f"{name}_vs_ar"
    if METRICS[name].better == "higher":
        return Condition(quantity=quantity, low=-margin, high=math.inf)
    return Condition(quantity=quantity, low=-math.inf, high=margin)


def joined_notes(timed: RunData, scored: RunData, across: Collection[str] = ()) -> list[str]:
    """Check that the speed of one run and the quality of another describe the same models.

    Seconds are taken from one run only, so the machines may differ.

    Args:
        timed: The run with the speed.
        scored: The run with the quality.
        across: Further kinds of difference that are allowed, as in `check_comparability`.

    Returns:
        A note of the differences that are allowed; none if the runs are alike.

    Raises:
        RefusedError: The runs differ in a kind that is not allowed.
    """
    unlike = differences(timed, scored)
    check_comparability(unlike, {*across, "machine"})
    stated = [str(difference) for difference in unlike if difference.kind != "machine"]
    if not stated:
        return []
    return [f"speed and quality are of two runs, which differ in {'; '.join(stated)}"]


def recommendation(
    speed: Mapping[str, pd.DataFrame],
    quality: Mapping[str, pd.DataFrame],
    condition: Condition,
    *,
    notes: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the table `recommendation`.

    For each sampling, the fastest cell that keeps the condition comes first. The fastest lossless
    cell follows if it is another one. Then come the faster cells that are not settled or have
    tokens that the target cannot give.

    Args:
        speed: Tables of the run with speedups.
        quality: Tables of the run with the figure; may be the same run. Runs are joined by cell.
        condition: The condition.
        notes: Notes of every row.

    Raises:
        RefusedError: No cell has a speedup, or none has the figure.
    """
    figures = one_row_per_cell(quality).filter([condition.quantity])
    has_speedup = speed["speed"]["speedup"].notna().any()
    if not has_speedup or figures.isna().all(axis=None):
        missing = condition.quantity if has_speedup else "a speedup"
        raise RefusedError(
            f"no cell has {missing}",
            "`lantern-bench score RUN` adds quality and distance; emitted TV is measured while "
            "decoding. Of two runs: recommend TIMED_RUN SCORED_RUN",
        )
    rows: list[Row] = []
    every_cell = rows_of(speed["speed"])
    for cells in cells_by_sampling(speed, quality, condition):
        if len(cells) == 1:  # leaves no choice
            continue
        words = " ".join(sampling(cells[0], every_cell))
        described = sorted(_described(cells, condition), key=_is_no_recommendation)
        for row in described:
            note = join_notes([*notes, row["note"]])
            rows.append(row | {"sampling": words or None, "note": note})
    return frame("recommendation", rows)


def cells_by_sampling(
    speed: Mapping[str, pd.DataFrame], quality: Mapping[str, pd.DataFrame], condition: Condition
) -> Iterator[list[Row]]:
    """Yield the cells of each sampling that have a speedup, with their figures, the fastest first.

    Args:
        speed: As in `recommendation`.
        quality: As in `recommendation`.
        condition: The condition whose figure to add.
    """
    cells = speed["speed"].dropna(subset="speedup")
    ends = [f"{condition.quantity}{end}" for end in ENDS]
    beside = ["impossible"]
    for name in _OF_TOKENS:
        beside += [f"{name}{end}" for end in ENDS]
    figures = one_row_per_cell(quality)
    scored = figures["quality_images"]
    figures["images"] = scored.where(scored > 0, figures["images"])

    joined = cells.drop(columns="images").merge(
        figures[["model", "cell_id", "images", *dict.fromkeys([*ends, *beside])]], "left"
    )
    ordered = joined.sort_values("speedup", ascending=False, kind="stable")
    for _, group in ordered.groupby(["model", "lossless_cell"], dropna=False, sort=False):
        yield rows_of(group)


def _is_no_recommendation(row: Row) -> bool:
    return row["verdict"] not in (KEEPS, LOSSLESS)


def _described(cells: Sequence[Row], condition: Condition) -> Iterator[Row]:
    """Yield the rows of cells with the same sampling, which are ordered from the fastest."""
    tried = 0
    found: Row | None = None
    is_unsettled = False
    for cell in cells:
        notes = [cell["note"]]
        of_cell = verdict_on(cell, condition)
        if cell["cell_id"] == cell["lossless_cell"]:
            verdict = LOSSLESS
            found = found or cell
            if found["speedup"] <= 1.0:
                shown = " is shown to keep" if is_unsettled else " keeps"
                notes.append(f"nothing faster than ar{shown} {condition}")
        elif of_cell is None or found:  # slower cells are of no use
            continue
        else:
            tried += 1
            verdict = of_cell
        if verdict == KEEPS:
            found = cell
            notes.append(_error_rate(tried))
        elif verdict == BREAKS:
            if not cell["impossible"]:
                continue
            notes.append(f"{cell['impossible']:.2%} of the tokens cannot come from the target")
        elif verdict != LOSSLESS:
            is_unsettled = True
        measured = Interval.read(cell, condition.quantity).columns("measured")
        row = {name: cell[name] for name in _COPIED} | measured
        row |= {"condition": str(condition), "verdict": verdict, "note": join_notes(notes)}
        yield row


def verdict_on(cell: Row, condition: Condition) -> str | None:
    """Return `KEEPS`, `BREAKS` or how many images would settle it; None without the figure."""
    figure = Interval.read(cell, condition.quantity)
    if figure.value is None:
        return None
    # A token of probability 0 is infinitely far from the target, and no feature counts it.
    if condition.quantity == "distance" and cell["impossible"]:
        return BREAKS
    return settle(
        figure,
        low=condition.low,
        high=condition.high,
        images=cell["images"],
        names=(KEEPS, BREAKS),
    )


def _error_rate(tried: int) -> str:
    """The probability of a wrong recommendation, over all cells that were tried before it."""
    if tried == 1:
        return f"1 cell tried: wrong in at most {_MISS:.1%} of repeats"
    return (
        f"the first of {tried} cells tried that keeps it: wrong in at most "
        f"{min(1.0, tried * _MISS):.1%} of repeats ({_MISS:.1%} for each cell)"
    )
