"""What was offered and what was accepted, along the walks of a cell.

A record keeps per step the child rank taken at each depth: a rank says that the walk moved on, a final -1 that
children were offered and all were rejected; a list that ends without -1 ended on a node that had no children. Every
acceptance figure is a sum over these lists (algorithms.md, section 7), by depth of the tree or by position in the
image: the draft at depth d of a step that starts at position s would fill position s + d - 1. Siblings tried at one
node count as one offer: the rate is that of moving on, not that of a single candidate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lantern_bench.report.records import CellRecords, Row
from lantern_bench.report.stats import proportion

# ---- How long the steps of a cell are: the histogram behind a mean accepted length, and its map over the image


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


# ----

AXES = ("depth", "position")


class Walks(NamedTuple):
    """Offers and acceptances of a set of images, counted by depth (from 1) or by image position (from 0)."""

    offered: Counter[int]
    accepted: Counter[int]

    @property
    def rate(self) -> float | None:
        """Depths accepted over depths offered; None when nothing was offered."""
        offers = self.offered.total()
        return self.accepted.total() / offers if offers else None


def walks(rows: Iterable[Row], axis: str) -> Walks:
    """Count the offers and acceptances of these records along `axis` (`depth` or `position`)."""
    counts = Walks(Counter(), Counter())
    for row in rows:
        for depth, position, rank in _offers(row):
            place = depth if axis == "depth" else position
            counts.offered[place] += 1
            if rank >= 0:
                counts.accepted[place] += 1
    return counts


def acceptance_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the rows of `acceptance.csv` of one cell: by depth, then by position. A cell that drafts nothing has none.

    The interval is Wilson's over steps; it takes steps as independent, which neighbouring ones are only nearly.
    """
    for axis in AXES:
        counts = walks(cell.good, axis)
        for place in sorted(counts.offered):
            rate = proportion(counts.accepted[place], counts.offered[place])
            yield {
                **cell.columns,
                "axis": axis,
                "index": place,
                "offered": counts.offered[place],
                "accepted": counts.accepted[place],
                "rate": rate.value,
                "rate_low": rate.low,
                "rate_high": rate.high,
            }


def _offers(row: Row) -> Iterator[tuple[int, int, int]]:
    """Yield (depth from 1, image position, child rank or -1) for each node of the walks that had children."""
    starts, ranks_per_step = row.get("start_per_step") or (), row.get("child_rank_per_step") or ()
    for start, ranks in zip(starts, ranks_per_step, strict=False):
        for depth, rank in enumerate(ranks, start=1):
            yield depth, start + depth - 1, rank
