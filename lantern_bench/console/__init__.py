"""The only place that draws on a terminal. stdout carries data; stderr carries messages and progress.

One `Console` is made from the flags and handed down. A terminal gets Rich tables and bars; a pipe or a file gets CSV
and plain lines, because Rich cuts wide tables there and shows a bar only when it ends. No escape code is written
without a terminal, with `NO_COLOR` or on a dumb terminal. `report.format_tables` formats the figures.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO, TypeAlias, get_args

from lantern_bench.clock import now
from lantern_bench.errors import LanternError, UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMATS", "Console", "Format", "Progress", "duration"]

Format: TypeAlias = Literal["table", "csv", "json", "md", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)

# All of C0 and C1 but tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# ---- Progress: bars on a terminal, plain lines in a log


class Progress:
    """Progress of a long task, told as lines of a log; without `tell` it writes nothing. A context manager.

    A log gets a line at the start, at the end of each part, at the end, and at most one a minute between.
    `start(total, description)` begins, `advance(n, **live)` adds to what is done, `reach(done, **live)` sets it,
    `finish()` ends; then it may start again. A total of 1 is a share, shown as per cent. `parts` (name to size) divides
    the total, for example into cells; `advance(part=name)` counts towards one. `live` holds current figures:
    `mal=2.9, s_per_image=0.7`.
    """

    _running = False

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell

    def start(self, total: float, description: str, parts: Mapping[str, int] | None = None) -> None:
        """Begin to count up to `total`."""
        self.finish()
        self._total, self._description, self._done, self._live = total, description, 0.0, ""
        self._left, self._began, self._running = dict(parts or {}), now(), True
        self._draw_start()

    def advance(self, n: float = 1, *, part: str | None = None, **live: float | str) -> None:
        """Count `n` more as done."""
        ended = None
        if part in self._left:
            self._left[part] -= 1
            ended = part if self._left[part] == 0 else None
        self._move(self._done + n, ended, live)

    def reach(self, done: float, **live: float | str) -> None:
        """Set how much is done in all."""
        self._move(done, None, live)

    def share(self, what: str, done: float) -> None:
        """Set which share of `what` is done; a new `what` starts again."""
        if not self._running or self._description != what:
            self.start(1, what)
        self.reach(done)

    def finish(self) -> None:
        """End; what is drawn stays."""
        if self._running:
            self._running = False
            self._draw_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def _move(self, done: float, ended: str | None, live: Mapping[str, float | str]) -> None:
        texts = {name: value if isinstance(value, str) else f"{value:.3g}" for name, value in live.items()}
        words = (f"{name.replace('_per_', '/').replace('_', ' ')} {text}" for name, text in texts.items())
        self._done, self._live = done, ", ".join(words) or self._live
        self._draw_move(ended)

    def _draw_start(self) -> None:
        self._last = self._began
        self._tell(self._description if self._total == 1 else f"{self._description}: {self._total:g}")

    def _draw_move(self, ended: str | None) -> None:
        """Draw a move; `ended` is the part that it completes, if any."""
        if ended is None and now() - self._last < 60.0:
            return
        self._last = now()
        left = (self._last - self._began) * (self._total - self._done) / self._done if self._done else None
        words = (f"{ended} done" if ended else "", self._so_far(), f"{duration(left)} left" if left else "", self._live)
        self._tell(f"{self._description}: {', '.join(filter(None, words))}")

    def _draw_end(self) -> None:
        self._tell(f"{self._description}: {self._so_far()} in {duration(now() - self._began)}")

    def _so_far(self) -> str:
        return f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"


class Bars(Progress):
    """Rich bars with the time left: one for the whole, one for its parts when it has any."""

    _drawn: Any = None

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def tell(self, text: str) -> bool:
        """Write a line above the bars; False when there are none."""
        if self._drawn is not None:
            self._drawn.console.print(text, soft_wrap=True)
        return self._drawn is not None

    def _draw_start(self) -> None:
        from rich import progress
        from rich.console import Console as Rich

        self._drawn = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn() if self._total == 1 else progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[live]}"),
            console=Rich(file=self._stream, markup=False, emoji=False, highlight=False),
            # Images of different cells take different times: estimate the rate over a long period.
            speed_estimate_period=600.0,
            redirect_stdout=False,
        )
        self._whole = self._drawn.add_task(self._description, total=self._total, live="")
        self._parts = self._drawn.add_task("cells", total=len(self._left), live="") if self._left else None
        self._drawn.start()

    def _draw_move(self, ended: str | None) -> None:
        self._drawn.update(self._whole, completed=self._done, live=self._live)
        if ended is not None:
            self._drawn.advance(self._parts)

    def _draw_end(self) -> None:
        self._drawn.stop()
        self._drawn = None


def duration(seconds: float) -> str:
    """Return a time as text: `42 s`, `4 min 12 s`, `1 h 03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---- Messages and tables


class Console:
    """Writes everything that a person or a program reads.

    `quiet` keeps errors and data only, `verbose` adds `detail` lines. `format` is the default format of `table`: a
    table on a terminal and CSV elsewhere.
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
        self.quiet, self.verbose = quiet, verbose
        self._out, self._err = stdout or sys.stdout, stderr or sys.stderr
        self.format: Format = format or ("table" if self._out.isatty() else "csv")
        self._bars: Bars | None = None

    @property
    def width(self) -> int:
        """Columns of a line on stdout: the terminal's, 100 without one."""
        return shutil.get_terminal_size((100, 24)).columns if self._out.isatty() else 100

    @property
    def writes_blocks(self) -> bool:
        """Whether stdout can write more than ASCII."""
        return "utf" in (getattr(self._out, "encoding", None) or "utf-8").lower()

    def data(self, text: str) -> None:
        """Write text to stdout with a line end: unchanged into a file or pipe, `printable` on a terminal."""
        text = printable(text) if self._out.isatty() else text
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self, table: pd.DataFrame, name: str | None = None, *, title: str | None = None, format: str | None = None
    ) -> None:
        """Write a table to stdout in `format` (one of `FORMATS`), by default the console's.

        `name` is the table's name in the schema, where it has one. CSV and JSON hold the figures unchanged; the other
        formats are for people (`report.format_tables`) and carry `title` and notes. Raises `UserError` for an unknown
        format.
        """
        chosen = self.checked_format(format) if format is not None else self.format
        if chosen == "csv":
            from lantern_bench.report.tables import csv_text

            return self.data(csv_text(table))
        if chosen == "json":
            return self.data(table.to_json(orient="records", double_precision=15, indent=1, force_ascii=False))
        from lantern_bench.report.format_tables import readable

        shown, notes = readable(table, name)
        if chosen == "md":
            rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
            lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
            heads = [f"**{title}**\n"] if title else []
            self.data("\n".join([*heads, *lines, *(f"\n{note}" for note in notes)]))
        elif chosen == "latex":
            remarks = [f"% {note}" for note in ([title] if title else []) + list(notes)]
            self.data("\n".join([*remarks, shown.to_latex(index=False, escape=True)]))
        else:
            _draw(self._out, shown, title, notes)

    @staticmethod
    def checked_format(format: str) -> Format:
        """Return `format` when it is one of `FORMATS`; else raise `UserError`."""
        for known in FORMATS:
            if format == known:
                return known
        raise UserError(f"--format {format}: must be one of {', '.join(FORMATS)}")

    def say(self, text: str = "") -> None:
        """Write a message to stderr, unless quiet."""
        if not self.quiet:
            self._tell(text)

    def detail(self, text: str) -> None:
        """Write a message that only `-v` shows."""
        if self.verbose:
            self.say(text)

    def warn(self, text: str, advice: str | None = None) -> None:
        """Write a warning, and what to do about it."""
        self.say(f"warning: {text}" + (f"\n  {advice}" if advice else ""))

    def error(self, error: LanternError) -> None:
        """Write an error, also when quiet: what is wrong and what to do."""
        self._tell("\n  ".join([f"error: {error.message}", *(error.advice or "").splitlines()]))

    def progress(self) -> Progress:
        """Return progress on stderr: bars on a terminal, lines elsewhere, nothing when quiet."""
        if self.quiet:
            return Progress()
        if not _takes_escapes(self._err):
            return Progress(self._tell)
        self._bars = Bars(self._err)
        return self._bars

    def _tell(self, text: str) -> None:
        text = printable(text)
        if self._bars is None or not self._bars.tell(text):
            self._err.write(text + "\n")
            self._err.flush()


def printable(text: str) -> str:
    """Return text with its control characters written out: a prompt or a file must not steer the terminal."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _takes_escapes(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _draw(stream: TextIO, shown: pd.DataFrame, title: str | None, notes: tuple[str, ...]) -> None:
    """Draw a table as wide as it needs to be; a narrow terminal gets several blocks, so that no figure is cut."""
    from rich import box
    from rich.console import Console as Rich
    from rich.table import Table

    drawing, fancy = StringIO(), _takes_escapes(stream)
    width = None if stream.isatty() else 10_000
    rich = Rich(file=drawing, width=width, force_terminal=fancy, color_system="auto" if fancy else None, markup=False)
    for block in _blocks(shown, rich.width):
        drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column in block.columns:
            drawn.add_column(column, justify="right" if _is_figures(block[column]) else "left", overflow="fold")
        for row in block.itertuples(index=False):
            drawn.add_row(*map(printable, row))
        rich.print(drawn)
        title = None
    for note in notes:
        rich.print(note, soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in drawing.getvalue().splitlines())


def _is_figures(column: pd.Series) -> bool:
    """Whether a column holds numbers: these are right-aligned."""
    return "".join(column).lstrip("+-")[:1].isdigit()


def _blocks(shown: pd.DataFrame, width: int) -> Iterator[pd.DataFrame]:
    """Yield the columns in blocks that fit, each after the columns that say what a row is."""
    takes = [2 + max(map(len, [name, *shown[name]])) for name in shown.columns]
    keys = next((i for i, name in enumerate(shown.columns) if _is_figures(shown[name])), len(takes))
    room = width - sum(takes[:keys])
    block: list[int] = []
    for number in range(keys, len(takes)):
        if block and sum(takes[i] for i in block) + takes[number] > room:
            yield shown.iloc[:, [*range(keys), *block]]
            block = []
        block.append(number)
    yield shown.iloc[:, [*range(keys), *block]]
