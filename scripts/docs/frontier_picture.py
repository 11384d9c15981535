"""Draw docs/pictures/frontier.png: the speed of cells on a GPU against what they change.

Speed is up. Lossless cells are in the narrow panel, relaxed ones in the wide panel, by their
distance. Everything is from one run. The picture leaves out cells at temperature 0, which have no
distance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from safetensors.torch import load_file

from lantern_bench.analysis.recommend import MAX_DISTANCE
from lantern_bench.report.draw import save_figure
from scripts.docs.figures import REFERENCE, SIGNIFICANT, WEIGHTS, Figure, cells_of, output

RUN = "frontier-h200"
TARGET = WEIGHTS / "target.safetensors"
TICKS = (0, 0.005, 0.01, 0.03, 0.1, 0.3)  # of the distance
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
    "w: window. Labels leave out chain-7 (no other chain or tree was timed), jacobi, static, row,"
    " maximal,\nk=100 and decay=0."
)


def frontier(out: Path) -> list[Path]:
    """Draw the picture; return the files that it was made from."""
    figure, panels = pyplot.subplots(ncols=2, sharey=True, figsize=(8.6, 5.5), width_ratios=(1, 5))
    figure.subplots_adjust(left=0.215, right=0.7, bottom=0.27, top=0.82, wspace=0.17)
    for axes, words in zip(panels, ("lossless", "relaxed"), strict=True):
        axes.set_title(words, fontsize=9.5, weight="bold")
    draw_lossless(panels[0])
    draw_relaxed(panels[1])
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
    return [TARGET, *(REFERENCE / RUN / file for file in files)]


def sampled_cells(kind: str) -> list[str]:
    """The names of the lossless or relaxed cells that sample, the fastest first."""
    cells = cells_of(RUN)
    names = [name for name, cell in cells.items() if output(cell) == kind]
    sampled = [name for name in names if cells[name]["temperature"].value]
    return sorted(sampled, key=lambda name: -cells[name]["speedup"].value)


def draw_lossless(axes: Axes) -> None:
    """Draw the speedups of the lossless cells, with their names on the left."""
    names = sampled_cells("lossless")
    leader = LEADER | {"relpos": (1, 0.5)}
    for name, place, across in zip(names, label_places(names), cycle((0, 0.5, -0.5))):
        speedup = cells_of(RUN)[name]["speedup"]
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


def draw_relaxed(axes: Axes) -> None:
    """Draw the relaxed cells by their distance, with their names on the right."""
    axes.axvline(MAX_DISTANCE, color=GRAY, lw=0.8, ls=":", zorder=0)
    names = sampled_cells("relaxed")
    leader = LEADER | {"relpos": (0, 0.5)}
    for name, place in zip(names, label_places(names), strict=True):
        speedup, distance = (cells_of(RUN)[name][column] for column in ("speedup", "distance"))
        bars = {"xerr": _whiskers([distance]), "yerr": _whiskers([speedup])}
        axes.errorbar(distance.value, speedup.value, **bars, **_style(name))
        end = (distance.value, speedup.value)
        text = f"{speedup.value:.2f}x  {label(name)}"
        words = axes.annotate(text, end, (0.55, place), arrowprops=leader)
        _lead(words, name)
    axes.set_xscale("symlog", linthresh=MAX_DISTANCE, linscale=1.1)
    axes.set_xlim(-0.0025, 0.4)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.set_yticks([1, 2, 3], ["1x", "2x", "3x"])
    axes.tick_params(axis="y", labelleft=True)
    shift = f"means moved by {MAX_DISTANCE**0.5:g} SD"
    axes.set_xlabel(f"distance, at least; linear to {MAX_DISTANCE:g}\n({shift}), then logarithmic")
    words = {"color": GRAY, "fontsize": 8.5}
    ahead = {"arrowstyle": "->", "color": GRAY}
    axes.annotate("better", (-0.0021, 3.86), (0.0006, 3.62), arrowprops=ahead, **words)
    axes.text(0.012, 3.64, "default limit\nof recommend", **words)
    fastest = cells_of(RUN)[sampled_cells("lossless")[0]]["speedup"].value
    axes.text(0.35, fastest - 0.13, "fastest lossless cell", ha="right", **words)


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
        groups.append([cells_of(RUN)[name]["speedup"].value])
        while len(groups) > 1 and _places(groups[-2])[-1] - _places(groups[-1])[0] < GAP:
            lower = groups.pop()
            groups[-1] += lower
    return list(chain.from_iterable(map(_places, groups)))


def _places(speedups: Sequence[float]) -> list[float]:
    highest = sum(speedups) / len(speedups) + GAP * (len(speedups) - 1) / 2
    return [highest - GAP * number for number in range(len(speedups))]


def _style(name: str) -> dict[str, Any]:
    """Draw a detected shift as a hollow point."""
    style = {"fmt": "o", "color": _colour(name), "ms": 5, "lw": 1}
    if cells_of(RUN)[name]["distance_p"].value < SIGNIFICANT:
        return style | {"mfc": "white"}
    return style


def _colour(name: str) -> str:
    return COLOURS[cells_of(RUN)[name]["drafting"].value]


def _lead(words: Annotation, name: str) -> None:
    """Give a label the colour of its cell."""
    words.set(va="center", color=_colour(name), fontsize=8.5, annotation_clip=False)


def _mark_speeds(axes: Axes) -> None:
    """Draw a line at the speed of `ar`, and one at the speed of the fastest lossless cell."""
    fastest = sampled_cells("lossless")[0]
    axes.axhline(cells_of(RUN)[fastest]["speedup"].value, **DASHED)
    axes.axhline(1, color=GRAY, lw=0.8, zorder=0)
    axes.set_ylim(SPEEDS)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(8.5)
    axes.spines[["top", "right"]].set_visible(False)


def title() -> str:
    """What the picture shows."""
    cells = [cells_of(RUN)[name] for name in sampled_cells("lossless")]
    window, chain = (
        next(cell["speedup"].value for cell in cells if cell["drafting"].value == drafting)
        for drafting in ("jacobi", "static")
    )
    gpu = manifest_of(RUN)["device"].split()[-1]
    speedups = f"lossless windows reach {window:.2f}x, chains of seven {chain:.2f}x"
    return f"A miniature model on one {gpu}: {speedups}"


def sources() -> str:
    """What was measured, on which machines, with which engine versions."""
    manifest = manifest_of(RUN)
    millions = parameters_of(TARGET) / 1e6
    experiment = manifest["experiment"]
    latency = cells_of(RUN)["ar"]["latency_s"]
    return (
        f"lanterns, {millions:.1f} million parameters; engine version"
        f" {manifest['key']['engine_version']}, batch {experiment['batch']},"
        f" {experiment['images']} images per cell.\n"
        f"Up: speedup over ar ({latency:.3f} s per image)."
        " Right: change of the output (0 for lossless cells)."
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
    words = f"hollow: a test detects a change (p < {SIGNIFICANT:g}); filled: it does not"
    detected = Line2D([], [], marker="o", color=GRAY, mfc="white", lw=0, label=words)
    return [*entries, intervals, detected]


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures; at least 0, as Matplotlib asks."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
