"""The only module that draws on a terminal.

stdout carries data; stderr carries messages and progress. A terminal gets Rich tables and bars; a
pipe or a file gets CSV and plain lines, without escape codes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import takewhile
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

from lantern_bench.sweeps.events import shown_by
from lantern_bench.utils.errors import LanternError
from lantern_bench.utils.progress import Emit, Note, Progress, heard_by

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("table", "csv", "json", "md", "latex")

_WIDE = 180  # columns of a terminal that take a summary with all its intervals

# C0 and C1 control characters, except tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Console:
    """Writes data and messages: only data and errors if `quiet`, also details if `verbose`."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        verbose: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self._out = stdout or sys.stdout
        self._err = stderr or sys.stderr
        # The format of tables, one of `FORMATS`.
        self.format = "table" if self._out.isatty() else "csv"

    def data(self, text: str) -> None:
        """Write text to stdout with a line end; a terminal gets it without control characters."""
        text = printable(text) if self._out.isatty() else text
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self,
        rows: pd.DataFrame | Sequence[Any],
        name: str | None = None,
        *,
        title: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Write a table to stdout.

        CSV and JSON contain unrounded figures. The other formats are for people.

        Args:
            rows: The table, or its rows.
            name: Its name in the schema, if it has one.
            title: A title, for people.
            notes: Notes below the table, for people.
        """
        import pandas as pd

        table = pd.DataFrame(rows)
        if self.format == "csv":
            from lantern_bench.storage.schema import csv_text

            return self.data(csv_text(table))
        if self.format == "json":
            from lantern_bench.storage.schema import without_unused

            table = without_unused(table)
            return self.data(
                table.to_json(orient="records", double_precision=15, indent=1, force_ascii=False)
            )
        from lantern_bench.report.format_tables import latex, readable

        if self.format == "latex":
            return self.data(latex(table=table, name=name, title=title, more=notes))
        texts, of_table = readable(table, name, intervals=self._is_wide())
        notes = [*of_table, *notes]
        if self.format == "md":
            cells = texts.replace({r"\|": r"\|", r"\s+": " "}, regex=True)
            rows = [cells.columns, ["---"] * len(cells.columns), *cells.to_numpy()]
            lines = [f"| {' | '.join(row)} |" for row in rows]
            head = [f"**{title}**\n"] if title else []
            self.data("\n".join([*head, *lines, *(f"\n{note}" for note in notes)]))
        else:
            _draw_table(stream=self._out, texts=texts, title=title, notes=notes)
        return None

    def _is_wide(self) -> bool:
        """Whether a table has space for all its intervals; a file has."""
        return not self._out.isatty() or get_terminal_size().columns >= _WIDE

    def say(self, text: str) -> None:
        """Write a message to stderr, unless quiet."""
        if not self.quiet:
            self._write_message(text)

    def note(self, note: Note | None) -> None:
        """Write a note, if there is one, and its advice; details only if verbose."""
        if note is None or (note.level == "detail" and not self.verbose):
            return
        text = f"warning: {note.text}" if note.level == "warning" else note.text
        self.say("\n  ".join([text, *(note.advice or "").splitlines()]))

    def warn(self, text: str, advice: str | None = None) -> None:
        """Write a warning, and what to do about it."""
        self.note(Note(text, advice, "warning"))

    def error(self, error: LanternError) -> None:
        """Write an error and its advice, also if quiet."""
        advice = (error.advice or "").splitlines()
        self._write_message("\n  ".join([f"error: {error.message}", *advice]))

    @contextmanager
    def events(self) -> Iterator[Emit]:
        """Yield a function that shows events on stderr, no progress if quiet."""
        bars = self._err if _takes_escapes(self._err) and not self.quiet else None
        with closing(Progress(self.say, bars)) as progress:
            emit = shown_by(progress, self.note)
            with heard_by(emit):
                yield emit

    def _write_message(self, text: str) -> None:
        """Write a message, above bars; a terminal breaks its lines between words."""
        from tqdm import tqdm

        text = printable(text)
        if self._err.isatty():
            text = _between_words(text, get_terminal_size().columns)
        tqdm.write(text, file=self._err)
        self._err.flush()


def printable(text: str) -> str:
    """Return text with control characters escaped: a prompt must not steer the terminal."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _between_words(text: str, width: int) -> str:
    """Return text with lines broken between words, never within a word."""
    wrapped = partial(wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(wrapped(line, subsequent_indent="  ")) for line in text.splitlines())


def _takes_escapes(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _draw_table(
    stream: TextIO, texts: pd.DataFrame, title: str | None, notes: Sequence[str]
) -> None:
    """Draw a table. Headers wrap and a narrow terminal gets several blocks: no figure is cut."""
    from rich import box
    from rich.console import Console as RichConsole
    from rich.table import Table

    rich = RichConsole(
        file=stream,
        width=None if stream.isatty() else 10_000,
        color_system="auto" if _takes_escapes(stream) else None,
        markup=False,
    )
    texts = texts.map(printable)
    # Heads wrap to the width of their column.
    widths = {name: max(map(len, [*texts[name], *name.split()])) for name in texts.columns}
    with rich.capture() as drawn:
        for names in _blocks(texts, widths, rich.width):
            table = Table(
                title=title,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                collapse_padding=True,
            )
            for name in names:
                table.add_column(
                    name,
                    justify="right" if _is_figures(texts[name]) else "left",
                    max_width=widths[name],
                    overflow="fold",
                )
            for row in texts[names].itertuples(index=False):
                table.add_row(*row)
            rich.print(table)
            title = None
        for note in notes:
            rich.print(_between_words(note, rich.width), soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in drawn.get().splitlines())


def _is_figures(column: pd.Series) -> bool:
    """Whether a column holds numbers, which are right-aligned."""
    return "".join(column).lstrip("+-")[:1].isdigit()


def _blocks(texts: pd.DataFrame, widths: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the columns of blocks that fit, each with the columns that identify a row."""
    keys = list(takewhile(lambda name: not _is_figures(texts[name]), texts.columns))
    block = [*keys]
    for name in texts.columns[len(keys) :]:
        if len(block) > len(keys) and sum(2 + widths[column] for column in [*block, name]) > most:
            yield block
            block = [*keys]
        block.append(name)
    yield block
