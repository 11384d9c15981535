"""Stop on SIGINT (Ctrl-C) and SIGTERM at moments when nothing is half done.

An exception inside a finalizer or a library's callback is only printed by Python. So the handler
also records the signal, and `check` raises it again. Every decode step and every event calls it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_received: list[int] = []
_delays = 0
_on_check: list[Callable[[], None]] = []


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks the program to stop.

    `exit_code` is 130 for SIGINT and 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def check() -> None:
    """Raise `Stopped` if a signal has asked to stop; cheap enough to be called often."""
    if _received:
        raise Stopped(_received[0])
    for listen in _on_check:
        listen()


def exit_code() -> int | None:
    """Return the exit code of a program that was asked to stop; None if it was not."""
    return 128 + _received[0] if _received else None


@contextmanager
def delayed() -> Iterator[None]:
    """Delay the first signal until the next `check` after the block; a second one stops at once."""
    global _delays
    _delays += 1
    try:
        yield
    finally:
        _delays -= 1


@contextmanager
def on_check(listen: Callable[[], None]) -> Iterator[None]:
    """Call `listen` at every `check`, as a heartbeat."""
    _on_check.append(listen)
    try:
        yield
    finally:
        _on_check.remove(listen)


@contextmanager
def signals_noted() -> Iterator[None]:
    """Record SIGINT and SIGTERM and raise them as `Stopped`, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def receive(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that a library forked: let the signal end it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _received.append(number)
        if not _delays or len(_received) > 1:
            raise Stopped(number)

    _received.clear()
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()
