"""Write the lists of columns of docs/results-format.md from lantern_bench/storage/schema.py.

    python -m scripts.docs.results_format

The text above the marker is written by hand; everything below it is replaced. The columns of a
figure share its line. Figures that an earlier table explains are only named.
"""

from __future__ import annotations

import re
from itertools import groupby, product
from pathlib import Path

from lantern_bench.storage.schema import CELL_COLUMNS, SCHEMA_VERSION, TABLES, Column

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results-format.md"
MARKER = "<!-- Below: python -m scripts.docs.results_format -->\n"
CELL = "the columns of a cell"
# The page's section "CSV tables" explains them.
ENDS = (
    "_low",
    "_high",
    "_ar_spread",
    "_verdict",
    "_detectable",
    "_vs_ar",
    "_p",
    "_infinity",
)


def render(page: str) -> str:
    """Return the text of the page with its lists of columns made anew."""
    written, _, _ = page.partition(MARKER)
    text = f"## {CELL.capitalize()}\n\n{''.join(map(_line, families(CELL_COLUMNS)))}"
    source = dict.fromkeys(CELL_COLUMNS, "of a cell")
    for name, table in TABLES.items():
        text += f"\n## {name}\n\n{_lines(table, source)}"
        source = dict.fromkeys(table, f"see `{name}`") | source
    return f"{written}{MARKER}\nSchema version {SCHEMA_VERSION}.\n\n{text}"


def families(table: tuple[Column, ...]) -> list[list[Column]]:
    """Each figure with the columns behind it whose names are its own with endings."""
    grouped: list[list[Column]] = []
    for column in table:
        if grouped and column.name in _with_endings(grouped[-1][0].name):
            grouped[-1].append(column)
        else:
            grouped.append([column])
    return grouped


def _with_endings(name: str) -> set[str]:
    names = [name + ending for ending in ENDS]
    return {*names, *(longer + ending for longer, ending in product(names, ENDS))}


def _lines(table: tuple[Column, ...], source: dict[Column, str]) -> str:
    """Return the lines of one table.

    `source` says where a column that an earlier table has is explained.
    """
    text = ""
    for place, grouped in groupby(families(table), lambda family: source.get(family[0], "")):
        named = list(grouped)
        if not place:
            text += "".join(map(_line, named))
        elif len(named) == len(families(CELL_COLUMNS)):
            text += f"- {CELL}\n"
        else:
            text += f"- {', '.join(map(_names, named))}: {place}\n"
    return text


def _names(family: list[Column]) -> str:
    """Return a figure's name and the endings of its further columns; ± is both interval ends."""
    figure = family[0].name
    names = [f"`{figure}`", *(f"`{column.name.removeprefix(figure)}`" for column in family[1:])]
    return re.sub(r"`, `\w*_low`, `\w*_high`", "`±", ", ".join(names))


def _line(family: list[Column]) -> str:
    figure = family[0]
    kind = figure.unit or figure.dtype.removeprefix("float")
    return f"- {_names(family)}{f' ({kind})' if kind else ''}: {figure.meaning}\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
