"""Start a worker process, send it its work, and receive its events."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil

from lantern_bench.sweeps.events import Event
from lantern_bench.sweeps.request import Request
from lantern_bench.utils import signals
from lantern_bench.utils.causes import explained
from lantern_bench.utils.clock import collect_seldom, now
from lantern_bench.utils.cores import cpu_quota, usable_cores
from lantern_bench.utils.errors import LanternError, RecordsFailedError
from lantern_bench.utils.progress import Emit, heard_by
from lantern_bench.utils.quick_exit import exit_quickly
from lantern_bench.utils.text import one_line

SECONDS_TO_END = 30.0  # after these seconds a worker that does not end is killed
_BEAT = 2.0  # seconds without an event after which a worker sends None, between two steps
_POLL = 1.0  # seconds between two checks for signals
_ADVICE = "Its finished images are kept. The same command continues."


class WorkerEndedError(RecordsFailedError):
    """A worker process ended without sending an error."""


def events_of(
    work: Callable[[Request, Emit], object],
    request: Request,
    name: str,
    *,
    stderr: int | None = None,
) -> Iterator[Event]:
    """Start a worker process and yield its events. The worker ends with this generator.

    Args:
        work: As of `worker_process`.
        request: The sweep.
        name: Name of the worker in errors.
        stderr: As of `worker_process`.

    Raises:
        WorkerEndedError: The worker process has ended without an error.
        RecordsFailedError: The worker gave no sign of life for `request.worker_timeout` seconds.
        LanternError: The error that the worker raised.
    """
    last_sign = now()
    last_event = "it started"
    with worker_process(work, request, stderr=stderr) as (worker, parent_end):
        with contextlib.suppress(EOFError, ConnectionError):  # the worker has ended
            while True:
                signals.check()
                if parent_end.poll(_POLL):
                    event = parent_end.recv()
                    last_sign = now()
                    if isinstance(event, LanternError):
                        # A signal would interrupt its exit.
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            worker.wait(SECONDS_TO_END)
                        raise event
                    if event is not None:
                        last_event = type(event).__name__
                        yield event
                elif now() - last_sign > request.worker_timeout:
                    worker.kill()
                    raise RecordsFailedError(
                        f"{name} hangs: no sign of life in {request.worker_timeout:g} s after "
                        f"{last_event}; it was ended",
                        f"{_ADVICE} --worker-timeout SECONDS waits longer.",
                    )
        code = worker.wait()
        if code:
            end = f"ended with code {code}"
            if code < 0:
                end = f"was ended by {signal.Signals(-code).name}"
            raise WorkerEndedError(f"{name} {end}", _ADVICE)


@contextlib.contextmanager
def worker_process(
    work: Callable[[Request, Emit], object], request: Request, *, stderr: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Connection[Any, Any]]]:
    """Start a worker process, which ends with the block.

    Args:
        work: A function of a module, which the worker calls with the request and an `Emit`.
        request: The sweep.
        stderr: As of `subprocess.Popen`: where the standard error of the worker goes, by default
            to the parent's own.

    Yields:
        The process, and the connection from which its events are read.
    """
    parent_end, worker_end = Pipe()
    # A new interpreter does not import the parent's main module, so a script that calls `sweep`
    # needs no guard.
    # In a separate session, Ctrl-C reaches only the parent, which ends the worker with one signal.
    worker = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(worker_end.fileno())],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=[worker_end.fileno()],
        start_new_session=True,
    )
    worker_end.close()
    try:
        with contextlib.suppress(ConnectionError):  # the worker has ended
            parent_end.send((work, request))
        yield worker, parent_end
    finally:
        _end(worker)
        parent_end.close()


@contextlib.contextmanager
def unheard_process(
    work: Callable[[Request, Emit], object], request: Request
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker process that nobody listens to, as `worker_process`.

    What it sends is dropped at every check of signals; unread, it would fill the connection, and
    the worker would wait. Its standard error is dropped too.
    """
    with worker_process(work, request, stderr=subprocess.DEVNULL) as (worker, parent_end):

        def drop() -> None:
            with contextlib.suppress(EOFError, OSError):  # the worker has ended
                while parent_end.poll():
                    parent_end.recv()

        with signals.on_check(drop):
            yield worker


def has_room_for_second() -> bool:
    """Return whether this machine has a core, and memory, for a second process like this one."""
    cores = min(len(usable_cores()), cpu_quota() or 2)
    memory = psutil.Process().memory_info().rss
    return cores >= 2 and memory < psutil.virtual_memory().available / 2


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Ask a worker to stop. Kill it if it does not, or on a second signal."""
    try:
        worker.terminate()
        worker.wait(SECONDS_TO_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        worker.kill()
        worker.wait()


# ---- The worker


def serve(parent: Connection[Any, Any]) -> None:
    """Do the work that the parent sends, and send back its events, or the error that ended it."""
    work, request = parent.recv()
    last_sent = now()

    def send(event: object) -> None:
        nonlocal last_sent
        parent.send(event)
        last_sent = now()

    def beat() -> None:
        if now() - last_sent > _BEAT:
            send(None)

    def end_with_parent() -> None:  # so that the run directory is free again
        with contextlib.suppress(EOFError, OSError):
            parent.recv()  # the parent sends nothing more: this returns when its end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with signals.on_check(beat), heard_by(send):
            work(request, send)
    except LanternError as error:
        send(error)
    except Exception as error:
        cause = explained(error)
        if type(cause) is not LanternError:
            send(cause)
            return
        # The parent may hide this process's standard error.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name} line {frame.lineno}"
        send(
            LanternError(
                f"internal, in {place}: {one_line(error, most=500)}",
                "This is a bug in lantern-bench.",
            )
        )


def _main(descriptor: int) -> int:
    # standard output is for the data of the command
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    collect_seldom()
    try:
        with signals.signals_noted():
            serve(Connection(descriptor))
    except KeyboardInterrupt as stopped:
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:
        return 128 + signal.SIGTERM
    finally:
        # the exit handlers of libraries print what interrupts them
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    exit_quickly(_main(int(sys.argv[1])))
