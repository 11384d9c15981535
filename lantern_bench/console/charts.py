"""Curves in small, as lines of text: acceptance by depth, accepted lengths and their means, speed against quality.

For a look over a remote shell. They show the points that the files show (`report/curve_data.py`), with the same names;
intervals are in the files. No escape codes, so that they can be piped and pasted; where the stream cannot write block
characters plain ones stand for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING

from lantern_bench.errors import RefusedError
from lantern_bench.report.curve_data import (
    QUALITIES,
    SPEEDS,
    Front,
    acceptance_points,
    bound_points,
    fronts,
    length_points,
)
from lantern_bench.report.labels import BOUNDS

if TYPE_CHECKING:
    import pandas as pd

    Tables = Mapping[str, pd.DataFrame]

__all__ = ["plain", "terminal_curves"]

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans(dict(zip("▁▂▃▄▅▆▇█│└─", "..::-=+#|+-", strict=True)) | {"δ": "delta", "λ": "lambda"})
_FRONT_HEIGHT = 14
_FRONT_WIDTH = 64
_GROUP = ["run", "model", "cell_id"]


def terminal_curves(runs: Mapping[str, Tables], by: str = "mode", width: int = 100) -> list[str]:
    """Return the charts there is data for, each a text of several lines at most `width` wide where labels allow.

    Raises `RefusedError` when there is nothing to draw.
    """
    charts = [*_depths(acceptance_points(runs)), *_lengths(length_points(runs))]
    for parameter in (by,) if by != "mode" else BOUNDS:
        charts += _bounds(bound_points(runs, parameter), parameter, width)
    charts += [_front(front, width) for front in fronts(runs) if front.speed == "speedup"]
    if not charts:
        raise RefusedError("nothing to draw: no drafts and no scored, timed images in these runs")
    return charts


def plain(text: str) -> str:
    """Return a chart in ASCII."""
    return text.translate(_PLAIN)


def _depths(points: pd.DataFrame) -> Iterator[str]:
    if not len(points):
        return
    depths = sorted({int(depth) for depth in points["index"]})
    rows = []
    for _, line in points.groupby(_GROUP, sort=False):
        rate = dict(zip(line["index"].astype(int), line["rate"].astype(float), strict=True))
        cells = [f"{_bar(rate[depth])} {rate[depth]:.2f}" if depth in rate else "" for depth in depths]
        rows.append([str(line["label"].iloc[0]), *cells])
    yield _columns("acceptance rate by depth of the draft tree", ["", *map(str, depths)], rows)


def _lengths(points: pd.DataFrame) -> Iterator[str]:
    if not len(points):
        return
    longest = int(points["length"].max())
    highest = float(points["share"].max())
    rows = []
    for _, line in points.groupby(_GROUP, sort=False):
        share = dict(zip(line["length"].astype(int), line["share"].astype(float), strict=True))
        mean = sum(length * part for length, part in share.items())
        bars = [f"{_bar(share.get(n, 0.0) / highest)} {share.get(n, 0.0):.0%}" for n in range(1, longest + 1)]
        rows.append([str(line["label"].iloc[0]), *bars, f"{mean:.2f}"])
    yield _columns("share of steps by tokens committed", ["", *map(str, range(1, longest + 1)), "mean"], rows)


def _bounds(points: pd.DataFrame, parameter: str, width: int) -> Iterator[str]:
    """Horizontal bars: the mean accepted length for each value, from 1, which is what no draft at all gives."""
    if points[parameter].nunique() < 2:
        return
    names = [str(label) for label in points["label"]]
    room = max(10, min(48, width - max(map(len, names)) - 10))
    most = max(float(points["mean_accepted_length"].max()), 1.001)
    lines = [f"mean accepted length by {parameter} (bars begin at 1)"]
    for name, value in zip(names, points["mean_accepted_length"].astype(float), strict=True):
        length = max(0, round(room * (value - 1) / (most - 1)))
        lines.append(f"  {name:<{max(map(len, names))}}  {value:5.2f} │{'█' * length}".rstrip())
    yield "\n".join(lines)


def _front(front: Front, width: int) -> str:
    """A scatter of letters: capital on the front, small where another cell is at least as fast and as good."""
    points = front.points
    wide = max(20, min(_FRONT_WIDTH, width - 12))
    letters = _letters(points)
    across = _places(points[front.speed].astype(float).tolist(), wide)
    up = _places(points[front.quality].astype(float).tolist(), _FRONT_HEIGHT)
    canvas = [[" "] * wide for _ in range(_FRONT_HEIGHT)]
    for letter, x, y in zip(letters, across, up, strict=True):
        row = _FRONT_HEIGHT - 1 - y if not QUALITIES[front.quality].less_is_better else y
        while canvas[row][x] != " " and x + 1 < wide:
            x += 1
        canvas[row][x] = letter
    best, worst = _ends(points[front.quality], QUALITIES[front.quality].less_is_better)
    marks = {0: f"{best:.4g}", _FRONT_HEIGHT - 1: f"{worst:.4g}"}
    lines = [f"{front.axis.replace(chr(10), ' ')}, better is up; {SPEEDS[front.speed]}, faster is right"]
    lines += [f"{marks.get(n, ''):>8} │{''.join(row).rstrip()}".rstrip() for n, row in enumerate(canvas)]
    low, high = float(points[front.speed].min()), float(points[front.speed].max())
    lines += [f"{'':>8} └{'─' * wide}", f"{'':>10}{f'{low:.2f}':<{wide - 5}}{high:>5.2f}"]
    for letter, (_, point) in zip(letters, points.iterrows(), strict=True):
        figures = f"{point[front.speed]:.2f}  {point[front.quality]:.4g}"
        lines.append(f"  {letter}  {figures:<14} {point['label']}" + ("  (dominated)" if point["dominated"] else ""))
    return "\n".join(lines)


def _letters(points: pd.DataFrame) -> list[str]:
    alphabet = (ascii_uppercase * (len(points) // len(ascii_uppercase) + 1))[: len(points)]
    return [a.lower() if pale else a for a, pale in zip(alphabet, points["dominated"], strict=True)]


def _ends(values: pd.Series, less_is_better: bool) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if less_is_better else (high, low)


def _places(values: Sequence[float], count: int) -> list[int]:
    low, high = min(values), max(values)
    return [round((value - low) / (high - low) * (count - 1)) if high > low else count // 2 for value in values]


def _bar(share: float) -> str:
    return _BARS[max(0, min(8, round(8 * share)))]


def _columns(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    wide = [max(len(row[n]) for row in [heads, *rows]) for n in range(len(heads))]
    lines = [title]
    for row in [heads, *rows]:
        lines.append("  " + "  ".join(text.ljust(size) for text, size in zip(row, wide, strict=True)).rstrip())
    return "\n".join(lines)
