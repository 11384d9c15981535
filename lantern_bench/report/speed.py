"""One cell's row of `speed.csv`: how fast, and where the speed comes from.

Every mean is a ratio of sums over the cell's good images (algorithms.md, section 7), the uncertain ones with an
interval over prompts. A speedup compares the same (prompt, repeat) pairs of the two cells and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lantern_bench.report.acceptance import walks
from lantern_bench.report.cells import CellRecords, Row, baseline_of, joined, settings_that_differ
from lantern_bench.report.stats import Interval, ratio_of_sums

__all__ = ["speed_row"]

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
