"""One HTML file that shows runs and needs no network.

It is made of tables and of plain values, which the scripts `assets/*.js` draw.
"""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

import jinja2
import msgspec
import numpy as np
import pandas as pd
from PIL import Image, UnidentifiedImageError

from lantern_bench import __version__
from lantern_bench.analysis.cells import CellRecords, baseline_of, run_cells
from lantern_bench.analysis.compare import warn_of_unlike
from lantern_bench.analysis.labels import CELL, GROUPINGS, CellKey, cell_names
from lantern_bench.analysis.published import comparability, reproduction_rows, sources
from lantern_bench.analysis.quality import sort_scores
from lantern_bench.config.paper import read_paper
from lantern_bench.methods.catalog import (
    DRAFTINGS,
    LOSSLESS,
    METRICS,
    OF_IMAGES,
    RELAXED,
)
from lantern_bench.report.charts import (
    DASHES,
    MARKERS,
    SPEEDS,
    Chart,
    Styles,
    Tables,
    category_charts,
    charts,
    curve_tables,
    is_hollow,
    line_label,
    run_styles,
    stack_runs,
    styles_of,
    symlog,
    symlog_ticks,
    whiskers,
)
from lantern_bench.report.draw import SURFACE
from lantern_bench.report.format_tables import (
    BEST_NOTE,
    BETTER,
    best_of,
    figure_texts,
    format_figure,
    head_of,
    may_be_best,
    readable,
    side_by_side,
    worth_showing,
)
from lantern_bench.report.verdict import hardware, verdicts
from lantern_bench.storage.records import rows_of
from lantern_bench.storage.run_directory import (
    PICTURES_LEFT_OUT,
    RunData,
    load_runs,
    no_pixels,
)
from lantern_bench.storage.schema import ENDS, columns, frame, typed
from lantern_bench.utils.files import write_file

Plain: TypeAlias = dict[str, Any]


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of runs to `out` and return it.

    Raises `UserError` if it cannot be written.
    """
    runs = load_runs(directories)
    warn_of_unlike(runs)
    text = render(runs, out.parent)
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
    styles = run_styles(tables)
    pictures = _pictures(runs, records, home)
    cells = list(_cells(tables, records, styles))
    data = {
        "name": " + ".join(runs),
        "cells": cells,
        "figures": _figures(tables, styles) | {"groups": _group_figures(runs, styles)},
        "metrics": {name: METRICS[name].heading for name in OF_IMAGES},
        **pictures,
    }
    plotly = gzip.compress(get_plotlyjs().encode(), mtime=0)  # no time: equal bytes
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lantern_bench.report", "assets"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_function"] = _json
    return environment.get_template("report.html.j2").render(
        title=" + ".join(runs),
        version=__version__,
        cells=cells,
        outputs=_numbers_by(cells, "output", [LOSSLESS, RELAXED]),
        modes=_numbers_by(cells, "mode", dict.fromkeys(cell["mode"] for cell in cells)),
        pictures=pictures,
        warnings=list(_warnings(runs)),
        summary=_summary(tables, styles),
        surfaces=list(_surfaces(runs)),
        runs=[_run_facts(name, run, tables[name]) for name, run in runs.items()],
        data=data,
        plotly=base64.b64encode(plotly).decode("ascii"),
    )


def _json(value: Any, **_: Any) -> str:
    """JSON without spaces; what is not finite becomes null."""
    return msgspec.json.encode(value).decode()


def _warnings(runs: Mapping[str, RunData]) -> Iterator[str]:
    """Yield a sentence for each run that is incomplete or shows no pixels."""
    for name, run in runs.items():
        if run.incomplete:
            yield f"{name}: {run.incomplete}"
        without_pixels = no_pixels(run.manifest)
        if without_pixels is not None:
            yield f"{name}: {without_pixels}"


# ---- The cells and their curves

# The hues of the modes, light enough for a dark background.
_ON_DARK = {
    "#000000": "#F2F0EC",
    "#0072B2": "#56A8E0",
    "#D55E00": "#F58549",
    "#009E73": "#34C99F",
    "#767676": "#9A9A9A",
    "#332288": "#8E7BE8",
    "#882255": "#D96CA5",
    "#661100": "#D2694F",
    "#AA4499": "#D27AC2",
    "#8B5A2B": "#C79A6B",
}

# The figure of a chart on the page, by what x is; others are of a bound. A figure with several
# charts has a menu.
_FIGURES = {
    "speedup": "front",
    "mean_accepted_length": "front",
    "index": "depth",
    "length": "lengths",
    "middle": "position",
}


def _cells(
    tables: Mapping[str, Tables], records: Mapping[CellKey, CellRecords], styles: Styles
) -> Iterator[Plain]:
    """Yield the cells of the page: what they are, how they look, and their maps."""
    names = cell_names(stack_runs(tables, "speed"))
    has_grid = _grid_side(records.values()) is not None
    scored = stack_runs(tables, "quality_with_speed").drop_duplicates(CELL)
    distances = scored.set_index(CELL)["distance"]
    ids = Counter(cell.cell_id for cell in records.values())
    for (key, cell), name in zip(records.items(), names, strict=True):
        style = styles[key]
        mode = str(cell.columns["mode"])
        drafting = cell.columns["drafting"]
        drafts = drafting not in DRAFTINGS or DRAFTINGS[drafting].drafts
        run, model, _ = key
        base = baseline_of(cell, [other for at, other in records.items() if at[0] == run])
        yield {
            "run": run,
            "cell": cell.cell_id,
            "key": cell.cell_id if ids[cell.cell_id] == 1 else "/".join(key),
            "name": name,
            "mode": mode,
            "output": cell.output,
            "distance": format_figure("distance", distances[key]),
            "base": None if base is None else styles[run, model, base.cell_id].number,
            "drafts": drafts,
            "colour": style.colour,
            "dark": _ON_DARK.get(style.colour, style.colour),
            "marker": MARKERS[style.marker],
            "dash": DASHES[style.line],
            "map": length_map(cell) if has_grid and drafts else None,
        }


def _numbers_by(cells: Sequence[Plain], name: str, values: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the cells with each value of `name`."""
    numbers: dict[str, list[int]] = {}
    for value in values:
        numbers[value] = [number for number, cell in enumerate(cells) if cell[name] == value]
    return numbers


def _surfaces(runs: Mapping[str, RunData]) -> Iterator[Plain]:
    """Yield the best predictions, and the maps, of the explorations that runs verify."""
    for run in runs.values():
        folder = run.folder.parent
        if not (folder / SURFACE).is_file():
            continue
        table = typed("surface", pd.read_csv(folder / SURFACE))
        best = table[table["dominated"] == 0].sort_values("predicted_speedup", ascending=False)
        pictures = {
            path.stem: base64.b64encode(path.read_bytes()).decode("ascii")
            for path in sorted((folder / "figures").glob("map-*.png"))
        }
        yield {
            "name": folder.name,
            "table": readable(best.drop(columns="dominated"), "surface").frame,
            "pictures": pictures,
        }


def _figures(tables: Mapping[str, Tables], styles: Styles) -> dict[str, list[Plain]]:
    """The charts of each figure."""
    figures: dict[str, list[Plain]] = {name: [] for name in (*_FIGURES.values(), "bound")}
    for chart in charts(tables, (*GROUPINGS[1:], "neighbours")):
        # Lines of one point each are worth no chart, unless it is against a bound.
        is_of_points = all(len(points) == 1 for points in chart.lines())
        if chart.x not in ("tree", "temperature") or not is_of_points:
            figures[_FIGURES.get(chart.x, "bound")].append(to_plotly(chart, styles))
    return figures


def _group_figures(runs: Mapping[str, RunData], styles: Styles) -> list[Plain]:
    """The charts of groups of prompts, with a row for each group."""
    figures = []
    for chart in category_charts(runs):
        figure = to_plotly(chart, styles)
        prompts = chart.points.groupby("category", sort=False)["prompts"]
        names = [_row_name(str(group), counts) for group, counts in prompts]
        lines = 2 + max(name.count("<br>") for name in names)
        row = max(_LINE * lines, min(_POINT * len(chart.lines()), _MOST_ROW))
        figure["layout"] |= {
            # Points of a row stand one below the other.
            "scattermode": "group",
            "height": _MARGINS + row * len(prompts),
        }
        # Plotly's own range would begin at 0. The figure of ar is 1.
        ends = chart.points[[f"{chart.x}{end}" for end in ENDS]]
        lowest = min(1.0, float(ends.min().min()))
        highest = max(1.0, float(ends.max().max()))
        margin = 0.04 * (highest - lowest)
        figure["layout"]["xaxis"]["range"] = (lowest - margin, highest + margin)
        figure["layout"]["yaxis"] |= {
            "type": "category",
            "autorange": "reversed",
            "tickvals": list(prompts.groups),
            "ticktext": names,
        }
        figures.append(figure)
    return figures


def _row_name(group: str, prompts: pd.Series) -> str:
    """The name of a row of a chart of groups of prompts, in lines."""
    fewest = int(prompts.min())
    most = int(prompts.max())
    count = f"{most} prompt{'s' if most != 1 else ''}"
    if fewest < most:
        count = f"{fewest} to {count}"
    return "<br>".join([*map(html.escape, wrap(group, _NAME)), count])


# Of charts of groups of prompts.
_MARGINS = 80  # pixels above and below the rows
_LINE = 17  # pixels of a line of a name
_POINT = 11  # pixels of a row for each cell
_MOST_ROW = 160  # pixels of the cells of a row; with more cells their points overlap
_NAME = 16  # letters in a line of a name

_TICKS = 10  # at most, on an axis that counts


def to_plotly(chart: Chart, styles: Styles) -> Plain:
    """Return a chart as traces and axes of Plotly, without colours.

    Returns:
        `name`, `title`, `data` and `layout`. `customdata` has the number of the cell of each point,
        and `text` names the point of a front where there is room.
    """
    traces: list[Plain] = []
    for x, y in chart.front_lines():
        line = {"x": x, "y": symlog(pd.Series(y), chart.y_linear_below).tolist()}
        traces.append(line | {"customdata": [], "mode": "lines", "hoverinfo": "skip"})
    lines = sorted(chart.lines(), key=lambda points: points[chart.x].iloc[0])
    traces += [_trace(chart, points, styles) for points in lines]

    x_axis: Plain = {"title": {"text": chart.x_title}}
    if chart.x_is_count:
        x_axis["dtick"] = math.ceil(float(chart.points[chart.x].max()) / _TICKS)
    y_axis: Plain = {"title": {"text": chart.y_title.replace("\n", "<br>")}}
    if chart.better_is_lower:
        y_axis["autorange"] = "reversed"
    if chart.y_linear_below is not None:
        ticks = symlog_ticks(chart.y_linear_below)
        y_axis["tickvals"] = symlog(pd.Series(ticks), chart.y_linear_below).tolist()
        y_axis["ticktext"] = [f"{tick:g}" for tick in ticks]
    if chart.y in ("rate", "acceptance_rate"):
        y_axis["range"] = (0, 1.02)
    layout: Plain = {"xaxis": x_axis, "yaxis": y_axis}
    if chart.x == "speedup":
        dots = {"dash": "dot", "width": 1, "color": "#888888"}
        ends = {"x0": 1.0, "x1": 1.0, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [{"type": "line", **ends, "line": dots}]
    return {"name": chart.name, "title": chart.title, "data": traces, "layout": layout}


_HOVER_OF_GROUPS = "<b>%{hovertext}</b><br>%{y}, %{x:.4g}<extra></extra>"


def _trace(chart: Chart, points: pd.DataFrame, styles: Styles) -> Plain:
    """The trace of one line."""
    hollow = is_hollow(points)
    looks = styles_of(points, styles)
    names = points["label"].tolist()
    figures = zip(figure_texts(points, chart.x), figure_texts(points, chart.y), strict=True)
    end = "-open" if hollow else ""
    trace: Plain = {
        "name": line_label(points),
        "x": points[chart.x].tolist(),
        "y": symlog(points[chart.y], chart.y_linear_below).tolist(),
        "customdata": [style.number for style in looks],
        "hovertext": [
            f"<b>{name}</b><br>{x}, {y}" for name, (x, y) in zip(names, figures, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "mode": "lines+markers" if chart.joined else "markers",
        "opacity": 0.5 if hollow else 1.0,
        "marker": {"symbol": [f"{MARKERS[style.marker]}{end}" for style in looks], "size": 8},
        "line": {"dash": DASHES[looks[-1].line], "width": 1.5},
    }
    if chart.of_groups:
        trace |= {"orientation": "h", "hovertemplate": _HOVER_OF_GROUPS}
    elif not chart.joined:
        trace |= {"text": names[0], "textfont": {"size": 12}}
    if "index_end" in points:
        return trace  # whiskers of many curves along an image would hide them
    # Plotly has no axis that is linear, then logarithmic: it gets places.
    scales = {"x": None, "y": chart.y_linear_below}
    for axis, column in (("x", chart.x), ("y", chart.y)):
        lengths = whiskers(points, column, scales[axis])
        if lengths is not None:
            below, above = lengths
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
    "committed_per_step",
]


def _pictures(
    runs: Mapping[str, RunData], records: Mapping[CellKey, CellRecords], home: Path
) -> Plain:
    """Prompts in the order of the plan, and their pictures with their figures.

    `left_out` counts the prompts for whose pictures the page has no room.
    """
    done = [cell.completed[_READ].assign(cell=n) for n, cell in enumerate(records.values())]
    drawn = pd.concat(done).dropna(subset="image").fillna({"order_index": 0})
    drawn = drawn.sort_values("order_index", kind="stable")
    counts = drawn.groupby("prompt", sort=False).size().cumsum()
    prompts = list(counts.index[counts <= PICTURES]) or list(counts.index[:1])
    scores = {name: _image_scores(run) for name, run in runs.items()}
    keys = list(records)
    thumbnails: dict[str, int] = {}
    pictures = []
    for row in rows_of(drawn[drawn["prompt"].isin(prompts)]):
        name, _, _ = keys[row["cell"]]
        run = runs[name]
        file = run.folder / row["image"]
        has_link = file.is_file() and not run.manifest.get(PICTURES_LEFT_OUT)
        small = thumbnail(file)
        # Equal pictures are stored once.
        number = None if small is None else thumbnails.setdefault(small, len(thumbnails))
        pictures.append(
            {
                "cell": row["cell"],
                "prompt": prompts.index(row["prompt"]),
                "repeat": row["repeat"],
                "thumb": number,
                "file": os.path.relpath(file, home) if has_link else None,
                "seconds": row["seconds"],
                "steps": row["committed_per_step"] or (),
                **scores[name][row["record_key"]],
            }
        )
    return {
        "prompts": prompts,
        "pictures": pictures,
        "thumbs": list(thumbnails),
        "grid": _grid_side(records.values()),
        "left_out": len(counts) - len(prompts),
    }


def _image_scores(run: RunData) -> Mapping[str, dict[str, float]]:
    """The figures of each image, by record key, from the first protocol that has them."""
    scores: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for protocol in sort_scores(run.scores).values():
        for key, row in protocol.image.items():
            figures = {name: row[name] for name in OF_IMAGES if row.get(name) is not None}
            scores[key] = figures | scores[key]
    return scores


def _grid_side(cells: Iterable[CellRecords]) -> int | None:
    """The side of the square that the tokens of every image fill, or None."""
    sizes = set(pd.concat([cell.completed["tokens"] for cell in cells]).fillna(0))
    side = math.isqrt(max(sizes, default=0))
    return side if side and sizes == {side**2} else None


def length_map(cell: CellRecords) -> list[float | None]:
    """Return the mean step length at each position over the images of a cell.

    No step committed the token at the first position, which has None.
    """
    lengths = []
    for committed in cell.completed["committed_per_step"]:
        steps = np.array(committed or (), dtype=int)
        lengths.append(np.repeat(steps, steps))
    return [None, *pd.DataFrame(lengths).mean().round(3)]


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

_FIRST = ("speedup", "distance", "mean_accepted_length", "emitted_tv", "distance_p")
"""The columns that the summary shows before its reader asks for all of them."""

_ON_DEMAND = ("images", "failed", "speedup_over_lossless", "acceptance_rate", *METRICS)
_COLUMNS = dict.fromkeys((*_FIRST, *_ON_DEMAND))
_MEANINGS = {column.name: column.meaning for column in (*columns("speed"), *columns("quality"))}


def _summary(tables: Mapping[str, Tables], styles: Styles) -> Plain:
    """The summary of all runs, the fastest cell first.

    Returns:
        `rows` (number of the cell, protocol), `columns` as in `_column`, and `notes` (sentences
        below).
    """
    cells = stack_runs(tables, "quality_with_speed")
    cells = cells.sort_values("speedup", ascending=False, kind="stable", ignore_index=True)
    protocols = cells["protocol"].fillna("")
    if cells["protocol"].nunique() <= 1:
        protocols[:] = ""
    numbers = [style.number for style in styles_of(cells, styles)]
    notes = [BEST_NOTE]
    for of_run in tables.values():
        notes += readable(of_run["summary"], "summary").notes
    return {
        "rows": list(zip(numbers, protocols, strict=True)),
        "columns": [
            _column(cells, name)
            for name in _COLUMNS
            if name in SPEEDS or worth_showing(cells, name)
        ],
        "notes": list(dict.fromkeys(notes)),
    }


def _column(cells: pd.DataFrame, name: str) -> Plain:
    """A column of the summary.

    Returns:
        `name`, `head`, `meaning`, `better` ("higher", "lower" or None), `on_demand` (whether it is
        hidden at first), and `cells`: of each cell the text, the figure with the ends of its
        interval, their places as fractions of the column's width, and whether it is the best.
        There are no places without an interval.
    """
    figures = cells.reindex(columns=[f"{name}{end}" for end in ENDS]).astype(float)
    lowest = float(figures.min().min())
    places = (figures - lowest) / (float(figures.max().max()) - lowest)
    bars = [None if np.isnan(ends).any() else ends for ends in places.to_numpy()]
    numbers = figures.astype(object).where(figures.notna(), "").to_numpy().tolist()
    texts = figure_texts(cells, name)
    best = best_of(name, texts, among=may_be_best(cells))
    return {
        "name": name,
        "head": head_of(name),
        "meaning": _MEANINGS[name],
        "better": BETTER.get(name),
        "on_demand": name not in _FIRST,
        "cells": list(zip(texts, numbers, bars, best, strict=True)),
    }


def _run_facts(name: str, run: RunData, tables: Tables) -> Plain:
    """The facts behind a run: name, title, verdict and manifest, and its published figures."""
    experiment = run.manifest.get("experiment") or {}
    paper = read_paper(experiment.get("paper"))
    facts = {
        "name": name,
        "title": experiment.get("description") or experiment.get("name") or name,
        "hardware": hardware(run.manifest),
        "verdicts": verdicts(run, tables),
        "manifest": run.manifest,
        "experiment": experiment,
        "experiment_text": json.dumps(experiment, indent=2, ensure_ascii=False),
        "paper": paper,
    }
    if paper is not None:
        table = frame("reproduction", reproduction_rows(tables, paper))
        facts |= {
            "published": side_by_side(table.dropna(subset="published")),
            "notes": [*sources(table), *comparability(tables, paper, run.manifest)],
        }
    return facts
