"""Notes and progress events, the callback that receives them, and the progress that people see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias

from lantern_bench.utils.clock import now
from lantern_bench.utils.text import duration

_LOG_SECONDS = 60.0  # between two lines of progress in a log
_SLOW_SECONDS = 2.0  # after which `slow_task` shows progress


class Note(NamedTuple):
    """A text for the user."""

    text: str
    advice: str | None = None  # what the user can do
    level: Literal["detail", "info", "warning"] = "info"  # details are shown with `--verbose` only


class ProgressEvent(NamedTuple):
    """How much of a long task is done; decoding reports `ImageDone` instead."""

    label: str
    done: float
    total: float = 1  # 1 where `done` is a fraction
    figures: Mapping[str, Any] = {}  # shown beside the progress
    elapsed: float = 0.0  # seconds since a task began that is shown because it is slow


Emit: TypeAlias = Callable[[Any], None]
"""Receives every event of a run: `Note`, `ProgressEvent`, and the events of `sweeps/events.py`."""


def ignore_events(_event: object) -> None:
    """Ignore an event: the default of functions that take an `Emit`."""


# ---- Events of functions that take no `Emit`: loading, hashing, tables, captions

_listener: ContextVar[Emit] = ContextVar("listener", default=ignore_events)


@contextmanager
def heard_by(emit: Emit) -> Iterator[None]:
    """Let `emit` receive the events of `tell` and `slow_task`."""
    token = _listener.set(emit)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(event: Note | ProgressEvent) -> None:
    """Send an event to the listener of `heard_by`, if there is one."""
    _listener.get()(event)


def slow_task(label: str, total: float) -> Callable[[float], None]:
    """Begin a task whose progress is shown if it takes longer than 2 seconds.

    Args:
        label: Names the task.
        total: How much there is to do.

    Returns:
        A function that is told how much more is done.
    """
    began = now()
    done = 0.0

    def add(more: float) -> None:
        nonlocal done
        done += more
        elapsed = now() - began
        if elapsed > _SLOW_SECONDS:
            tell(ProgressEvent(label, done / total, elapsed=elapsed))

    return add


class Progress:
    """Progress of long tasks, one after another.

    A terminal and a notebook show bars. A log gets a line at the start and at the end of a task,
    and at most one a minute between.

    Args:
        write_line: Receives the lines of a log.
        stream: A terminal for bars; None: there are lines instead.
    """

    # Of the running task.
    _done: float
    _figures: str
    _start_time: float
    _line_time: float

    def __init__(self, write_line: Callable[[str], None], stream: TextIO | None) -> None:
        self._write_line = write_line
        self._stream = stream
        self._description: str | None = None  # description of the running task
        self._bar: Any = None

    def share(
        self,
        description: str,
        done: float,
        total: float = 1,
        *,
        elapsed: float = 0.0,
        **figures: float | str,
    ) -> None:
        """Show how much of a task is done.

        Args:
            description: Names the task. A new description ends the last task.
            done: How much is done.
            total: When the task is done; 1 if `done` is a fraction.
            elapsed: Seconds since the first part began, of a task that is shown earlier or later.
                Only they count for the time left. The task ends when it is done.
            **figures: Figures that are shown beside the progress.
        """
        if description != self._description:
            self.close()
            self._start(description, total, elapsed)
        if elapsed and self._done == 0:
            waited = now() - elapsed - self._start_time
            self._start_time += waited
            if self._bar is not None:
                self._bar.start_t += waited
        words = []
        for name, value in figures.items():
            text = value if isinstance(value, str) else f"{value:.3g}"
            words.append(f"{name.replace('_per_', '/').replace('_', ' ')} {text}")
        self._done = done
        self._figures = ", ".join(words) or self._figures
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures, refresh=False)
            self._bar.update(done - self._bar.n)
        elif now() - self._line_time >= _LOG_SECONDS:
            self._line_time = now()
            time = ""
            if 0 < done < total:
                seconds = self._line_time - self._start_time
                time = f", {duration(seconds * (total - done) / done)} left"
            self._log(time)
        if elapsed and done >= total:
            self.close()

    def close(self) -> None:
        """End the task. Its bar or lines stay visible."""
        if self._bar is not None:
            self._bar.close()
        elif self._description is not None:
            self._log(f" in {duration(now() - self._start_time)}")
        self._description = self._bar = None

    def _start(self, description: str, total: float, elapsed: float) -> None:
        self._description = description
        self._total = total
        self._figures = ""
        self._done = 0.0
        self._line_time = now()
        self._start_time = now()
        if self._stream is None and elapsed:
            self._line_time -= _LOG_SECONDS  # the first line says how much is done
            return
        if self._stream is None:
            self._write_line(description if total == 1 else f"{description}: {total:g}")
            return
        from tqdm.auto import tqdm

        count = "" if total == 1 else " {n:g}/{total:g}"
        self._bar = tqdm(
            desc=description,
            total=total,
            file=self._stream,
            # Images of different cells take different times: estimate from all of them.
            smoothing=0,
            bar_format=f"{{l_bar}}{{bar}}|{count} {{elapsed}}, {{remaining}} left{{postfix}}",
        )

    def _log(self, time: str) -> None:
        """Write a line: how much of the task is done, the time, and the figures."""
        done = f"{self._done:.0%}" if self._total == 1 else f"{self._done:g} of {self._total:g}"
        figures = f", {self._figures}" if self._figures else ""
        self._write_line(f"{self._description}: {done}{time}{figures}")
