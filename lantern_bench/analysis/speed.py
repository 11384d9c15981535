"""Rows of speed.csv and acceptance.csv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lantern_bench.analysis.cells import (
    CellRecords,
    baseline_of,
    fastest_lossless,
    join_notes,
    settings_that_differ,
    timed_images,
)
from lantern_bench.analysis.statistics import (
    Interval,
    proportion,
    ratio_of_images,
    repeat_interval,
    timing,
)
from lantern_bench.storage.schema import Row

SPEEDUPS = ("speedup", "speedup_over_lossless")

# Columns that are sum over sum of two figures of images.
_RATIOS = {
    "tokens_per_s": ["tokens", "seconds"],
    "mal_uncut": ["uncut", "steps"],
    "accepted_drafts": ["accepted", "steps"],
    "target_forwards": ["target_forwards", "count"],
    "drafter_forwards": ["drafter_forwards", "count"],
    "draft_ms": ["draft_ms", "steps"],
    "target_ms": ["target_ms", "steps"],
    "verify_ms": ["verify_ms", "steps"],
    "other_ms": ["other_ms", "steps"],
}


def speed_row(
    cell: CellRecords, cells: Sequence[CellRecords], *, pool_devices: bool = False
) -> Row:
    """Return the row of a cell in `speed.csv`.

    Args:
        cell: The cell.
        cells: All cells of the run.
        pool_devices: Compare seconds of several kinds of device.
    """
    images = cell.images
    seconds = images["seconds"]
    marks = images["disturbed"].dropna()
    lossless = fastest_lossless(cell, cells)
    row: Row = {
        **cell.columns,
        "images": len(cell.completed),
        "failed": cell.failed,
        "disturbed": int(marks.sum()) if len(marks) else None,
        "held_up": int((images["kept_fraction"] < 1.0).sum()),
        "lossless_cell": lossless.cell_id if lossless else None,
        "acceptance_rate": _acceptance_rate(cell),
        "peak_memory_mb": images["peak_memory_bytes"].max() / 1e6,
        "latency_p50_s": seconds.quantile(0.50),
        "latency_p95_s": seconds.quantile(0.95),
    }
    for name, columns in _RATIOS.items():
        numerator, denominator = images[columns].dropna().sum()
        row[name] = numerator / denominator if denominator else None

    base = baseline_of(cell, cells)
    intervals = {
        "latency_s": _latency(cell),
        "speedup": _speedup(cell, base, name="ar", pool_devices=pool_devices),
        "speedup_over_lossless": _speedup(
            cell, lossless, name="lossless_cell", pool_devices=pool_devices
        ),
        "step_compression": ratio_of_images(images[["tokens", "target_forwards"]]),
        "mean_accepted_length": ratio_of_images(images[["committed", "steps"]]),
    }
    notes: list[str | None] = []
    if marks.mean() > 0.5:  # the mean of no marks is nan
        disturbed = f"{row['disturbed']} of {len(marks)} images disturbed"
        notes.append(f"{disturbed}: seconds of a busy machine")
    if len(cell.devices) > 1:
        devices = ", ".join(f"{count} on {name}" for name, count in sorted(cell.devices.items()))
        notes.append(f"seconds of several kinds of device: {devices}")
    for name, interval in intervals.items():
        row |= interval.columns(name)
        notes.append(interval.note)
    row["note"] = join_notes(notes)
    return row


def _acceptance_rate(cell: CellRecords) -> float | None:
    offers = cell.offers
    if offers.empty:
        return None
    return float(offers["accepted"].sum() / offers["offered"].sum())


def _latency(cell: CellRecords) -> Interval:
    timed = timed_images(cell)
    if timed.empty:
        return Interval(None, note="not timed")
    return repeat_interval(timing(timed))


def _speedup(
    cell: CellRecords, base: CellRecords | None, *, name: str, pool_devices: bool
) -> Interval:
    """Seconds of the baseline over seconds of the cell, over the images that both have.

    `name` is the name of the baseline in notes.
    """
    timed = cell.images["seconds"].count()
    if not timed:
        return Interval(None)
    if base is None:
        missing = name.removesuffix("_cell")
        note = f"no speedup: no {missing} cell to compare with in this run"
        return Interval(None, note=note)
    kinds = len(cell.devices + base.devices)
    if kinds > 1 and not pool_devices:
        note = f"no speedup: images of {kinds} kinds of device; --pool-devices pools them"
        return Interval(None, note=note)
    shared = timed_images(cell, base)
    if shared.empty:
        return Interval(None, note=f"no speedup: no image that {name} has too")

    speedup = repeat_interval(timing(shared))
    notes = []
    if len(shared) < timed:
        notes.append(f"speedup over the {len(shared)} of {timed} images that {name} has too")
    differing = settings_that_differ(cell, base)
    if differing:
        notes.append(f"speedup against {name} with {', '.join(differing)}")
    return speedup._replace(note=join_notes([*notes, speedup.note]))


def acceptance_rows(cell: CellRecords) -> Iterator[Row]:
    """Yield the rows of a cell in `acceptance.csv`: by depth from 1, then by position from 0.

    The intervals treat steps as independent, which is an approximation: neighbouring steps are
    correlated.
    """
    for axis in ("depth", "position"):
        sums = cell.offers.groupby(axis)[["offered", "accepted"]].sum()
        for place, offered, accepted in sums.itertuples():
            row: Row = {**cell.columns, "axis": axis, "index": place}
            row["offered"] = offered
            row["accepted"] = accepted
            yield row | proportion(accepted, offered).columns("rate")
