"""The data of charts, for `draw.py` (Matplotlib) and `page.py` (Plotly)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, count, cycle, product
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from lantern_bench.analysis.cells import CellRecords, run_cells
from lantern_bench.analysis.labels import BOUNDS, CELL, FAMILY, CellKey, labels
from lantern_bench.analysis.prompt_groups import grouping_columns, prompt_columns, tables_by
from lantern_bench.analysis.statistics import proportion
from lantern_bench.analysis.tables import SPEEDUPS, quality_with_speed, tables_of
from lantern_bench.methods.catalog import METRICS, MODES, ON_CURVES
from lantern_bench.report.format_tables import BETTER, head_of
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import ENDS, Row, columns, frame
from lantern_bench.utils.errors import UserError

Tables: TypeAlias = Mapping[str, pd.DataFrame]  # of one run by name, as from `curve_tables`

SPEEDS = {
    "speedup": "speedup over ar",
    "mean_accepted_length": "mean accepted length (incl. bonus token)",
}
"""The horizontal axes of speed-quality curves."""

BY_BOUND = ("mean_accepted_length", "acceptance_rate")
"""Figures that are drawn against parameters."""

OF_CURVES = (*BOUNDS, "neighbours")
"""Parameters that they are drawn against by default."""

INTERVAL = "95% interval"  # of the whiskers, in the titles of axes

_PLACES = 32  # positions of an image are pooled to at most this many points of a cell


# ---- The tables behind the charts


def curve_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables of `tables_of`, and the tables `quality_with_speed` and `lengths`."""
    tables = tables_of(run)
    row_tokens = run.records.groupby("model")["tokens"].max().map(_row_tokens)
    acceptance = tables["acceptance"]
    acceptance = acceptance.assign(row_tokens=acceptance["model"].map(row_tokens))
    return {
        **tables,
        "acceptance": acceptance,
        "quality_with_speed": quality_with_speed(tables),
        "lengths": frame("lengths", chain.from_iterable(map(_length_rows, run_cells(run)))),
    }


def _row_tokens(tokens: int) -> float:
    """The tokens in a row of a square image, with or without an end of each row; else NaN."""
    rows = math.isqrt(tokens)
    return tokens // rows if tokens in (rows**2, rows * (rows + 1)) else math.nan


def _length_rows(cell: CellRecords) -> Iterator[Row]:
    """Yield the histogram of the tokens committed by a step; nothing for a cell without drafts."""
    if cell.columns["drafting"] == "none":
        return
    committed = cell.completed["committed_per_step"]
    counts = np.bincount(committed.explode().dropna().astype(int))
    for length, steps in enumerate(counts[1:].tolist(), start=1):
        row = {"length": length, "steps": steps}
        yield cell.columns | row | proportion(steps, counts.sum()).columns("share")


def choose_cells(runs: Mapping[str, Tables], patterns: Sequence[str]) -> dict[str, Tables]:
    """Keep the cells whose id or mode matches a pattern, such as `*-lambda5-*`.

    Raises:
        UserError: No cell matches a pattern.
    """
    cells = stack_runs(runs, "speed")[["cell_id", "mode"]].drop_duplicates()
    chosen: set[str] = set()
    for pattern in patterns:
        matching = cells[cells.map(partial(fnmatchcase, pat=pattern)).any(axis=1)]
        if matching.empty:
            raise UserError(
                f"--cells {pattern}: no cell has such an id or mode",
                f"The cells are {', '.join(cells['cell_id'])}.",
            )
        chosen.update(matching["cell_id"])
    kept: dict[str, Tables] = {}
    for run, tables in runs.items():
        kept[run] = {
            name: table[table["cell_id"].isin(chosen)].reset_index(drop=True)
            for name, table in tables.items()
        }
    return kept


def stack_runs(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """Return one table of all runs, with the column `run`."""
    tables = [of_run[name].assign(run=run) for run, of_run in runs.items()]
    return pd.concat(tables, ignore_index=True)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """A table with the columns `run` and `label` in front."""
    return table.assign(label=labels(table)).set_index(["run", "label"]).reset_index()


# ---- Points


def acceptance_points(runs: Mapping[str, Tables], axis: str = "depth") -> pd.DataFrame:
    """Return the rows of `acceptance.csv` along `axis` of all runs.

    Positions of the image are pooled, from `index` to `index_end` around `middle`.
    """
    table = stack_runs(runs, "acceptance")
    table = table[table["axis"] == axis]
    return _labelled(_pooled(table) if axis == "position" else table)


def _pooled(table: pd.DataFrame) -> pd.DataFrame:
    """Pool the positions of each cell."""
    width = math.ceil((max(table["index"].tolist(), default=0) + 1) / _PLACES)
    places = table.groupby([*CELL, table["index"] // width], sort=False)
    pooled = table.assign(
        index_end=places["index"].transform("max"),
        offered=places["offered"].transform("sum"),
        accepted=places["accepted"].transform("sum"),
    )
    pooled = pooled[places.cumcount() == 0]
    counts = zip(pooled["accepted"], pooled["offered"], strict=True)
    rates = [proportion(accepted, offered).columns("rate") for accepted, offered in counts]
    middle = (pooled["index"] + pooled["index_end"]) / 2
    return pooled.assign(middle=middle, **pd.DataFrame(rates, index=pooled.index))


def length_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `speed.csv` of all runs, with intervals of `acceptance_rate`."""
    table = stack_runs(runs, "speed")
    by_depth = stack_runs(runs, "acceptance").query("axis == 'depth'")
    counts = by_depth.groupby(CELL, sort=False)[["accepted", "offered"]].sum()
    rates = [
        proportion(int(accepted), int(offered)).columns("acceptance_rate")
        for accepted, offered in counts.itertuples(index=False)
    ]
    names = [f"acceptance_rate{end}" for end in ENDS]
    intervals = pd.DataFrame(rates, index=counts.index, columns=names).reset_index()
    return table.drop(columns="acceptance_rate").merge(intervals, on=CELL, how="left")


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speed of their cell.

    A run that was not timed takes the speedups of the same cell from another run, which the column
    `speed_run` names.
    """
    table = stack_runs(runs, "quality_with_speed")
    cell = ["model", "cell_id"]
    speedups = [f"{name}{end}" for name, end in product(SPEEDUPS, ENDS)]
    borrowed = ["speed_run", *speedups]
    is_timed = table["speedup"].notna()
    table["speed_run"] = table["run"].where(is_timed)
    timed = table.loc[is_timed, [*cell, *borrowed]].drop_duplicates(cell)
    elsewhere = table[cell].merge(timed, on=cell, how="left")
    table[borrowed] = table[borrowed].where(is_timed, elsewhere[borrowed])

    table = table.assign(images=table["quality_images"], note=table["quality_note"])
    names = ["run", *(column.name for column in columns("quality")), *speedups]
    names += [f"mean_accepted_length{end}" for end in ENDS]
    has_speed = table[list(SPEEDS)].notna().any(axis=1)
    return _labelled(table.loc[has_speed, [*names, "speed_run"]])


def is_dominated(
    points: pd.DataFrame, speed: str, quality: str, *, less_is_better: bool
) -> list[bool]:
    """Return for each point whether another point of its run and model dominates it.

    The other point is no worse in both figures and better in one.

    Args:
        points: Columns `run`, `model` and both figures.
        speed: The figure of speed. More is better.
        quality: The figure of quality.
        less_is_better: Whether less of `quality` is better.
    """
    speeds = points[speed].to_numpy()
    qualities = points[quality].to_numpy()
    if less_is_better:
        qualities = -qualities
    group = points.groupby(["run", "model"]).ngroup().to_numpy()
    is_rival = group == group[:, None]
    no_slower = speeds >= speeds[:, None]
    no_worse = qualities >= qualities[:, None]
    better = (speeds > speeds[:, None]) | (qualities > qualities[:, None])
    return (is_rival & no_slower & no_worse & better).any(axis=1).tolist()


# ---- The charts


@dataclass(frozen=True)
class Chart:
    """A chart.

    `points` has the columns `run`, `model`, `cell_id` and `label`. It may have ends of intervals,
    such as `<x>_low`, and `dominated`, true where another cell beats a point.
    """

    name: str  # of its files
    points: pd.DataFrame
    x: str  # a column
    y: str
    x_title: str
    y_title: str  # a second line names the scorer
    family: Sequence[str] = tuple(CELL)  # columns that tell lines apart
    panels: Sequence[str] = ()  # columns that tell panels apart; empty: one for all lines
    x_is_count: bool = False  # whether x counts something
    scorer: str = ""  # of y, where the run has several
    y_linear_below: float | None = None  # y is logarithmic above it; None: linear everywhere

    @property
    def joined(self) -> bool:
        """Whether the points of a line are joined; on a front, only undominated points are."""
        return "dominated" not in self.points and self.x != "tree" and not self.of_groups

    @property
    def of_groups(self) -> bool:
        """Whether the points of a line are groups of prompts, one below the other."""
        return self.y == "category"

    @property
    def title(self) -> str:
        """What a menu of charts shows: `distance (at least) against speedup`."""
        if self.of_groups:
            return f"{head_of(self.x)} by {self.y_title}"
        title = f"{head_of(self.y)} against {head_of(self.x)}"
        return f"{title} ({self.scorer})" if self.scorer else title

    @property
    def better_is_lower(self) -> bool:
        """Whether the y axis points down: what is good is on top of every chart."""
        return BETTER.get(self.y) == "lower"

    def in_panels(self) -> list[Chart]:
        """Return the chart of each panel, in the order of their first points."""
        groups = self.points.groupby(list(self.panels), sort=False, dropna=False)
        return [replace(self, points=points, panels=()) for _, points in groups]

    def lines(self) -> list[pd.DataFrame]:
        """Return the points of each line, in the order of their first points."""
        groups = self.points.groupby(list(self.family), sort=False, dropna=False)
        return [points for _, points in groups]

    def front_lines(self) -> Iterator[tuple[list[float], list[float]]]:
        """Yield x and y of the undominated points of each run and model, by x."""
        if "dominated" not in self.points:
            return
        best = self.points[~self.points["dominated"]]
        for _, rows in best.sort_values(self.x).groupby(["run", "model"], sort=False):
            yield rows[self.x].tolist(), rows[self.y].tolist()


def charts(runs: Mapping[str, Tables], parameters: Sequence[str] = OF_CURVES) -> Iterator[Chart]:
    """Yield the charts that the runs have data for.

    `parameters` are the horizontal axes of charts of `BY_BOUND`.
    """
    yield from _draft_charts(runs)
    yield from fronts(runs)
    yield from bound_charts(length_points(runs), parameters)


def group_charts(groups: Mapping[str, Tables], by: str) -> Iterator[Chart]:
    """Yield the charts of acceptance by groups of prompts: a line for each group in each panel.

    Args:
        groups: The tables of each group. Charts name it in the place of the run.
        by: The column of the prompts, for the names of the charts.
    """
    for chart in (*_draft_charts(groups), *bound_charts(length_points(groups), OF_CURVES)):
        # The legend names the groups.
        points = chart.points.assign(label=labels(chart.points.assign(run="")))
        yield replace(
            chart,
            name=f"{chart.name}-by-{_in_name(by)}",
            points=points,
            panels=[name for name in chart.family if name != "run"],
        )


def category_charts(runs: Mapping[str, RunData]) -> Iterator[Chart]:
    """Yield a chart of the speed of each group of prompts, for each column that groups them.

    The speed is the speedup, or the mean accepted length where nothing is timed.
    """
    names: dict[str, None] = {}
    for run in runs.values():
        names |= dict.fromkeys(grouping_columns(run))
    for name in names:
        tables = {}
        for of_run, run in runs.items():
            if name in prompt_columns(run):
                # Speed needs no scores.
                tables[of_run] = tables_by(replace(run, scores=[]), name)
        yield from _category_chart(stack_runs(tables, "speed"), name)


def _category_chart(speeds: pd.DataFrame, name: str) -> Iterator[Chart]:
    """Yield the chart of groups of prompts by the column `name`; nothing without drafts."""
    drafted = speeds[speeds["drafting"] != "none"]
    for speed, title in SPEEDS.items():
        points = drafted.dropna(subset=[speed])
        if len(points):
            yield Chart(
                name=f"{speed.replace('_', '-')}-by-{_in_name(name)}",
                points=_labelled(points),
                x=speed,
                y="category",
                x_title=f"{title} ({INTERVAL})",
                y_title=name,
            )
            return


def _draft_charts(runs: Mapping[str, Tables]) -> Iterator[Chart]:
    """Yield the charts of accepted drafts that the runs have data for."""
    rate = f"acceptance rate ({INTERVAL})"
    of_drafts = [
        Chart(
            name="acceptance-by-depth",
            points=acceptance_points(runs),
            x="index",
            y="rate",
            x_title="depth of the draft tree",
            y_title=rate,
            x_is_count=True,
        ),
        Chart(
            name="acceptance-by-position",
            points=acceptance_points(runs, "position"),
            x="middle",
            y="rate",
            x_title="position in the image (tokens, row by row)",
            y_title=rate,
            panels=CELL,
        ),
        Chart(
            name="accepted-lengths",
            points=_labelled(stack_runs(runs, "lengths")),
            x="length",
            y="share",
            x_title="tokens committed by a step (bonus token included)",
            y_title="fraction of steps",
            panels=CELL,
            x_is_count=True,
        ),
    ]
    yield from (chart for chart in of_drafts if len(chart.points))


def bound_charts(table: pd.DataFrame, parameters: Sequence[str]) -> Iterator[Chart]:
    """Yield the charts of a length and of a rate against each parameter that varies.

    Args:
        table: Cells with the column `run`, the figures and their intervals.
        parameters: The horizontal axes.
    """
    for parameter, figure in product(parameters, BY_BOUND):
        drafted = table[table["drafting"] != "none"].dropna(subset=[parameter, figure])
        if drafted[parameter].nunique() < 2:
            continue
        figures = [f"{figure}{end}" for end in ENDS]
        points = drafted.filter([*FAMILY, "cell_id", "images", *figures])
        yield Chart(
            name=f"{figure.replace('_', '-')}-by-{parameter}",
            points=_labelled(points.sort_values([parameter, "run"], kind="stable")),
            x=parameter,
            y=figure,
            x_title=parameter.replace("_", " "),
            y_title=f"{figure.replace('_', ' ')} ({INTERVAL})",
            # Cells that differ in nothing but the parameter are one line.
            family=[name for name in FAMILY if name in points and name != parameter],
        )


def fronts(runs: Mapping[str, Tables]) -> Iterator[Chart]:
    """Yield a chart for each quality figure and each of its scorers.

    The charts against speedup come first, then those against mean accepted length.
    """
    table = speed_quality_points(runs)
    # Figures of the tokens come first: they show what a few pictures cannot show.
    figures = sorted(ON_CURVES, key=lambda name: METRICS[name].level != "tokens")
    for speed, figure in product(SPEEDS, figures):
        points = table.dropna(subset=[figure, speed])
        if METRICS[figure].level == "drafts" and points["drafting"].eq("none").all():
            continue  # ar alone
        scorers = points.groupby(METRICS[figure].scored_by)
        for scorer, rows in scorers:
            name = f"{'speed' if speed == 'speedup' else 'length'}-quality-{figure}"
            chart = _front(rows, name=name, speed=speed, figure=figure, scorer=str(scorer))
            if len(scorers) > 1:
                chart = replace(chart, name=f"{name}-{_in_name(chart.scorer)}")
            else:
                chart = replace(chart, scorer="")
            yield chart


def _in_name(text: str) -> str:
    """Text as a part of the name of a file."""
    return re.sub(r"[\W_]", "-", text)


def _front(rows: pd.DataFrame, *, name: str, speed: str, figure: str, scorer: str) -> Chart:
    """The chart of one figure against one speed."""
    metric = METRICS[figure]
    others = [other for other in ON_CURVES if other != figure]
    unused = [f"{other}{end}" for other, end in product(others, ENDS)]
    points = rows.drop(columns=unused).reset_index(drop=True)
    # Labels name what differs in this chart, not between all runs.
    points["label"] = labels(points)
    compared = points
    if metric.against_ar == "none":
        # A figure that is not significantly above 0, the value of the target, counts as 0.
        is_above = points[f"{figure}_low"] > 0
        compared = points.assign(**{figure: points[figure].where(is_above, 0.0)})
    points["dominated"] = is_dominated(
        compared, speed, figure, less_is_better=metric.better == "lower"
    )
    scale = f", log above {metric.linear_below:g}" if metric.linear_below else ""
    return Chart(
        name=name,
        points=points,
        x=speed,
        y=figure,
        x_title=f"{SPEEDS[speed]} ({INTERVAL})",
        y_title=f"{metric.heading}, {metric.better} is better{scale}\n({scorer})",
        scorer=scorer,
        y_linear_below=metric.linear_below,
    )


_TICKS = (0, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50)


def symlog_ticks(linear_below: float) -> list[float]:
    """Return the ticks of an axis that is linear below a figure and logarithmic above it."""
    return [tick * linear_below for tick in _TICKS]


def symlog(figures: pd.Series, linear_below: float | None) -> pd.Series:
    """Return the places of figures on such an axis: 1 at `linear_below`, then 1 for each decade.

    With None, the axis is linear and the figures are their places.
    """
    if linear_below is None:
        return figures
    ratios = figures.abs() / linear_below
    places = ratios.where(ratios <= 1, 1 + np.log10(ratios.clip(lower=1)))
    return places * np.sign(figures)


def line_label(rows: pd.DataFrame) -> str:
    """Return the words that the labels of all points of a line share."""
    first, *others = (str(label).split(" ") for label in rows["label"])
    return " ".join(word for word in first if all(word in words for words in others))


def is_hollow(points: pd.DataFrame) -> bool:
    """Return whether another cell beats the cell of a line."""
    return "dominated" in points and bool(points["dominated"].iloc[0])


def whiskers(
    points: pd.DataFrame, name: str, linear_below: float | None = None
) -> list[list[float]] | None:
    """Return the lengths below and above each point; None for a figure without intervals.

    Args:
        points: The points.
        name: The column of the figure.
        linear_below: As in `symlog`, for lengths on such an axis.
    """
    if f"{name}_low" not in points:
        return None
    at, low, high = (symlog(points[f"{name}{end}"], linear_below) for end in ENDS)
    return [side.clip(lower=0).fillna(0).tolist() for side in (at - low, high - at)]


# ---- Colours, markers and lines of cells, the same in every picture

_COLOURS = {name: mode.colour for name, mode in MODES.items() if mode.colour}
# Nine and four have no common divisor: marker and line repeat together after 36 cells only.
MARKERS = {
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
"""Matplotlib's and Plotly's names of the markers."""
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
"""Matplotlib's and Plotly's names of the lines."""


class Style(NamedTuple):
    """The style of a cell."""

    number: int  # of the cell among the cells of all runs, from 0
    colour: str  # hex
    marker: str  # one of `MARKERS`
    line: str  # one of `DASHES`


Styles: TypeAlias = Mapping[CellKey, Style]


def run_styles(runs: Mapping[str, Tables], by: str = "mode") -> Styles:
    """Return the style of every cell of the runs; the colour stands for `by`."""
    cells = stack_runs(runs, "speed")
    looks = map(Style, count(), _colours(cells[by], by), cycle(MARKERS), cycle(DASHES))
    return dict(zip(_keys(cells), looks, strict=True))


def group_styles(groups: Mapping[str, Tables]) -> Styles:
    """Return the style of every cell of groups of prompts, the same for all cells of a group."""
    names = pd.Series(list(groups))
    looks = map(Style, count(), _colours(names, "group"), cycle(MARKERS), cycle(DASHES))
    of_group = dict(zip(names, looks, strict=True))
    return {key: of_group[key[0]] for key in _keys(stack_runs(groups, "speed"))}


def _keys(table: pd.DataFrame) -> Iterator[CellKey]:
    """The key of each row of a table of several runs."""
    return table[CELL].itertuples(index=False, name=None)


def _colours(values: pd.Series, by: str) -> list[str]:
    if by == "mode":
        return values.map(_COLOURS).fillna("#CC79A7").tolist()
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    distinct = sorted(values.dropna().unique())
    # The palest part of the map does not print. No shade is near the grey of cells without the
    # value.
    shades = colormaps["plasma"].resampled(len(distinct) + 1)
    colours = {value: to_hex(shades(number)) for number, value in enumerate(distinct)}
    return values.map(colours).fillna("#767676").tolist()


def styles_of(points: pd.DataFrame, styles: Styles) -> list[Style]:
    """Return the style of each point of a line."""
    return [styles[key] for key in _keys(points)]
