"""The only file that draws. stdout carries data, stderr speaks to people.

One `Console` is made from the flags and handed down. A terminal gets Rich tables and bars; a pipe or a file gets CSV
and plain lines, since Rich cuts wide tables with an ellipsis there and shows a bar only when it is over. Without a
terminal, with `NO_COLOR` or on a dumb one no escape code is written at all. What a figure looks like to a person is
decided in `report.reading`; nothing is computed here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
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
_MINUTE = 60.0


class Progress:
    """Progress of something long, drawn nowhere; the kinds below draw it. A context manager: leaving it ends it.

    `start(total, description)` begins, `advance(n, **live)` adds to what is done, `reach(done, **live)` sets it,
    `finish()` ends; then it may start again. A total of 1 is a share, shown as per cent. `parts` (name to size) says
    which parts the total has, such as cells; `advance(part=name)` counts towards one. `live` are figures worth seeing
    now: `mal=2.9, s_per_image=0.7`.
    """

    def start(self, total: float, description: str, parts: Mapping[str, int] | None = None) -> None:
        """Begin to count up to `total`."""
        self.finish()
        self._total, self._description, self._done, self._live = total, description, 0.0, ""
        self._left = dict(parts or {})
        self._began = now()
        self._running = True
        self._opened()

    def advance(self, n: float = 1, *, part: str | None = None, **live: float | str) -> None:
        """Count `n` more as done."""
        ended = None
        if part in self._left:
            self._left[part] -= 1
            ended = part if self._left[part] == 0 else None
        self._move(self._done + n, ended, live)

    def reach(self, done: float, **live: float | str) -> None:
        """Say how much is done in all."""
        self._move(done, None, live)

    def finish(self) -> None:
        """End; what was drawn stays."""
        if self._running:
            self._running = False
            self._closed()

    _running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def _move(self, done: float, ended: str | None, live: Mapping[str, float | str]) -> None:
        self._done = done
        self._live = _figures(live) or self._live
        self._moved(ended)

    def _so_far(self) -> str:
        return f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"

    def _opened(self) -> None:
        """Draw the beginning."""

    def _moved(self, ended: str | None) -> None:
        """Draw a move; `ended` is the part it completed, if any."""

    def _closed(self) -> None:
        """Draw the end."""


class _Lines(Progress):
    """Plain lines, for logs: one at the start, one for each part, one at the end, and one a minute between."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last = 0.0

    def _opened(self) -> None:
        self._last = now()
        self._tell(self._description if self._total == 1 else f"{self._description}: {self._total:g}")

    def _moved(self, ended: str | None) -> None:
        if ended is None and now() - self._last < _MINUTE:
            return
        self._last = now()
        left = (self._last - self._began) * (self._total - self._done) / self._done if self._done else None
        words = [f"{ended} done"] if ended else []
        words += [self._so_far()] + ([f"{duration(left)} left"] if left else []) + ([self._live] if self._live else [])
        self._tell(f"{self._description}: {', '.join(words)}")

    def _closed(self) -> None:
        self._tell(f"{self._description}: {self._so_far()} in {duration(now() - self._began)}")


class _Bars(Progress):
    """Rich bars with the time left: one for the whole, one for its parts when it has any."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: Any = None

    def tell(self, text: str) -> bool:
        """Write a line above the bars; False when there are none."""
        if self._drawn is not None:
            self._drawn.console.print(text, soft_wrap=True)
        return self._drawn is not None

    def _opened(self) -> None:
        from rich import progress
        from rich.console import Console as Rich

        share = self._total == 1
        self._drawn = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn() if share else progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[live]}"),
            console=Rich(file=self._stream, markup=False, emoji=False, highlight=False),
            # Images of different cells take different times: look far back for the rate.
            speed_estimate_period=600.0,
            redirect_stdout=False,
        )
        self._whole = self._drawn.add_task(self._description, total=self._total, live="")
        self._parts = self._drawn.add_task("cells", total=len(self._left), live="") if self._left else None
        self._drawn.start()

    def _moved(self, ended: str | None) -> None:
        self._drawn.update(self._whole, completed=self._done, live=self._live)
        if ended is not None:
            self._drawn.advance(self._parts)

    def _closed(self) -> None:
        self._drawn.stop()
        self._drawn = None


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
        self._bars: _Bars | None = None

    def data(self, text: str) -> None:
        """Write text to stdout, as it is, with a line end."""
        self._out.write(text if text.endswith("\n") else text + "\n")
        self._out.flush()

    def table(
        self, table: pd.DataFrame, name: str | None = None, *, title: str | None = None, format: str | None = None
    ) -> None:
        """Write a table to stdout in `format` (one of `FORMATS`), else in the console's.

        `name` is the table's name in the schema, where it has one. CSV and JSON hold the figures as they are; the
        others are for reading (`report.reading`) and carry `title` and notes. An unknown format raises `UserError`.
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
        if not _fancy(self._err):
            return _Lines(self._tell)
        self._bars = _Bars(self._err)
        return self._bars

    def _tell(self, text: str) -> None:
        if self._bars is not None and self._bars.tell(text):
            return
        self._err.write(text + "\n")
        self._err.flush()

    def _read(self, table: pd.DataFrame, name: str | None, title: str | None, format: Format) -> None:
        from lantern_bench.report.reading import readable

        shown, notes = readable(table, name)
        if format == "md":
            heads = [f"**{title}**\n"] if title else []
            self.data("\n".join([*heads, _markdown(shown), *(f"\n{note}" for note in notes)]))
        elif format == "latex":
            remarks = [f"% {note}" for note in ([title] if title else []) + list(notes)]
            self.data("\n".join([*remarks, shown.to_latex(index=False, escape=True)]))
        else:
            _draw(self._out, shown, title, notes)


def duration(seconds: float) -> str:
    """Return a time as people say it: `42 s`, `4 min 12 s`, `1 h 03 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _fancy(stream: TextIO) -> bool:
    """Whether escape codes may be written there."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _markdown(shown: pd.DataFrame) -> str:
    rows = [list(shown.columns), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _draw(stream: TextIO, shown: pd.DataFrame, title: str | None, notes: tuple[str, ...]) -> None:
    """Draw a table. On a terminal long cells wrap; elsewhere it is as wide as it needs to be."""
    from rich import box
    from rich.console import Console as Rich
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(shown.columns):
        # What is read is on the left, what is compared on the right.
        figures = number > 0 and any(character.isdigit() for character in "".join(shown[column])[:1])
        drawn.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in shown.itertuples(index=False):
        drawn.add_row(*row)
    drawing, fancy = StringIO(), _fancy(stream)
    width = None if stream.isatty() else 10_000
    rich = Rich(file=drawing, width=width, force_terminal=fancy, color_system="auto" if fancy else None, markup=False)
    rich.print(drawn)
    for note in notes:
        rich.print(note, soft_wrap=True, highlight=False)
    stream.writelines(line.rstrip() + "\n" for line in drawing.getvalue().splitlines())


def _figures(figures: Mapping[str, float | str]) -> str:
    """Figures of the moment: `mal 2.90, s/image 0.712`."""
    words = [
        f"{name.replace('_per_', '/').replace('_', ' ')} {value if isinstance(value, str) else f'{value:.3g}'}"
        for name, value in figures.items()
    ]
    return ", ".join(words)
