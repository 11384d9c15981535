"""Recommend a cell: the fastest whose output keeps a condition, beside the fastest lossless one.

A condition holds when the whole interval of a figure keeps it. So too few images settle nothing, whereas a test that
finds no difference passes because of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from lantern_bench.analysis.speed import SPEEDUPS
from lantern_bench.analysis.statistics import Interval, settle
from lantern_bench.analysis.tables import cells_of
from lantern_bench.methods.catalog import METRICS, PAIRED
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.schema import ENDS, frame
from lantern_bench.utils.errors import RefusedError, UserError

MAX_DISTANCE = 0.01
"""Without a condition: a tenth of a standard deviation a token. The bundled model passes it between lambda 2 and 3."""

KEEPS = "keeps"
BREAKS = "breaks"
LOSSLESS = "lossless"
_COPIED = (
    "model",
    "cell_id",
    *(f"{name}{end}" for name in SPEEDUPS for end in ENDS),
    "images",
    "note",
)


class Condition(NamedTuple):
    """Limits of a figure."""

    quantity: str  # a column of the table `quality`
    low: float
    high: float

    def __str__(self) -> str:
        """`distance <= 0.01`."""
        return f"{self.quantity} " + (
            f"<= {self.high:g}" if math.isinf(self.low) else f">= {self.low:g}"
        )


def condition_of(max_distance: float | None, within: tuple[str, float] | None) -> Condition:
    """Return the condition of the flags; of a score: by how much it may be worse than that of ar."""
    if within is None:
        return Condition(
            "distance", -math.inf, MAX_DISTANCE if max_distance is None else max_distance
        )
    name, margin = within
    if max_distance is not None or name not in PAIRED:
        raise UserError(
            f"--within {name}={margin:g}: is no score of single images, or stands beside --max-distance",
            f"One condition: --max-distance, or --within with one of {', '.join(PAIRED)}.",
        )
    limits = (-margin, math.inf) if METRICS[name].better == "higher" else (-math.inf, margin)
    return Condition(f"{name}_vs_ar", *limits)


def recommendation(
    speed: Mapping[str, pd.DataFrame], quality: Mapping[str, pd.DataFrame], condition: Condition
) -> pd.DataFrame:
    """Return the table `recommendation` from the tables of a run, or of two that are joined by cell.

    For each sampling, from the fastest: cells that are not settled, the first that keeps the condition, the fastest
    lossless one. Raises `RefusedError` where no cell has a figure.
    """
    cells = speed["speed"].dropna(subset="speedup")
    ends = [f"{condition.quantity}{end}" for end in ENDS]
    # Of several protocols the first that has the figure.
    figures = cells_of(quality).groupby(["model", "cell_id"], as_index=False).first()
    if cells.empty or figures[condition.quantity].isna().all():
        raise RefusedError(
            f"no cell has {'a speedup' if cells.empty else condition.quantity}",
            "`lantern-bench score RUN` adds quality and distance. Of two runs: recommend TIMED_RUN SCORED_RUN",
        )
    figures["images"] = figures["quality_images"].where(
        figures["quality_images"] > 0, figures["images"]
    )
    joined = cells.drop(columns="images").merge(
        figures[["model", "cell_id", "images", *ends]], "left"
    )
    ordered = joined.sort_values("speedup", ascending=False, kind="stable")
    rows: list[dict[str, Any]] = []
    for _, group in ordered.groupby(["model", "lossless_cell"], dropna=False, sort=False):
        verdict = ""
        for cell in rows_of(group) if len(group) > 1 else ():  # one cell leaves no choice
            figure = Interval(*(cell[end] for end in ends))
            if cell["cell_id"] == cell["lossless_cell"]:
                verdict = LOSSLESS
            elif figure.value is None or verdict in (KEEPS, LOSSLESS):  # slower cells are of no use
                continue
            else:
                verdict = settle(
                    figure=figure,
                    low=condition.low,
                    high=condition.high,
                    images=cell["images"],
                    names=(KEEPS, BREAKS),
                )
            if verdict != BREAKS:
                about = {"condition": str(condition), "verdict": verdict}
                rows.append(
                    {name: cell[name] for name in _COPIED} | figure.columns("measured") | about
                )
    return frame("recommendation", rows)
