"""Small curves as lines of text, for a remote shell: acceptance by depth, accepted lengths, speed against quality.

They show the points of `report/curves.py` with the same labels; intervals are in the files. They hold no escape
codes, so that they can be piped; `plain` replaces block characters where the stream cannot write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from string import ascii_uppercase
from typing import TYPE_CHECKING

from lantern_bench.errors import RefusedError
from lantern_bench.report import curves
from lantern_bench.report.curves import SPEEDS, Front, Tables
from lantern_bench.report.labels import BOUNDS, CELL

if TYPE_CHECKING:
    import pandas as pd

_BARS = " ▁▂▃▄▅▆▇█"
_SIGNS = {symbol: name for name, symbol in BOUNDS.items() if len(symbol) == 1 and not symbol.isascii()}
_PLAIN = str.maketrans(dict(zip("▁▂▃▄▅▆▇█│└─", "..::-=+#|+-", strict=True)) | _SIGNS)
_FRONT_HEIGHT = 14


def terminal_curves(runs: Mapping[str, Tables], by: str = "mode", width: int = 100) -> list[str]:
    """Return the charts there is data for, each a text of several lines at most `width` wide where labels allow.

    Raises `RefusedError` when there is nothing to draw.
    """
    charts = []
    if len(points := curves.acceptance_points(runs)):
        rates = _by_cell(points, "index", "rate")
        rows = [
            [label, *(f"{_bar(rate)} {rate:.2f}" if rate == rate else "" for rate in line)]
            for label, *line in rates.itertuples()
        ]
        charts.append(_columns("acceptance rate by depth of the draft tree", ["", *map(str, rates.columns)], rows))
    if len(points := curves.length_points(runs)):
        shares = _by_cell(points, "length", "share").fillna(0.0)
        highest, rows = float(points["share"].max()), []
        for label, *line in shares.itertuples():
            mean = sum(length * share for length, share in zip(shares.columns, line, strict=True))
            rows.append([label, *(f"{_bar(share / highest)} {share:.0%}" for share in line), f"{mean:.2f}"])
        charts.append(_columns("share of steps by tokens committed", ["", *map(str, shares.columns), "mean"], rows))
    for parameter in (by,) if by != "mode" else BOUNDS:
        points = curves.bound_points(runs, parameter)
        if points[parameter].nunique() > 1:
            charts.append(_bounds(points, parameter, width))
    charts += [_front(front, width) for front in curves.fronts(runs) if front.speed == "speedup"]
    if not charts:
        raise RefusedError("nothing to draw: these runs hold no drafts and no images that are both scored and timed")
    return charts


def plain(text: str) -> str:
    """Return a chart in ASCII."""
    return text.translate(_PLAIN)


def _bounds(points: pd.DataFrame, parameter: str, width: int) -> str:
    """Horizontal bars: the mean accepted length for each value, from 1, the length without drafts."""
    wide = points["label"].str.len().max()
    room = max(10, min(48, width - wide - 10))
    most = max(float(points["mean_accepted_length"].max()), 1.001)
    lines = [f"mean accepted length by {parameter} (bars begin at 1)"]
    for label, value in zip(points["label"], points["mean_accepted_length"], strict=True):
        length = max(0, round(room * (value - 1) / (most - 1)))
        lines.append(f"  {label:<{wide}}  {value:5.2f} │{'█' * length}".rstrip())
    return "\n".join(lines)


def _front(front: Front, width: int) -> str:
    """A scatter of letters: capital on the front, small where another cell is at least as fast and as good."""
    points, less_is_better = front.points, front.less_is_better
    wide = max(20, min(64, width - 12))
    letters = [a.lower() if pale else a for a, pale in zip(cycle(ascii_uppercase), points["dominated"], strict=False)]
    speeds, qualities = points[front.speed], points[front.quality]
    canvas = [[" "] * wide for _ in range(_FRONT_HEIGHT)]
    for letter, x, y in zip(letters, _places(speeds, wide), _places(qualities, _FRONT_HEIGHT), strict=True):
        row = canvas[y if less_is_better else _FRONT_HEIGHT - 1 - y]
        free = next((place for place in range(x, wide) if row[place] == " "), wide - 1)
        row[free] = letter
    ends = [qualities.max(), qualities.min()][:: -1 if less_is_better else 1]
    marks = dict(zip((0, _FRONT_HEIGHT - 1), ends, strict=True))
    lines = [f"{front.axis.replace(chr(10), ' ')}, better is up; {SPEEDS[front.speed]}, faster is right"]
    for number, row in enumerate(canvas):
        mark = f"{marks[number]:.4g}" if number in marks else ""
        lines.append(f"{mark:>8} │{''.join(row).rstrip()}".rstrip())
    lines += [f"{'':>8} └{'─' * wide}", f"{'':>10}{f'{speeds.min():.2f}':<{wide - 5}}{speeds.max():>5.2f}"]
    for letter, (_, point) in zip(letters, points.iterrows(), strict=True):
        figures = f"{point[front.speed]:.2f}  {point[front.quality]:.4g}"
        lines.append(f"  {letter}  {figures:<14} {point['label']}" + ("  (dominated)" if point["dominated"] else ""))
    return "\n".join(lines)


def _by_cell(points: pd.DataFrame, place: str, value: str) -> pd.DataFrame:
    """The values by place, a row for each cell, indexed by its label; nan where a cell has no value."""
    cells = points.pivot_table(value, [*CELL, "label"], place, sort=False).sort_index(axis=1)
    return cells.droplevel([*CELL]).astype(float)


def _places(values: pd.Series, count: int) -> list[int]:
    low, high = values.min(), values.max()
    return [round((value - low) / (high - low) * (count - 1)) if high > low else count // 2 for value in values]


def _bar(share: float) -> str:
    return _BARS[max(0, min(8, round(8 * share)))]


def _columns(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    wide = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(text.ljust(size) for text, size in zip(row, wide, strict=True)) for row in [heads, *rows]]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])
