"""How long the steps of a cell are: the histogram behind a mean accepted length, and its map over the image.

A step's length is the number of tokens it committed and the image kept, the target's own token included, so 1 is a
step whose drafts were all rejected. Over the image, a token counts with the length of the step that brought it: where
that is high, drafts are taken in long runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lantern_bench.report.cells import CellRecords, Row
from lantern_bench.report.stats import proportion

__all__ = ["grid_side", "length_at_positions", "length_rows", "mean_length_map"]


def length_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table `lengths` of one cell; a cell that drafts nothing has none.

    The interval is Wilson's over steps, as in `acceptance.csv`.
    """
    if cell.columns["drafting"] == "none":
        return
    counts = Counter(int(length) for row in cell.good for length in row.get("committed_per_step") or () if length > 0)
    for length in range(1, max(counts, default=0) + 1):
        share = proportion(counts[length], counts.total())
        yield {
            **cell.columns,
            "length": length,
            "steps": counts[length],
            "share": share.value,
            "share_low": share.low,
            "share_high": share.high,
        }


def length_at_positions(row: Row) -> list[int]:
    """Return for each token of an image the length of the step that brought it; 0 where no step did (the first)."""
    lengths = [0] * int(row.get("tokens") or 0)
    steps = zip(row.get("start_per_step") or (), row.get("committed_per_step") or (), strict=False)
    for start, length in steps:
        for place in range(start, min(start + length, len(lengths))):
            lengths[place] = int(length)
    return lengths


def mean_length_map(cell: CellRecords) -> list[float | None]:
    """Return for each position the mean over the cell's images; None where no step brought a token."""
    maps = [length_at_positions(row) for row in cell.good]
    size = max(map(len, maps), default=0)
    places = [[one[place] for one in maps if place < len(one) and one[place]] for place in range(size)]
    return [sum(found) / len(found) if found else None for found in places]


def grid_side(rows: Sequence[Row]) -> int | None:
    """Return the side of the square that the tokens of these images fill, row by row; None where they fill none."""
    sizes = {int(row.get("tokens") or 0) for row in rows}
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side * side} else None
