"""Standard output and standard error that say why they cannot be written.

A reader may be gone, a disk may be full, and a program may be started with closed streams.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from lantern_bench.utils.errors import RefusedError


class ReaderGoneError(BaseException):
    """The reader of a pipe has ended; like SIGPIPE it ends the program, without a message.

    It is no `Exception`, because no command can go on.
    """

    exit_code = 141  # 128 + SIGPIPE, as shells report other programs


class _Checked:
    """A text stream whose `OSError` names the stream; everything else is the stream's own."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        # Raised by every later call too: libraries suppress errors where they probe a stream.
        self._failure: BaseException | None = None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def write(self, text: str) -> int:
        with self._named():
            return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        with self._named():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            self._failure = self._named_error(error)
            # What is still in the buffer would fail again when the program ends.
            with contextlib.suppress(OSError):
                _connect(self._stream.fileno(), os.O_WRONLY)
            raise self._failure from error

    def _named_error(self, error: OSError) -> BaseException:
        if error.errno == errno.EPIPE:
            return ReaderGoneError()
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        return RefusedError(
            f"{self._name}: cannot be written: {reason}",
            "What the command wrote to files is kept. Make room, or redirect it elsewhere.",
        )


def _connect(number: int, flags: int) -> None:
    """Let a file descriptor lead nowhere."""
    nowhere = os.open(os.devnull, flags)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def open_closed_streams() -> None:
    """Open standard streams that the program was started without.

    Otherwise the next file gets the number of the stream, and messages would be written into it.
    Writing to standard output then fails; messages to standard error have no reader.
    """
    if sys.stdin is None:
        _connect(0, os.O_RDONLY)
    if sys.stdout is None:
        _connect(1, os.O_RDONLY)
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        _connect(2, os.O_WRONLY)
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115


@contextlib.contextmanager
def checked_streams() -> Iterator[None]:
    """Let errors of standard output and standard error name the stream."""
    stdout: Any = _Checked(sys.stdout, "standard output")
    stderr: Any = _Checked(sys.stderr, "standard error")
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
