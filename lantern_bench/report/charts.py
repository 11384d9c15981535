"""Curves of one or several runs as PNG, SVG and PDF beside the CSV of their points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pandas as pd

from lantern_bench.analysis.cells import CellRecords, run_cells
from lantern_bench.analysis.labels import BOUNDS, CELL, FAMILY, CellKey, labels
from lantern_bench.analysis.speed import SPEEDUPS
from lantern_bench.analysis.statistics import proportion
from lantern_bench.analysis.tables import cells_of, tables_of
from lantern_bench.methods.catalog import METRICS, ON_CURVES
from lantern_bench.report.styles import Style, styles
from lantern_bench.storage.run_directory import RunData
from lantern_bench.storage.schema import ENDS, columns, frame
from lantern_bench.utils.errors import UserError

# ---- The data behind the curves

Tables: TypeAlias = Mapping[str, pd.DataFrame]  # of one run by name, as `curve_tables` returns them
Styles: TypeAlias = Mapping[CellKey, Style]

SPEEDS = {
    "speedup": "speedup over AR",
    "mean_accepted_length": "mean accepted length (incl. bonus token)",
}
"""What a speed-quality curve has on its horizontal axis."""

INTERVAL = "95 % interval"  # what whiskers are, in the titles of axes


def curve_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables of `tables_of`, `cells` (as `cells_of`) and `lengths`."""
    tables = tables_of(run)
    lengths = frame("lengths", (row for cell in run_cells(run) for row in _length_rows(cell)))
    row_tokens = run.records.groupby("model")["tokens"].max().map(_row_tokens)
    acceptance = tables["acceptance"].assign(
        row_tokens=tables["acceptance"]["model"].map(row_tokens)
    )
    return {**tables, "acceptance": acceptance, "cells": cells_of(tables), "lengths": lengths}


def _row_tokens(tokens: int) -> float:
    """The tokens of a row of an image with as many rows as columns, or also an end of each row; else NaN."""
    rows = math.isqrt(tokens)
    return tokens // rows if tokens in (rows**2, rows * (rows + 1)) else math.nan


def choose_cells(runs: Mapping[str, Tables], patterns: Sequence[str]) -> dict[str, Tables]:
    """Keep the cells whose id or mode is like a pattern, such as `*-lambda5-*`; `UserError` where none is."""
    cells: dict[str, str] = dict(
        stack_runs(runs, "speed")[["cell_id", "mode"]].itertuples(index=False)
    )
    chosen = set[str]()
    for pattern in patterns:
        like = {
            cell
            for cell, mode in cells.items()
            if fnmatchcase(cell, pattern) or fnmatchcase(mode, pattern)
        }
        if not like:
            raise UserError(
                f"--cells {pattern}: no cell has such an id or mode",
                f"The cells are {', '.join(cells)}.",
            )
        chosen |= like
    return {
        run: {
            name: table[table["cell_id"].isin(chosen)].reset_index(drop=True)
            for name, table in tables.items()
        }
        for run, tables in runs.items()
    }


def _length_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """The histogram of the tokens committed by a step; empty for a cell without drafts."""
    if cell.columns["drafting"] == "none":
        return
    steps = (length for counts in cell.completed["committed_per_step"] for length in counts or ())
    counts = Counter(int(length) for length in steps if length > 0)
    for length in range(1, max(counts, default=0) + 1):
        share = proportion(counts[length], counts.total()).columns("share")
        yield {**cell.columns, "length": length, "steps": counts[length], **share}


def stack_runs(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """Return one table of all runs, with the column `run`."""
    return pd.concat(
        [tables[name].assign(run=run) for run, tables in runs.items()], ignore_index=True
    )


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """A table with the columns `run` and `label` in front."""
    front = table.assign(label=labels(table))
    return front[["run", "label", *(column for column in table if column != "run")]]


def acceptance_points(runs: Mapping[str, Tables], axis: str = "depth") -> pd.DataFrame:
    """Return the rows of `acceptance.csv` along `axis` of all runs.

    Positions of the image are pooled to at most 32 places a cell, from `index` to `index_end` around `middle`.
    """
    table = stack_runs(runs, "acceptance")
    table = table[table["axis"] == axis].reset_index(drop=True)
    if axis == "position":
        width = -(-(int(table["index"].max()) + 1) // 32) if len(table) else 1
        cells = table.groupby([*CELL, table["index"] // width], sort=False)
        sums = cells[["offered", "accepted"]].transform("sum")
        table = table.assign(index_end=cells["index"].transform("max"), **sums)[
            ~cells.cumcount().astype(bool)
        ]
        rates = [
            proportion(int(a), int(n))
            for a, n in zip(table["accepted"], table["offered"], strict=True)
        ]
        for number, end in enumerate(ENDS):
            table[f"rate{end}"] = [rate[number] for rate in rates]
        table["middle"] = (table["index"] + table["index_end"]) / 2
    return _labelled(table)


def _bound_points(runs: Mapping[str, Tables], parameter: str) -> pd.DataFrame:
    """The mean accepted length of the cells that have `parameter`, by its value, with intervals."""
    table = stack_runs(runs, "speed")
    rows = table[
        table[parameter].notna()
        & table["mean_accepted_length"].notna()
        & (table["drafting"] != "none")
    ]
    names = [name for name in (*FAMILY, "cell_id", "images") if name in rows]
    points = rows[[*names, *(f"mean_accepted_length{end}" for end in ENDS)]]
    return _labelled(points.sort_values([parameter, "run"], kind="stable").reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedups and mean accepted length of their cell.

    A run that was not timed takes the speedups of the same cell from another run, which `speed_run` names.
    """
    table = stack_runs(runs, "cells")
    cell = ["model", "cell_id"]
    speedup = [f"{name}{end}" for name in SPEEDUPS for end in ENDS]
    length = [f"mean_accepted_length{end}" for end in ENDS]
    is_timed = table["speedup"].notna()
    borrowed = [*speedup, "speed_run"]
    table["speed_run"] = table["run"].where(is_timed)
    elsewhere = table[cell].merge(
        table.loc[is_timed, [*cell, *borrowed]].drop_duplicates(cell), on=cell, how="left"
    )
    table[borrowed] = table[borrowed].where(is_timed, elsewhere[borrowed])
    table = table.assign(images=table["quality_images"], note=table["quality_note"])
    table = table[
        ["run", *(column.name for column in columns("quality")), *speedup, *length, "speed_run"]
    ]
    return _labelled(table[table[list(SPEEDS)].notna().any(axis=1)].reset_index(drop=True))


def is_dominated(
    points: pd.DataFrame, speed: str, quality: str, less_is_better: bool
) -> list[bool]:
    """Return for each point whether another of its run and model is no worse in both, better in one."""
    speeds = points[speed].to_numpy()
    qualities = points[quality].to_numpy() * (-1 if less_is_better else 1)
    group = points.groupby(["run", "model"]).ngroup().to_numpy()
    no_worse = (
        (speeds >= speeds[:, None]) & (qualities >= qualities[:, None]) & (group == group[:, None])
    )
    better = (speeds > speeds[:, None]) | (qualities > qualities[:, None])
    return (no_worse & better).any(axis=1).tolist()


# ---- The charts


@dataclass(frozen=True)
class Chart:
    """A chart. `points` may also hold ends of intervals, such as `<x>_low`."""

    name: str  # of its files
    # with `run`, `model`, `cell_id`, `label`; `dominated` where another cell beats a point
    points: pd.DataFrame
    x: str
    y: str
    x_title: str
    y_title: str  # a second line names the scorer
    lines: Sequence[str] = tuple(CELL)  # columns that tell lines apart
    panels: bool = False  # a panel for each line
    x_is_count: bool = False  # whether x counts something

    @property
    def joined(self) -> bool:
        """Whether the points of a line are joined; on a front those are that nothing dominates."""
        return "dominated" not in self.points and self.x != "tree"

    def groups(self) -> list[pd.DataFrame]:
        """The points of each line."""
        return [rows for _, rows in self.points.groupby(list(self.lines), sort=False, dropna=False)]

    def front_lines(self) -> Iterator[tuple[list[float], list[float]]]:
        """Yield x and y of the points of each run and model that nothing dominates, by x."""
        if "dominated" in self.points:
            for _, best in self.points[~self.points["dominated"]].groupby(
                ["run", "model"], sort=False
            ):
                ordered = best.sort_values(self.x)
                yield ordered[self.x].astype(float).tolist(), ordered[self.y].astype(float).tolist()


def fronts(runs: Mapping[str, Tables]) -> Iterator[Chart]:
    """Yield a chart for each quality figure and each scorer of it: against speedup, then against MAL."""
    table = speed_quality_points(runs)
    for speed, prefix in (("speedup", "speed"), ("mean_accepted_length", "length")):
        # What is measured of the tokens themselves comes first: it sees what few pictures cannot show.
        for figure in sorted(ON_CURVES, key=lambda name: METRICS[name].level in ("image", "set")):
            metric = METRICS[figure]
            measured = table[table[figure].notna() & table[speed].notna()]
            others = [f"{name}{end}" for name in ON_CURVES if name != figure for end in ENDS]
            for scored_by, rows in measured.groupby(metric.scored_by):
                is_alone = measured[metric.scored_by].nunique() == 1
                suffix = (
                    ""
                    if is_alone
                    else "-" + "".join(c if c.isalnum() else "-" for c in str(scored_by))
                )
                points = rows.drop(columns=others, errors="ignore").reset_index(drop=True)
                # they name what differs in this chart, not between all runs
                points["label"] = labels(points)
                compared = points.copy()
                # but with the target: what is not told from it counts as equal to it
                if metric.against_ar == "none":
                    compared[figure] = points[figure].where(points[f"{figure}_low"] > 0, 0.0)
                points["dominated"] = is_dominated(
                    points=compared,
                    speed=speed,
                    quality=figure,
                    less_is_better=metric.better == "lower",
                )
                name = f"{prefix}-quality-{figure}{suffix}"
                x_title = f"{SPEEDS[speed]} ({INTERVAL})"
                y_title = f"{metric.heading}, {metric.better} is better\n({scored_by})"
                yield Chart(
                    name=name, points=points, x=speed, y=figure, x_title=x_title, y_title=y_title
                )


def charts(
    runs: Mapping[str, Tables], parameters: Sequence[str] = tuple(BOUNDS)
) -> Iterator[Chart]:
    """Yield the charts that the runs have data for, of the mean accepted length against `parameters`."""
    rate = f"acceptance rate ({INTERVAL})"
    if len(depths := acceptance_points(runs)):
        yield Chart(
            name="acceptance-by-depth",
            points=depths,
            x="index",
            y="rate",
            x_title="depth of the draft tree",
            y_title=rate,
            x_is_count=True,
        )
    if len(positions := acceptance_points(runs, "position")):
        x_title = "position in the image (tokens, row by row)"
        yield Chart(
            name="acceptance-by-position",
            points=positions,
            x="middle",
            y="rate",
            x_title=x_title,
            y_title=rate,
            panels=True,
        )
    if len(lengths := _labelled(stack_runs(runs, "lengths"))):
        yield Chart(
            name="accepted-lengths",
            points=lengths,
            x="length",
            y="share",
            x_title="tokens committed by a step (bonus token included)",
            y_title="share of steps",
            panels=True,
            x_is_count=True,
        )
    yield from fronts(runs)
    for parameter in parameters:
        points = _bound_points(runs, parameter)
        if points[parameter].nunique() > 1:
            # Cells that differ in nothing else are one line.
            family = [name for name in FAMILY if name in points and name != parameter]
            yield Chart(
                name=f"mean-accepted-length-by-{parameter}",
                points=points,
                x=parameter,
                y="mean_accepted_length",
                x_title=BOUNDS.get(parameter, parameter),
                y_title=f"mean accepted length ({INTERVAL})",
                lines=family,
            )


def line_label(rows: pd.DataFrame) -> str:
    """Return the words that the labels of all points of a line share."""
    first, *others = (str(label).split(" ") for label in rows["label"])
    return " ".join(word for word in first if all(word in words for words in others))


def whiskers(rows: pd.DataFrame, name: str) -> list[list[float]] | None:
    """Return the lengths of both whiskers of each point; None for a figure without intervals."""
    if f"{name}_low" not in rows:
        return None
    lengths = rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]
    return [length.astype(float).clip(lower=0).fillna(0).tolist() for length in lengths]


def run_styles(runs: Mapping[str, Tables], by: str = "mode") -> Styles:
    """Return the style of every cell of the runs, the same in all their charts."""
    return styles(stack_runs(runs, "speed"), by)
