"""One HTML file that shows runs and needs no network.

It is made of tables and of plain values, which the scripts `assets/*.js` draw.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import pandas as pd
from PIL import Image, UnidentifiedImageError

from lantern_bench import __version__
from lantern_bench.analysis.cells import CellRecords, run_cells
from lantern_bench.analysis.labels import GROUPINGS, CellKey, cell_key, labels
from lantern_bench.analysis.published import comparability, reproduction_rows, sources
from lantern_bench.analysis.quality import sort_scores
from lantern_bench.config.paper import read_paper
from lantern_bench.methods.catalog import METRICS, OF_IMAGES
from lantern_bench.report.charts import (
    INTERVAL,
    SPEEDS,
    Chart,
    Line,
    Styles,
    Tables,
    charts,
    curve_tables,
    run_styles,
    stack_runs,
)
from lantern_bench.report.format_tables import (
    format_figure,
    head_of,
    readable,
    side_by_side,
    worth_showing,
)
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import (
    NO_SPEED,
    PICTURES_LEFT_OUT,
    RunData,
    disturbance,
    load_runs,
)
from lantern_bench.storage.schema import Row, columns, frame
from lantern_bench.utils.files import write_file

Plain: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[CellKey, int]  # places of the cells on the page


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of runs to `out` and return it.

    Raises `UserError` if it cannot be written.
    """
    text = render(load_runs(directories), out.parent)
    write_file(out, text.encode(), flag="--out")
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; links to pictures are relative to `home`, its folder."""
    from plotly.offline import get_plotlyjs

    tables = {name: curve_tables(run) for name, run in runs.items()}
    records: dict[CellKey, CellRecords] = {}
    for name, run in runs.items():
        for cell in run_cells(run):
            records[name, str(cell.columns["model"]), cell.cell_id] = cell
    numbers = {key: number for number, key in enumerate(records)}
    styles = run_styles(tables)
    cells = _cells(tables, records, styles)
    pictures = _pictures(runs, records, home)
    data = {
        "cells": cells,
        "figures": _figures(tables, numbers),
        "metrics": {name: [METRICS[name].heading, METRICS[name].digits] for name in OF_IMAGES},
        **pictures,
    }
    shown = stack_runs(tables, "cells")
    shown["number"] = [numbers[cell_key(row)] for _, row in shown.iterrows()]
    plotly = gzip.compress(get_plotlyjs().encode(), mtime=0)  # no time: equal bytes
    return _template().render(
        title=" + ".join(runs),
        version=__version__,
        cells=cells,
        figures={figure: title for figure, (title, _) in _FIGURES.items()},
        pictures=pictures,
        warnings=list(_speed_warnings(runs)),
        summary=summary(shown, tables),
        runs=[run_facts(name, run, tables[name]) for name, run in runs.items()],
        data=_plain(data),
        plotly=base64.b64encode(plotly).decode("ascii"),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", "assets"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    return environment.get_template("report.html.j2")


def _speed_warnings(runs: Mapping[str, RunData]) -> Iterator[str]:
    """Yield a sentence for each run that measures speed and whose images were mostly disturbed."""
    for name, run in runs.items():
        text = disturbance(run.records[run.records["status"] == "ok"])
        metrics = run.manifest.get("experiment", {}).get("metrics", ("speed",))
        if "speed" in metrics and text and text.startswith(NO_SPEED):
            yield f"{name}: {text}"


def _plain(value: Any) -> Any:
    """Numbers with six digits, as in the CSV files; None for what is missing or not finite."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---- The cells and their curves

_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "*": "star",
    "<": "triangle-left",
}
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}

# The hues of the modes, light enough for a dark background.
_ON_DARK = {
    "#000000": "#F2F0EC",
    "#0072B2": "#56A8E0",
    "#D55E00": "#F58549",
    "#009E73": "#34C99F",
    "#767676": "#9A9A9A",
}

# Figures of the page: title, and how the names of their charts begin. A figure with several charts
# has a menu.
_FIGURES = {
    "front": ("Speed, and what it costs", ("speed-quality-", "length-quality-")),
    "depth": ("Acceptance rate by depth of the draft tree", ("acceptance-by-depth",)),
    "lengths": ("Steps by tokens committed", ("accepted-lengths",)),
    "position": ("Acceptance rate by position in the image", ("acceptance-by-position",)),
    "bound": ("Mean accepted length against a parameter", ("mean-accepted-length-by-",)),
}


def _cells(
    tables: Mapping[str, Tables], records: Mapping[CellKey, CellRecords], styles: Styles
) -> list[Plain]:
    """The cells of the page: what they are, how they look, and their maps."""
    names = labels(stack_runs(tables, "speed"))
    cells = []
    for (key, cell), name in zip(records.items(), names, strict=True):
        run, model, cell_id = key
        style = styles[key]
        cells.append(
            {
                "run": run,
                "model": model,
                "cell": cell_id,
                "name": name,
                "mode": cell.columns["mode"],
                "colour": style.colour,
                "dark": _ON_DARK.get(style.colour, style.colour),
                "marker": _SYMBOLS[style.marker],
                "dash": _DASHES[style.line],
                "map": length_map(cell),
            }
        )
    return cells


def _figures(tables: Mapping[str, Tables], numbers: Numbers) -> dict[str, list[Plain]]:
    """The charts of each figure."""
    styles = run_styles(tables)
    figures: dict[str, list[Plain]] = {figure: [] for figure in _FIGURES}
    for chart in charts(tables, GROUPINGS[1:]):
        lines = chart.lines(styles)
        # Lines of one point each are worth no chart, unless it is against a bound.
        if chart.x in ("tree", "temperature") and all(len(line.x) == 1 for line in lines):
            continue
        drawn = to_plotly(chart, styles, numbers)
        for figure, (_, beginnings) in _FIGURES.items():
            if chart.name.startswith(beginnings):
                figures[figure].append(drawn)
    # The distance is the first chart of the menu.
    figures["front"].sort(key=lambda chart: not chart["name"].startswith("speed-quality-distance"))
    return figures


def to_plotly(chart: Chart, styles: Styles, numbers: Numbers) -> Plain:
    """Return a chart as traces and axes of Plotly, without colours.

    Args:
        chart: The chart.
        styles: The style of every cell.
        numbers: The place of every cell on the page, which becomes `customdata` of its points.

    Returns:
        `name`, `title`, `data` and `layout`. `text` names the point of a front where there is room.
    """
    traces: list[Plain] = [
        {"x": x, "y": y, "customdata": [], "mode": "lines", "hoverinfo": "skip"}
        for x, y in chart.front_lines()
    ]
    lines = sorted(chart.lines(styles), key=lambda line: line.x[0])
    traces += [_trace(chart, line, numbers) for line in lines]

    x_axis: Plain = {"title": {"text": chart.x_title}}
    if chart.x_is_count:
        x_axis["dtick"] = 1
    y_axis: Plain = {"title": {"text": chart.y_title.replace("\n", "<br>")}}
    if _is_lower_better(chart.y):
        y_axis["autorange"] = "reversed"
    if chart.y == "rate":
        y_axis["range"] = (0, 1.02)
    layout: Plain = {"xaxis": x_axis, "yaxis": y_axis}
    if chart.x == "speedup":
        dots = {"dash": "dot", "width": 1, "color": "#888888"}
        line_at_one = {"type": "line", "x0": 1.0, "x1": 1.0, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [line_at_one | {"line": dots}]
    title = f"{chart.y_title} against {chart.x_title}".replace("\n", " ")
    title = title.replace(f" ({INTERVAL})", "")
    return {"name": chart.name, "title": title, "data": traces, "layout": layout}


def _trace(chart: Chart, line: Line, numbers: Numbers) -> Plain:
    """The trace of one line."""
    names = line.points["label"].tolist()
    symbols = [_SYMBOLS[style.marker] for style in line.styles]
    if line.is_hollow:
        symbols = [f"{symbol}-open" for symbol in symbols]
    trace: Plain = {
        "name": line.label,
        "x": line.x,
        "y": line.y,
        "customdata": [numbers[cell] for cell in line.cells],
        "hovertext": names,
        "hovertemplate": "<b>%{hovertext}</b><br>%{x}, %{y:.4g}<extra></extra>",
        "mode": "lines+markers" if chart.joined else "markers",
        "opacity": 0.5 if line.is_hollow else 1.0,
        "marker": {"symbol": symbols, "size": 8},
        "line": {"dash": _DASHES[line.styles[-1].line], "width": 1.5},
    }
    if not chart.joined:
        trace["text"] = names[0]
        trace["textfont"] = {"size": 11}
    if "index_end" in line.points:
        return trace  # whiskers of many curves along an image would hide them
    for axis, whiskers in (("x", line.x_whiskers), ("y", line.y_whiskers)):
        if whiskers is not None:
            below, above = whiskers
            trace[f"error_{axis}"] = {"type": "data", "arrayminus": below, "array": above}
    return trace


# ---- Pictures and maps

PICTURES = 4_000  # of a page; browsers get slow with more

_READ = [
    "prompt",
    "repeat",
    "order_index",
    "record_key",
    "image",
    "seconds",
    "tokens",
    "drafting",
    "start_per_step",
    "committed_per_step",
]

# A step length as one character.
_DIGITS = string.digits + string.ascii_lowercase


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], home: Path
) -> Plain:
    """Prompts in the order of the plan, and their pictures with their figures.

    `left_out` counts the prompts for whose pictures the page has no room.
    """
    drawn = _drawn_records(list(records.values()))
    counts = drawn.groupby("prompt", sort=False).size().cumsum()
    prompts = list(counts.index[counts <= PICTURES]) or list(counts.index[:1])
    grid = _shared_grid(records.values())
    scores = {name: _image_scores(run) for name, run in runs.items()}
    keys = list(records)
    thumbnails: dict[str, int] = {}
    pictures = []
    for row in rows_of(drawn[drawn["prompt"].isin(prompts)]):
        run, _, _ = keys[row["cell"]]
        picture = _picture(row, runs[run], home)
        picture["prompt"] = prompts.index(row["prompt"])
        if grid is None:
            picture["runs"] = None
        # Equal pictures are stored once.
        small = picture["thumb"]
        if small is not None:
            picture["thumb"] = thumbnails.setdefault(small, len(thumbnails))
        pictures.append(picture | scores[run][str(row["record_key"])])
    return {
        "prompts": prompts,
        "pictures": pictures,
        "thumbs": list(thumbnails),
        "grid": grid,
        "left_out": len(counts) - len(prompts),
    }


def _drawn_records(cells: Sequence[CellRecords]) -> pd.DataFrame:
    """The records with a picture, in the order of the plan, each with the number of its cell."""
    tables = []
    for number, cell in enumerate(cells):
        has_picture = cell.completed["image"].notna()
        tables.append(cell.completed.loc[has_picture, _READ].assign(cell=number))
    drawn = pd.concat(tables).fillna({"order_index": 0})
    return drawn.sort_values("order_index", kind="stable")


def _shared_grid(cells: Iterable[CellRecords]) -> int | None:
    """The side of the square of tokens, if it is the same in all cells."""
    sides = {grid_side(cell.completed) for cell in cells if len(cell.completed)}
    return sides.pop() if len(sides) == 1 else None


def _picture(row: Row, run: RunData, home: Path) -> Plain:
    """One picture, with the file of its thumbnail as base64."""
    file = run.folder / str(row["image"])
    has_link = file.is_file() and not run.manifest.get(PICTURES_LEFT_OUT)
    steps = row["committed_per_step"] or ()
    digits = None
    if row["drafting"] != "none":
        lengths = step_lengths(row)
        digits = "".join(_DIGITS[min(length, len(_DIGITS) - 1)] for length in lengths)
    return {
        "cell": row["cell"],
        "prompt": None,
        "repeat": int(row["repeat"]),
        "thumb": thumbnail(file),
        "file": os.path.relpath(file, home) if has_link else None,
        "seconds": row["seconds"],
        "length": sum(steps) / len(steps) if steps else None,
        "steps": len(steps),
        "runs": digits,
    }


def _image_scores(run: RunData) -> Mapping[str, dict[str, float]]:
    """The figures of each image, by record key, from the first protocol that has them."""
    scores: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for protocol in sort_scores(run.scores).protocols.values():
        for key, row in protocol.images.items():
            figures = {name: row[name] for name in OF_IMAGES if row.get(name) is not None}
            scores[key] = figures | scores[key]
    return scores


def step_lengths(row: Row) -> list[int]:
    """Return for each token the length of the step that committed it; 0 for the first token."""
    lengths = [0] * int(row.get("tokens") or 0)
    starts = row.get("start_per_step") or ()
    committed = row.get("committed_per_step") or ()
    for start, length in zip(starts, committed, strict=False):
        end = min(start + length, len(lengths))
        lengths[start:end] = [int(length)] * (end - start)
    return lengths


def length_map(cell: CellRecords) -> list[float | None] | None:
    """Return the mean step length at each position over the images of a cell.

    A position where no step committed a token has None. A cell without drafts, or whose tokens fill
    no square, has no map.
    """
    if grid_side(cell.completed) is None or cell.columns["drafting"] == "none":
        return None
    rows = rows_of(cell.completed[["tokens", "start_per_step", "committed_per_step"]])
    lengths = pd.DataFrame([step_lengths(row) for row in rows])
    means = lengths.where(lengths > 0).mean()
    return [None if pd.isna(mean) else round(float(mean), 3) for mean in means]


def grid_side(rows: pd.DataFrame) -> int | None:
    """Return the side of the square that the tokens of images fill, or None."""
    sizes = {int(count) for count in rows["tokens"].fillna(0).unique()}
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side * side} else None


def thumbnail(picture: Path) -> str | None:
    """Return a picture made small, as base64 of a WebP file; None if it cannot be read."""
    content = io.BytesIO()
    try:
        with Image.open(picture) as opened:
            small = opened.convert("RGB")
            small.thumbnail((128, 128), Image.Resampling.LANCZOS)
            small.save(content, "WEBP", quality=70)
    except (OSError, UnidentifiedImageError):
        return None
    return base64.b64encode(content.getvalue()).decode("ascii")


# ---- The tables of the page: the summary, published figures, settings, machine

_COLUMNS = (
    "images",
    "failed",
    "speedup",
    "speedup_over_lossless",
    "mean_accepted_length",
    "acceptance_rate",
    *METRICS,
)
_MEANINGS = {column.name: column.meaning for column in (*columns("speed"), *columns("quality"))}


def _is_lower_better(name: str) -> bool:
    return name in METRICS and METRICS[name].better == "lower"


def _good_end(name: str) -> str:
    """Which end of a column is the good one: up, down, or none for counts of images."""
    if name in ("images", "failed"):
        return ""
    return "down" if _is_lower_better(name) else "up"


def summary(cells: pd.DataFrame, tables: Mapping[str, Tables]) -> Plain:
    """Return the summary of all runs, a row for each of `cells`.

    Returns:
        `heads` (text, meaning and the good end of each column), `rows` (number of the cell,
        protocol, entries) and `notes` (sentences below).
    """
    names = [name for name in _COLUMNS if name in SPEEDS or worth_showing(cells, name)]
    heads = [
        {"text": head_of(name), "meaning": _MEANINGS[name], "good": _good_end(name)}
        for name in names
    ]
    protocols = cells["protocol"].fillna("").tolist()
    if cells["protocol"].nunique() <= 1:
        protocols = [""] * len(cells)
    entries = zip(*(_entries(cells, name) for name in names), strict=True)
    rows = list(zip(cells["number"], protocols, entries, strict=True))
    notes: dict[str, None] = {}
    for of_run in tables.values():
        notes |= dict.fromkeys(readable(of_run["summary"], "summary").notes)
    return {"heads": heads, "rows": rows, "notes": list(notes)}


def _entries(table: pd.DataFrame, name: str) -> list[Plain]:
    """The entries of a column: value and interval as text, order, bar, and whether it is best.

    `order` is what the column is sorted by. `bar` has both ends and the value as fractions of the
    column's width; it is None without an interval.
    """
    figures = table.reindex(columns=[name, f"{name}_low", f"{name}_high"]).astype(float)
    best = _best(figures[name], name)
    lowest = float(figures.min().min())
    width = float(figures.max().max()) - lowest
    entries: list[Plain] = []
    for value, low, high in figures.itertuples(index=False):
        if pd.isna(value):
            entries.append({"value": "", "interval": "", "order": None, "bar": None, "best": False})
            continue
        is_count = not _good_end(name)
        # A figure by definition, or of one prompt many times, has no uncertainty.
        is_certain = pd.isna(low) or pd.isna(high) or low == high == value
        bar = None
        if is_certain:
            text = format_figure(name, int(value) if is_count else value)
        else:
            text = format_figure(name, value, low=low, high=high)
            if width > 0:
                bar = [(end - lowest) / width for end in (low, high, value)]
        text, bracket, interval = text.partition(" [")
        entries.append(
            {
                "value": text,
                "interval": bracket.strip() + interval,
                "order": value,
                "bar": bar,
                "best": value == best,
            }
        )
    return entries


def _best(figures: pd.Series[float], name: str) -> float | None:
    """The best figure of a column; None where several look alike.

    A figure that is 0 by definition in many cells has no best cell.
    """
    good = _good_end(name)
    if not good or (name in METRICS and METRICS[name].against_ar == "none"):
        return None
    best = float(figures.min() if good == "down" else figures.max())
    texts = [format_figure(name, value) for value in figures.dropna()]
    return best if texts.count(format_figure(name, best)) == 1 else None


def run_facts(name: str, data: RunData, tables: Tables) -> Plain:
    """Return the facts behind a run, from its manifest; what was not recorded is left out.

    Args:
        name: The name of the run.
        data: The run.
        tables: Its tables.

    Returns:
        `machine`, `settings` and `weights` as lists of (name, value), `experiment` as JSON, and
        `published`, a table as text or None, with its title and notes.
    """
    manifest = data.manifest
    experiment = dict(manifest.get("experiment") or {})
    names = ("model", "prompts", "images", "repeats", "seed", "batch", "metrics", "compile")
    settings = {name: experiment.get(name) for name in names}
    settings["started"] = manifest.get("started")
    settings["ended"] = manifest.get("ended")
    settings["sessions"] = len(manifest.get("sessions") or ()) or None
    machine = {name: manifest.get(name) for name in ("device", "threads", "dtype", "machine")}
    weights = (manifest.get("key") or {}).get("weights") or {}
    return {
        "name": name,
        "title": str(experiment.get("description") or experiment.get("name") or name),
        "machine": _in_words(machine),
        "settings": _in_words(settings),
        "weights": list(weights.items()),
        "experiment": json.dumps(experiment, indent=2, ensure_ascii=False),
        **_published(data, tables),
    }


def _published(data: RunData, tables: Tables) -> Plain:
    """The published figures beside the figures of a run."""
    experiment = data.manifest.get("experiment") or {}
    paper = read_paper(experiment.get("paper"))
    if paper is None:
        return {"published": None, "published_title": "", "published_notes": []}
    rows = reproduction_rows(tables, paper)
    known = [row for row in rows if row.get("published") is not None]
    published = frame("reproduction", known)
    return {
        "published": side_by_side(published) if known else None,
        "published_title": paper.title,
        "published_notes": [*sources(published), *comparability(tables, paper, data.manifest)],
    }


def _in_words(values: Plain) -> list[tuple[str, str]]:
    """The values of nested dicts with their names, as text; missing values are left out."""
    (flat,) = pd.json_normalize(values, sep=" ").to_dict("records")
    pairs = []
    for name, value in flat.items():
        if value in (None, "", [], {}):
            continue
        words = re.sub(r"\b(machine|versions) ", "", str(name)).replace("_", " ")
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        pairs.append((words, text))
    return pairs
