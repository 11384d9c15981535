"""Draw charts as Matplotlib files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from lantern_bench.analysis.compare import warn_of_unlike
from lantern_bench.analysis.labels import GROUPINGS, labels
from lantern_bench.analysis.prompt_groups import prompt_columns, split_run
from lantern_bench.report.charts import (
    OF_CURVES,
    Chart,
    Styles,
    Tables,
    bound_charts,
    charts,
    choose_cells,
    curve_tables,
    group_charts,
    group_styles,
    is_hollow,
    line_label,
    run_styles,
    styles_of,
    symlog_ticks,
    whiskers,
)
from lantern_bench.storage.run_directory import RunData, load_runs
from lantern_bench.storage.schema import write_csv
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SURFACE = "surface.csv"
"""The file of the table in the folder of an exploration."""

_DISTANCES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of the lines in maps

WIDTHS = {"one": 3.3, "two": 6.9}  # inches of one column and of two in a paper

# Without dates, versions and random ids equal curves are equal files.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Producer": None},
}

_LOOK: dict[Any, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "font.size": 8,
    "pdf.fonttype": 42,
    "figure.dpi": 200,
}


def draw_curves(
    runs: Sequence[Path],
    folder: Path,
    *,
    by: str = "mode",
    cells: Sequence[str] = (),
    width: str = "two",
) -> list[Path]:
    """Draw the curves of run directories and return the files.

    Args:
        runs: The run directories.
        folder: Where to write the files.
        by: One of `GROUPINGS`, or a column of the prompts; each value gets a colour. A parameter
            is also the horizontal axis of charts of length and acceptance rate. A column of the
            prompts gives only the charts of acceptance, with a line for each value.
        cells: Patterns as in `choose_cells`; empty for all cells.
        width: A key of `WIDTHS`.

    Raises:
        RefusedError: The runs have nothing to draw.
        UserError: `by`, `cells` or `width` is wrong, or a file cannot be written.
    """
    from matplotlib import rc_context

    if width not in WIDTHS:
        raise UserError(f"--width {width}: must be one of {', '.join(WIDTHS)}")
    loaded = load_runs(runs, tables_suffice=True)
    warn_of_unlike(loaded)
    of_cells = by in GROUPINGS
    shown = loaded if of_cells else _groups(loaded, by)
    tables: dict[str, Tables] = {name: curve_tables(run) for name, run in shown.items()}
    if cells:
        tables = choose_cells(tables, cells)
    if of_cells:
        styles = run_styles(tables, by)
        drawn = list(charts(tables, OF_CURVES if by == "mode" else (by,)))
    else:
        styles = group_styles(tables)
        drawn = list(group_charts(tables, by))
    if not drawn:
        raise RefusedError(
            "nothing to draw: these runs hold no drafts and no images that are both scored and "
            "timed"
        )
    files = []
    for chart in drawn:
        with rc_context({**_LOOK, "svg.hashsalt": chart.name}):
            figure = to_matplotlib(chart, styles, WIDTHS[width])
            files += _save_all(figure, chart, folder)
    return files


def _groups(runs: Mapping[str, RunData], by: str) -> dict[str, RunData]:
    """Return the run of each group of prompts of the runs, by its name in legends."""
    kept: dict[str, None] = {}
    for run in runs.values():
        kept |= dict.fromkeys(prompt_columns(run))
    if by not in kept:
        raise UserError(
            f"--by {by}: must be one of {', '.join(GROUPINGS)}, or a column of the prompts",
            f"The columns of these prompts are {', '.join(kept)}." if kept else None,
        )
    groups = {}
    for name, run in runs.items():
        for value, group in split_run(run, by).items():
            prompts = group.records["prompt_id"].nunique()
            of_run = f"{name}: " if len(runs) > 1 else ""
            groups[f"{of_run}{value} ({prompts} prompts)"] = group
    return groups


def draw_surface(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw the predictions of an exploration as PNG with their data, and return the files.

    There are a chart of the settings that no other one beats in speedup and distance, charts
    against each parameter that varies, and maps of the speedup over neighbours and a bound, with
    lines of equal distance.

    Args:
        table: The table `surface`.
        folder: Where to write the files.
    """
    from matplotlib import rc_context

    points = table.assign(run="")
    styles = run_styles({"": {"speed": table}})
    best = points[points["dominated"] == 0].assign(dominated=False)
    front = Chart(
        name="predicted-speedup-distance",
        points=best.assign(label=labels(best)),
        x="predicted_speedup",
        y="distance",
        x_title="predicted speedup over ar",
        y_title="predicted distance",
    )
    files = []
    with rc_context({**_LOOK, "svg.hashsalt": front.name}):
        for chart in (front, *bound_charts(points, OF_CURVES)):
            files += _save_all(to_matplotlib(chart, styles), chart, folder, kinds=("png",))
        for bound in ("delta", "lambda"):
            mapped = table.dropna(subset=[bound, "neighbours"])
            for (model, tree), rows in mapped.groupby(["model", "tree"]):
                if min(rows[bound].nunique(), rows["neighbours"].nunique()) > 1:
                    path = folder / f"map-{model}-{tree}-{bound}.png"
                    save_figure(_map(rows, bound), path, metadata=_METADATA["png"])
                    files.append(path)
    return files


def _map(rows: pd.DataFrame, bound: str) -> Figure:
    """Return a map of the speedup over neighbours and a bound; lines join equal distances."""
    from matplotlib.figure import Figure

    axis = rows.pivot_table(
        index=bound, columns="neighbours", values=["predicted_speedup", "distance"]
    )
    speedup = axis["predicted_speedup"]
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(speedup, origin="lower", aspect="auto")
    lines = axes.contour(axis["distance"], levels=_DISTANCES, colors="white", linewidths=0.8)
    axes.clabel(lines, fontsize="x-small")
    axes.set_xticks(range(speedup.shape[1]), [f"{k:g}" for k in speedup.columns])
    axes.set_yticks(range(speedup.shape[0]), [f"{value:g}" for value in speedup.index])
    axes.grid(visible=False)
    axes.set(xlabel="neighbours k", ylabel=bound, title="lines: predicted distance")
    figure.colorbar(image, label="predicted speedup")
    return figure


def _save_all(
    figure: Figure, chart: Chart, folder: Path, kinds: Iterable[str] = tuple(_METADATA)
) -> list[Path]:
    """Save a chart in some formats, and its data."""
    files = []
    for kind in kinds:
        path = folder / f"{chart.name}.{kind}"
        save_figure(figure, path, metadata=_METADATA[kind])
        files.append(path)
    path = folder / f"{chart.name}.csv"
    write_csv(chart.points, path)
    return [*files, path]


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure whole or not at all; `options` go to `Figure.savefig`.

    Raises `UserError` if the file cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    write_file(path, content.getvalue(), flag="--out")


def to_matplotlib(chart: Chart, styles: Styles, width: float = WIDTHS["two"]) -> Figure:
    """Return a chart as a figure: one pair of axes, or a panel for each line.

    Args:
        chart: The chart.
        styles: The style of every cell.
        width: Inches.
    """
    if chart.panels:
        return _draw_panels(chart, styles, width)
    return _draw_one_panel(chart, styles, width)


def _draw_panels(chart: Chart, styles: Styles, width: float) -> Figure:
    """Draw panels, above a legend if a panel has several lines."""
    from matplotlib.figure import Figure

    parts = chart.in_panels()
    across = min(round(width / 2), len(parts))
    down = -(-len(parts) // across)
    figure = Figure((width, 1.5 * down + 0.6), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for number, axes in enumerate(grid.ravel()):
        # The last panel of each column has tick labels, also above an empty one.
        axes.tick_params(labelbottom=number + across >= len(parts))
        axes.set_visible(number < len(parts))
    groups = {}
    for axes, part in zip(grid.ravel(), parts, strict=False):
        for points in part.lines():
            groups[str(points["run"].iloc[0])] = _draw_line(axes, chart, points, styles=styles)
        axes.set_title(line_label(part.points), fontsize="small", loc="left")
        if chart.x == "middle" and pd.notna(part.points["row_tokens"].iloc[0]):
            row = int(part.points["row_tokens"].iloc[0])
            _draw_row_ends(axes, row, tokens=int(part.points["index_end"].max()) + 1)
    _limit(grid[0, 0], chart)
    figure.supxlabel(chart.x_title, fontsize="medium")
    figure.supylabel(chart.y_title, fontsize="medium")
    if "run" not in chart.panels:
        # Matplotlib reads formulas between dollar signs. Below the panels is the title of x.
        names = [name.replace("$", r"\$") for name in groups]
        _draw_legend(figure, list(groups.values()), names, place="outside upper left")
    return figure


def _draw_one_panel(chart: Chart, styles: Styles, width: float) -> Figure:
    """Draw all lines into one pair of axes, above a legend."""
    from matplotlib.figure import Figure

    figure = Figure((width, 1.0 + 0.35 * width), layout="constrained")
    axes = figure.subplots()
    lines = chart.lines()
    for points in lines:
        _draw_line(axes, chart, points, styles=styles)
    _limit(axes, chart)
    if chart.better_is_lower:
        axes.invert_yaxis()
    if chart.y_linear_below is not None:
        axes.set_yscale("symlog", linthresh=chart.y_linear_below)
        ticks = symlog_ticks(chart.y_linear_below)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for x, y in chart.front_lines():
        axes.plot(x, y, color="#888888", linewidth=1, zorder=1)
    if chart.x == "speedup":
        axes.axvline(1.0, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=0)
    _draw_ar_spread(axes, chart)
    if any(map(is_hollow, lines)):
        axes.set_title(
            "pale and hollow: another cell is at least as fast and as good",
            fontsize="x-small",
            loc="left",
        )
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)

    _draw_legend(figure, *axes.get_legend_handles_labels())
    return figure


def _draw_legend(
    figure: Figure,
    handles: Sequence[Any],
    names: Sequence[str],
    place: Literal["outside lower left", "outside upper left"] = "outside lower left",
) -> None:
    """Draw a legend outside the axes, which keep their height. It has as many columns as fit."""
    columns = max(1, int(figure.get_figwidth() / (0.65 + 0.055 * max(map(len, names)))))
    rows = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.14 * rows)
    figure.legend(
        handles,
        names,
        loc=place,
        ncols=columns,
        frameon=False,
        fontsize="small",
        handlelength=3.2,
    )


def _draw_line(axes: Axes, chart: Chart, points: pd.DataFrame, *, styles: Styles) -> Any:
    """Draw a line, and return its handle for a legend."""
    style = styles_of(points, styles)[-1]
    hollow = is_hollow(points)
    return axes.errorbar(
        points[chart.x].tolist(),
        points[chart.y].tolist(),
        xerr=whiskers(points, chart.x),
        yerr=whiskers(points, chart.y),
        label=line_label(points),
        color=style.colour,
        marker=style.marker,
        capsize=2,
        elinewidth=0.8,
        markersize=3 if chart.panels else 5,
        linestyle=style.line if chart.joined else "none",
        alpha=0.38 if hollow else 1.0,
        markerfacecolor="none" if hollow else style.colour,
    )


def _limit(axes: Axes, chart: Chart) -> None:
    """Begin fractions at 0, and put ticks at whole numbers where x counts something."""
    from matplotlib.ticker import MaxNLocator

    if chart.y in ("rate", "acceptance_rate"):
        axes.set_ylim(0, 1.02)
    if chart.y == "share":
        axes.set_ylim(bottom=0)
    if chart.x_is_count:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_ar_spread(axes: Axes, chart: Chart) -> None:
    """Draw the spread of ar over seeds as a grey strip, where the chart has it."""
    ends = [f"{chart.y}_ar_spread_low", f"{chart.y}_ar_spread_high"]
    strips = chart.points.reindex(columns=ends).dropna().drop_duplicates()
    for low, high in strips.itertuples(index=False):
        axes.axhspan(low, high, color="#EEEEEE", zorder=0, label="95% of further sets of ar images")


def _draw_row_ends(axes: Axes, row: int, *, tokens: int) -> None:
    """Draw a thin line between rows of the image; ticks are at whole rows."""
    rows_per_tick = max(1, round(tokens / row / 4))
    axes.set_xticks(range(0, tokens + 1, row * rows_per_tick))
    axes.grid(visible=False, axis="x")
    for end in range(row, tokens, row):
        axes.axvline(end - 0.5, color="#CCCCCC", linewidth=0.4, zorder=0)
