"""The data behind the curves, a table for each: what is drawn is what stands in the CSV beside it.

Everything is taken from the tables of one or several runs and from nothing else. Rates along the image are pooled over
neighbouring positions where there are too many to see. How the points look is `report/curves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_bench.report.acceptance import length_rows
from lantern_bench.report.labels import labels
from lantern_bench.report.records import group
from lantern_bench.report.stats import proportion
from lantern_bench.report.tables import frame, tables_of
from lantern_bench.runs.store import RunData

if TYPE_CHECKING:
    import pandas as pd

    Tables = Mapping[str, pd.DataFrame]


class Quality(NamedTuple):
    """A quality figure: the column that says what measured it, its axis, whether less is better."""

    judge: str
    axis: str
    less_is_better: bool


QUALITIES = {
    "fid": Quality("fid_features", "FID, lower is better\n({})", True),
    "clip_score": Quality("clip_model", "CLIP score, higher is better\n({})", False),
    "prompt_accuracy": Quality("protocol", "prompt accuracy, higher is better\n({})", False),
}
"""Quality figures that speed is drawn against."""

SPEEDS = {"speedup": "speedup over AR", "mean_accepted_length": "mean accepted length (incl. bonus token)"}
"""What a front has on its horizontal axis."""

FAMILY = (
    "run", "model", "mode", "drafting", "rule", "tree", "neighbours", "neighbour_metric", "residual", "delta", "lambda",
    "bound", "temperature", "cfg_scale", "top_k", "top_p", "batch",
)  # fmt: skip
"""Columns that tell cells apart; without a parameter they name the family that the parameter is varied in."""

_MOST_PLACES = 32


class Front(NamedTuple):
    """One speed-quality picture: file name, columns of the axes, what the quality axis says, and its points."""

    name: str
    speed: str
    quality: str
    axis: str
    points: pd.DataFrame


def curve_tables(data: RunData) -> dict[str, pd.DataFrame]:
    """Return the tables of a run that curves are made of: those of `tables_of`, and `lengths`."""
    lengths = (row for cell in group(data.records) for row in length_rows(cell))
    return {**tables_of(data), "lengths": frame("lengths", lengths)}


def acceptance_points(runs: Mapping[str, Tables], axis: str = "depth") -> pd.DataFrame:
    """Return the rows of `acceptance.csv` along `axis` of all runs, with the columns `run` and `label` in front.

    Along the image neighbouring positions are pooled until a cell has at most 32 places; `index_end` is the last
    position of each.
    """
    table = _stacked(runs, "acceptance")
    table = table[table["axis"] == axis].reset_index(drop=True)
    return _labelled(_pooled(table) if axis == "position" else table)


def length_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the table `lengths` of all runs, with `run` and `label` in front."""
    return _labelled(_stacked(runs, "lengths"))


def bound_points(runs: Mapping[str, Tables], parameter: str) -> pd.DataFrame:
    """Return the mean accepted length of the cells that have `parameter`, by its value, with intervals."""
    table = _stacked(runs, "speed")
    there = table[table[parameter].notna() & table["mean_accepted_length"].notna() & (table["drafting"] != "none")]
    length = [f"mean_accepted_length{end}" for end in ("", "_low", "_high")]
    kept = [name for name in (*FAMILY, "cell_id", "images") if name in there]
    chosen = there[[*kept, *length]].sort_values([parameter, "run"], kind="stable")
    return _labelled(chosen.reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedup and mean accepted length of their cell.

    A run that was not timed (batched decoding) takes the speedup of the same cell from another of the runs, where it
    was measured; `speed_run` says from which. A cell without either figure is left out.
    """
    import pandas as pd

    quality, speed = _stacked(runs, "quality"), _stacked(runs, "speed")
    timed = speed[speed["speedup"].notna()]
    figures = [f"{name}{end}" for name in SPEEDS for end in ("", "_low", "_high")]
    found: list[dict[str, Any]] = []
    for _, row in quality.iterrows():
        own = speed[(speed["cell_id"] == row["cell_id"]) & (speed["run"] == row["run"])]
        own = own[own["model"] == row["model"]]
        same = timed[(timed["cell_id"] == row["cell_id"]) & (timed["model"] == row["model"])]
        mine = same[same["run"] == row["run"]]
        best = mine if len(mine) else same
        values = {name: own.iloc[0][name] for name in figures if len(own)}
        if len(best):
            values |= {name: best.iloc[0][name] for name in figures if name.startswith("speedup")}
            values["speed_run"] = best.iloc[0]["run"]
        found.append(values)
    beside = pd.DataFrame(found, index=quality.index, columns=[*figures, "speed_run"])
    table = pd.concat([quality, beside.astype({name: "float64" for name in figures})], axis=1)
    return _labelled(table[table[list(SPEEDS)].notna().any(axis=1)].reset_index(drop=True))


def fronts(runs: Mapping[str, Tables]) -> Iterator[Front]:
    """Yield a front for each quality figure and each thing that measured it: against speedup, then against MAL.

    The column `dominated` says of a cell that another of its model and run is at least as fast and as good, and
    better in one. Raises nothing: what nobody measured has no front.
    """
    table = speed_quality_points(runs)
    for speed, prefix in (("speedup", "speed"), ("mean_accepted_length", "length")):
        for figure, quality in QUALITIES.items():
            there = table[table[figure].notna() & table[speed].notna()]
            for measured_by, same in there.groupby(quality.judge):
                alone = there[quality.judge].nunique() == 1
                suffix = "" if alone else "-" + "".join(c if c.isalnum() else "-" for c in str(measured_by))
                others = {f"{name}{end}" for name in QUALITIES if name != figure for end in ("", "_low", "_high")}
                points = same[[name for name in same.columns if name not in others]].reset_index(drop=True)
                points["dominated"] = is_dominated(points, speed, figure, quality.less_is_better)
                yield Front(
                    f"{prefix}-quality-{figure}{suffix}", speed, figure, quality.axis.format(measured_by), points
                )


def is_dominated(points: pd.DataFrame, speed: str, quality: str, less_is_better: bool) -> list[bool]:
    """Return for each point whether another of the same run and model beats it: no worse in both, better in one.

    By the figures alone: intervals that overlap may still be dominated.
    """
    sign = -1.0 if less_is_better else 1.0
    groups = list(zip(points["run"], points["model"], strict=True))
    places = list(zip(points[speed].astype(float), sign * points[quality].astype(float), strict=True))

    def beaten(own: int) -> bool:
        fast, good = places[own]
        rivals = (place for group, place in zip(groups, places, strict=True) if group == groups[own])
        return any(f >= fast and g >= good and (f, g) != (fast, good) for f, g in rivals)

    return [beaten(own) for own in range(len(places))]


def _stacked(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([tables[name].assign(run=run) for run, tables in runs.items()], ignore_index=True)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    front = table.assign(label=labels(table))
    return front[["run", "label", *(column for column in table.columns if column != "run")]]


def _pooled(table: pd.DataFrame) -> pd.DataFrame:
    """Pool neighbouring positions of each cell into at most `_MOST_PLACES`, with the interval of the sums."""
    import pandas as pd

    if not len(table):
        return table.assign(index_end=table["index"])
    width = -(-(int(table["index"].max()) + 1) // _MOST_PLACES)
    rows: list[dict[Any, Any]] = []
    for _, places in table.groupby(["run", "model", "cell_id", table["index"] // width], sort=False):
        offered, accepted = int(places["offered"].sum()), int(places["accepted"].sum())
        rate = proportion(accepted, offered)
        row = places.iloc[0].to_dict() | {"index_end": int(places["index"].max()), "offered": offered}
        rows.append(row | {"accepted": accepted, "rate": rate.value, "rate_low": rate.low, "rate_high": rate.high})
    return pd.DataFrame(rows, columns=[*table.columns, "index_end"])
