"""Draw docs/pictures/frontier.png: the speed of cells on a GPU against their distance.

The speeds and the distances are from two runs of the same cells. The picture leaves out cells at
temperature 0, which have no distance, and three windows of `scd` and `block-scd`, to stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from safetensors.torch import load_file

from lantern_bench.report.draw import save_figure
from scripts.docs.figures import REFERENCE, WEIGHTS, Figure, cells_of, output

Shift: TypeAlias = tuple[float, float]  # in points, to the right and up


class Point(NamedTuple):
    """A cell, with words at an end of one of its intervals."""

    cell: str
    words: str
    side: str  # of `SIDES`
    shift: Shift = (0, 0)  # of the words; if they go up or down, a thin line leads to them


class Side(NamedTuple):
    """Where words begin, and how they are aligned there."""

    speedup: str  # attribute of the `Figure`
    distance: str  # attribute of the `Figure`
    shift: Shift
    ha: str
    va: str


class Series(NamedTuple):
    """Cells of one method, joined by a line."""

    marker: str
    points: Sequence[Point]


TIMED = "frontier-h200"  # the run with the speeds
SCORED = "frontier"  # the run of the same cells with the distances
TARGET = WEIGHTS / "target.safetensors"
THRESHOLD = 0.01  # distance; the axis is linear up to here and logarithmic beyond
LEFT = 0.8  # least speedup
RIGHT = 4.3  # largest speedup
TOP = -0.008  # least distance; above all intervals, for words
BOTTOM = 0.6  # largest distance
GRAY = "#555555"
# By where the drafts come from. Colour-blind readers can tell these colours apart.
COLOURS = {
    "none": "black",
    "static": "#0072B2",
    "jacobi": "#C04A00",
    "pac": "#C04A00",
    "hybrid": "#8A3D8F",
}
DRAFTS = {
    "static": "chain: drafts of a drafter network",
    "jacobi": "window: drafts of the model itself",
    "hybrid": "hybrid: both",
}
_WINDOW = "w32-row-maximal"
_LEADER: dict[str, Any] = {"arrowstyle": "-", "lw": 0.6, "shrinkA": 0, "shrinkB": 0}
SIDES = {
    "above": Side("value", "low", (0, 3), ha="center", va="bottom"),
    "below": Side("value", "high", (0, -3), ha="center", va="top"),
    "left": Side("low", "value", (-4, 0), ha="right", va="center"),
    "right": Side("high", "value", (4, 0), ha="left", va="center"),
}
SERIES = (
    Series("o", [Point("ar", "ar", "below")]),
    Series(
        "o",
        [
            Point("speculative chain-7", "speculative\nchain-7", "above", shift=(-8, 0)),
            Point(
                "speculative block chain-7", "speculative\nblock chain-7", "above", shift=(34, 2)
            ),
        ],
    ),
    Series(
        "o",
        [
            Point(
                "lantern++ chain-7 k=100 lambda=2",
                "lantern++ chain-7\nlambda=2",
                "below",
                shift=(-33, -18),
            ),
            Point("lantern++ chain-7 k=100 lambda=3", "lambda=3", "right"),
            Point("lantern++ chain-7 k=100 lambda=5", "lambda=5", "right"),
        ],
    ),
    Series("^", [Point("typical chain-7 epsilon=0.09 alpha=0.1", "typical chain-7", "left")]),
    Series(
        "s",
        [
            Point("lantern static chain-7 k=2 delta=0.01", "k=2 delta=0.01", "left"),
            Point(
                "lantern static chain-7 k=5 delta=0.2",
                "lantern static chain-7\nk=5 delta=0.2",
                "right",
            ),
        ],
    ),
    Series("D", [Point("entropy chain-7 k=100 scale=0.1", "entropy chain-7", "right")]),
    Series("v", [Point("sjd w16-row", "sjd w16", "below")]),
    Series("D", [Point("hybrid block w32d2-row-maximal", "hybrid w32", "above", shift=(-16, 0))]),
    Series("D", [Point("gsd jacobi w16-row cluster=14", "gsd w16", "below", shift=(0, -6))]),
    Series("^", [Point("sjd-pac w16x3x2-row-maximal", "sjd-pac w16", "above", shift=(22, 0))]),
    Series("s", [Point("block-scd w32-row-maximal", "block-scd w32", "above", shift=(20, 3))]),
    Series(
        "o",
        [
            Point("scd w32-row-maximal", "scd w32", "above"),
            Point("scd w64-row-maximal", "scd w64", "above"),
        ],
    ),
    Series(
        "o",
        [
            Point(
                f"lantern++ jacobi {_WINDOW} k=100 lambda=2",
                "lantern++ jacobi w32\nlambda=2",
                "below",
                shift=(-26, -10),
            ),
            Point(
                f"lantern++ jacobi {_WINDOW} k=100 lambda=3", "lambda=3", "below", shift=(0, -18)
            ),
            Point(f"lantern++ jacobi {_WINDOW} k=100 lambda=5", "lambda=5", "below", shift=(17, 0)),
        ],
    ),
    Series(
        "s",
        [
            Point(
                f"cool-sd jacobi {_WINDOW} strength=2 decay=0",
                "cool-sd jacobi w32\nstrength=2",
                "above",
            ),
            Point(
                f"cool-sd jacobi {_WINDOW} strength=3 decay=0",
                "strength=3",
                "below",
                shift=(-17, 0),
            ),
        ],
    ),
)


def frontier(out: Path) -> list[Path]:
    """Draw the picture; return the files that it was made from."""
    figure, axes = pyplot.subplots(figsize=(8.6, 5.9))
    figure.subplots_adjust(left=0.09, right=0.985, bottom=0.085, top=0.885)
    _draw_scales(axes)
    for series in SERIES:
        _draw_series(axes, series)
    _draw_legend(axes)
    figure.text(0.012, 0.955, title(), weight="bold", fontsize=11)
    figure.text(0.012, 0.917, sources(), fontsize=9.5)
    save_figure(figure, out, dpi=200, metadata={"Software": None})
    files = ("manifest.json", "speed.csv", "summary.csv")
    return [TARGET, *(REFERENCE / run / file for run, file in product((TIMED, SCORED), files))]


def title() -> str:
    """What was measured."""
    millions = parameters_of(TARGET) / 1e6
    experiment = manifest_of(TIMED)["experiment"]
    return (
        f"lanterns, a miniature model of {millions:.1f} million parameters:"
        f" batch {experiment['batch']}, {experiment['images']} images per cell"
    )


def sources() -> str:
    """Which machines and engine versions the speeds and the distances are from."""
    timed = manifest_of(TIMED)
    scored = manifest_of(SCORED)
    return (
        f"speed: one {timed['device']}, engine version {timed['key']['engine_version']};   "
        f"distance: a run of the same cells on a CPU ({scored['machine']['cpu']['model']}),"
        f" engine version {scored['key']['engine_version']}"
    )


def manifest_of(run: str) -> dict[str, Any]:
    """The manifest of a committed run."""
    manifest: dict[str, Any] = json.loads((REFERENCE / run / "manifest.json").read_text("utf-8"))
    return manifest


def parameters_of(weights: Path) -> int:
    """The number of parameters in a safetensors file."""
    return sum(weight.numel() for weight in load_file(weights).values())


def _draw_scales(axes: Axes) -> None:
    """Set up both axes; draw the lines at distance 0 and at the threshold."""
    latency = cells_of(TIMED)["ar"]["latency_s"]
    axes.set_xlim(LEFT, RIGHT)
    axes.set_xlabel(f"speedup over ar ({latency:.3f} s per image)", fontsize=10)

    ticks = (0, THRESHOLD / 2, THRESHOLD, 0.02, 0.05, 0.1, 0.2, 0.5)
    axes.set_yscale("symlog", linthresh=THRESHOLD, linscale=1.1)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(BOTTOM, TOP)
    axes.set_ylabel("distance from the model (lower bound); worse is down", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)

    axes.axhline(0, color=GRAY, lw=0.8, zorder=0)
    axes.axhline(THRESHOLD, color=GRAY, lw=0.8, ls=(0, (6, 4)), zorder=0)
    shift = f"{THRESHOLD:g}: a shift of {THRESHOLD**0.5:g}\nstandard deviations"
    _write(axes, "lossless: 0\nup to noise", (RIGHT, 0), shift=(0, 3), ha="right", va="bottom")
    _write(axes, shift, (RIGHT, THRESHOLD), shift=(0, 3), ha="right", va="bottom")
    _write(axes, "log scale below", (RIGHT, THRESHOLD), shift=(0, -3), ha="right", va="top")
    axes.text(RIGHT, TOP, "faster, no shift found  ↗", ha="right", va="top", weight="bold")


def _draw_series(axes: Axes, series: Series) -> None:
    """Draw the points of a series with their intervals and words."""
    timed = [cells_of(TIMED)[point.cell] for point in series.points]
    speedups = [cell["speedup"] for cell in timed]
    distances = [cells_of(SCORED)[point.cell]["distance"] for point in series.points]
    colour = COLOURS[timed[0]["drafting"].value]
    axes.errorbar(
        [figure.value for figure in speedups],
        [figure.value for figure in distances],
        xerr=_whiskers(speedups),
        yerr=_whiskers(distances),
        fmt=f"{series.marker}-",
        color=colour,
        ecolor=(colour, 0.3),
        elinewidth=1,
        markerfacecolor=colour if output(timed[0]) == "lossless" else "white",
        markeredgewidth=1.4,
        ms=6,
        lw=1,
    )
    for point, speedup, distance in zip(series.points, speedups, distances, strict=True):
        side = SIDES[point.side]
        _write(
            axes,
            point.words,
            (getattr(speedup, side.speedup), getattr(distance, side.distance)),
            shift=tuple(np.add(side.shift, point.shift)),
            ha=side.ha,
            va=side.va,
            color=colour,
            arrowprops=_LEADER | {"color": colour} if point.shift[1] else None,
        )


def _write(axes: Axes, words: str, at: tuple[float, float], *, shift: Shift, **style: Any) -> None:
    """Write words at a point of the axes, shifted by some points."""
    place = {"xy": at, "xytext": shift, "textcoords": "offset points"}
    axes.annotate(words, **place, **{"color": GRAY, "fontsize": 9, **style})


def _draw_legend(axes: Axes) -> None:
    """Say what fills, lines and colours mean."""
    mark: dict[str, Any] = {"marker": "o", "ls": "", "markeredgewidth": 1.4, "color": GRAY}
    entries = [
        Line2D([], [], label="lossless", **mark),
        Line2D([], [], label="relaxed", markerfacecolor="white", **mark),
        Line2D([], [], label="settings of one method", lw=1, color=GRAY),
        Line2D([], [], label="95% interval", lw=1, color=(GRAY, 0.3)),
        *(Patch(color=COLOURS[drafting], label=words) for drafting, words in DRAFTS.items()),
    ]
    axes.legend(
        handles=entries,
        loc="lower right",
        labelspacing=0.35,
        fontsize=9,
        frameon=False,
    )


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures; at least 0, as Matplotlib asks."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
