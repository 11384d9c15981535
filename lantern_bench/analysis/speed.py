"""Rows of speed.csv and acceptance.csv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

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
    ratio_of_sums,
    repeat_interval,
    timing,
)

SPEEDUPS = ("speedup", "speedup_over_lossless")

_RATIOS = {
    "tokens_per_s": ("tokens", "seconds"),
    "mal_uncut": ("uncut", "steps"),
    "accepted_drafts": ("accepted", "steps"),
    "target_forwards": ("target_forwards", "count"),
    "drafter_forwards": ("drafter_forwards", "count"),
    **{name: (name, "steps") for name in ("draft_ms", "target_ms", "verify_ms", "other_ms")},
}


def speed_row(
    cell: CellRecords, cells: Sequence[CellRecords], pool_devices: bool = False
) -> dict[str, Any]:
    """Return the row of `cell` in `speed.csv`; `cells` are all cells of the run."""
    images = cell.images
    lossless = fastest_lossless(cell, cells)
    offers = cell.offers
    marks = images["disturbed"].dropna()
    row: dict[str, Any] = {
        **cell.columns,
        "images": len(cell.completed),
        "failed": cell.failed,
        "disturbed": int(marks.sum()) if len(marks) else None,
        "held_up": int((images["kept_share"] < 1.0).sum()),
        "lossless_cell": lossless.cell_id if lossless else None,
        "acceptance_rate": offers["accepted"].sum() / offers["offered"].sum()
        if len(offers)
        else None,
        "peak_memory_mb": images["peak_memory_bytes"].max() / 1e6,
        **{
            f"latency_p{percent}_s": images["seconds"].quantile(percent / 100)
            for percent in (50, 95)
        },
    }
    notes: list[str | None] = []
    if marks.mean() > 0.5:  # the mean of no marks is nan
        notes.append(
            f"{row['disturbed']} of {len(marks)} images disturbed: seconds of a busy machine"
        )
    if len(cell.devices) > 1:
        devices = ", ".join(f"{count} on {name}" for name, count in sorted(cell.devices.items()))
        notes.append(f"seconds of several kinds of device: {devices}")
    timed = timed_images(cell)
    intervals = {
        "latency_s": repeat_interval(timing(timed))
        if len(timed)
        else Interval(None, note="not timed"),
        "speedup": _speedup(
            cell=cell, base=baseline_of(cell, cells), name="ar", pool_devices=pool_devices
        ),
        "speedup_over_lossless": _speedup(
            cell=cell, base=lossless, name="lossless_cell", pool_devices=pool_devices
        ),
        "step_compression": _ratio(images[["tokens", "target_forwards"]]),
        "mean_accepted_length": _ratio(images[["committed", "steps"]]),
    }
    for name, interval in intervals.items():
        row |= interval.columns(name)
        notes.append(interval.note)
    for name, (over, under) in _RATIOS.items():
        sums = images[[over, under]].dropna().sum()
        row[name] = sums[over] / sums[under] if sums[under] else None
    return row | {"note": join_notes(notes)}


def _ratio(images: pd.DataFrame) -> Interval:
    """Sum over sum of both columns, over the images that have them."""
    measured = images.dropna()
    over, under = measured.to_numpy().T
    return ratio_of_sums(over, under, measured.index.get_level_values("prompt_id"))


def _speedup(
    cell: CellRecords, base: CellRecords | None, name: str, pool_devices: bool
) -> Interval:
    """Seconds of the baseline (`name` in notes) over seconds of the cell, over the images that both have."""
    timed = cell.images["seconds"].count()
    if not timed:
        return Interval(None)
    if base is None:
        return Interval(
            None,
            note=f"no speedup: no {name.removesuffix('_cell')} cell to compare with in this run",
        )
    kinds = len(cell.devices + base.devices)
    if kinds > 1 and not pool_devices:
        return Interval(
            None, note=f"no speedup: images of {kinds} kinds of device; --pool-devices pools them"
        )
    shared = timed_images(cell, base)
    if not len(shared):
        return Interval(None, note=f"no speedup: no image that {name} has too")
    speedup = repeat_interval(timing(shared))
    notes = []
    if len(shared) < timed:
        notes.append(f"speedup over the {len(shared)} of {timed} images that {name} has too")
    if differing := settings_that_differ(cell, base):
        notes.append(f"speedup against {name} with {', '.join(differing)}")
    return speedup._replace(note=join_notes([*notes, speedup.note]))


def acceptance_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the rows of `acceptance.csv` of one cell: by depth (from 1), then by position in the image (from 0).

    The interval treats steps as independent, which is approximate for neighbouring ones.
    """
    offers = cell.offers
    for axis in ("depth", "position"):
        for place, offered, accepted in (
            offers.groupby(axis)[["offered", "accepted"]].sum().itertuples()
        ):
            row = {
                **cell.columns,
                "axis": axis,
                "index": place,
                "offered": offered,
                "accepted": accepted,
            }
            yield row | proportion(accepted, offered).columns("rate")
