"""Curves of one or several runs: the points behind each, and its picture as PNG and SVG beside the CSV of its points.

Acceptance by depth and by position in the image, histograms of the accepted length, quality against speed with its
front, and the mean accepted length against a bound. FID values of different features never share an axis.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.tables import METRICS, ON_CURVES
from lantern_bench.models.io.files import write_atomically
from lantern_bench.report.labels import (
    BOUNDS,
    CELL,
    PARAMETER_NAMES,
    CellKey,
    Style,
    cell_key,
    check_grouping,
    labels,
    styles,
)
from lantern_bench.report.records import CellRecords, group_records
from lantern_bench.report.stats import proportion
from lantern_bench.report.tables import ENDS, SPEEDUPS, frame, tables_of, write_csv
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Styles = Mapping[CellKey, Style]

# ---- The data behind the curves

Tables: TypeAlias = Mapping[str, "pd.DataFrame"]
"""The tables of one run by name, as `curve_tables` returns them."""


SPEEDS = {"speedup": "speedup over AR", "mean_accepted_length": "mean accepted length (incl. bonus token)"}
"""What a speed-quality curve has on its horizontal axis."""

FAMILY = (
    "run", "model", "mode", "drafting", "rule", "tree", "neighbours", "neighbour_metric", "residual", *BOUNDS,
    "temperature", "cfg_scale", "top_k", "top_p", "batch", "seed_set",
)  # fmt: skip
"""Columns that tell cells apart; without a parameter they name the family in which that parameter varies."""


class Front(NamedTuple):
    """One speed-quality curve: file name, columns of the axes, title and direction of the quality axis, its points."""

    name: str
    speed: str
    quality: str
    axis: str
    less_is_better: bool
    points: pd.DataFrame


def curve_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables that curves are made from: those of `tables_of`, and `lengths`."""
    lengths = (row for cell in group_records(run.records) for row in length_rows(cell))
    return {**tables_of(run), "lengths": frame("lengths", lengths)}


def length_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the histogram of the tokens committed by a step, with Wilson intervals; empty for a cell without drafts."""
    if cell.columns["drafting"] == "none":
        return
    steps = (length for counts in cell.good.column("committed_per_step") for length in counts or ())
    counts = Counter(int(length) for length in steps if length > 0)
    for length in range(1, max(counts, default=0) + 1):
        share = proportion(counts[length], counts.total()).columns("share")
        yield {**cell.columns, "length": length, "steps": counts[length], **share}


def acceptance_points(runs: Mapping[str, Tables], axis: str = "depth") -> pd.DataFrame:
    """Return the rows of `acceptance.csv` along `axis` of all runs, with the columns `run` and `label` in front.

    Neighbouring positions of the image are pooled until a cell has at most 32 places; `index_end` is the last position
    of each, and the interval is that of the sums.
    """
    table = stack_runs(runs, "acceptance")
    table = table[table["axis"] == axis].reset_index(drop=True)
    if axis == "position":
        width = -(-(int(table["index"].max()) + 1) // 32) if len(table) else 1
        cells = table.groupby(["run", "model", "cell_id", table["index"] // width], sort=False)
        sums = cells[["offered", "accepted"]].transform("sum")
        table = table.assign(index_end=cells["index"].transform("max"), **sums)[~cells.cumcount().astype(bool)]
        rates = [proportion(int(a), int(n)) for a, n in zip(table["accepted"], table["offered"], strict=True)]
        for number, end in enumerate(ENDS):
            table[f"rate{end}"] = [rate[number] for rate in rates]
    return _labelled(table)


def length_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the table `lengths` of all runs, with `run` and `label` in front."""
    return _labelled(stack_runs(runs, "lengths"))


def bound_points(runs: Mapping[str, Tables], parameter: str) -> pd.DataFrame:
    """Return the mean accepted length of the cells that have `parameter`, by its value, with intervals."""
    table = stack_runs(runs, "speed")
    known = table[table[parameter].notna() & table["mean_accepted_length"].notna() & (table["drafting"] != "none")]
    kept = [name for name in (*FAMILY, "cell_id", "images") if name in known]
    chosen = known[[*kept, *(f"mean_accepted_length{end}" for end in ENDS)]]
    return _labelled(chosen.sort_values([parameter, "run"], kind="stable").reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedups and mean accepted length of their cell.

    A run that was not timed (batched decoding) takes the speedups of the same cell from another of the runs, where it
    was measured; `speed_run` names that run. A cell without either figure is left out.
    """
    cell = ["model", "cell_id"]
    quality, speed = stack_runs(runs, "quality"), stack_runs(runs, "speed")
    speedup, length = (
        [f"{name}{end}" for name in names for end in ENDS] for names in (SPEEDUPS, ("mean_accepted_length",))
    )
    own = speed.loc[speed["speedup"].notna(), ["run", *cell, *speedup]]
    own = own.assign(speed_run=own["run"])
    table = quality.merge(own, on=["run", *cell], how="left")
    elsewhere = quality[cell].merge(own.drop(columns="run").drop_duplicates(cell), on=cell, how="left")
    borrowed = [*speedup, "speed_run"]
    table[borrowed] = table[borrowed].where(table["speedup"].notna(), elsewhere[borrowed])
    table = table.merge(speed[["run", *cell, *length]], on=["run", *cell], how="left")
    table = table[[*quality.columns, *speedup, *length, "speed_run"]]
    return _labelled(table[table[list(SPEEDS)].notna().any(axis=1)].reset_index(drop=True))


def fronts(runs: Mapping[str, Tables]) -> Iterator[Front]:
    """Yield a curve for each quality figure and each scorer of it: against speedup, then against MAL.

    The column `dominated` marks a cell when another of its model and run is at least as fast and as good, and better in
    one of the two.
    """
    table = speed_quality_points(runs)
    for speed, prefix in (("speedup", "speed"), ("mean_accepted_length", "length")):
        for figure in ON_CURVES:
            metric = METRICS[figure]
            scorer, less_is_better = metric.scored_by, metric.better == "lower"
            known = table[table[figure].notna() & table[speed].notna()]
            others = [f"{name}{end}" for name in ON_CURVES if name != figure for end in ENDS]
            for scored_by, same in known.groupby(scorer):
                alone = known[scorer].nunique() == 1
                suffix = "" if alone else "-" + "".join(c if c.isalnum() else "-" for c in str(scored_by))
                points = same.drop(columns=others, errors="ignore").reset_index(drop=True)
                points["label"] = labels(points)  # they name what differs in this picture, not between all runs
                points["dominated"] = is_dominated(points, speed, figure, less_is_better)
                name = f"{prefix}-quality-{figure}{suffix}"
                title = f"{metric.heading}, {metric.better} is better\n({scored_by})"
                yield Front(name, speed, figure, title, less_is_better, points)


def is_dominated(points: pd.DataFrame, speed: str, quality: str, less_is_better: bool) -> list[bool]:
    """Return for each point whether another of the same run and model beats it: no worse in both, better in one.

    By the figures alone: intervals that overlap may still be dominated.
    """
    places = points[["run", "model"]].assign(fast=points[speed], good=points[quality] * (-1 if less_is_better else 1))

    def beaten(own: Any) -> bool:
        rivals = places[(places["run"] == own.run) & (places["model"] == own.model)]
        no_worse = rivals[(rivals["fast"] >= own.fast) & (rivals["good"] >= own.good)]
        return bool(((no_worse["fast"] > own.fast) | (no_worse["good"] > own.good)).any())

    return [beaten(own) for own in places.itertuples()]


def stack_runs(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """Return one table of all runs, with the column `run`."""
    import pandas as pd

    return pd.concat([tables[name].assign(run=run) for run, tables in runs.items()], ignore_index=True)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    front = table.assign(label=labels(table))
    return front[["run", "label", *(column for column in table.columns if column != "run")]]


# ---- The curves, drawn with matplotlib

KINDS = ("png", "svg", "csv")
"""The files of a curve."""

_INTERVAL = "95 % interval"


class Picture(NamedTuple):
    """A curve: its file name without ending, the points behind it, and the figure."""

    name: str
    points: pd.DataFrame
    figure: Figure


def draw_curves(runs: Mapping[str, Tables], folder: Path, by: str = "mode") -> list[Path]:
    """Draw the curves of runs (name to `curve_tables`) into `folder`; return the files.

    `by` (one of `GROUPINGS`) is what colours stand for and, except for the mode, what the mean accepted length is drawn
    against. Raises `RefusedError` when there is nothing to draw, and `UserError` when the folder cannot be written or
    `by` is unknown.
    """
    from matplotlib import rc_context

    drawn = list(pictures(runs, by))
    if not drawn:
        raise RefusedError("nothing to draw: these runs hold no drafts and no images that are both scored and timed")
    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in drawn:
            files += (made := [folder / f"{picture.name}.{kind}" for kind in KINDS])
            # Without dates, versions and random ids equal curves are equal files.
            with rc_context({"svg.hashsalt": picture.name}):
                save_figure(picture.figure, made[0], dpi=160, bbox_inches="tight", metadata={"Software": None})
                save_figure(picture.figure, made[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
            write_csv(picture.points, made[2])
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def save_figure(figure: Figure, path: Path, **how: Any) -> None:
    """Write a figure whole or not at all; `how` as in `Figure.savefig`. Raises `OSError`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **how)
    write_atomically(path, content.getvalue())


def pictures(runs: Mapping[str, Tables], by: str = "mode") -> Iterator[Picture]:
    """Yield the curves that the runs have data for."""
    look = run_styles(runs, by)
    for axis, draw in (("depth", draw_depths), ("position", draw_positions)):
        points = acceptance_points(runs, axis)
        if len(points):
            yield Picture(f"acceptance-by-{axis}", points, draw(points, look))
    lengths = length_points(runs)
    if len(lengths):
        yield Picture("accepted-lengths", lengths, draw_lengths(lengths, look))
    for front in fronts(runs):
        yield Picture(front.name, front.points, draw_front(front, look))
    for parameter in (by,) if by != "mode" else BOUNDS:
        points = bound_points(runs, parameter)
        if points[parameter].nunique() > 1:
            yield Picture(f"mean-accepted-length-by-{parameter}", points, draw_bounds(points, parameter, look))


def run_styles(runs: Mapping[str, Tables], by: str = "mode") -> dict[CellKey, Style]:
    """Return the style of every cell of the runs, the same in all their curves; `UserError` for an unknown `by`."""
    check_grouping(by)
    return styles(stack_runs(runs, "speed"), by)


def draw_depths(points: pd.DataFrame, styles: Styles) -> Figure:
    """Acceptance rate by depth of the draft tree, with whiskers."""
    figure, axes = _figure("depth of the draft tree", f"acceptance rate ({_INTERVAL})")
    cells = _cells(points)
    for shift, line in zip(_spread(len(cells), 0.04), cells, strict=True):
        style = styles[cell_key(line.iloc[0])]
        axes.errorbar(
            line["index"].astype(float) + shift, line["rate"], yerr=_whiskers(line, "rate"),
            label=line["label"].iloc[0], color=style.colour, marker=style.marker, linestyle=style.line, capsize=2,
            linewidth=1.3, markersize=5,
        )  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.set_xticks(sorted({int(depth) for depth in points["index"]}))
    return _finished(figure, axes)


def draw_positions(points: pd.DataFrame, styles: Styles) -> Figure:
    """Acceptance rate along the image, one panel a cell with its band; the other cells are grey behind it."""
    cells = _cells(points)
    figure, panels = _panels(len(cells), "position in the image (tokens, row by row)", f"acceptance rate ({_INTERVAL})")
    middles = [(line["index"].astype(float) + line["index_end"].astype(float)) / 2 for line in cells]
    for axes, line, middle in zip(panels, cells, middles, strict=False):
        style = styles[cell_key(line.iloc[0])]
        for other, elsewhere in zip(cells, middles, strict=True):
            axes.plot(elsewhere, other["rate"], color="#CFCFCF", linewidth=0.6, zorder=1)
        low, high = line["rate_low"].astype(float), line["rate_high"].astype(float)
        axes.fill_between(middle, low, high, color=style.colour, alpha=0.22, linewidth=0, zorder=2)
        axes.plot(middle, line["rate"], color=style.colour, linewidth=1.4, zorder=3)
        rate = line["accepted"].sum() / line["offered"].sum()
        axes.set_title(f"{line['label'].iloc[0]}\nmean {rate:.2f}", fontsize="small", loc="left")
        axes.set_ylim(0, 1.02)
    return figure


def draw_lengths(points: pd.DataFrame, styles: Styles) -> Figure:
    """Histograms of the accepted length, one panel a cell on the same axes; a line marks the mean."""
    cells = _cells(points)
    figure, panels = _panels(len(cells), "tokens committed by a step (bonus token included)", "share of steps")
    for axes, rows in zip(panels, cells, strict=False):
        lengths, share = rows["length"].astype(float), rows["share"].astype(float)
        axes.bar(lengths, share, width=0.78, color=styles[cell_key(rows.iloc[0])].colour, alpha=0.85)
        axes.errorbar(lengths, share, yerr=_whiskers(rows, "share"), fmt="none", ecolor="#444444", elinewidth=0.8)
        mean = float((lengths * share).sum())
        axes.axvline(mean, color="#222222", linestyle="--", linewidth=0.9)
        axes.set_title(f"{rows['label'].iloc[0]}\nmean {mean:.2f}", fontsize="small", loc="left")
    panels[0].set_xticks(range(1, int(points["length"].max()) + 1))
    return figure


def draw_front(front: Front, styles: Styles) -> Figure:
    """Quality against speed: a line joins the front, dominated cells are pale, a grey band is the spread of AR."""
    points, quality = front.points, front.quality
    figure, axes = _figure(f"{SPEEDS[front.speed]} ({_INTERVAL})", front.axis)
    for _, best in points[~points["dominated"]].groupby(["run", "model"], sort=False):
        ordered = best.sort_values(front.speed)
        axes.plot(ordered[front.speed], ordered[quality], color="#888888", linewidth=1, zorder=1)
    for _, point in points.iterrows():
        style, row = styles[cell_key(point)], point.to_frame().T
        pale = bool(point["dominated"])
        axes.errorbar(
            [point[front.speed]], [point[quality]], xerr=_whiskers(row, front.speed), yerr=_whiskers(row, quality),
            label=point["label"], color=style.colour, marker=style.marker, linestyle="none", capsize=2, elinewidth=0.8,
            markersize=7, alpha=0.38 if pale else 1.0, markerfacecolor="none" if pale else style.colour,
        )  # fmt: skip
    if front.speed == "speedup":
        axes.axvline(1.0, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=0)
    ends = [f"{quality}_band_low", f"{quality}_band_high"]
    for low, high in points.reindex(columns=ends).dropna().drop_duplicates().itertuples(index=False):
        axes.axhspan(low, high, color="#EEEEEE", zorder=0, label="95 % of further sets of AR images")
    if points["dominated"].any():
        axes.set_title("pale and hollow: another cell is at least as fast and as good", fontsize="x-small", loc="left")
    return _finished(figure, axes)


def draw_bounds(points: pd.DataFrame, parameter: str, styles: Styles) -> Figure:
    """Mean accepted length against a parameter; cells that differ in nothing else are joined."""
    figure, axes = _figure(PARAMETER_NAMES[parameter], f"mean accepted length ({_INTERVAL})")
    places = {value: number for number, value in enumerate(dict.fromkeys(points[parameter]))}
    words = parameter == "tree"
    family = [name for name in FAMILY if name in points and name != parameter]
    lines = [line for _, line in points.groupby(family, sort=False, dropna=False)]
    shift = _spread(len(lines), 0.06 if words else 0.0)
    for number, line in enumerate(lines):
        style = styles[cell_key(line.iloc[-1])]
        x = [places[value] + shift[number] if words else float(value) for value in line[parameter]]
        # A line has the label of its first cell without the parameter on the axis.
        text = str(line[parameter].iloc[0]) if words else f"{line[parameter].iloc[0]:g}"
        spoken = {"tree": text, "temperature": "greedy" if text == "0" else f"T={text}"}
        own = spoken.get(parameter) or f"{BOUNDS[parameter]}={text}"
        axes.errorbar(
            x, line["mean_accepted_length"], yerr=_whiskers(line, "mean_accepted_length"),
            label=" ".join(word for word in line["label"].iloc[0].split(" ") if word != own), color=style.colour,
            marker=style.marker, linestyle="none" if words else style.line, capsize=2, linewidth=1.3, markersize=6,
        )  # fmt: skip
    if words:
        axes.set_xticks(list(places.values()), [str(value) for value in places])
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    return _finished(figure, axes)


def _cells(points: pd.DataFrame) -> list[pd.DataFrame]:
    return [rows for _, rows in points.groupby(CELL, sort=False)]


def _panels(cells: int, x: str, y: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a panel for each cell, all with the same axes."""
    from matplotlib.figure import Figure

    columns = min(3, cells)
    down = -(-cells // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 1.75 * down + 0.7), layout="constrained")
    panels = figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for number, axes in enumerate(panels):
        _plain(axes)
        axes.set_visible(number < cells)
        # The last panel of each column has tick labels, also above an empty place.
        axes.tick_params(labelbottom=number + columns >= cells)
    figure.supxlabel(x, fontsize="medium")
    figure.supylabel(y, fontsize="medium")
    return figure, list(panels)


def _spread(count: int, step: float) -> list[float]:
    """Small shifts that keep whiskers of equal places apart."""
    return [step * (number - (count - 1) / 2) for number in range(count)]


def _whiskers(rows: pd.DataFrame, name: str) -> list[Sequence[float]] | None:
    """Lengths of the two whiskers of each row, 0 where there is no interval; None for a figure without intervals."""
    if f"{name}_low" not in rows:
        return None
    lengths = (rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name])
    return [length.astype(float).clip(lower=0).fillna(0).tolist() for length in lengths]


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _plain(axes)
    return figure, axes


def _plain(axes: Any) -> None:
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _finished(figure: Figure, axes: Axes) -> Figure:
    legend = axes.legend(
        loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize="small", handlelength=3.2
    )
    # Inches that a line of the legend takes: the axes become as high as a long legend.
    figure.set_figheight(max(figure.get_figheight(), 0.25 * len(legend.texts)))
    return figure
