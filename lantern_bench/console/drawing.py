"""Tables of texts, drawn: Rich for eyes, Markdown for pages.

Nothing is cut. Where a terminal is too narrow the columns stand in several blocks; where there is no terminal a table
is as wide as it needs to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["draw", "markdown", "takes_escapes"]


def takes_escapes(stream: TextIO) -> bool:
    """Whether escape codes may be written there."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def markdown(shown: pd.DataFrame) -> str:
    """Return a table of texts as Markdown."""
    rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def draw(stream: TextIO, shown: pd.DataFrame, title: str | None, notes: tuple[str, ...]) -> None:
    """Draw a table as wide as it needs to be; on a narrow terminal in several blocks, since no figure may be cut."""
    from rich import box
    from rich.console import Console as Rich
    from rich.table import Table

    drawing, fancy = StringIO(), takes_escapes(stream)
    width = None if stream.isatty() else 10_000
    rich = Rich(file=drawing, width=width, force_terminal=fancy, color_system="auto" if fancy else None, markup=False)
    for block in _blocks(shown, rich.width):
        drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column in block.columns:
            figures = _is_figures(block[column])
            drawn.add_column(column, justify="right" if figures else "left", overflow="fold")
        for row in block.itertuples(index=False):
            drawn.add_row(*row)
        rich.print(drawn)
        title = None
    for note in notes:
        rich.print(note, soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in drawing.getvalue().splitlines())


def _is_figures(column: pd.Series) -> bool:
    """Whether a column is compared, not read: it stands on the right."""
    return "".join(column).lstrip("+-")[:1].isdigit()


def _blocks(shown: pd.DataFrame, width: int) -> Iterator[pd.DataFrame]:
    """Yield the columns in blocks that fit, each after the columns that say what a row is."""
    gap = 2
    takes = [gap + max(map(len, [name, *shown[name]])) for name in shown.columns]
    keys = next((i for i, name in enumerate(shown.columns) if _is_figures(shown[name])), len(takes))
    room = width - sum(takes[:keys])
    block: list[int] = []
    for number in range(keys, len(takes)):
        if block and sum(takes[i] for i in block) + takes[number] > room:
            yield shown.iloc[:, [*range(keys), *block]]
            block = []
        block.append(number)
    yield shown.iloc[:, [*range(keys), *block]]
