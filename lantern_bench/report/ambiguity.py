"""Token ambiguity as tables: over the whole image, along its rows, along its positions, with intervals over prompts.

The rows come from `measure/ambiguity.py`. Tokens of one prompt are not independent: prompts are what is resampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lantern_bench.report.cells import Row, joined
from lantern_bench.report.stats import ratio_of_sums
from lantern_bench.spec.schema_checks import AMBIGUITY

__all__ = ["ambiguity_table_rows"]

_KEPT = ("model", "temperature", "top_k", "top_p", "cfg_scale")


def ambiguity_table_rows(places: Iterable[Row], width: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `ambiguity` from those of `ambiguity_places`; `width` is that of the image's grid of tokens."""
    rows = list(places)
    yield _means(rows, "all", None)
    for axis, divisor in (("row", width), ("position", 1)):
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(int(row["position"]) // divisor, []).append(row)
        for index in sorted(groups):
            yield _means(groups[index], axis, index)


def _means(rows: Sequence[Row], axis: str, index: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {key: rows[0][key] for key in _KEPT} | {"axis": axis, "index": index}
    found |= {"places": len(rows), "prompts": len({row["prompt_id"] for row in rows})}
    notes: list[str] = []
    for name in AMBIGUITY:
        there = [row for row in rows if row.get(name) is not None]
        mean = ratio_of_sums(
            [float(row[name]) for row in there], [1.0] * len(there), [str(row["prompt_id"]) for row in there]
        )
        found |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
        if mean.note == "no data":
            notes.append("nobody drafts the first token" if axis == "position" else "no drafter")
        elif mean.note:
            notes.append(mean.note)
    return {**found, "note": joined(notes)}
