"""Progress of something long: bars on a terminal, plain lines in a log, nothing when nobody wants it.

Whoever does the work counts; what is drawn, and how often, is decided here. A log gets a line for each finished part
and at most one a minute besides, since a bar in a file is silent until its end or fills the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from lantern_bench.clock import now

__all__ = ["Bars", "Lines", "Progress", "duration"]

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

    def share(self, what: str, done: float) -> None:
        """Say which share of `what` is done; another `what` than before begins anew."""
        if not self._running or self._description != what:
            self.start(1, what)
        self.reach(done)

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
        self._live = _words(live) or self._live
        self._moved(ended)

    def _so_far(self) -> str:
        return f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"

    def _opened(self) -> None:
        """Draw the beginning."""

    def _moved(self, ended: str | None) -> None:
        """Draw a move; `ended` is the part it completed, if any."""

    def _closed(self) -> None:
        """Draw the end."""


class Lines(Progress):
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


class Bars(Progress):
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


def duration(seconds: float) -> str:
    """Return a time as people say it: `42 s`, `4 min 12 s`, `1 h 03 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _words(figures: Mapping[str, float | str]) -> str:
    """Figures of the moment: `mal 2.90, s/image 0.712`."""
    words = [
        f"{name.replace('_per_', '/').replace('_', ' ')} {value if isinstance(value, str) else f'{value:.3g}'}"
        for name, value in figures.items()
    ]
    return ", ".join(words)
