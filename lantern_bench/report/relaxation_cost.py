"""What relaxation costs, from the places it was measured at: means over places with intervals over prompts.

The rows come from `measure/relaxation_cost.py`. Places of one prompt enter a resample together. A mean of estimates
that each err upwards errs upwards: the one that errs downwards stands beside it, and the note says when they are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from lantern_bench.report.cells import Row, joined
from lantern_bench.report.stats import ratio_of_sums
from lantern_bench.spec.columns import CELL_COLUMNS

__all__ = ["APART", "cost_rows"]

APART = 0.1
"""Two estimates of one mean that differ by more than this share of it are too few draws."""


def cost_rows(places: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `emitted_tv` from those of `emitted_tv_places`, cells in the order they come."""
    cells: dict[str, list[Row]] = {}
    for row in places:
        cells.setdefault(f"{row['model']} {row['cell_id']}", []).append(row)
    for rows in cells.values():
        yield _cell(rows)


def _cell(rows: list[Row]) -> dict[str, Any]:
    tv = [float(row["emitted_tv"]) for row in rows]
    prompts = [str(row["prompt_id"]) for row in rows]
    ones = [1.0] * len(rows)
    mean = ratio_of_sums(tv, ones, prompts)
    row: dict[str, Any] = {column.name: rows[0].get(column.name) for column in CELL_COLUMNS}
    row |= {"places": len(rows), "prompts": len(set(prompts)), "emitted_tv_median": median(tv)}
    row |= {"emitted_tv": mean.value, "emitted_tv_low": mean.low, "emitted_tv_high": mean.high}
    row["emitted_tv_max"] = max(tv)
    for name in ("emitted_tv_crossed", "moved_mass"):
        values = [float(place[name]) for place in rows if place.get(name) is not None]
        row[name] = sum(values) / len(values) if values else None
    if row["delta"] is not None:
        above = ratio_of_sums([float(value > row["delta"]) for value in tv], ones, prompts)
        row |= {"above_delta": above.value, "above_delta_low": above.low, "above_delta_high": above.high}
        row["times_delta"] = mean.value / row["delta"] if mean.value is not None else None
    return {**row, "note": joined(note for note in (mean.note, _draws(row)) if note)}


def _draws(row: Row) -> str | None:
    """Say where the two estimates are too far apart to be called one figure."""
    crossed, value = row["emitted_tv_crossed"], row["emitted_tv"]
    if crossed is None or value is None or value - crossed <= APART * value:
        return None
    return "more draws are needed: the mean lies between emitted_tv_crossed and emitted_tv, and they are apart"
