"""The only place that draws. stdout carries data, stderr speaks to people.

One `Console` is made from the flags and handed down. A terminal gets Rich tables and bars; a pipe or a file gets CSV
and plain lines, since Rich cuts wide tables with an ellipsis there and shows a bar only when it is over. Without a
terminal, with `NO_COLOR` or on a dumb one no escape code is written at all. What a figure looks like to a person is
decided in `report.format_tables`; nothing is computed here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias, get_args

from lantern_bench.console.progress import Bars, Lines, Progress, duration
from lantern_bench.errors import LanternError, UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMATS", "Console", "Format", "Progress", "duration"]


# ---- Tables of texts, drawn: Rich for eyes, Markdown for pages


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


# ----

Format: TypeAlias = Literal["table", "csv", "json", "md", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)


class Console:
    """Where everything a person or a program reads is written.

    `quiet` leaves errors and data, `verbose` adds `detail` lines. `format` is what `table` writes when it is not told:
    by default a table on a terminal and CSV elsewhere.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        format: Format | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self._out = stdout or sys.stdout
        self._err = stderr or sys.stderr
        self.format: Format = format or ("table" if self._out.isatty() else "csv")
        self._bars: Bars | None = None

    @property
    def width(self) -> int:
        """Columns of a line on stdout: the terminal's, and 100 where there is none."""
        return shutil.get_terminal_size((100, 24)).columns if self._out.isatty() else 100

    @property
    def writes_blocks(self) -> bool:
        """Whether stdout can write more than ASCII."""
        return "utf" in (getattr(self._out, "encoding", None) or "utf-8").lower()

    def data(self, text: str) -> None:
        """Write text to stdout, as it is, with a line end."""
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self, table: pd.DataFrame, name: str | None = None, *, title: str | None = None, format: str | None = None
    ) -> None:
        """Write a table to stdout in `format` (one of `FORMATS`), else in the console's.

        `name` is the table's name in the schema, where it has one. CSV and JSON hold the figures as they are; the
        others are for reading (`report.format_tables`) and carry `title` and notes. Raises `UserError` for
        an unknown format.
        """
        chosen = self.checked_format(format) if format is not None else self.format
        if chosen == "csv":
            self.data(table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
        elif chosen == "json":
            self.data(table.to_json(orient="records", double_precision=15, indent=1, force_ascii=False))
        else:
            self._read(table, name, title, chosen)

    @staticmethod
    def checked_format(format: str) -> Format:
        """Return `format` when it is one; else raise `UserError`."""
        for known in FORMATS:
            if format == known:
                return known
        raise UserError(f"--format {format}: unknown", f"The formats are {', '.join(FORMATS)}.")

    def say(self, text: str = "") -> None:
        """Tell people something on stderr, unless they asked for quiet."""
        if not self.quiet:
            self._tell(text)

    def detail(self, text: str) -> None:
        """Tell people something they asked for with `-v`."""
        if self.verbose and not self.quiet:
            self._tell(text)

    def warn(self, text: str, advice: str | None = None) -> None:
        """Warn, and say what to do about it."""
        if not self.quiet:
            self._tell(f"warning: {text}" + (f"\n  {advice}" if advice else ""))

    def error(self, error: LanternError) -> None:
        """Show an error: what is wrong and what to do, also when quiet."""
        advice = "".join(f"\n  {line}" for line in (error.advice or "").splitlines())
        self._tell(f"error: {error.message}{advice}")

    def progress(self) -> Progress:
        """Return progress on stderr: bars on a terminal, else a plain line a minute and one for each part; or none."""
        if self.quiet:
            return Progress()
        if not takes_escapes(self._err):
            return Lines(self._tell)
        self._bars = Bars(self._err)
        return self._bars

    def _tell(self, text: str) -> None:
        if self._bars is not None and self._bars.tell(text):
            return
        self._err.write(text + "\n")
        self._err.flush()

    def _read(self, table: pd.DataFrame, name: str | None, title: str | None, format: Format) -> None:
        from lantern_bench.report.format_tables import readable

        shown, notes = readable(table, name)
        if format == "md":
            heads = [f"**{title}**\n"] if title else []
            self.data("\n".join([*heads, markdown(shown), *(f"\n{note}" for note in notes)]))
        elif format == "latex":
            remarks = [f"% {note}" for note in ([title] if title else []) + list(notes)]
            self.data("\n".join([*remarks, shown.to_latex(index=False, escape=True)]))
        else:
            draw(self._out, shown, title, notes)
