"""Draw docs/pictures/frontier.png: the speed of cells on a GPU, and their distance.

The upper panel has lossless cells, one in a row, since their distance is 0. The lower panel has
relaxed cells, each at its distance. Speeds and distances are from two runs of the same cells. The
picture leaves out cells at temperature 0, which have no distance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from safetensors.torch import load_file

from lantern_bench.report.draw import save_figure
from scripts.docs.figures import REFERENCE, WEIGHTS, Figure, cells_of

TIMED = "frontier-h200"  # the run with the speeds
SCORED = "frontier"  # the run of the same cells with the distances
TARGET = WEIGHTS / "target.safetensors"
THRESHOLD = 0.01  # distance; the axis is linear up to here and logarithmic beyond
TICKS = (0, THRESHOLD / 2, THRESHOLD, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the distance
RIGHT = 4.5  # largest speedup
TOP = -0.006  # least distance
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
LOSSLESS = (
    "ar",
    "speculative chain-7",
    "speculative block chain-7",
    "sjd w16-row",
    "hybrid block w32d2-row-maximal",
    "sjd-pac w16x3x2-row-maximal",
    "block-scd w16-row-maximal",
    "block-scd w32-row-maximal",
    "block-scd w64-row-maximal",
    "scd w16-row-maximal",
    "scd w32-row-maximal",
    "scd w64-row-maximal",
)


class Place(NamedTuple):
    """Where the words of a point stand: shifted from it by points, and aligned."""

    right: float
    up: float
    ha: str = "left"
    va: str = "center"


class Relaxed(NamedTuple):
    """A relaxed cell of the lower panel, with its words."""

    cell: str
    words: str
    place: Place


class Series(NamedTuple):
    """Relaxed cells of one method, joined by a line."""

    marker: str
    cells: Sequence[Relaxed]


_WINDOW = "w32-row-maximal"
SERIES = (
    Series(
        "o",
        [
            Relaxed(
                "lantern++ chain-7 k=100 lambda=2",
                "lantern++ chain-7 k=100\nlambda=2",
                Place(-8, 0, ha="right"),
            ),
            Relaxed("lantern++ chain-7 k=100 lambda=3", "lambda=3", Place(9, 7)),
            Relaxed("lantern++ chain-7 k=100 lambda=5", "lambda=5", Place(9, 7)),
        ],
    ),
    Series(
        "^",
        [
            Relaxed(
                "typical chain-7 epsilon=0.09 alpha=0.1",
                "typical chain-7\nepsilon=0.09 alpha=0.1",
                Place(-9, 4, ha="right"),
            ),
        ],
    ),
    Series(
        "s",
        [
            Relaxed(
                "lantern static chain-7 k=2 delta=0.01",
                "lantern static chain-7\nk=2 delta=0.01",
                Place(-8, -11, ha="right"),
            ),
            Relaxed("lantern static chain-7 k=5 delta=0.2", "k=5 delta=0.2", Place(9, 7)),
        ],
    ),
    Series(
        "D",
        [
            Relaxed(
                "entropy chain-7 k=100 scale=0.1", "entropy chain-7 k=100 scale=0.1", Place(9, 7)
            )
        ],
    ),
    Series(
        "D",
        [
            Relaxed(
                "gsd jacobi w16-row cluster=14",
                "gsd jacobi w16-row cluster=14",
                Place(0, 37, ha="center"),
            )
        ],
    ),
    Series(
        "o",
        [
            Relaxed(
                f"lantern++ jacobi {_WINDOW} k=100 lambda=2",
                f"lantern++ jacobi\n{_WINDOW}\nk=100 lambda=2",
                Place(-6, -22, ha="right"),
            ),
            Relaxed(
                f"lantern++ jacobi {_WINDOW} k=100 lambda=3", "lambda=3", Place(-6, 8, ha="right")
            ),
            Relaxed(f"lantern++ jacobi {_WINDOW} k=100 lambda=5", "lambda=5", Place(9, 7)),
        ],
    ),
    Series(
        "s",
        [
            Relaxed(
                f"cool-sd jacobi {_WINDOW} strength=2 decay=0",
                f"cool-sd jacobi\n{_WINDOW}\nstrength=2 decay=0",
                Place(9, 20),
            ),
            Relaxed(
                f"cool-sd jacobi {_WINDOW} strength=3 decay=0",
                "strength=3",
                Place(-8, -9, ha="right"),
            ),
        ],
    ),
)


def frontier(out: Path) -> list[Path]:
    """Draw the picture; return the files that it was made from."""
    figure, (upper, lower) = pyplot.subplots(
        nrows=2, sharex=True, figsize=(8.6, 7.6), height_ratios=(12, 13)
    )
    figure.subplots_adjust(left=0.27, right=0.985, bottom=0.068, top=0.89, hspace=0.14)
    draw_lossless(upper)
    draw_relaxed(lower)
    figure.text(0.012, 0.967, title(), weight="bold", fontsize=11)
    figure.text(0.012, 0.94, sources(), fontsize=9.5)
    save_figure(figure, out, dpi=200, metadata={"Software": None})
    files = ("manifest.json", "speed.csv", "summary.csv")
    return [TARGET, *(REFERENCE / run / file for run, file in product((TIMED, SCORED), files))]


def draw_lossless(axes: Axes) -> None:
    """Draw the speedup of lossless cells, one in a row."""
    for row, name in enumerate(LOSSLESS):
        cell = cells_of(TIMED)[name]
        speedup = cell["speedup"]
        colour = COLOURS[cell["drafting"].value]
        axes.barh(row, speedup.value, height=0.62, color=colour, alpha=0.3)
        axes.errorbar(speedup.value, row, xerr=_whiskers([speedup]), fmt="o", color=colour, ms=5)
        words = f"{speedup.value:.2f}x"
        _write(axes, words, at=(speedup.high, row), place=Place(5, 0), color=colour)
    axes.set_yticks(range(len(LOSSLESS)), LOSSLESS)
    axes.set_ylim(len(LOSSLESS) - 0.4, -0.6)
    axes.tick_params(labelsize=9, labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "Lossless: distance 0 by construction, and no shift found", loc="left", fontsize=10
    )
    _draw_legend(axes)


def draw_relaxed(axes: Axes) -> None:
    """Draw the speedup and the distance of relaxed cells."""
    latency = cells_of(TIMED)["ar"]["latency_s"]
    axes.set_xlim(0, RIGHT)
    axes.set_xlabel(f"speedup over ar ({latency:.3f} s per image)", fontsize=10)

    axes.set_yscale("symlog", linthresh=THRESHOLD, linscale=1.0)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.set_ylim(BOTTOM, TOP)
    axes.set_ylabel("distance from the model, at least;\nworse is down", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Relaxed: the better, the further to the upper right", loc="left", fontsize=10)

    axes.axhline(0, color=GRAY, lw=0.8, zorder=0)
    axes.axhline(THRESHOLD, color=GRAY, lw=0.8, ls=(0, (6, 4)), zorder=0)
    shift = f"{THRESHOLD:g}: a shift of {THRESHOLD**0.5:g}\nstandard deviations;\nlog scale below"
    _write(axes, shift, at=(RIGHT, THRESHOLD), place=Place(0, -8, ha="right", va="top"))
    for series in SERIES:
        _draw_series(axes, series)


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


def _draw_series(axes: Axes, series: Series) -> None:
    """Draw the points of a series with their intervals and words."""
    timed = [cells_of(TIMED)[point.cell] for point in series.cells]
    speedups = [cell["speedup"] for cell in timed]
    distances = [cells_of(SCORED)[point.cell]["distance"] for point in series.cells]
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
        ms=6,
        lw=1,
    )
    for point, speedup, distance in zip(series.cells, speedups, distances, strict=True):
        at = (speedup.value, distance.value)
        _write(axes, point.words, at=at, place=point.place, color=colour)


def _write(
    axes: Axes, words: str, *, at: tuple[float, float], place: Place, color: str = GRAY
) -> None:
    """Write words at a point of the axes."""
    axes.annotate(
        words,
        xy=at,
        xytext=(place.right, place.up),
        textcoords="offset points",
        ha=place.ha,
        va=place.va,
        color=color,
        fontsize=9,
    )


def _draw_legend(axes: Axes) -> None:
    """Say what lines and colours mean."""
    entries = [
        Line2D([], [], marker="o", color=COLOURS[name], label=words)
        for name, words in DRAFTS.items()
    ]
    entries.append(Line2D([], [], color=GRAY, label="lines: 95% intervals"))
    axes.legend(handles=entries, loc="upper right", labelspacing=0.35, fontsize=9, frameon=False)


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures; at least 0, as Matplotlib asks."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
