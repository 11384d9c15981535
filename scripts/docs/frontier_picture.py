"""Draw docs/pictures/frontier.png: the speed of cells on a GPU against what they change.

Speed is up in all three panels. Lossless cells are in the first panel. Relaxed cells are in the
second and the third, by their emitted TV and by their distance. Speeds are from one run, distances
and emitted TV from another run of the same cells. The picture leaves out cells at temperature 0,
which have no distance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from safetensors.torch import load_file

from lantern_bench.report.draw import save_figure
from scripts.docs.figures import (
    REFERENCE,
    SCORED,
    SIGNIFICANT,
    WEIGHTS,
    Figure,
    cells_of,
    output,
)

TIMED = "frontier-h200"  # the run with the speeds
TARGET = WEIGHTS / "target.safetensors"
THRESHOLD = 0.01  # distance; the axis is linear up to here and logarithmic beyond
TICKS = (0, THRESHOLD, 0.1, 0.5)  # of the distance
SPEEDS = (0.85, 3.95)  # the ends of the speedup's axis
GRAY = "#555555"
DASHED = {"color": GRAY, "lw": 0.8, "ls": (0, (5, 4)), "zorder": 0}
LEADER = {"arrowstyle": "-", "color": GRAY, "lw": 0.5, "shrinkA": 1, "shrinkB": 0}  # to a label
GAP = 0.125  # between two labels, in units of the speedup
# By where the drafts come from. Colour-blind readers can tell these colours apart.
COLOURS = {
    "none": "black",
    "static": "#0072B2",
    "jacobi": "#C04A00",
    "pac": "#C04A00",
    "hybrid": "#8A3D8F",
}
DRAFTS = {
    "jacobi": "drafts of a window (the model itself)",
    "static": "drafts of a chain (a drafter network)",
    "hybrid": "both",
}
# Parts of names that the labels leave out and the notes give.
OMITTED = ("-row-maximal", "-row", " jacobi", " chain-7", " static", " k=100", " decay=0")
NOTES = (
    "Labels leave out chain-7 (no other chain or tree was timed), jacobi, static, row, maximal,"
    " k=100 and decay=0.\nw: window. block-scd lost a slow loop in engine version 11, which no GPU"
    " has timed."
)


def frontier(out: Path) -> list[Path]:
    """Draw the picture; return the files that it was made from."""
    figure, panels = pyplot.subplots(
        ncols=3, sharey=True, figsize=(8.6, 6.0), width_ratios=(0.7, 3, 3)
    )
    figure.subplots_adjust(left=0.215, right=0.715, bottom=0.29, top=0.83, wspace=0.2)
    exact, moved, shifted = panels
    titles = ("lossless", "relaxed: emitted TV", "relaxed: distance")
    for axes, words in zip(panels, titles, strict=True):
        axes.set_title(words, fontsize=9.5, weight="bold")
    draw_lossless(exact)
    draw_emitted_tv(moved)
    draw_distance(shifted)
    for axes in panels:
        _mark_speeds(axes)
    figure.text(0.012, 0.958, title(), weight="bold", fontsize=11)
    figure.text(0.012, 0.896, sources(), fontsize=9)
    figure.legend(
        handles=_legend(),
        loc="lower left",
        bbox_to_anchor=(0, 0.045),
        ncols=2,
        fontsize=8.5,
        frameon=False,
    )
    figure.text(0.012, 0.012, NOTES, fontsize=8.5)
    save_figure(figure, out, dpi=200, metadata={"Software": None})
    files = ("manifest.json", "speed.csv", "summary.csv")
    return [TARGET, *(REFERENCE / run / file for run, file in product((TIMED, SCORED), files))]


def sampled_cells(kind: str) -> list[str]:
    """The names of the lossless or relaxed cells that sample, the fastest first."""
    cells = cells_of(TIMED)
    names = [name for name, cell in cells.items() if output(cell) == kind]
    sampled = [name for name in names if cells[name]["temperature"].value]
    return sorted(sampled, key=lambda name: -cells[name]["speedup"].value)


def draw_lossless(axes: Axes) -> None:
    """Draw the speedups of the lossless cells, with their names on the left."""
    names = sampled_cells("lossless")
    leader = LEADER | {"relpos": (1, 0.5)}
    for name, place, across in zip(names, label_places(names), cycle((0, 0.5, -0.5))):
        speedup = cells_of(TIMED)[name]["speedup"]
        axes.errorbar(across, speedup.value, yerr=_whiskers([speedup]), **_style(name))
        text = f"{label(name)}  {speedup.value:.2f}x"
        words = axes.annotate(text, (across, speedup.value), (-1.6, place), arrowprops=leader)
        words.set_ha("right")
        _lead(words, name)
    axes.set_xlim(-1, 1)
    axes.set_xticks([0], ["0"])
    axes.set_xlabel("points are\nmoved apart")
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.spines["left"].set_visible(False)


def draw_emitted_tv(axes: Axes) -> None:
    """Draw the relaxed cells by their emitted TV."""
    _draw_relaxed(axes, lambda name: cells_of(SCORED)[name]["emitted_tv"])
    axes.set_xlim(0, 0.25)
    axes.set_xticks([0, 0.1, 0.2], ["0", "0.1", "0.2"])
    axes.set_yticks([1, 2, 3], ["1x", "2x", "3x"])
    axes.tick_params(axis="y", labelleft=True)
    axes.set_xlabel("at most; share of the\nprobability per token")
    ahead = {"arrowstyle": "->", "color": GRAY}
    axes.annotate("", (0.006, 3.88), (0.034, 3.62), arrowprops=ahead)
    axes.text(0.036, 3.56, "better", color=GRAY, va="center", fontsize=8.5)


def draw_distance(axes: Axes) -> None:
    """Draw the relaxed cells by their distance, with their names on the right."""
    _draw_relaxed(axes, lambda name: cells_of(SCORED)[name]["distance"])
    axes.axvline(THRESHOLD, color=GRAY, lw=0.8, ls=":", zorder=0)  # also the end of the linear part
    axes.set_xscale("symlog", linthresh=THRESHOLD, linscale=1.1)
    axes.set_xlim(-0.006, 0.6)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    shift = f"means\nmoved by {THRESHOLD**0.5:g} SD"
    axes.set_xlabel(f"at least; linear to {THRESHOLD:g} ({shift}), then logarithmic")
    names = sampled_cells("relaxed")
    leader = LEADER | {"relpos": (0, 0.5)}
    for name, place in zip(names, label_places(names), strict=True):
        speedup = cells_of(TIMED)[name]["speedup"].value
        end = (cells_of(SCORED)[name]["distance"].value, speedup)
        text = f"{speedup:.2f}x  {label(name)}"
        words = axes.annotate(text, end, (0.8, place), arrowprops=leader)
        _lead(words, name)


def label(name: str) -> str:
    """The name of a cell without the parts that the notes give."""
    for part in OMITTED:
        name = name.replace(part, "")
    return name


def label_places(names: Sequence[str]) -> list[float]:
    """Where the labels of cells are: at their speedups, moved apart where they would overlap.

    Labels that touch become one group, `GAP` apart, around the mean of their speedups.
    """
    groups: list[list[float]] = []
    for name in names:
        groups.append([cells_of(TIMED)[name]["speedup"].value])
        while len(groups) > 1 and _places(groups[-2])[-1] - _places(groups[-1])[0] < GAP:
            lower = groups.pop()
            groups[-1] += lower
    return list(chain.from_iterable(map(_places, groups)))


def _places(speedups: Sequence[float]) -> list[float]:
    highest = sum(speedups) / len(speedups) + GAP * (len(speedups) - 1) / 2
    return [highest - GAP * number for number in range(len(speedups))]


def _draw_relaxed(axes: Axes, change: Callable[[str], Figure]) -> None:
    for name in sampled_cells("relaxed"):
        across = change(name)
        speedup = cells_of(TIMED)[name]["speedup"]
        bars = {"xerr": _whiskers([across]), "yerr": _whiskers([speedup])}
        axes.errorbar(across.value, speedup.value, **bars, **_style(name))


def _style(name: str) -> dict[str, Any]:
    """Draw a detected shift as a hollow point; half hollow if only the run with the speeds does."""
    colour = _colour(name)
    style = {"fmt": "o", "color": colour, "ms": 5, "lw": 1}
    if cells_of(SCORED)[name]["distance_p"].value < SIGNIFICANT:
        return style | {"mfc": "white"}
    if cells_of(TIMED)[name]["distance_p"].value < SIGNIFICANT:
        return style | {"fillstyle": "left", "markerfacecoloralt": "white"}
    return style


def _colour(name: str) -> str:
    return COLOURS[cells_of(TIMED)[name]["drafting"].value]


def _lead(words: Annotation, name: str) -> None:
    """Give a label the colour of its cell."""
    words.set(va="center", color=_colour(name), fontsize=8.5, annotation_clip=False)


def _mark_speeds(axes: Axes) -> None:
    """Draw a line at the speed of `ar`, and one at the speed of the fastest lossless cell."""
    fastest = sampled_cells("lossless")[0]
    axes.axhline(cells_of(TIMED)[fastest]["speedup"].value, **DASHED)
    axes.axhline(1, color=GRAY, lw=0.8, zorder=0)
    axes.set_ylim(SPEEDS)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(8.5)
    axes.spines[["top", "right"]].set_visible(False)


def title() -> str:
    """What the picture shows."""
    cells = [cells_of(TIMED)[name] for name in sampled_cells("lossless")]
    window, chain = (
        next(cell["speedup"].value for cell in cells if cell["drafting"].value == drafting)
        for drafting in ("jacobi", "static")
    )
    gpu = manifest_of(TIMED)["device"].split()[-1]
    speedups = f"{window:.2f}x against {chain:.2f}x, lossless"
    return f"On one {gpu}, windows beat chains of seven: {speedups}"


def sources() -> str:
    """What was measured, on which machines, with which engine versions."""
    timed = manifest_of(TIMED)
    scored = manifest_of(SCORED)
    millions = parameters_of(TARGET) / 1e6
    experiment = timed["experiment"]
    latency = cells_of(TIMED)["ar"]["latency_s"]
    return (
        f"lanterns, a miniature model of {millions:.1f} million parameters; batch"
        f" {experiment['batch']}, {experiment['images']} images per cell. Up: speedup over ar"
        f" ({latency:.3f} s per image),\nengine version {timed['key']['engine_version']}. Right:"
        " change of the output, of the same cells on a CPU, engine version"
        f" {scored['key']['engine_version']}."
    )


def manifest_of(run: str) -> dict[str, Any]:
    """The manifest of a committed run."""
    manifest: dict[str, Any] = json.loads((REFERENCE / run / "manifest.json").read_text("utf-8"))
    return manifest


def parameters_of(weights: Path) -> int:
    """The number of parameters in a safetensors file."""
    return sum(weight.numel() for weight in load_file(weights).values())


def _legend() -> list[Line2D]:
    """Say what colours and lines mean."""
    entries = [
        Line2D([], [], marker="o", color=COLOURS[name], label=words)
        for name, words in DRAFTS.items()
    ]
    intervals = Line2D([], [], color=GRAY, label="lines: 95% intervals")
    dashed = Line2D([], [], **(DASHED | {"label": "dashed: the fastest lossless cell"}))
    words = f"hollow: detected (p < {SIGNIFICANT:g}; on chains also a bias to the drafter)"
    detected = Line2D([], [], marker="o", color=GRAY, mfc="white", lw=0, label=words)
    words = "half hollow: detected in the GPU run only (older distance)"
    half = Line2D([], [], marker="o", color=GRAY, lw=0, label=words)
    half.set(fillstyle="left", markerfacecoloralt="white")
    return [*entries, dashed, intervals, detected, half]


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures; at least 0, as Matplotlib asks."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
