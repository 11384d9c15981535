"""Colours, markers and lines of cells, the same in every picture."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import pandas as pd

from lantern_bench.analysis.labels import CELL, CellKey, cell_key
from lantern_bench.methods.catalog import MODES

_COLOURS = {name: mode.colour for name, mode in MODES.items() if mode.colour}
# Nine and four have no common divisor: marker and line repeat together after 36 cells only.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_LINES = ("-", "--", "-.", ":")


class Style(NamedTuple):
    """The style of a cell: a hex colour, and matplotlib's names of a marker and a line style."""

    colour: str
    marker: str
    line: str


def styles(table: pd.DataFrame, by: str = "mode") -> dict[CellKey, Style]:
    """Return the style of every cell; the colour stands for `by`."""
    cells = table.drop_duplicates(CELL)
    looks = map(Style, _colours(cells[by], by), cycle(_MARKERS), cycle(_LINES))
    return {cell_key(row): style for (_, row), style in zip(cells.iterrows(), looks, strict=False)}


def _colours(values: pd.Series, by: str) -> list[str]:
    if by == "mode":
        return [_COLOURS.get(value, "#CC79A7") for value in values]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    distinct = sorted(values.dropna().unique())
    # The palest part of the map does not print. No shade is near the grey of cells without the
    # value.
    shades = colormaps["plasma"].resampled(len(distinct) + 1)
    return [
        "#767676" if pd.isna(value) else to_hex(shades(distinct.index(value))) for value in values
    ]
