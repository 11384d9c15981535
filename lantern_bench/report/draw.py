"""Draw charts as Matplotlib files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lantern_bench.analysis.labels import BOUNDS, GROUPINGS, cell_key
from lantern_bench.storage.run_directory import load_runs
from lantern_bench.storage.schema import write_csv
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from lantern_bench.report.charts import (
    Chart,
    Styles,
    Tables,
    charts,
    choose_cells,
    curve_tables,
    line_label,
    run_styles,
    whiskers,
)

# ---- Their pictures and files

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
    by: str = "mode",
    cells: Sequence[str] = (),
    width: str = "two",
) -> list[Path]:
    """Draw the curves of run directories into `folder`; return the files.

    `by` is what colours stand for and, except for the mode, what the mean accepted length is drawn against; `cells`:
    patterns as in `choose_cells`, empty for all; `width`: see `WIDTHS`. Raises `RefusedError` without anything to draw.
    """
    from matplotlib import rc_context

    for flag, value, choices in (("by", by, GROUPINGS), ("width", width, WIDTHS)):
        if value not in choices:
            raise UserError(f"--{flag} {value}: must be one of {', '.join(choices)}")
    tables: dict[str, Tables] = {
        name: curve_tables(run) for name, run in load_runs(runs, tables_suffice=True).items()
    }
    tables = choose_cells(tables, cells) if cells else tables
    cell_styles = run_styles(tables, by)
    drawn = list(charts(tables, tuple(BOUNDS) if by == "mode" else (by,)))
    if not drawn:
        raise RefusedError(
            "nothing to draw: these runs hold no drafts and no images that are both scored and timed"
        )
    files = []
    for chart in drawn:
        with rc_context({**_LOOK, "svg.hashsalt": chart.name}):
            figure = to_matplotlib(chart, cell_styles, WIDTHS[width])
            for kind, metadata in _METADATA.items():
                files.append(folder / f"{chart.name}.{kind}")
                save_figure(figure, files[-1], metadata=metadata)
        files.append(folder / f"{chart.name}.csv")
        write_csv(chart.points, files[-1])
    return files


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure whole or not at all; `options` go to `Figure.savefig`.

    Raises `UserError` if the file cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], **options)
    write_file(path, content.getvalue(), flag="--out")


def to_matplotlib(chart: Chart, styles: Styles, width: float = WIDTHS["two"]) -> Figure:
    """Return the chart as a figure of `width` inches: one pair of axes, or a panel for each line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    groups = chart.groups()
    across = min(round(width / 2), len(groups)) if chart.panels else 1
    down = -(-len(groups) // across) if chart.panels else 1
    figure = Figure(
        (width, 1.5 * down + 0.6 if chart.panels else 1.0 + 0.35 * width), layout="constrained"
    )
    panels: list[Axes] = list(
        figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    )
    for number, rows in enumerate(groups):
        axes = panels[number if chart.panels else 0]
        style = styles[cell_key(rows.iloc[-1])]
        is_hollow = "dominated" in rows and bool(rows["dominated"].iloc[0])
        axes.errorbar(
            rows[chart.x].tolist(),
            rows[chart.y].astype(float),
            xerr=whiskers(rows, chart.x),
            yerr=whiskers(rows, chart.y),
            label=line_label(rows),
            color=style.colour,
            marker=style.marker,
            capsize=2,
            elinewidth=0.8,
            markersize=3 if chart.panels else 5,
            linestyle=style.line if chart.joined else "none",
            alpha=0.38 if is_hollow else 1.0,
            markerfacecolor="none" if is_hollow else style.colour,
        )
        if chart.x == "middle" and pd.notna(row := rows["row_tokens"].iloc[0]):
            _draw_row_ends(axes, int(row), int(rows["index_end"].max()) + 1)
    if chart.y in ("rate", "share"):
        panels[0].set_ylim(0, 1.02 if chart.y == "rate" else None)
    if chart.x_is_count:
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.panels:
        for number, axes in enumerate(panels):
            axes.set_visible(number < len(groups))
            # The last panel of each column has tick labels, also above an empty one.
            axes.tick_params(labelbottom=number + across >= len(groups))
            axes.set_title(
                line_label(groups[number]) if number < len(groups) else "",
                fontsize="small",
                loc="left",
            )
        figure.supxlabel(chart.x_title, fontsize="medium")
        figure.supylabel(chart.y_title, fontsize="medium")
        return figure
    axes = panels[0]
    for x, y in chart.front_lines():
        axes.plot(x, y, color="#888888", linewidth=1, zorder=1)
    if chart.x == "speedup":
        axes.axvline(1.0, color="#BBBBBB", linewidth=0.8, linestyle=":", zorder=0)
    ends = [f"{chart.y}_ar_spread_low", f"{chart.y}_ar_spread_high"]
    for low, high in (
        chart.points.reindex(columns=ends).dropna().drop_duplicates().itertuples(index=False)
    ):
        axes.axhspan(
            low, high, color="#EEEEEE", zorder=0, label="95 % of further sets of AR images"
        )
    if "dominated" in chart.points and chart.points["dominated"].any():
        axes.set_title(
            "pale and hollow: another cell is at least as fast and as good",
            fontsize="x-small",
            loc="left",
        )
    axes.set(xlabel=chart.x_title, ylabel=chart.y_title)
    lines, names = axes.get_legend_handles_labels()
    # As many columns as fit; the axes keep their height.
    columns = max(1, int(width / (0.65 + 0.055 * max(map(len, names)))))
    figure.set_figheight(figure.get_figheight() + 0.14 * -(-len(names) // columns))
    figure.legend(
        lines,
        names,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize="small",
        handlelength=3.2,
    )
    return figure


def _draw_row_ends(axes: Axes, row: int, tokens: int) -> None:
    """Draw a thin line between rows of the image; ticks are at whole rows."""
    axes.set_xticks(range(0, tokens + 1, row * max(1, round(tokens / row / 4))))
    axes.grid(visible=False, axis="x")
    for end in range(row, tokens, row):
        axes.axvline(end - 0.5, color="#CCCCCC", linewidth=0.4, zorder=0)
