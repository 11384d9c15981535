"""One HTML file that shows one run or several: no network, no second file, links to the picture files.

A Jinja template takes the tables (`page_tables.py`) and a tree of plain values; the JavaScript in `assets/` draws
curves, pictures and maps from that tree. Plotly draws the curves; the page contains its whole library, compressed.
Without JavaScript the page still shows its tables.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench import __version__
from lantern_bench.errors import UserError
from lantern_bench.models.io.files import write_atomically
from lantern_bench.report import curve_data
from lantern_bench.report.curve_data import FAMILY, SPEEDS, Tables
from lantern_bench.report.curves import run_styles
from lantern_bench.report.labels import BOUNDS, GROUPINGS, PARAMETER_NAMES, CellKey, cell_key, labels
from lantern_bench.report.page_tables import highlights, run_facts, summary
from lantern_bench.report.records import CellRecords, Row, group_records, load_runs
from lantern_bench.report.tables import sort_scores
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

# In the order in which they build on each other.
_SCRIPTS = ("state.js", "chips.js", "table.js", "charts.js", "pictures.js", "stage.js", "maps.js", "start.js")


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of these runs to `out` and return it.

    Raises as `records.load_runs`, and `UserError` when the file cannot be written.
    """
    text = render(load_runs(directories), out.parent)
    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}", "Choose a writable file.") from error
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; `home` is the folder it will lie in, to which links to pictures are relative."""
    import jinja2
    from plotly.offline import get_plotlyjs

    made = {name: curve_data.curve_tables(run) for name, run in runs.items()}
    data = page_data(runs, made, home)
    numbers = {(cell["run"], cell["model"], cell["cell"]): number for number, cell in enumerate(data["cells"])}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assets = resources.files("lantern_bench.report").joinpath("assets")
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
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        scripts="\n".join(assets.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
        data=_as_script(data),
        # Without a time the same library gives the same bytes.
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii"),
    )


def _as_script(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# ---- The data of the page: cells, curves, fronts, maps, prompts, pictures

Plain: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[CellKey, int]

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Plotly's names of matplotlib's markers and line styles.
_MARKERS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star", "<": "triangle-left",
}  # fmt: skip
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_IMAGE_FIGURES = ("clip_score", "prompt_accuracy")
_ENDS = ("", "_low", "_high")


def page_data(runs: Mapping[str, RunData], made: Mapping[str, Tables], home: Path) -> Plain:
    """Return the data of a page in the folder `home`; `made` are the runs' `curve_tables`."""
    speed, look = curve_data.stack_runs(made, "speed"), run_styles(made)
    records = {
        (name, cell.columns["model"], cell.cell_id): cell
        for name, run in runs.items()
        for cell in group_records(run.records)
    }
    cells: list[Plain] = []
    for (_, row), name in zip(speed.iterrows(), labels(speed), strict=True):
        style = look[cell_key(row)]
        cells.append(
            {
                "run": row["run"], "model": row["model"], "cell": row["cell_id"], "name": name, "mode": row["mode"],
                "colour": style.colour, "dark": style.colour_on_dark, "marker": _MARKERS[style.marker],
                "dash": _DASHES[style.line], "drafts": row["drafting"] != "none",
                "map": length_map(records[cell_key(row)]),
            }
        )  # fmt: skip
    numbers = {cell_key(row): number for number, (_, row) in enumerate(speed.iterrows())}
    return {
        "cells": cells,
        "speeds": SPEEDS,
        "fronts": _fronts(made, numbers),
        "depth": _curve(curve_data.acceptance_points(made), "index", "rate", numbers),
        "position": _curve(curve_data.acceptance_points(made, "position"), "index", "rate", numbers),
        "lengths": _curve(curve_data.length_points(made), "length", "share", numbers),
        "bounds": _bounds(made, numbers),
        **_pictures(runs, records, numbers, home),
    }


def _fronts(made: Mapping[str, Tables], numbers: Numbers) -> list[Plain]:
    found = []
    for front in curve_data.fronts(made):
        points = [
            {
                "cell": numbers[cell_key(row)], "dominated": bool(row["dominated"]),
                "x": _rounded(row.get(f"{front.speed}{end}") for end in _ENDS),
                "y": _rounded(row.get(f"{front.quality}{end}") for end in _ENDS),
            }
            for _, row in front.points.iterrows()
        ]  # fmt: skip
        about = {"speed": front.speed, "quality": front.quality, "axis": front.axis}
        found.append(about | {"less": "lower is better" in front.axis, "points": points})
    return found


def _curve(points: pd.DataFrame, x: str, y: str, numbers: Numbers) -> list[Plain]:
    """By cell: places, values and ends of their intervals."""
    if "index_end" in points:
        points = points.assign(**{x: (points[x].astype(float) + points["index_end"].astype(float)) / 2})
    columns = {"x": x, "y": y, "low": f"{y}_low", "high": f"{y}_high"}
    return [
        {"cell": numbers[cell_key(line.iloc[0])]} | {name: _rounded(line[column]) for name, column in columns.items()}
        for _, line in points.groupby(["run", "model", "cell_id"], sort=False)
    ]


def _bounds(made: Mapping[str, Tables], numbers: Numbers) -> list[Plain]:
    """Mean accepted length against each parameter that varies; cells that differ in nothing else are one line."""
    found = []
    for parameter in GROUPINGS[1:]:
        points = curve_data.bound_points(made, parameter)
        if points[parameter].nunique() < 2:
            continue
        family = [name for name in FAMILY if name in points and name != parameter]
        lines: list[Plain] = [
            {
                "cells": [numbers[cell_key(row)] for _, row in line.iterrows()],
                "x": [value if parameter == "tree" else float(value) for value in line[parameter]],
                "y": [_rounded(ends) for ends in zip(*(line[f"mean_accepted_length{e}"] for e in _ENDS), strict=True)],
            }
            for _, line in points.groupby(family, sort=False, dropna=False)
        ]
        if parameter in BOUNDS or any(len(line["x"]) > 1 for line in lines):
            found.append({"parameter": parameter, "name": PARAMETER_NAMES[parameter], "lines": lines})
    return found


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], numbers: Numbers, home: Path
) -> Plain:
    """Prompts by first appearance in the plan, and a picture for each completed record with its own figures."""
    thumbnails, pictures = Thumbnails(), []
    prompts: dict[str, int] = {}
    scores = {name: _image_scores(run) for name, run in runs.items()}
    grid = grid_side([row for cell in records.values() for row in cell.good])
    drawn = [(key, row) for key, cell in records.items() for row in cell.good if row.get("image")]
    for key, row in sorted(drawn, key=lambda pair: pair[1].get("order_index") or 0):
        file = runs[key[0]].folder / str(row["image"])
        steps = row.get("committed_per_step") or ()
        seconds, length = _rounded((row.get("seconds"), sum(steps) / len(steps) if steps else None))
        maps = "".join(_DIGITS[min(length, len(_DIGITS) - 1)] for length in step_lengths(row))
        pictures.append(
            {
                "cell": numbers[key], "prompt": prompts.setdefault(str(row["prompt"]), len(prompts)),
                "repeat": int(row["repeat"]), "thumb": thumbnails.place(file), "file": _link(file, home),
                "seconds": seconds, "length": length, "steps": len(steps),
                **scores[key[0]].get(str(row["record_key"]), {}),
                "runs": maps if grid and row.get("drafting") != "none" else None,
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
                    mine.setdefault(name, _rounded([row[name]])[0])
    return found


def step_lengths(row: Row) -> list[int]:
    """Return for each token of an image the length of the step that committed it; 0 for the first token."""
    lengths = [0] * int(row.get("tokens") or 0)
    for start, length in zip(row.get("start_per_step") or (), row.get("committed_per_step") or (), strict=False):
        end = min(start + length, len(lengths))
        lengths[start:end] = [int(length)] * (end - start)
    return lengths


def length_map(cell: CellRecords) -> list[float | None] | None:
    """Return the mean step length at each position over the cell's images, None where no step committed a token.

    A cell that drafts nothing, or whose tokens fill no square, has no map.
    """
    import pandas as pd

    if grid_side(cell.good) is None or cell.columns["drafting"] == "none":
        return None
    lengths = pd.DataFrame([step_lengths(row) for row in cell.good])
    return [None if pd.isna(mean) else round(float(mean), 3) for mean in lengths.where(lengths > 0).mean()]


def grid_side(rows: Sequence[Row]) -> int | None:
    """Return the side of the square that the tokens of these images fill, row by row; None where they fill none."""
    sizes = {int(row.get("tokens") or 0) for row in rows}
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side * side} else None


def _link(file: Path, home: Path) -> str | None:
    """The relative link from the page to a file; None without a file or on another drive."""
    try:
        return Path(os.path.relpath(file, home)).as_posix() if file.is_file() else None
    except ValueError:
        return None


def _rounded(values: Iterable[Any]) -> list[float | None]:
    """Six digits, as in the CSV files; None for what is missing or no number."""
    numbers = (math.nan if value is None or isinstance(value, str) else float(value) for value in values)
    return [float(f"{number:.6g}") if math.isfinite(number) else None for number in numbers]


# ---- Pictures small enough for a page with hundreds of them

SIDE = 128
"""Longest side of a thumbnail in pixels."""

BUDGET = 5_000_000
"""Limit for all thumbnails of a page together, as base64 text, in bytes."""

_QUALITIES = (90, 82, 70, 55, 40, 25)


class Thumbnails:
    """The WebP thumbnails of a page, each once, in order of first use."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[int, int], bytes], int] = {}

    def place(self, picture: Path) -> int | None:
        """Return the place of a picture's thumbnail; None when the file is missing or no picture."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(picture) as opened:
                small = opened.convert("RGB")
                small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError):
            return None
        return self._places.setdefault((small.size, small.tobytes()), len(self._places))

    def encoded(self, budget: int = BUDGET) -> list[str]:
        """Return the thumbnails as base64 of WebP files, within `budget` where the lowest quality allows it."""
        from PIL import Image

        def encode(size: tuple[int, int], pixels: bytes, quality: int) -> str:
            written = io.BytesIO()
            Image.frombytes("RGB", size, pixels).save(written, "WEBP", quality=quality, method=4)
            return base64.b64encode(written.getvalue()).decode("ascii")

        texts: list[str] = []
        for quality in _QUALITIES:
            texts = [encode(*picture, quality) for picture in self._places]
            if sum(map(len, texts)) <= budget:
                break
        return texts
