"""Charts drawn from one description: as PNG and SVG by matplotlib, and on the report page by Plotly."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.models.io.files import write_atomically
from lantern_bench.report.format_tables import format_figure
from lantern_bench.report.labels import CELL, CellKey, Style, cell_key

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Styles = Mapping[CellKey, Style]

INTERVAL = "95 % interval"
"""In the titles of axes: what whiskers are."""


@dataclass(frozen=True)
class Chart:
    """A chart. `points` may also hold `<x>_low`, `<x>_high`, `<y>_low` and `<y>_high`: ends of intervals."""

    name: str  # of its files
    points: pd.DataFrame  # with `run`, `model`, `cell_id`, `label`; `dominated` where another cell beats a point
    x: str
    y: str
    x_title: str
    y_title: str  # a second line names the scorer
    lines: Sequence[str] = tuple(CELL)  # columns that tell lines apart
    x_end: str = ""  # column of the last x of a point that stands for several
    panels: bool = False  # a panel for each line, with a band in place of whiskers
    bars: bool = False  # bars in place of markers
    joined: bool = True  # whether the points of a line are joined; otherwise those that nothing dominates
    y_range: tuple[float, float] | None = None
    x_is_count: bool = False  # whether x counts something
    less_is_better: bool = False  # the page turns the axis of y over, so that up is better
    vertical_line: float | None = None  # at this x
    mean: Callable[[pd.DataFrame], float] | None = None  # of a line, for the title of its panel

    def groups(self) -> list[pd.DataFrame]:
        """Return the points of each line."""
        return [rows for _, rows in self.points.groupby(list(self.lines), sort=False, dropna=False)]

    def x_values(self, rows: pd.DataFrame) -> list[Any]:
        """Return x of these points: numbers, or words."""
        values = rows[self.x]
        if self.x_end:
            values = (values.astype(float) + rows[self.x_end].astype(float)) / 2
        return list(values) if values.dtype.kind in "OT" else values.astype(float).tolist()


def line_label(rows: pd.DataFrame) -> str:
    """Return the words that the labels of all points of a line share."""
    first, *others = (str(label).split(" ") for label in rows["label"])
    return " ".join(word for word in first if all(word in words for words in others))


def whiskers(rows: pd.DataFrame, name: str) -> list[list[float]] | None:
    """Return the lengths of both whiskers of each point, 0 where it has none; None for a figure without intervals."""
    if f"{name}_low" not in rows:
        return None
    lengths = rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]
    return [length.astype(float).clip(lower=0).fillna(0).tolist() for length in lengths]


# ---- matplotlib


def to_matplotlib(chart: Chart, styles: Styles) -> Figure:
    """Return the chart as a figure of matplotlib."""
    from matplotlib.figure import Figure

    groups = chart.groups()
    across = min(3, len(groups)) if chart.panels else 1
    down = -(-len(groups) // across) if chart.panels else 1
    size = (2.6 * across + 0.6, 1.75 * down + 0.7) if chart.panels else (6.4, 4.2)
    figure = Figure(figsize=size, layout="constrained" if chart.panels else None)
    panels: list[Axes] = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel())
    for number, axes in enumerate(panels):
        axes.grid(visible=True, linewidth=0.4, alpha=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_visible(not chart.panels or number < len(groups))
        # The last panel of each column has tick labels, also above an empty one.
        axes.tick_params(labelbottom=not chart.panels or number + across >= len(groups))
    for number, rows in enumerate(groups):
        _draw_line(panels[number if chart.panels else 0], chart, rows, styles[cell_key(rows.iloc[-1])])
        if chart.panels and not chart.bars:
            for other in groups:
                panels[number].plot(chart.x_values(other), other[chart.y], color="#CFCFCF", linewidth=0.6, zorder=1)
    _draw_background(panels[0], chart)
    if chart.panels:
        figure.supxlabel(chart.x_title, fontsize="medium")
        figure.supylabel(chart.y_title, fontsize="medium")
        return figure
    panels[0].set(xlabel=chart.x_title, ylabel=chart.y_title)
    legend = panels[0].legend(
        loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize="small", handlelength=3.2
    )
    # Inches that a line of the legend takes: the axes become as high as a long legend.
    figure.set_figheight(max(figure.get_figheight(), 0.25 * len(legend.texts)))
    return figure


def _draw_line(axes: Axes, chart: Chart, rows: pd.DataFrame, style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    x, y, label = chart.x_values(rows), rows[chart.y].astype(float), line_label(rows)
    ends: Any = {"xerr": whiskers(rows, chart.x), "yerr": whiskers(rows, chart.y)}
    if chart.bars:
        axes.bar(x, y, width=0.78, color=style.colour, alpha=0.85)
        axes.errorbar(x, y, **ends, fmt="none", ecolor="#444444", elinewidth=0.8)
    elif chart.panels:
        low, high = (rows[f"{chart.y}{end}"].astype(float) for end in ("_low", "_high"))
        axes.fill_between(x, low, high, color=style.colour, alpha=0.22, linewidth=0, zorder=2)
        axes.plot(x, y, color=style.colour, linewidth=1.4, zorder=3)
    else:
        is_hollow = "dominated" in rows and bool(rows["dominated"].iloc[0])
        axes.errorbar(
            x, y, **ends, label=label, color=style.colour, marker=style.marker, capsize=2, elinewidth=0.8, markersize=6,
            linestyle=style.line if chart.joined else "none", alpha=0.38 if is_hollow else 1.0,
            markerfacecolor="none" if is_hollow else style.colour,
        )  # fmt: skip
    if chart.panels:
        mean = "" if chart.mean is None else f"\nmean {chart.mean(rows):.2f}"
        axes.set_title(label + mean, fontsize="small", loc="left")
    if chart.bars and chart.mean is not None:
        axes.axvline(chart.mean(rows), color="#222222", linestyle="--", linewidth=0.9)
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    if chart.x_is_count:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_background(axes: Axes, chart: Chart) -> None:
    """The front, the vertical line, and the spread of ar as a grey band."""
    for x, y in _fronts(chart):
        axes.plot(x, y, color="#888888", linewidth=1, zorder=1)
    if chart.vertical_line is not None:
        axes.axvline(chart.vertical_line, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=0)
    ends = [f"{chart.y}_band_low", f"{chart.y}_band_high"]
    for low, high in chart.points.reindex(columns=ends).dropna().drop_duplicates().itertuples(index=False):
        axes.axhspan(low, high, color="#EEEEEE", zorder=0, label="95 % of further sets of AR images")
    if "dominated" in chart.points and chart.points["dominated"].any():
        axes.set_title("pale and hollow: another cell is at least as fast and as good", fontsize="x-small", loc="left")


def _fronts(chart: Chart) -> Iterator[tuple[list[float], list[float]]]:
    """The points of each run and model that nothing dominates, by x."""
    if "dominated" in chart.points:
        for _, best in chart.points[~chart.points["dominated"]].groupby(["run", "model"], sort=False):
            ordered = best.sort_values(chart.x)
            yield ordered[chart.x].astype(float).tolist(), ordered[chart.y].astype(float).tolist()


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure whole or not at all; `options` as in `Figure.savefig`. Raises `OSError`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    write_atomically(path, content.getvalue())


# ---- Plotly

_SYMBOLS = {
    "o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross", "X": "x",
    "*": "star", "<": "triangle-left",
}  # fmt: skip
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
# Points of one chart that all have their names beside them.
_NAMED = 12
_TEXT_POSITIONS = ("top right", "bottom right", "top left", "bottom left")


def symbol_of(style: Style) -> tuple[str, str]:
    """Return Plotly's names of the marker and the line of a cell."""
    return _SYMBOLS[style.marker], _DASHES[style.line]


def to_plotly(chart: Chart, styles: Styles, numbers: Mapping[CellKey, int]) -> dict[str, Any]:
    """Return the chart as traces and axes of Plotly; `customdata` of a point is the number of its cell on the page.

    Colours and fonts are left to the page, which has a light and a dark theme.
    """
    traces: list[dict[str, Any]] = [
        {"x": x, "y": y, "customdata": [], "mode": "lines", "hoverinfo": "skip"} for x, y in _fronts(chart)
    ]
    groups = chart.groups()
    order = sorted(range(len(groups)), key=lambda number: chart.x_values(groups[number])[0])
    for number, rows in enumerate(groups):
        symbols = [symbol_of(styles[cell_key(row)])[0] for _, row in rows.iterrows()]
        is_hollow = "dominated" in rows and bool(rows["dominated"].iloc[0])
        trace: dict[str, Any] = {
            "name": line_label(rows), "x": chart.x_values(rows), "y": rows[chart.y].astype(float).tolist(),
            "customdata": [numbers[cell_key(row)] for _, row in rows.iterrows()],
            "hovertext": [_hover(chart, row) for _, row in rows.iterrows()],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "mode": "lines+markers" if chart.joined else "markers",
            "opacity": 0.5 if is_hollow else 1.0,
            "marker": {"symbol": [symbol + "-open" * is_hollow for symbol in symbols], "size": 8},
            "line": {"dash": symbol_of(styles[cell_key(rows.iloc[-1])])[1], "width": 1.5},
        }  # fmt: skip
        if not chart.joined and (len(groups) <= _NAMED or not is_hollow):
            # Neighbours have their names in different places.
            position = _TEXT_POSITIONS[order.index(number) % len(_TEXT_POSITIONS)]
            trace |= {"mode": "markers+text", "text": rows["label"].tolist(), "textposition": position}
        for axis, name in (("x", chart.x), ("y", chart.y)):
            # Whiskers of many curves along an image would hide them.
            if (lengths := whiskers(rows, name)) is not None and not (chart.panels and not chart.bars):
                trace[f"error_{axis}"] = {"type": "data", "arrayminus": lengths[0], "array": lengths[1]}
        traces.append(trace)
    x_axis: dict[str, Any] = {"title": {"text": chart.x_title}} | ({"dtick": 1} if chart.x_is_count else {})
    y_axis: dict[str, Any] = {"title": {"text": chart.y_title.replace("\n", "<br>")}}
    y_axis |= {"autorange": "reversed"} if chart.less_is_better else {}
    y_axis |= {"range": chart.y_range} if chart.y_range else {}
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": y_axis}
    if (x := chart.vertical_line) is not None:
        line = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [line | {"line": {"dash": "dot", "width": 1, "color": "#888888"}}]
    title = f"{chart.y_title} against {chart.x_title}".replace("\n", " ").replace(f" ({INTERVAL})", "")
    return {"name": chart.name, "title": title, "data": traces, "layout": layout}


def _hover(chart: Chart, row: pd.Series) -> str:
    """The label of a point and its figures."""
    lines = [f"<b>{row['label']}</b>"]
    for name, title in ((chart.x, chart.x_title), (chart.y, chart.y_title)):
        value = row[name] if isinstance(row[name], str) else float(row[name])
        figure = format_figure(name, value, row.get(f"{name}_low"), row.get(f"{name}_high"))
        lines.append(f"{title.partition(',')[0].partition(' (')[0]}: {figure}")
    return "<br>".join([*lines, *(["dominated"] if row.get("dominated", False) else [])])
