"""One run or several as one HTML file: no network, no second file, the pictures' own files linked.

A Jinja template takes the tables (`page_tables.py`) and the data (`page_data.py`); what moves is plain JavaScript over
that data, in `page/`. Charts are Plotly's, whose whole library lies inside the page, packed: the Python package brings
no smaller one, and packed it is a third of that. A page without JavaScript still shows its tables.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench import __version__
from lantern_bench.errors import UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.report.acceptance import grid_side, length_at_positions, mean_length_map
from lantern_bench.report.curve_data import (
    FAMILY,
    SPEEDS,
    acceptance_points,
    bound_points,
    curve_tables,
    fronts,
    length_points,
)
from lantern_bench.report.curves import run_styles
from lantern_bench.report.labels import BOUNDS, GROUPINGS, PARAMETER_NAMES, CellKey, cell_key, labels
from lantern_bench.report.page_tables import highlights, run_facts, summary
from lantern_bench.report.records import CellRecords, Row, group, read_named
from lantern_bench.report.tables import sort_scores
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

    Tables = Mapping[str, pd.DataFrame]


# ---- Pictures small enough for a page that holds hundreds of them: WebP, at most 128 pixels a side


SIDE = 128
"""Longest side of a thumbnail in pixels."""

BUDGET = 5_000_000
"""What the thumbnails of a page may weigh together, as base64 text, in bytes."""

# A quality is tried on every so-many-th picture before it is used on all.
_SAMPLED = 8
_QUALITIES = (90, 82, 70, 55, 40, 25)


class Thumbnails:
    """The thumbnails of a page, each once, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._kept: list[Image] = []
        self._places: dict[tuple[tuple[int, int], bytes], int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail; None when the file is not there or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        key = (small.size, small.tobytes())
        if key not in self._places:
            self._places[key] = len(self._kept)
            self._kept.append(small)
        return self._places[key]

    def encoded(self, budget: int = BUDGET) -> list[str]:
        """Return the thumbnails as base64 of WebP files, within `budget` where the lowest quality allows it."""
        texts: list[str] = []
        sample = self._kept[::_SAMPLED]
        for quality in _QUALITIES:
            share = len(sample) / max(1, len(self._kept))
            if quality != _QUALITIES[-1] and sum(len(_webp(one, quality)) for one in sample) > share * budget:
                continue
            texts = [_webp(picture, quality) for picture in self._kept]
            if sum(map(len, texts)) <= budget:
                break
        return texts


def _webp(picture: Image, quality: int) -> str:
    written = io.BytesIO()
    picture.save(written, "WEBP", quality=quality, method=4)
    return base64.b64encode(written.getvalue()).decode("ascii")


# ---- Everything a report page shows, as one tree of plain values: cells, curves, fronts, maps, prompts, pictures


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


# ----

_ASSETS = "assets"
# In the order in which they build on each other.
_SCRIPTS = ("state.js", "chips.js", "table.js", "charts.js", "pictures.js", "stage.js", "maps.js", "start.js")


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of these runs to `out` and return it.

    Raises as `named_runs.read_named`, and `UserError` when the file cannot be written.
    """
    text = render(read_named(folders), out.parent)
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}", "Give a file you may write.") from error
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; `home` is the folder it will lie in, to which links to pictures are relative."""
    import jinja2

    made = {name: curve_tables(run) for name, run in runs.items()}
    data = page_data(runs, home, made)
    numbers = {(cell["run"], cell["model"], cell["cell"]): number for number, cell in enumerate(data["cells"])}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", _ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=" + ".join(runs),
        version=__version__,
        cells=data["cells"],
        grid=data["grid"],
        pictures=len(data["pictures"]),
        prompts=len(data["prompts"]),
        highlights=highlights(made, numbers, [cell["name"] for cell in data["cells"]]),
        summary=summary(made, numbers),
        runs=[run_facts(name, run, made[name]) for name, run in runs.items()],
        style=_part("report.css"),
        scripts="\n".join(_part(name) for name in _SCRIPTS),
        data=_as_script(data),
        plotly=_packed_plotly(),
    )


def _part(name: str) -> str:
    return resources.files("lantern_bench.report").joinpath(_ASSETS, name).read_text(encoding="utf-8")


def _as_script(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _packed_plotly() -> str:
    """Plotly's library, gzip and base64; the same bytes each time."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")
