"""One HTML file that shows runs without network, made of tables and of plain values that `assets/*.js` draw."""

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
from collections.abc import Mapping, Sequence
from functools import partial
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
from lantern_bench.report import charts
from lantern_bench.report.charts import SPEEDS, Chart, Styles, Tables, stack_runs
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
    """Write the report of these runs to `out` and return it; raises `UserError` when it cannot be written."""
    text = render(load_runs(directories), out.parent)
    write_file(out, text.encode(), flag="--out")
    return out


def render(runs: Mapping[str, RunData], home: Path) -> str:
    """Return the page; links to pictures are relative to `home`, its folder."""
    from plotly.offline import get_plotlyjs

    tables = {name: charts.curve_tables(run) for name, run in runs.items()}
    records = {
        (name, str(cell.columns["model"]), cell.cell_id): cell
        for name, run in runs.items()
        for cell in run_cells(run)
    }
    numbers = {key: number for number, key in enumerate(records)}
    cells = _cells(tables, records)
    shown = stack_runs(tables, "cells")
    shown["number"] = [numbers[cell_key(row)] for _, row in shown.iterrows()]
    pictures = _pictures(runs, records, home)
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
    return environment.get_template("report.html.j2").render(
        title=" + ".join(runs),
        version=__version__,
        cells=cells,
        figures={figure: title for figure, (title, _) in _FIGURES.items()},
        pictures=pictures,
        warnings=[f"{name}: {text}" for name, run in runs.items() if (text := _speed_warning(run))],
        summary=summary(shown, tables),
        runs=[run_facts(name, run, tables[name]) for name, run in runs.items()],
        data=_plain(
            {"cells": cells, "figures": _figures(tables, numbers), "metrics": _METRICS, **pictures}
        ),
        # Without a time the same library gives the same bytes.
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode("ascii"),
    )


def _speed_warning(run: RunData) -> str | None:
    """Say that most images of a run that measures speed were disturbed; None if they were not."""
    text = disturbance(run.records[run.records["status"] == "ok"])
    is_timed = "speed" in run.manifest.get("experiment", {}).get("metrics", ("speed",))
    return text if is_timed and text and text.startswith(NO_SPEED) else None


def _plain(value: Any) -> Any:
    """Numbers of six digits, as in the CSV files; None for what is missing or not finite."""
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
# The hues of the modes, light enough for a dark background.
_ON_DARK = {
    "#000000": "#F2F0EC",
    "#0072B2": "#56A8E0",
    "#D55E00": "#F58549",
    "#009E73": "#34C99F",
    "#767676": "#9A9A9A",
}
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_METRICS = {name: [METRICS[name].heading, METRICS[name].digits] for name in OF_IMAGES}

# Figures of the page: titles, and how the names of their charts begin; a menu lists these where there are several.
_FIGURES = {
    "front": ("Speed, and what it costs", ("speed-quality-", "length-quality-")),
    "depth": ("Acceptance rate by depth of the draft tree", ("acceptance-by-depth",)),
    "lengths": ("Share of steps by tokens committed", ("accepted-lengths",)),
    "position": ("Acceptance rate by position in the image", ("acceptance-by-position",)),
    "bound": ("Mean accepted length against a parameter", ("mean-accepted-length-by-",)),
}


def _cells(tables: Mapping[str, Tables], records: Mapping[CellKey, CellRecords]) -> list[Plain]:
    """The cells of the page: what they are, how they look, and their maps."""
    styles = charts.run_styles(tables)
    names = labels(stack_runs(tables, "speed"))
    return [
        {
            "run": key[0],
            "model": key[1],
            "cell": key[2],
            "name": name,
            "mode": cell.columns["mode"],
            "colour": styles[key].colour,
            "dark": _ON_DARK.get(styles[key].colour, styles[key].colour),
            "marker": _SYMBOLS[styles[key].marker],
            "dash": _DASHES[styles[key].line],
            "map": length_map(cell),
        }
        for (key, cell), name in zip(records.items(), names, strict=True)
    ]


def _figures(tables: Mapping[str, Tables], numbers: Numbers) -> dict[str, list[Plain]]:
    """The charts of each figure."""
    styles = charts.run_styles(tables)
    figures = defaultdict[str, list[Plain]](list)
    for chart in charts.charts(tables, GROUPINGS[1:]):
        # Lines of one point each are worth no chart, unless it is against a bound.
        if chart.x not in ("tree", "temperature") or any(len(rows) > 1 for rows in chart.groups()):
            (figure,) = (
                figure for figure, (_, names) in _FIGURES.items() if chart.name.startswith(names)
            )
            figures[figure].append(to_plotly(chart, styles, numbers))
    figures["front"].sort(key=lambda chart: not chart["name"].startswith("speed-quality-distance"))
    return {figure: figures[figure] for figure in _FIGURES}


def to_plotly(chart: Chart, styles: Styles, numbers: Numbers) -> Plain:
    """Return the chart as traces and axes of Plotly, without colours.

    `customdata` of a point is its cell's number; `text` names the point of a front, written where there is room.
    """
    traces: list[Plain] = [
        {"x": x, "y": y, "customdata": [], "mode": "lines", "hoverinfo": "skip"}
        for x, y in chart.front_lines()
    ]
    groups = sorted(chart.groups(), key=lambda rows: rows[chart.x].iloc[0])
    for rows in groups:
        row_styles = [styles[cell_key(row)] for _, row in rows.iterrows()]
        is_hollow = "dominated" in rows and bool(rows["dominated"].iloc[0])
        trace: Plain = {
            "name": charts.line_label(rows),
            "x": rows[chart.x].tolist(),
            "y": rows[chart.y].astype(float).tolist(),
            "customdata": [numbers[cell_key(row)] for _, row in rows.iterrows()],
            "hovertext": rows["label"].tolist(),
            "hovertemplate": "<b>%{hovertext}</b><br>%{x}, %{y:.4g}<extra></extra>",
            "mode": "lines+markers" if chart.joined else "markers",
            "opacity": 0.5 if is_hollow else 1.0,
            "marker": {
                "symbol": [_SYMBOLS[style.marker] + "-open" * is_hollow for style in row_styles],
                "size": 8,
            },
            "line": {"dash": _DASHES[row_styles[-1].line], "width": 1.5},
        }
        if not chart.joined:
            trace |= {"text": rows["label"].iloc[0], "textfont": {"size": 11}}
        for axis, name in (("x", chart.x), ("y", chart.y)):
            # Whiskers of many curves along an image would hide them.
            if (lengths := charts.whiskers(rows, name)) is not None and "index_end" not in rows:
                trace[f"error_{axis}"] = {
                    "type": "data",
                    "arrayminus": lengths[0],
                    "array": lengths[1],
                }
        traces.append(trace)
    x_axis: Plain = {"title": {"text": chart.x_title}} | ({"dtick": 1} if chart.x_is_count else {})
    y_axis: Plain = {"title": {"text": chart.y_title.replace("\n", "<br>")}}
    if _is_lower_better(chart.y):
        y_axis["autorange"] = "reversed"
    if chart.y == "rate":
        y_axis["range"] = (0, 1.02)
    layout: Plain = {"xaxis": x_axis, "yaxis": y_axis}
    if chart.x == "speedup":
        line = {"type": "line", "x0": 1.0, "x1": 1.0, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [line | {"line": {"dash": "dot", "width": 1, "color": "#888888"}}]
    title = f"{chart.y_title} against {chart.x_title}".replace("\n", " ").replace(
        f" ({charts.INTERVAL})", ""
    )
    return {"name": chart.name, "title": title, "data": traces, "layout": layout}


# ---- Pictures and maps

PICTURES = 4_000  # of a page; with more, browsers get slow

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
_DIGITS = string.digits + string.ascii_lowercase


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], home: Path
) -> Plain:
    """Prompts in the order of the plan, and their pictures, each with its figures; `left_out` counts other prompts."""
    cells = list(records.values())
    keys = list(records)
    drawn = pd.concat(
        [
            cell.completed.loc[cell.completed["image"].notna(), _READ].assign(cell=n)
            for n, cell in enumerate(cells)
        ]
    )
    drawn = drawn.fillna({"order_index": 0}).sort_values("order_index", kind="stable")
    counts = drawn.groupby("prompt", sort=False).size().cumsum()
    prompts = list(counts.index[counts <= PICTURES]) or list(counts.index[:1])
    sides = {grid_side(cell.completed) for cell in cells if len(cell.completed)}
    grid = sides.pop() if len(sides) == 1 else None
    scores = {name: _image_scores(run) for name, run in runs.items()}
    thumbnails: dict[str, int] = {}
    pictures = []
    for row in rows_of(drawn[drawn["prompt"].isin(prompts)]):
        run = keys[row["cell"]][0]
        steps = row["committed_per_step"] or ()
        file = runs[run].folder / str(row["image"])
        small = thumbnail(file)
        has_link = file.is_file() and not runs[run].manifest.get(PICTURES_LEFT_OUT)
        digits = "".join(_DIGITS[min(length, len(_DIGITS) - 1)] for length in step_lengths(row))
        pictures.append(
            {
                "cell": row["cell"],
                "prompt": prompts.index(row["prompt"]),
                "repeat": int(row["repeat"]),
                "thumb": None if small is None else thumbnails.setdefault(small, len(thumbnails)),
                "file": os.path.relpath(file, home) if has_link else None,
                "seconds": row["seconds"],
                "length": sum(steps) / len(steps) if steps else None,
                "steps": len(steps),
                "runs": digits if grid and row["drafting"] != "none" else None,
                **scores[run][str(row["record_key"])],
            }
        )
    return {
        "prompts": prompts,
        "pictures": pictures,
        "thumbs": list(thumbnails),
        "grid": grid,
        "left_out": len(counts) - len(prompts),
    }


def _image_scores(run: RunData) -> Mapping[str, dict[str, float]]:
    """The figures of each image, by record key, from the first protocol that has them."""
    scores: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for protocol in sort_scores(run.scores).protocols.values():
        for key, row in protocol.images.items():
            scores[key] = {
                name: row[name] for name in OF_IMAGES if row.get(name) is not None
            } | scores[key]
    return scores


def step_lengths(row: Row) -> list[int]:
    """Return for each token the length of the step that committed it; 0 for the first token."""
    lengths = [0] * int(row.get("tokens") or 0)
    for start, length in zip(
        row.get("start_per_step") or (), row.get("committed_per_step") or (), strict=False
    ):
        end = min(start + length, len(lengths))
        lengths[start:end] = [int(length)] * (end - start)
    return lengths


def length_map(cell: CellRecords) -> list[float | None] | None:
    """Return the mean step length at each position over the cell's images, None where no step committed a token.

    None for a cell without drafts, or whose tokens fill no square.
    """
    if grid_side(cell.completed) is None or cell.columns["drafting"] == "none":
        return None
    rows = rows_of(cell.completed[["tokens", "start_per_step", "committed_per_step"]])
    lengths = pd.DataFrame([step_lengths(row) for row in rows])
    return [
        None if pd.isna(mean) else round(float(mean), 3)
        for mean in lengths.where(lengths > 0).mean()
    ]


def grid_side(rows: pd.DataFrame) -> int | None:
    """Return the side of the square that the tokens of these images fill, or None."""
    sizes = {int(count) for count in rows["tokens"].fillna(0).unique()}
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side * side} else None


def thumbnail(picture: Path) -> str | None:
    """Return a picture made small, as base64 of a WebP file; None when the file is missing or no picture."""
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
_MEANINGS = {
    column.name: column.meaning for table in ("speed", "quality") for column in columns(table)
}


def _is_lower_better(name: str) -> bool:
    return name in METRICS and METRICS[name].better == "lower"


def summary(cells: pd.DataFrame, tables: Mapping[str, Tables]) -> Plain:
    """Return the summary of all runs, a row for each of `cells`.

    heads: dicts of text, meaning and the good end (up, down or none); rows: (number of the cell, protocol, entries);
    notes: sentences below.
    """
    names = [name for name in _COLUMNS if name in SPEEDS or worth_showing(cells, name)]
    goods = {name: "down" if _is_lower_better(name) else "up" for name in names}
    goods |= dict.fromkeys(("images", "failed"), "")
    heads = [
        {"text": head_of(name), "meaning": _MEANINGS[name], "good": goods[name]} for name in names
    ]
    entries = [_entries(cells, name, goods[name]) for name in names]
    protocols = (
        cells["protocol"].fillna("") if cells["protocol"].nunique() > 1 else [""] * len(cells)
    )
    notes = [
        note for of_run in tables.values() for note in readable(of_run["summary"], "summary").notes
    ]
    rows = list(zip(cells["number"], protocols, zip(*entries, strict=True), strict=True))
    return {"heads": heads, "rows": rows, "notes": list(dict.fromkeys(notes))}


def _entries(table: pd.DataFrame, name: str, good: str) -> list[Plain]:
    """The column's entries: dicts of value and interval as text, what they sort by, their bar, and whether it is best.

    bar: both ends and the value as shares of the column's width; None without an interval.
    """
    figures = table.reindex(columns=[name, f"{name}_low", f"{name}_high"]).astype(float)
    lowest = float(figures.min().min())
    highest = float(figures.max().max())
    values = figures[name].dropna().map(partial(format_figure, name))
    best = figures[name].min() if good == "down" else figures[name].max()
    # A tie has no winner, nor has what is 0 by definition in many cells.
    is_ranked = bool(good) and (name not in METRICS or METRICS[name].against_ar != "none")
    is_alone = is_ranked and (values == format_figure(name, best)).sum() == 1
    entries: list[Plain] = []
    for value, low, high in figures.itertuples(index=False):
        if pd.isna(value):
            entries.append({"value": "", "interval": "", "order": None, "bar": None, "best": False})
            continue
        # By definition, or of one prompt many times, nothing is uncertain.
        ends = [] if pd.isna(low) or pd.isna(high) or low == high == value else [low, high]
        bar = (
            [(end - lowest) / (highest - lowest) for end in (*ends, value)]
            if ends and highest > lowest
            else None
        )
        text, bracket, interval = format_figure(
            name, int(value) if not good else value, *ends
        ).partition(" [")
        entries.append(
            {
                "value": text,
                "interval": bracket.strip() + interval,
                "order": value,
                "bar": bar,
                "best": is_alone and value == best,
            }
        )
    return entries


def run_facts(name: str, data: RunData, tables: Tables) -> Plain:
    """Return the facts behind a run, from its manifest; what was not recorded is left out.

    machine, settings, weights: lists of (name, value); published: a table as text, or None; published_notes: sentences.
    """
    manifest = data.manifest
    experiment = dict(manifest.get("experiment") or {})
    paper = read_paper(experiment.get("paper"))
    names = ("model", "prompts", "images", "repeats", "seed", "batch", "metrics", "compile")
    settings = {name: experiment.get(name) for name in names}
    settings |= {name: manifest.get(name) for name in ("started", "ended")}
    settings["sessions"] = len(manifest.get("sessions") or ()) or None
    rows = (
        [row for row in reproduction_rows(tables, paper) if row.get("published") is not None]
        if paper
        else []
    )
    published = frame("reproduction", rows)
    weights = (manifest.get("key") or {}).get("weights") or {}
    return {
        "name": name,
        "title": str(experiment.get("description") or experiment.get("name") or name),
        "machine": _in_words(
            {name: manifest.get(name) for name in ("device", "threads", "dtype", "machine")}
        ),
        "settings": _in_words(settings),
        "weights": list(weights.items()),
        "experiment": json.dumps(experiment, indent=2, ensure_ascii=False),
        "published": side_by_side(published) if rows else None,
        "published_title": paper.title if paper else "",
        "published_notes": [*sources(published), *comparability(tables, paper, manifest)]
        if paper
        else [],
    }


def _in_words(values: Plain) -> list[tuple[str, str]]:
    """The values of nested dicts with their names, as text; nothing for a missing value."""
    pairs = []
    for name, value in pd.json_normalize(values, sep=" ").to_dict("records")[0].items():
        if value not in (None, "", [], {}):
            words = re.sub(r"\b(machine|versions) ", "", str(name)).replace("_", " ")
            pairs.append(
                (words, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
            )
    return pairs
