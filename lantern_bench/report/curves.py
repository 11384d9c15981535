"""Curves of one or several runs: the points behind each, and its picture as PNG and SVG beside the CSV of its points.

Acceptance by depth and by position in the image, histograms of the accepted length, quality against speed with its
front, and the mean accepted length against a bound. FID values of different features never share an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.methods.tables import METRICS, ON_CURVES
from lantern_bench.report.charts import INTERVAL, Chart, save_figure, to_matplotlib
from lantern_bench.report.labels import (
    BOUNDS,
    PARAMETER_NAMES,
    CellKey,
    Style,
    check_grouping,
    labels,
    styles,
)
from lantern_bench.report.records import CellRecords, run_cells
from lantern_bench.report.stats import proportion
from lantern_bench.report.tables import ENDS, SPEEDUPS, cells_of, frame, tables_of, write_csv
from lantern_bench.runs.store import RunData
from lantern_bench.schema import columns

if TYPE_CHECKING:
    import pandas as pd

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


def curve_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables that curves are made from: those of `tables_of`, and `lengths`."""
    lengths = (row for cell in run_cells(run) for row in length_rows(cell))
    return {**tables_of(run), "lengths": frame("lengths", lengths)}


def length_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the histogram of the tokens committed by a step, with Wilson intervals; empty for a cell without drafts."""
    if cell.columns["drafting"] == "none":
        return
    steps = (length for counts in cell.good["committed_per_step"] for length in counts or ())
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
    rows = table[table[parameter].notna() & table["mean_accepted_length"].notna() & (table["drafting"] != "none")]
    names = [name for name in (*FAMILY, "cell_id", "images") if name in rows]
    points = rows[[*names, *(f"mean_accepted_length{end}" for end in ENDS)]]
    return _labelled(points.sort_values([parameter, "run"], kind="stable").reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedups and mean accepted length of their cell.

    A run that was not timed (batched decoding) takes the speedups of the same cell from another of the runs, where it
    was measured; `speed_run` names that run. A cell without either figure is left out.
    """
    table, cell = stack_cells(runs), ["model", "cell_id"]
    speedup, length = (
        [f"{name}{end}" for name in names for end in ENDS] for names in (SPEEDUPS, ("mean_accepted_length",))
    )
    table["speed_run"] = table["run"].where(table["speedup"].notna())
    borrowed = [*speedup, "speed_run"]
    timed = table.loc[table["speedup"].notna(), [*cell, *borrowed]].drop_duplicates(cell)
    elsewhere = table[cell].merge(timed, on=cell, how="left")
    table[borrowed] = table[borrowed].where(table["speedup"].notna(), elsewhere[borrowed])
    table = table.assign(images=table["quality_images"], note=table["quality_note"])
    names = [column.name for column in columns("quality")]
    table = table[["run", *names, *speedup, *length, "speed_run"]]
    return _labelled(table[table[list(SPEEDS)].notna().any(axis=1)].reset_index(drop=True))


def fronts(runs: Mapping[str, Tables]) -> Iterator[Chart]:
    """Yield a chart for each quality figure and each scorer of it: against speedup, then against MAL.

    The column `dominated` marks a cell when another of its model and run is at least as fast and as good, and better in
    one of the two.
    """
    table = speed_quality_points(runs)
    for speed, prefix in (("speedup", "speed"), ("mean_accepted_length", "length")):
        for figure in ON_CURVES:
            metric = METRICS[figure]
            measured = table[table[figure].notna() & table[speed].notna()]
            others = [f"{name}{end}" for name in ON_CURVES if name != figure for end in ENDS]
            for scored_by, rows in measured.groupby(metric.scored_by):
                is_alone = measured[metric.scored_by].nunique() == 1
                suffix = "" if is_alone else "-" + "".join(c if c.isalnum() else "-" for c in str(scored_by))
                points = rows.drop(columns=others, errors="ignore").reset_index(drop=True)
                points["label"] = labels(points)  # they name what differs in this chart, not between all runs
                points["dominated"] = is_dominated(points, speed, figure, metric.better == "lower")
                yield Chart(
                    f"{prefix}-quality-{figure}{suffix}",
                    points,
                    speed,
                    figure,
                    f"{SPEEDS[speed]} ({INTERVAL})",
                    f"{metric.heading}, {metric.better} is better\n({scored_by})",
                    joined=False,
                    less_is_better=metric.better == "lower",
                    vertical_line=1.0 if speed == "speedup" else None,
                )


def is_dominated(points: pd.DataFrame, speed: str, quality: str, less_is_better: bool) -> list[bool]:
    """Return for each point whether another of the same run and model beats it: no worse in both, better in one.

    By the figures alone: intervals that overlap may still be dominated.
    """
    cells = points[["run", "model"]].assign(fast=points[speed], good=points[quality] * (-1 if less_is_better else 1))

    def is_beaten(cell: Any) -> bool:
        rivals = cells[(cells["run"] == cell.run) & (cells["model"] == cell.model)]
        no_worse = rivals[(rivals["fast"] >= cell.fast) & (rivals["good"] >= cell.good)]
        return bool(((no_worse["fast"] > cell.fast) | (no_worse["good"] > cell.good)).any())

    return [is_beaten(cell) for cell in cells.itertuples()]


def stack_runs(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """Return one table of all runs, with the column `run`."""
    import pandas as pd

    return pd.concat([tables[name].assign(run=run) for run, tables in runs.items()], ignore_index=True)


def stack_cells(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return `cells_of` of all runs, with the column `run`."""
    import pandas as pd

    return pd.concat([cells_of(tables).assign(run=run) for run, tables in runs.items()], ignore_index=True)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    front = table.assign(label=labels(table))
    return front[["run", "label", *(column for column in table.columns if column != "run")]]


# ---- The charts, and their files

KINDS = ("png", "svg", "csv")
"""The files of a chart."""

_RATE = f"acceptance rate ({INTERVAL})"


def charts(runs: Mapping[str, Tables], parameters: Sequence[str] = tuple(BOUNDS)) -> Iterator[Chart]:
    """Yield the charts that the runs have data for; the mean accepted length is drawn against `parameters`."""
    if len(depths := acceptance_points(runs)):
        yield Chart(
            "acceptance-by-depth", depths, "index", "rate", "depth of the draft tree", _RATE, y_range=(0, 1.02),
            x_is_count=True,
        )  # fmt: skip
    if len(positions := acceptance_points(runs, "position")):
        yield Chart(
            "acceptance-by-position", positions, "index", "rate", "position in the image (tokens, row by row)", _RATE,
            x_end="index_end", panels=True, y_range=(0, 1.02),
            mean=lambda rows: float(rows["accepted"].sum() / rows["offered"].sum()),
        )  # fmt: skip
    if len(lengths := length_points(runs)):
        yield Chart(
            "accepted-lengths", lengths, "length", "share", "tokens committed by a step (bonus token included)",
            "share of steps", panels=True, bars=True, x_is_count=True,
            mean=lambda rows: float((rows["length"] * rows["share"]).sum()),
        )  # fmt: skip
    yield from fronts(runs)
    for parameter in parameters:
        points = bound_points(runs, parameter)
        if points[parameter].nunique() > 1:
            # Cells that differ in nothing else are one line.
            yield Chart(
                f"mean-accepted-length-by-{parameter}", points, parameter, "mean_accepted_length",
                PARAMETER_NAMES[parameter], f"mean accepted length ({INTERVAL})",
                [name for name in FAMILY if name in points and name != parameter], joined=parameter != "tree",
            )  # fmt: skip


def draw_curves(runs: Mapping[str, Tables], folder: Path, by: str = "mode") -> list[Path]:
    """Draw the curves of runs (name to `curve_tables`) into `folder`; return the files.

    `by` (one of `GROUPINGS`) is what colours stand for and, except for the mode, what the mean accepted length is drawn
    against. Raises `RefusedError` when there is nothing to draw, and `UserError` when the folder cannot be written or
    `by` is unknown.
    """
    from matplotlib import rc_context

    cell_styles = run_styles(runs, by)
    drawn = list(charts(runs, tuple(BOUNDS) if by == "mode" else (by,)))
    if not drawn:
        raise RefusedError("nothing to draw: these runs hold no drafts and no images that are both scored and timed")
    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in drawn:
            png, svg, csv = (folder / f"{chart.name}.{kind}" for kind in KINDS)
            figure = to_matplotlib(chart, cell_styles)
            # Without dates, versions and random ids equal curves are equal files.
            with rc_context({"svg.hashsalt": chart.name}):
                save_figure(figure, png, dpi=160, bbox_inches="tight", metadata={"Software": None})
                save_figure(figure, svg, bbox_inches="tight", metadata={"Date": None, "Creator": None})
            write_csv(chart.points, csv)
            files += [png, svg, csv]
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def run_styles(runs: Mapping[str, Tables], by: str = "mode") -> dict[CellKey, Style]:
    """Return the style of every cell of the runs, the same in all their charts; `UserError` for an unknown `by`."""
    check_grouping(by)
    return styles(stack_runs(runs, "speed"), by)
