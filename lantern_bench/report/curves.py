"""Curves of one or several runs as files: each a PNG and an SVG with the CSV behind it.

Acceptance by depth and by position in the image, histograms of the accepted length, quality against speed with its
front, and the mean accepted length against a bound. They are made from the tables and hold nothing that is not in
them. FID values of different features never share an axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lantern_bench.errors import RefusedError, UserError
from lantern_bench.report import drawing
from lantern_bench.report.naming import BOUNDS, CellKey, Style, check_grouping, styles
from lantern_bench.report.points import acceptance_points, bound_points, fronts, length_points
from lantern_bench.report.tables import write_csv

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    Tables = Mapping[str, pd.DataFrame]

__all__ = ["KINDS", "Picture", "draw_curves", "pictures", "run_styles"]

KINDS = ("png", "svg", "csv")
"""The files of a curve."""


class Picture(NamedTuple):
    """A curve: its file name without ending, the points behind it, and the figure."""

    name: str
    points: pd.DataFrame
    figure: Figure


def draw_curves(runs: Mapping[str, Tables], folder: Path, by: str = "mode") -> list[Path]:
    """Draw the curves of one or several runs (name to `points.curve_tables`) into `folder`; return the files.

    `by` (one of `GROUPINGS`) is what colours tell apart and, but for the mode, what the mean accepted length is drawn
    against. Raises `RefusedError` when there is nothing to draw, and `UserError` when the folder cannot be written or
    `by` is unknown.
    """
    drawn = list(pictures(runs, by))
    if not drawn:
        raise RefusedError("nothing to draw: no drafts and no scored, timed images in these runs")
    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in drawn:
            files += _save(picture, folder)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error
    return files


def pictures(runs: Mapping[str, Tables], by: str = "mode") -> Iterator[Picture]:
    """Yield the curves there is data for."""
    look = run_styles(runs, by)
    for axis, draw in (("depth", drawing.draw_depths), ("position", drawing.draw_positions)):
        points = acceptance_points(runs, axis)
        if len(points):
            yield Picture(f"acceptance-by-{axis}", points, draw(points, look))
    lengths = length_points(runs)
    if len(lengths):
        yield Picture("accepted-lengths", lengths, drawing.draw_lengths(lengths, look))
    for front in fronts(runs):
        yield Picture(front.name, front.points, drawing.draw_front(front, look))
    for parameter in (by,) if by != "mode" else BOUNDS:
        points = bound_points(runs, parameter)
        if points[parameter].nunique() > 1:
            name = f"mean-accepted-length-by-{parameter}"
            yield Picture(name, points, drawing.draw_bounds(points, parameter, look))


def run_styles(runs: Mapping[str, Tables], by: str = "mode") -> dict[CellKey, Style]:
    """Return the style of every cell of the runs, the same in all their pictures; `UserError` for an unknown `by`."""
    import pandas as pd

    check_grouping(by)
    speed = pd.concat([tables["speed"].assign(run=run) for run, tables in runs.items()], ignore_index=True)
    return styles(speed, by)


def _save(picture: Picture, folder: Path) -> list[Path]:
    from matplotlib import rc_context

    files = [folder / f"{picture.name}.{kind}" for kind in KINDS]
    # Without dates, versions and random ids equal curves are equal files.
    with rc_context({"svg.hashsalt": picture.name}):
        picture.figure.savefig(files[0], dpi=160, bbox_inches="tight", metadata={"Software": None})
        picture.figure.savefig(files[1], bbox_inches="tight", metadata={"Date": None, "Creator": None})
    write_csv(picture.points, files[2])
    return files
