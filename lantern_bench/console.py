"""The only module that draws on a terminal. stdout carries data; stderr carries messages and progress.

Commands get one `Console`, made from the global flags. A terminal gets Rich tables and bars; a pipe or a file gets CSV
and plain lines, because Rich cuts wide tables there and shows a bar only when it ends. No escape code is written
without a terminal, with `NO_COLOR` or on a dumb terminal. `report.format_tables` formats the figures.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from lantern_bench.clock import now
from lantern_bench.errors import LanternError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("table", "csv", "json", "md", "latex")

# All of C0 and C1 but tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LOG_SECONDS = 60.0  # between two lines of progress in a log

# ---- Progress: bars on a terminal, plain lines in a log


class Progress:
    """Progress of a long task as lines of a log; without `write_line` it writes nothing. A context manager.

    A log gets a line at the start, when a cell is complete, at the end, and at most one a minute between. `figures`, as
    in `mal=2.9`, are shown beside what is done.
    """

    _running = False

    def __init__(self, write_line: Callable[[str], None] = lambda _: None) -> None:
        self._write_line = write_line

    def start(self, total: float, description: str, cells: Mapping[str, int] | None = None) -> None:
        """Begin to count up to `total`; a total of 1 is shown as per cent. `cells` divides it: their numbers by id."""
        self.finish()
        self._total, self._description, self._done, self._figures = total, description, 0.0, ""
        self._to_do, self._start_time, self._running = dict(cells or {}), now(), True
        self._draw_start()

    def advance(self, *, cell: str | None = None, **figures: float | str) -> None:
        """Count one more as done, of a cell if it is named."""
        complete = None
        if cell in self._to_do:
            self._to_do[cell] -= 1
            complete = cell if self._to_do[cell] == 0 else None
        self._move(self._done + 1, complete, figures)

    def share(self, description: str, done: float, total: float = 1, **figures: float | str) -> None:
        """Set how much of a task is done; a new description starts again."""
        if not self._running or self._description != description:
            self.start(total, description)
        self._move(done, None, figures)

    def finish(self) -> None:
        """End the task; what is drawn stays."""
        if self._running:
            self._running = False
            self._draw_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def _move(self, done: float, complete: str | None, figures: Mapping[str, float | str]) -> None:
        texts = {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in figures.items()}
        words = (f"{name.replace('_per_', '/').replace('_', ' ')} {text}" for name, text in texts.items())
        self._done, self._figures = done, ", ".join(words) or self._figures
        self._draw_move(complete)

    def _draw_start(self) -> None:
        self._line_time = self._start_time
        self._write_line(self._description if self._total == 1 else f"{self._description}: {self._total:g}")

    def _draw_move(self, complete: str | None) -> None:
        """Draw a move; `complete` is the cell whose last image it is, if any."""
        if complete is None and now() - self._line_time < _LOG_SECONDS:
            return
        self._line_time = now()
        seconds = (self._line_time - self._start_time) * (self._total - self._done) / self._done if self._done else 0.0
        words = [f"{complete} done" if complete else "", self._so_far(), f"{duration(seconds)} left" if seconds else ""]
        self._write_line(f"{self._description}: {', '.join(filter(None, [*words, self._figures]))}")

    def _draw_end(self) -> None:
        self._write_line(f"{self._description}: {self._so_far()} in {duration(now() - self._start_time)}")

    def _so_far(self) -> str:
        return f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"


class Bars(Progress):
    """Rich bars with the time left: one for all images, one for the cells if there are any."""

    _drawing: Any = None

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write_above(self, text: str) -> bool:
        """Write a line above the bars; False when there are none."""
        if self._drawing is not None:
            self._drawing.console.print(text, soft_wrap=True)
        return self._drawing is not None

    def _draw_start(self) -> None:
        from rich import progress
        from rich.console import Console as RichConsole

        self._drawing = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn() if self._total == 1 else progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            console=RichConsole(file=self._stream, markup=False, emoji=False, highlight=False),
            # Images of different cells take different times: estimate the rate over a long period.
            speed_estimate_period=600.0,
            redirect_stdout=False,
        )
        self._bar = self._drawing.add_task(self._description, total=self._total, figures="")
        self._cells_bar = self._drawing.add_task("cells", total=len(self._to_do), figures="") if self._to_do else None
        self._drawing.start()

    def _draw_move(self, complete: str | None) -> None:
        self._drawing.update(self._bar, completed=self._done, figures=self._figures)
        if complete is not None:
            self._drawing.advance(self._cells_bar)

    def _draw_end(self) -> None:
        self._drawing.stop()
        self._drawing = None


def duration(seconds: float) -> str:
    """Return a time as text: `42 s`, `4 min 12 s`, `1 h 03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---- Messages and tables


class Console:
    """Writes everything that a person or a program reads.

    `quiet` writes errors and data only, `verbose` adds `detail` lines. `format` is the default format of `table`: a
    table on a terminal and CSV elsewhere.
    """

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.quiet, self.verbose = quiet, verbose
        self._out, self._err = stdout or sys.stdout, stderr or sys.stderr
        self.format = "table" if self._out.isatty() else "csv"
        self._bars: Bars | None = None

    def data(self, text: str) -> None:
        """Write text to stdout with a line end: unchanged into a file or pipe, `printable` on a terminal."""
        text = printable(text) if self._out.isatty() else text
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self, table: pd.DataFrame, name: str | None = None, *, title: str | None = None, format: str | None = None
    ) -> None:
        """Write a table to stdout in `format` (one of `FORMATS`), by default the console's.

        `name` is the table's name in the schema, where it has one. CSV and JSON have the figures unchanged; the other
        formats are for people (`report.format_tables`) and have `title` and notes.
        """
        format = format or self.format
        if format == "csv":
            from lantern_bench.report.tables import csv_text

            return self.data(csv_text(table))
        if format == "json":
            return self.data(table.to_json(orient="records", double_precision=15, indent=1, force_ascii=False))
        from lantern_bench.report.format_tables import readable

        texts, notes = readable(table, name)
        if format == "md":
            rows = [list(texts.columns), ["---"] * len(texts.columns), *texts.to_numpy().tolist()]
            lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
            head = [f"**{title}**\n"] if title else []
            self.data("\n".join([*head, *lines, *(f"\n{note}" for note in notes)]))
        elif format == "latex":
            remarks = [f"% {note}" for note in ([title] if title else []) + list(notes)]
            self.data("\n".join([*remarks, texts.to_latex(index=False, escape=True)]))
        else:
            _draw_table(self._out, texts, title, notes)

    def say(self, text: str = "") -> None:
        """Write a message to stderr, unless quiet."""
        if not self.quiet:
            self._write_message(text)

    def detail(self, text: str) -> None:
        """Write a message that only `-v` shows."""
        if self.verbose:
            self.say(text)

    def warn(self, text: str, advice: str | None = None) -> None:
        """Write a warning, and what to do about it."""
        self.say(f"warning: {text}" + (f"\n  {advice}" if advice else ""))

    def note(self, text: str, advice: str | None, level: Literal["detail", "info", "warning"]) -> None:
        """Write a note of a run (`runs.events.Note`) as its level asks for."""
        if level == "warning":
            self.warn(text, advice)
        elif level == "info" or self.verbose:
            self.say(text + (f"\n  {advice}" if advice else ""))

    def error(self, error: LanternError) -> None:
        """Write an error, also when quiet: what is wrong and what to do."""
        self._write_message("\n  ".join([f"error: {error.message}", *(error.advice or "").splitlines()]))

    def progress(self) -> Progress:
        """Return progress on stderr: bars on a terminal, lines elsewhere, nothing when quiet."""
        if self.quiet:
            return Progress()
        if not _takes_escapes(self._err):
            return Progress(self._write_message)
        self._bars = Bars(self._err)
        return self._bars

    def _write_message(self, text: str) -> None:
        text = printable(text)
        if self._bars is None or not self._bars.write_above(text):
            self._err.write(text + "\n")
            self._err.flush()


def printable(text: str) -> str:
    """Return text with its control characters written out: a prompt or a file must not steer the terminal."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _takes_escapes(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _draw_table(stream: TextIO, texts: pd.DataFrame, title: str | None, notes: tuple[str, ...]) -> None:
    """Draw a table as wide as it needs to be; a narrow terminal gets several blocks, so that no figure is cut."""
    from rich import box
    from rich.console import Console as RichConsole
    from rich.table import Table

    lines, escapes = StringIO(), _takes_escapes(stream)
    rich = RichConsole(
        file=lines,
        width=None if stream.isatty() else 10_000,
        force_terminal=escapes,
        color_system="auto" if escapes else None,
        markup=False,
    )
    for block in _blocks(texts, rich.width):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column in block.columns:
            table.add_column(column, justify="right" if _is_figures(block[column]) else "left", overflow="fold")
        for row in block.itertuples(index=False):
            table.add_row(*map(printable, row))
        rich.print(table)
        title = None
    for note in notes:
        rich.print(note, soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in lines.getvalue().splitlines())


def _is_figures(column: pd.Series) -> bool:
    """Whether a column holds numbers: these are right-aligned."""
    return "".join(column).lstrip("+-")[:1].isdigit()


def _blocks(texts: pd.DataFrame, width: int) -> Iterator[pd.DataFrame]:
    """Yield the columns in blocks that fit, each after the columns that say what a row is."""
    widths = [2 + max(map(len, [name, *texts[name]])) for name in texts.columns]
    keys = next((i for i, name in enumerate(texts.columns) if _is_figures(texts[name])), len(widths))
    room = width - sum(widths[:keys])
    block: list[int] = []
    for number in range(keys, len(widths)):
        if block and sum(widths[i] for i in block) + widths[number] > room:
            yield texts.iloc[:, [*range(keys), *block]]
            block = []
        block.append(number)
    yield texts.iloc[:, [*range(keys), *block]]
