"""The data behind the curves, one table for each: a curve shows exactly the CSV beside it.

Everything is computed from the tables of one or several runs. Rates by position in the image are pooled over
neighbouring positions where there are too many to see. `report/curves.py` draws the curves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lantern_bench.report.labels import labels
from lantern_bench.report.records import CellRecords, group_records
from lantern_bench.report.stats import proportion
from lantern_bench.report.tables import frame, tables_of
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

Tables: TypeAlias = Mapping[str, "pd.DataFrame"]
"""The tables of one run by name, as `curve_tables` returns them."""


class Quality(NamedTuple):
    """A quality figure: the column that names its scorer, its axis title, whether less is better."""

    scorer: str
    axis: str
    less_is_better: bool


QUALITIES = {
    "fid": Quality("fid_features", "FID, lower is better\n({})", True),
    "clip_score": Quality("clip_model", "CLIP score, higher is better\n({})", False),
    "prompt_accuracy": Quality("protocol", "prompt accuracy, higher is better\n({})", False),
}
"""Quality figures that speed is drawn against."""

SPEEDS = {"speedup": "speedup over AR", "mean_accepted_length": "mean accepted length (incl. bonus token)"}
"""What a speed-quality curve has on its horizontal axis."""

FAMILY = (
    "run", "model", "mode", "drafting", "rule", "tree", "neighbours", "neighbour_metric", "residual", "delta", "lambda",
    "bound", "temperature", "cfg_scale", "top_k", "top_p", "batch",
)  # fmt: skip
"""Columns that tell cells apart; without a parameter they name the family in which that parameter varies."""

_MOST_PLACES = 32
_ENDS = ("", "_low", "_high")


class Front(NamedTuple):
    """One speed-quality curve: file name, columns of the axes, title of the quality axis, and its points."""

    name: str
    speed: str
    quality: str
    axis: str
    points: pd.DataFrame


def curve_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables that curves are made from: those of `tables_of`, and `lengths`."""
    lengths = (row for cell in group_records(run.records) for row in length_rows(cell))
    return {**tables_of(run), "lengths": frame("lengths", lengths)}


def length_rows(cell: CellRecords) -> Iterator[dict[str, Any]]:
    """Yield the histogram of the tokens committed by a step, with Wilson intervals; empty for a cell without drafts."""
    if cell.columns["drafting"] == "none":
        return
    counts = Counter(int(length) for row in cell.good for length in row.get("committed_per_step") or () if length > 0)
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
        width = -(-(int(table["index"].max()) + 1) // _MOST_PLACES) if len(table) else 1
        cells = table.groupby(["run", "model", "cell_id", table["index"] // width], sort=False)
        sums = cells[["offered", "accepted"]].transform("sum")
        table = table.assign(index_end=cells["index"].transform("max"), **sums)[~cells.cumcount().astype(bool)]
        rates = [proportion(int(a), int(n)) for a, n in zip(table["accepted"], table["offered"], strict=True)]
        for number, end in enumerate(_ENDS):
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
    chosen = known[[*kept, *(f"mean_accepted_length{end}" for end in _ENDS)]]
    return _labelled(chosen.sort_values([parameter, "run"], kind="stable").reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedup and mean accepted length of their cell.

    A run that was not timed (batched decoding) takes the speedup of the same cell from another of the runs, where it
    was measured; `speed_run` names that run. A cell without either figure is left out.
    """
    cell = ["model", "cell_id"]
    quality, speed = stack_runs(runs, "quality"), stack_runs(runs, "speed")
    lengths = speed[["run", *cell, *(f"mean_accepted_length{end}" for end in _ENDS)]]
    speedups = speed.loc[speed["speedup"].notna(), ["run", *cell, *(f"speedup{end}" for end in _ENDS)]]
    own = speedups.assign(speed_run=speedups["run"])
    first = own.drop(columns="run").drop_duplicates(cell)
    table = quality.merge(own, on=["run", *cell], how="left")
    elsewhere = quality[cell].merge(first, on=cell, how="left")
    borrowed = [*(f"speedup{end}" for end in _ENDS), "speed_run"]
    table[borrowed] = table[borrowed].where(table["speedup"].notna(), elsewhere[borrowed])
    table = table.merge(lengths, on=["run", *cell], how="left")
    figures = [f"{name}{end}" for name in SPEEDS for end in _ENDS]
    table = table[[*quality.columns, *figures, "speed_run"]]
    return _labelled(table[table[list(SPEEDS)].notna().any(axis=1)].reset_index(drop=True))


def fronts(runs: Mapping[str, Tables]) -> Iterator[Front]:
    """Yield a curve for each quality figure and each scorer of it: against speedup, then against MAL.

    The column `dominated` marks a cell when another of its model and run is at least as fast and as good, and better in
    one of the two.
    """
    table = speed_quality_points(runs)
    for speed, prefix in (("speedup", "speed"), ("mean_accepted_length", "length")):
        for figure, (scorer, axis, less_is_better) in QUALITIES.items():
            known = table[table[figure].notna() & table[speed].notna()]
            others = [f"{name}{end}" for name in QUALITIES if name != figure for end in _ENDS]
            for scored_by, same in known.groupby(scorer):
                alone = known[scorer].nunique() == 1
                suffix = "" if alone else "-" + "".join(c if c.isalnum() else "-" for c in str(scored_by))
                points = same.drop(columns=others, errors="ignore").reset_index(drop=True)
                points["dominated"] = is_dominated(points, speed, figure, less_is_better)
                yield Front(f"{prefix}-quality-{figure}{suffix}", speed, figure, axis.format(scored_by), points)


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
