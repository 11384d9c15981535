"""Everything a report page shows, as one tree of plain values: cells, curves, fronts, maps, prompts, pictures.

It is what `page/*.js` reads. Figures come from the tables and points that the files are made of (`points.py`), so page
and files agree; styles are those of `naming.py`. Nothing is formatted here but names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench.report.cells import CellRecords, Row, group
from lantern_bench.report.curves import run_styles
from lantern_bench.report.lengths import grid_side, length_at_positions, mean_length_map
from lantern_bench.report.naming import BOUNDS, GROUPINGS, PARAMETER_NAMES, CellKey, cell_key, labels
from lantern_bench.report.points import (
    FAMILY,
    SPEEDS,
    acceptance_points,
    bound_points,
    curve_tables,
    fronts,
    length_points,
)
from lantern_bench.report.quality import sort_scores
from lantern_bench.report.thumbnails import Thumbnails
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

    Tables = Mapping[str, pd.DataFrame]

__all__ = ["page_data"]

Plain: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[CellKey, int]

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MARKERS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star", "<": "triangle-left",
}  # fmt: skip
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_IMAGE_FIGURES = ("clip_score", "prompt_accuracy")


def page_data(runs: Mapping[str, RunData], home: Path, tables: Mapping[str, Tables] | None = None) -> Plain:
    """Return the data of a page that will lie in the folder `home`, to which links to pictures are relative.

    `tables` are the runs' `curve_tables` where they are made already.
    """
    made = tables or {name: curve_tables(run) for name, run in runs.items()}
    cells, numbers = _cells(made)
    records = {
        (name, cell.columns["model"], cell.cell_id): cell for name, run in runs.items() for cell in group(run.records)
    }
    for key, number in numbers.items():
        cells[number] |= _map(records[key])
    return {
        "cells": cells,
        "speeds": SPEEDS,
        "fronts": _fronts(made, numbers),
        "depth": _curve(acceptance_points(made), "index", "rate", numbers),
        "position": _curve(acceptance_points(made, "position"), "index", "rate", numbers),
        "lengths": _curve(length_points(made), "length", "share", numbers),
        "bounds": _bounds(made, numbers),
        **_pictures(runs, records, numbers, home),
    }


def _cells(made: Mapping[str, Tables]) -> tuple[list[Plain], dict[CellKey, int]]:
    """The cells in the order of all tables, and the number of each."""
    import pandas as pd

    speed = pd.concat([tables["speed"].assign(run=name) for name, tables in made.items()], ignore_index=True)
    look, names = run_styles(made), labels(speed)
    cells: list[Plain] = []
    numbers: dict[CellKey, int] = {}
    for (_, row), name in zip(speed.iterrows(), names, strict=True):
        style = look[cell_key(row)]
        numbers[cell_key(row)] = len(cells)
        cells.append(
            {
                "run": row["run"], "model": row["model"], "cell": row["cell_id"], "name": name, "mode": row["mode"],
                "colour": style.colour, "dark": style.colour_on_dark, "marker": _MARKERS[style.marker],
                "dash": _DASHES[style.line], "drafts": row["drafting"] != "none",
            }
        )  # fmt: skip
    return cells, numbers


def _map(cell: CellRecords) -> Plain:
    """The accepted length over the image; none for a cell that drafts nothing or whose tokens fill no square."""
    side = grid_side(cell.good)
    if side is None or cell.columns["drafting"] == "none":
        return {"map": None}
    return {"map": [None if value is None else round(value, 3) for value in mean_length_map(cell)]}


def _fronts(made: Mapping[str, Tables], numbers: Numbers) -> list[Plain]:
    found = []
    for front in fronts(made):
        less = "lower is better" in front.axis
        points = [
            {
                "cell": numbers[cell_key(row)], "x": _interval(row, front.speed), "y": _interval(row, front.quality),
                "dominated": bool(row["dominated"]),
            }
            for _, row in front.points.iterrows()
        ]  # fmt: skip
        found.append(
            {"speed": front.speed, "quality": front.quality, "axis": front.axis, "less": less, "points": points}
        )
    return found


def _curve(points: pd.DataFrame, x: str, y: str, numbers: Numbers) -> list[Plain]:
    """By cell: places, values and ends of their intervals."""
    found = []
    for _, line in points.groupby(["run", "model", "cell_id"], sort=False):
        places = line[x].astype(float)
        if "index_end" in line:
            places = (places + line["index_end"].astype(float)) / 2
        values = {
            name: _rounded(line[column]) for name, column in (("y", y), ("low", f"{y}_low"), ("high", f"{y}_high"))
        }
        found.append({"cell": numbers[cell_key(line.iloc[0])], "x": _rounded(places), **values})
    return found


def _bounds(made: Mapping[str, Tables], numbers: Numbers) -> list[Plain]:
    """Mean accepted length against each parameter that varies; cells that differ in nothing else are one line."""
    found = []
    for parameter in GROUPINGS[1:]:
        points = bound_points(made, parameter)
        if points[parameter].nunique() < 2:
            continue
        family = [name for name in FAMILY if name in points and name != parameter]
        lines: list[Plain] = []
        for _, line in points.groupby(family, sort=False, dropna=False):
            values = [value if parameter == "tree" else float(value) for value in line[parameter]]
            cells = [numbers[cell_key(row)] for _, row in line.iterrows()]
            lengths = [_interval(row, "mean_accepted_length") for _, row in line.iterrows()]
            lines.append({"cells": cells, "x": values, "y": lengths})
        if parameter in BOUNDS or any(len(line["x"]) > 1 for line in lines):
            found.append({"parameter": parameter, "name": PARAMETER_NAMES[parameter], "lines": lines})
    return found


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], numbers: Numbers, home: Path
) -> Plain:
    """Prompts by first appearance in the plan, and a picture for each good record with its own figures."""
    thumbnails, pictures = Thumbnails(), []
    prompts: dict[str, int] = {}
    scores = {name: _image_scores(run) for name, run in runs.items()}
    grid = grid_side([row for cell in records.values() for row in cell.good])
    ordered = sorted(
        ((key, row) for key, cell in records.items() for row in cell.good),
        key=lambda pair: pair[1].get("order_index") or 0,
    )
    for key, row in ordered:
        if not row.get("image"):
            continue
        file = runs[key[0]].folder / str(row["image"])
        prompt = prompts.setdefault(str(row["prompt"]), len(prompts))
        figures = scores[key[0]].get(str(row["record_key"]), {})
        pictures.append(
            {
                "cell": numbers[key], "prompt": prompt, "repeat": int(row["repeat"]), "thumb": thumbnails.place(file),
                "file": _link(file, home), "seconds": _round(row.get("seconds")), "length": _round(_own_length(row)),
                "steps": len(row.get("committed_per_step") or ()), **figures,
                "runs": _digits(length_at_positions(row)) if grid and row.get("drafting") != "none" else None,
            }
        )  # fmt: skip
    return {"prompts": list(prompts), "pictures": pictures, "thumbs": thumbnails.encoded(), "grid": grid}


def _image_scores(run: RunData) -> dict[str, Plain]:
    """CLIP score and prompt accuracy of each image, under the first protocol that has them."""
    found: dict[str, Plain] = {}
    for scores in sort_scores(run.scores).values():
        for key, row in scores.images.items():
            mine = found.setdefault(key, {})
            for name in _IMAGE_FIGURES:
                if row.get(name) is not None:
                    mine.setdefault(name, _round(row[name]))
    return found


def _own_length(row: Row) -> float | None:
    steps: Sequence[int] = row.get("committed_per_step") or ()
    return sum(steps) / len(steps) if steps else None


def _digits(lengths: Sequence[int]) -> str:
    """Lengths as one digit each, base 36: what no step reaches, a tree of 35 levels, is cut."""
    return "".join(_DIGITS[min(length, len(_DIGITS) - 1)] for length in lengths)


def _link(file: Path, home: Path) -> str | None:
    """The way from the page to a file, as in a link; None where there is none (another drive)."""
    try:
        return Path(os.path.relpath(file, home)).as_posix() if file.is_file() else None
    except ValueError:
        return None


def _interval(row: Mapping[Hashable, Any] | pd.Series, name: str) -> list[float | None]:
    return [_round(row.get(f"{name}{end}")) for end in ("", "_low", "_high")]


def _rounded(values: Any) -> list[float | None]:
    return [_round(value) for value in values]


def _round(value: Any) -> float | None:
    """Six digits, as in the CSV files; what is missing is None."""
    if value is None or value != value or isinstance(value, str):
        return None
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
