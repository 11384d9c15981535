"""Curves: acceptance rate by depth, and quality against speedup. Each is a PNG with the CSV behind it.

They are drawn from the tables and hold nothing that is not in them. Cells are named as the papers name the methods.
Colours are those of Okabe and Ito, which people who see colours differently can tell apart; markers and line styles
say the same again, for print in grey. Several runs may be laid over each other. FID values of different features never
share an axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.report.cells import SAMPLING_DEFAULTS
from lantern_bench.report.tables import write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Tables = Mapping[str, pd.DataFrame]

__all__ = ["QUALITIES", "acceptance_points", "draw_curves", "labels", "speed_quality_points"]

QUALITIES = {
    "fid": ("fid_features", "FID, lower is better\n({})"),
    "clip_score": ("clip_model", "CLIP score, higher is better\n({})"),
    "prompt_accuracy": ("protocol", "prompt accuracy, higher is better\n({})"),
}
"""Quality figures that a speedup is drawn against: the column that says what measured it, and the axis."""

_METHODS = {"ar": "AR", "speculative": "speculative (strict)", "lantern": "LANTERN", "lantern++": "LANTERN++"}
_COLOURS = {"ar": "#000000", "speculative": "#0072B2", "lantern": "#D55E00", "lantern++": "#009E73"}
_OTHER_COLOUR = "#CC79A7"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_LINES = ("-", "--", "-.", ":")
# Named in a legend only where cells of one method differ in them; a bound is named always.
_SETTINGS = {
    "drafting": "{}",
    "rule": "{}",
    "tree": "{}",
    "neighbours": "k={:g}",
    "residual": "{} residual",
    "temperature": "T={:g}",
    "cfg_scale": "cfg={:g}",
    "top_k": "top-k={:g}",
    "top_p": "top-p={:g}",
}
_BOUNDS = {"delta": "δ={:g}", "lambda": "λ={:g}"}


def draw_curves(runs: Mapping[str, Tables], folder: Path) -> list[Path]:
    """Draw the curves of one or several runs (name to tables) into `folder` and return the files, PNG before CSV.

    `acceptance-by-depth` and one `speed-quality-FIGURE` for each quality figure there is. Raises `RefusedError` when
    there is nothing to draw, and `UserError` when the folder cannot be written.
    """
    acceptance = acceptance_points(runs)
    drawings = [("acceptance-by-depth", acceptance, _draw_acceptance(acceptance))] if len(acceptance) else []
    for name, axis, points in _scatters(runs):
        drawings.append((name, points, _draw_speed_quality(points, axis)))
    if not drawings:
        raise RefusedError("nothing to draw: no drafts and no scored, timed images in these runs")
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, points, figure in drawings:
            files += [folder / f"{name}.png", folder / f"{name}.csv"]
            # Without the default metadata, which names the version of the library, equal curves are equal files.
            figure.savefig(files[-2], dpi=160, bbox_inches="tight", metadata={"Software": None})
            write_csv(points, files[-1])
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def labels(table: pd.DataFrame) -> list[str]:
    """Return a legend entry for each row: `LANTERN++ λ=2`. Where there are several runs or models, they are named."""
    apart = [name for name in ("run", "model") if table[name].nunique() > 1]
    entries = []
    for _, row in table.iterrows():
        rivals = table[table["mode"] == row["mode"]]
        parts = [f"{row[name]}:" for name in apart]
        parts.append(_METHODS.get(row["mode"], row["mode"]))
        parts += [form.format(row[name]) for name, form in _BOUNDS.items() if _given(row[name])]
        for name, form in _SETTINGS.items():
            if (
                rivals[name].nunique(dropna=False) > 1
                and _given(row[name])
                and row[name] != SAMPLING_DEFAULTS.get(name)
            ):
                parts.append("greedy" if name == "temperature" and row[name] == 0 else form.format(row[name]))
        entries.append(" ".join(parts))
    return entries


def acceptance_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `acceptance.csv` by depth of all runs, with the columns `run` and `label` in front."""
    table = _stacked(runs, "acceptance")
    return _labelled(table[table["axis"] == "depth"].reset_index(drop=True))


def speed_quality_points(runs: Mapping[str, Tables]) -> pd.DataFrame:
    """Return the rows of `quality.csv` of all runs with the speedup of their cell beside them.

    A run that was not timed (batched decoding) takes the speedup of the same cell from another of the runs, where it
    was measured; `speed_run` says from which.
    """
    quality, speed = _stacked(runs, "quality"), _stacked(runs, "speed")
    speed = speed[speed["speedup"].notna()]
    figures = ["speedup", "speedup_low", "speedup_high"]
    found: list[dict[str, Any]] = []
    for _, row in quality.iterrows():
        same = speed[speed["cell_id"] == row["cell_id"]]
        own = same[same["run"] == row["run"]]
        best = own if len(own) else same
        found.append({**best.iloc[0][figures], "speed_run": best.iloc[0]["run"]} if len(best) else {})
    import pandas as pd

    beside = pd.DataFrame(found, index=quality.index, columns=[*figures, "speed_run"])
    table = pd.concat([quality, beside.astype({name: "float64" for name in figures})], axis=1)
    return _labelled(table[table["speedup"].notna()].reset_index(drop=True))


def _stacked(runs: Mapping[str, Tables], name: str) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([tables[name].assign(run=run) for run, tables in runs.items()], ignore_index=True)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    front = table.assign(label=labels(table))
    return front[["run", "label", *(column for column in table.columns if column != "run")]]


def _given(value: Any) -> bool:
    import pandas as pd

    return not pd.isna(value)


def _scatters(runs: Mapping[str, Tables]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield (file name, axis, points) for each quality figure, one for each thing that measured it."""
    points = speed_quality_points(runs)
    for figure, (judge, axis) in QUALITIES.items():
        there = points[points[figure].notna()]
        for measured_by, same in there.groupby(judge):
            alone = there[judge].nunique() == 1
            suffix = "" if alone else "-" + "".join(c if c.isalnum() else "-" for c in str(measured_by))
            shown = [name for name in same.columns if name not in QUALITIES or name == figure]
            others = [f"{name}{end}" for name in QUALITIES if name != figure for end in ("_low", "_high")]
            kept = [name for name in shown if name not in others]
            yield f"speed-quality-{figure}{suffix}", axis.format(measured_by), same[kept].reset_index(drop=True)


def _draw_acceptance(points: pd.DataFrame) -> Figure:
    figure, axes = _figure("depth of the draft tree", "acceptance rate (95 % interval)")
    markers, styles = cycle(_MARKERS), cycle(_LINES)
    for _, line in points.groupby(["run", "cell_id"], sort=False):
        mode = line["mode"].iloc[0]
        axes.errorbar(
            line["index"].astype(int),
            line["rate"],
            yerr=_whiskers(line, "rate"),
            label=line["label"].iloc[0],
            color=_COLOURS.get(mode, _OTHER_COLOUR),
            marker=next(markers),
            linestyle=next(styles),
            capsize=2,
            linewidth=1.2,
            markersize=5,
        )
    axes.set_ylim(0, 1.02)
    axes.set_xticks(sorted({int(depth) for depth in points["index"]}))
    return _finished(figure, axes)


def _draw_speed_quality(points: pd.DataFrame, axis: str) -> Figure:
    figure, axes = _figure("speedup over AR (95 % interval)", axis)
    quality = next(name for name in QUALITIES if name in points)
    styles = dict(zip(dict.fromkeys(points["mode"]), cycle(_LINES), strict=False))
    # Cells that differ in their bound alone are joined: along the line the rule is relaxed.
    family = ["run", "mode", "drafting", "tree", "neighbours", "residual", "temperature", "cfg_scale", "top_k", "top_p"]
    for _, line in points.groupby(family, sort=False, dropna=False):
        mode = line["mode"].iloc[0]
        axes.plot(
            line["speedup"], line[quality], color=_COLOURS.get(mode, _OTHER_COLOUR), linestyle=styles[mode], linewidth=1
        )
    markers = cycle(_MARKERS)
    for _, point in points.iterrows():
        axes.errorbar(
            [point["speedup"]],
            [point[quality]],
            xerr=_whiskers(point.to_frame().T, "speedup"),
            yerr=_whiskers(point.to_frame().T, quality),
            label=point["label"],
            color=_COLOURS.get(point["mode"], _OTHER_COLOUR),
            marker=next(markers),
            linestyle="none",
            capsize=2,
            elinewidth=0.8,
            markersize=6,
        )
    return _finished(figure, axes)


def _whiskers(rows: pd.DataFrame, name: str) -> list[Sequence[float]] | None:
    """Lengths of the two whiskers of each row, 0 where there is no interval; None for a figure without intervals."""
    if f"{name}_low" not in rows:
        return None
    lower = (rows[name] - rows[f"{name}_low"]).astype(float).clip(lower=0).fillna(0)
    upper = (rows[f"{name}_high"] - rows[name]).astype(float).clip(lower=0).fillna(0)
    return [lower.tolist(), upper.tolist()]


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finished(figure: Figure, axes: Axes) -> Figure:
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize="small")
    return figure
