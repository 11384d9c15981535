"""The verdict on a run and its hardware in words, for the head of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lantern_bench.analysis.labels import cell_names, sampling
from lantern_bench.analysis.recommend import (
    BREAKS,
    KEEPS,
    MAX_DISTANCE,
    cells_by_sampling,
    condition_of,
    verdict_on,
)
from lantern_bench.methods.catalog import LOSSLESS, RELAXED
from lantern_bench.report.format_tables import format_figure
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import NO_SPEED, RunData, disturbance
from lantern_bench.storage.schema import ENDS, Row

_WITHIN = condition_of()


def hardware(manifest: Mapping[str, Any]) -> str:
    """Return the hardware of a run in words: `AMD EPYC, 1 thread, bfloat16, compiled steps`."""
    device = manifest.get("device")
    threads = manifest.get("threads")
    words = [device]
    if device == "cpu" and manifest.get("machine"):
        words = [manifest["machine"]["cpu"]["model"]]
    if device == "cpu" and threads:
        words.append("1 thread" if threads == 1 else f"{threads} threads")
    words.append(manifest.get("dtype"))
    if "compile" in manifest:
        words.append("compiled steps" if manifest["compile"] else "steps not compiled")
    return ", ".join(word for word in words if word)


def verdicts(run: RunData, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Say which cells of a run are faster than ar: a lossless and a relaxed one for each sampling.

    A cell is called faster only if the whole interval of its speedup is above 1, and none is called
    so if most images were disturbed.
    """
    disturbed = disturbance(run.records[run.records["status"] == "ok"])
    if run.is_timed and disturbed and disturbed.startswith(NO_SPEED):
        return [f"{disturbed[0].upper()}{disturbed[1:]}."]
    speed = tables["speed"]
    all_cells = rows_of(speed)
    keys = [(cell["model"], cell["cell_id"]) for cell in all_cells]
    names = dict(zip(keys, cell_names(speed), strict=True))
    texts = []
    for cells in cells_by_sampling(tables, tables, _WITHIN):
        named = [cell | {"name": names[cell["model"], cell["cell_id"]]} for cell in cells]
        sentences = [*_of_lossless(named), *_of_relaxed(named)]
        if sentences:
            prefix = [f"{word}:" for word in sampling(cells[0], all_cells)]
            texts.append(" ".join([*prefix, *sentences]))
    return texts or ["No speedup over ar was measured."]


def _of_lossless(cells: Sequence[Row]) -> list[str]:
    """The sentence on the lossless cells, which are ordered from the fastest; none without any."""
    lossless = [cell for cell in cells if cell["output"] == LOSSLESS and cell["mode"] != "ar"]
    if not lossless:
        return []
    fastest = lossless[0]
    choice = f"the fastest of {len(lossless)} lossless cells"
    if len(lossless) == 1:
        choice = "the only lossless cell"
    if _beats_ar(fastest):
        return [f"{fastest['name']} is {choice}: {_speedup(fastest)}."]
    return [
        f"No lossless cell is shown to beat ar: {fastest['name']}, {choice}, has "
        f"{_speedup(fastest)}."
    ]


def _of_relaxed(cells: Sequence[Row]) -> list[str]:
    """The sentence on the relaxed cells, which are ordered from the fastest; none without any."""
    relaxed = [cell for cell in cells if cell["output"] == RELAXED]
    if not relaxed:
        return []
    found = [verdict_on(cell, _WITHIN) for cell in relaxed]
    if not any(found):
        return ["The distance of the relaxed cells was not measured."]

    limit = f"within a distance of {MAX_DISTANCE:g}"
    text = f"No relaxed cell is shown to beat ar {limit}"
    which = ""
    if KEEPS in found:
        place = found.index(KEEPS)
        found = found[:place]
        fastest = relaxed[place]
        if _beats_ar(fastest):
            which = " faster"
            text = (
                f"Of {len(relaxed)} relaxed cells, {fastest['name']} is the fastest shown to stay "
                f"{limit}: {_speedup(fastest)}"
            )
    unsettled = [
        cell
        for cell, verdict in zip(relaxed, found, strict=False)
        if verdict not in (BREAKS, None) and _may_beat_ar(cell)
    ]
    if unsettled:
        cells_are = "cell is" if len(unsettled) == 1 else "cells are"
        text += f"; {len(unsettled)}{which} {cells_are} not settled"
    return [f"{text}."]


def _beats_ar(cell: Row) -> bool:
    low = cell["speedup_low"]
    return low is not None and low > 1.0


def _may_beat_ar(cell: Row) -> bool:
    high = cell["speedup_high"]
    return high is None or high > 1.0


def _speedup(cell: Row) -> str:
    """The speedup of a cell with its interval, as in tables; says so where it has none."""
    text = format_figure("speedup", *(cell[f"speedup{end}"] for end in ENDS))
    return text if cell["speedup_low"] is not None else f"{text} without an interval"
