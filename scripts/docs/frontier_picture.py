"""Draw docs/pictures/frontier.png: the speed of cells on a GPU, and what they change.

A row per cell: its speedup, its distance and its emitted TV. Lossless cells are above relaxed ones,
and the fastest come first. Speeds are from one run, distances and emitted TV from another run of
the same cells. The picture leaves out cells at temperature 0, which have no distance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
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
OUTPUTS = ("lossless", "relaxed")
THRESHOLD = 0.01  # distance; the axis is linear up to here and logarithmic beyond
TICKS = (0, THRESHOLD, 0.1, 0.5)  # of the distance
GRAY = "#555555"
DASHED = {"color": GRAY, "lw": 0.8, "ls": (0, (5, 4)), "zorder": 0}
# By where the drafts come from. Colour-blind readers can tell these colours apart.
COLOURS = {
    "none": "black",
    "static": "#0072B2",
    "jacobi": "#C04A00",
    "pac": "#C04A00",
    "hybrid": "#8A3D8F",
}
NOTES = (
    "w: window; chain-7: seven drafts, no tree was timed; jacobi: a relaxed rule on a window;"
    " k: nearest codes.\n"
    "block-scd is faster since version 11, which no GPU has timed. n/a: block verification does not"
    " measure it."
)
DRAFTS = {
    "static": "drafts of a chain (a drafter network)",
    "jacobi": "drafts of a window (the model itself)",
    "hybrid": "both",
}


def frontier(out: Path) -> list[Path]:
    """Draw the picture; return the files that it was made from."""
    counts = [len(sampled_cells(kind)) for kind in OUTPUTS]
    figure, panels = pyplot.subplots(
        nrows=2,
        ncols=2,
        sharex="col",
        sharey="row",
        figsize=(8.6, 7.9),
        height_ratios=counts,
        width_ratios=(5, 4),
    )
    figure.subplots_adjust(left=0.41, right=0.92, bottom=0.178, top=0.865, wspace=0.06, hspace=0.1)
    for kind, (speed, distance) in zip(OUTPUTS, panels, strict=True):
        draw_speed(speed, kind)
        draw_distance(distance, kind)
    _label(*panels[1])
    for axes, words in zip(panels[0], ("speedup", "distance, at least"), strict=True):
        axes.set_title(words, fontsize=9)
    figure.text(0.925, 0.87, "emitted\nTV, at\nmost", fontsize=8.5)
    figure.text(0.012, 0.968, title(), weight="bold", fontsize=11)
    figure.text(0.012, 0.926, sources(), fontsize=9)
    figure.legend(
        handles=_legend(), loc="lower left", bbox_to_anchor=(0, 0.04), fontsize=8.5, frameon=False
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


def draw_speed(axes: Axes, kind: str) -> None:
    """Draw the speedup of each cell; beside relaxed cells, a line at the fastest lossless one."""
    names = sampled_cells(kind)
    for row, name in enumerate(names):
        cell = cells_of(TIMED)[name]
        speedup = cell["speedup"]
        colour = COLOURS[cell["drafting"].value]
        axes.errorbar(speedup.value, row, xerr=_whiskers([speedup]), fmt="o", color=colour, ms=4)
        right = max(speedup.high, speedup.value + 0.05)
        words = axes.text(right + 0.06, row, f"{speedup.value:.2f}x", va="center")
        words.set(fontsize=8.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    if kind == "relaxed":
        fastest = sampled_cells("lossless")[0]
        axes.axvline(cells_of(TIMED)[fastest]["speedup"].value, **DASHED)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(1, color=GRAY, lw=0.8, zorder=0)
    axes.set_xlim(0.8, 4.4)
    axes.tick_params(axis="x", labelbottom=True, labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(kind, loc="left", x=-1.4, y=0.97, weight="bold", fontsize=10)


def draw_distance(axes: Axes, kind: str) -> None:
    """Draw the distance of each cell, and write its emitted TV."""
    for row, name in enumerate(sampled_cells(kind)):
        cell = cells_of(SCORED)[name]
        distance = cell["distance"]
        colour = COLOURS[cell["drafting"].value]
        inside = "white" if cell["distance_p"].value < SIGNIFICANT else colour
        axes.errorbar(
            distance.value, row, xerr=_whiskers([distance]), fmt="o", color=colour, mfc=inside, ms=4
        )
        tv = f"{cell['emitted_tv']:alone}" or "n/a"
        axes.text(1.02, row, tv, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    axes.axvline(0, color=GRAY, lw=0.8, zorder=0)
    axes.axvline(THRESHOLD, **DASHED)  # also the end of the linear part
    axes.set_xscale("symlog", linthresh=THRESHOLD, linscale=1.1)
    axes.set_xlim(-0.006, 0.6)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelbottom=True, labelsize=8.5)
    axes.tick_params(axis="y", left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(speed: Axes, distance: Axes) -> None:
    """Label the axes below the panels."""
    latency = cells_of(TIMED)["ar"]["latency_s"]
    speed.set_xlabel(f"1x: ar, {latency:.3f} s per image;\ndashed: the fastest lossless cell")
    shift = f"{THRESHOLD:g}, a shift of {THRESHOLD**0.5:g}"
    distance.set_xlabel(f"dashed: {shift} standard\ndeviations; logarithmic beyond it")
    for axes in (speed, distance):
        axes.xaxis.label.set_fontsize(9)


def title() -> str:
    """What the picture shows."""
    parts = []
    for kind in OUTPUTS:
        cells = [cells_of(TIMED)[name] for name in sampled_cells(kind)]
        window, chain = (
            next(cell["speedup"].value for cell in cells if cell["drafting"].value == drafting)
            for drafting in ("jacobi", "static")
        )
        parts.append(f"{window:.2f}x against {chain:.2f}x {kind}")
    return f"On this model windows beat chains: {', '.join(parts)}"


def sources() -> str:
    """What was measured, on which machines, with which engine versions."""
    timed = manifest_of(TIMED)
    scored = manifest_of(SCORED)
    millions = parameters_of(TARGET) / 1e6
    experiment = timed["experiment"]
    return (
        f"lanterns, a miniature model of {millions:.1f} million parameters; batch"
        f" {experiment['batch']}, {experiment['images']} images per cell. Speed: one"
        f" {timed['device']},\nengine version {timed['key']['engine_version']}."
        " Distance and emitted TV: the same cells on a CPU,"
        f" engine version {scored['key']['engine_version']}."
    )


def manifest_of(run: str) -> dict[str, Any]:
    """The manifest of a committed run."""
    manifest: dict[str, Any] = json.loads((REFERENCE / run / "manifest.json").read_text("utf-8"))
    return manifest


def parameters_of(weights: Path) -> int:
    """The number of parameters in a safetensors file."""
    return sum(weight.numel() for weight in load_file(weights).values())


def _legend() -> list[Line2D]:
    """Say what lines and colours mean."""
    entries = [
        Line2D([], [], marker="o", color=COLOURS[name], label=words)
        for name, words in DRAFTS.items()
    ]
    intervals = Line2D([], [], color=GRAY, label="lines: 95% intervals")
    words = f"hollow: detected by a test, p < {SIGNIFICANT:g}"
    detected = Line2D([], [], marker="o", color=GRAY, mfc="white", lw=0, label=words)
    return [*entries, detected, intervals]


def _whiskers(figures: Sequence[Figure]) -> list[list[float]]:
    """How far the intervals reach below and above the figures; at least 0, as Matplotlib asks."""
    return [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
