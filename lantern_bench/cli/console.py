"""The only module that draws on a terminal.

stdout carries data; stderr carries messages and progress. A terminal gets Rich tables and bars; a
pipe or a file gets CSV and plain lines, without escape codes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

from lantern_bench.utils.clock import now
from lantern_bench.utils.errors import LanternError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console as RichConsole
from statistics import fmean

from lantern_bench.sweeps.events import Event, ImageDone, Started
from lantern_bench.utils.progress import Emit, Note, ProgressEvent
from lantern_bench.utils.text import duration

FORMATS = ("table", "csv", "json", "md", "latex")

# C0 and C1 control characters, except tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LOG_SECONDS = 60.0  # between two lines of progress in a log


class Progress:
    """Progress of long tasks, one after another.

    A terminal shows a Rich bar. A log gets a line at the start and at the end of a task, and at
    most one a minute between.
    """

    def __init__(self, write_line: Callable[[str], None], terminal: RichConsole | None) -> None:
        self._write_line = write_line
        self._terminal = terminal
        self._description: str | None = None  # description of the running task
        self._figures = ""
        self._start_time = 0.0
        self._line_time = 0.0
        self._bar: Any = None

    def share(
        self, description: str, done: float, total: float = 1, **figures: float | str
    ) -> None:
        """Show how much of a task is done.

        Args:
            description: Names the task. A new description ends the last task.
            done: How much is done.
            total: When the task is done; 1 if `done` is a fraction.
            **figures: Figures that are shown beside the progress.
        """
        if description != self._description:
            self.finish()
            self._start(description, total)
        texts = {
            name: value if isinstance(value, str) else f"{value:.3g}"
            for name, value in figures.items()
        }
        words = (
            f"{name.replace('_per_', '/').replace('_', ' ')} {text}" for name, text in texts.items()
        )
        self._done = done
        self._figures = ", ".join(words) or self._figures
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, figures=self._figures)
        elif now() - self._line_time >= _LOG_SECONDS:
            self._line_time = now()
            seconds = self._line_time - self._start_time
            seconds_left = seconds * (total - done) / done if done else 0.0
            parts = [
                self._so_far(),
                f"{duration(seconds_left)} left" if seconds_left else "",
                self._figures,
            ]
            self._write_line(f"{description}: {', '.join(filter(None, parts))}")

    def finish(self) -> None:
        """End the task. Its bar or lines stay visible."""
        if self._bar is not None:
            self._bar.stop()
        elif self._description is not None:
            parts = [f"{self._so_far()} in {duration(now() - self._start_time)}", self._figures]
            self._write_line(f"{self._description}: {', '.join(filter(None, parts))}")
        self._description = self._bar = None

    def _start(self, description: str, total: float) -> None:
        self._description = description
        self._total = total
        self._figures = ""
        self._start_time = self._line_time = now()
        if self._terminal is None:
            self._write_line(description if total == 1 else f"{description}: {total:g}")
            return
        from rich import progress

        self._bar = progress.Progress(
            *_columns(total),
            console=self._terminal,
            # Images of different cells take different times: estimate the rate over a long period.
            speed_estimate_period=600.0,
            redirect_stdout=False,
        )
        self._bar.add_task(description, total=total, figures="")
        self._bar.start()

    def _so_far(self) -> str:
        return f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"


def _columns(total: float) -> list[Any]:
    """Return the columns of a bar."""
    from rich import progress

    return [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn() if total == 1 else progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[figures]}"),
    ]


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
        # Default format of tables.
        self.format = "table" if self._out.isatty() else "csv"
        self._terminal: RichConsole | None = None  # draws bars, and messages above them
        if self._err.isatty():
            from rich.console import Console as RichConsole

            self._terminal = RichConsole(file=self._err, markup=False, emoji=False, highlight=False)

    def data(self, text: str) -> None:
        """Write text to stdout with a line end; a terminal gets it without control characters."""
        text = printable(text) if self._out.isatty() else text
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self,
        table: pd.DataFrame,
        name: str | None = None,
        *,
        title: str | None = None,
        notes: Sequence[str] = (),
        format: str | None = None,
    ) -> None:
        """Write a table to stdout.

        CSV and JSON contain unrounded figures. The other formats are for people.

        Args:
            table: The table.
            name: Its name in the schema, if it has one.
            title: A title, for people.
            notes: Notes below the table, for people.
            format: One of `FORMATS`; None for the console's default.
        """
        format = format or self.format
        if format == "csv":
            from lantern_bench.storage.schema import csv_text

            return self.data(csv_text(table))
        if format == "json":
            return self.data(
                table.to_json(orient="records", double_precision=15, indent=1, force_ascii=False)
            )
        from lantern_bench.report.format_tables import latex, readable

        if format == "latex":
            return self.data(latex(table=table, name=name, title=title, more=notes))
        texts, of_table = readable(table, name)
        notes = [*of_table, *notes]
        if format == "md":
            rows = [list(texts.columns), ["---"] * len(texts.columns), *texts.to_numpy().tolist()]
            cells = ([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows)
            lines = [f"| {' | '.join(row)} |" for row in cells]
            head = [f"**{title}**\n"] if title else []
            self.data("\n".join([*head, *lines, *(f"\n{note}" for note in notes)]))
        else:
            _draw_table(stream=self._out, texts=texts, title=title, notes=notes)
        return None

    def say(self, text: str) -> None:
        """Write a message to stderr, unless quiet."""
        if not self.quiet:
            self._write_message(text)

    def note(self, note: Note) -> None:
        """Write a note and its advice; details only if verbose."""
        if note.level == "detail" and not self.verbose:
            return
        text = f"warning: {note.text}" if note.level == "warning" else note.text
        self.say(f"{text}\n  {note.advice}" if note.advice else text)

    def warn(self, text: str, advice: str | None = None) -> None:
        """Write a warning, and what to do about it."""
        self.note(Note(text, advice, "warning"))

    def error(self, error: LanternError) -> None:
        """Write an error and its advice, also if quiet."""
        advice = (error.advice or "").splitlines()
        self._write_message("\n  ".join([f"error: {error.message}", *advice]))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Yield progress on stderr, none if quiet. Leaving the context ends the last task."""
        draws = _takes_escapes(self._err) and not self.quiet
        progress = Progress(self.say, self._terminal if draws else None)
        try:
            yield progress
        finally:
            progress.finish()

    def _write_message(self, text: str) -> None:
        """Write a message; a terminal breaks its lines between words."""
        if self._terminal is not None:
            self._terminal.print(
                _between_words(printable(text), self._terminal.width), soft_wrap=True
            )
        else:
            self._err.write(printable(text) + "\n")
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
    widths = {name: max(map(len, [*texts[name], *name.split()])) for name in texts.columns}
    texts = texts.rename(
        columns={name: "\n".join(wrap(name, width)) for name, width in widths.items() if width}
    )
    with rich.capture() as drawn:
        for block in _blocks(texts, rich.width):
            table = Table(
                title=title,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                collapse_padding=True,
            )
            for column in block.columns:
                table.add_column(
                    column,
                    justify="right" if _is_figures(block[column]) else "left",
                    overflow="fold",
                )
            for row in block.itertuples(index=False):
                table.add_row(*map(printable, row))
            rich.print(table)
            title = None
        for note in notes:
            rich.print(_between_words(note, rich.width), soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in drawn.get().splitlines())


def _is_figures(column: pd.Series) -> bool:
    """Whether a column holds numbers, which are right-aligned."""
    return "".join(column).lstrip("+-")[:1].isdigit()


def _blocks(texts: pd.DataFrame, width: int) -> Iterator[pd.DataFrame]:
    """Yield blocks of columns that fit, each with the columns that identify a row."""
    widths = [2 + max(map(len, [*name.split("\n"), *texts[name]])) for name in texts.columns]
    keys = next(
        (i for i, name in enumerate(texts.columns) if _is_figures(texts[name])), len(widths)
    )
    room = width - sum(widths[:keys])
    block: list[int] = []
    for number in range(keys, len(widths)):
        if block and sum(widths[i] for i in block) + widths[number] > room:
            yield texts.iloc[:, [*range(keys), *block]]
            block = []
        block.append(number)
    yield texts.iloc[:, [*range(keys), *block]]


def show_events(console: Console, progress: Progress) -> Emit:
    """Return a function that shows events: progress with running means, and messages."""
    images = done = 0
    figures: dict[str, list[float]] = {"mal": [], "s_per_image": []}

    def show(event: Event) -> None:
        nonlocal images, done
        match event:
            case Note():
                console.note(event)
            case ProgressEvent(label, share, total):
                progress.share(label, share, total)
            case Started(finished, to_do):
                images = sum(to_do.values())
                if finished:
                    console.say(f"{finished} images kept, {images} to do")
                if images:
                    progress.share("images", 0, images)
            case ImageDone(task, record):
                done += 1
                if event.failed:
                    console.warn(f"{task.image} failed: {record['error']}")
                else:
                    figures["s_per_image"].append(record["seconds"])
                    if task.cell.decoding.mode != "ar" and record["mean_accepted_length"]:
                        figures["mal"].append(record["mean_accepted_length"])
                progress.share(
                    "images",
                    done,
                    images,
                    **{key: fmean(row) for key, row in figures.items() if row},
                )

    return show
