"""A run made by several worker processes, one after the other: the parent deals the prompts and relays events.

A worker (`python -m lantern_bench.runs.processes`) reads its request from the standard input, decodes as a sweep of one
process does, locks and writes the run directory itself, and sends events through its standard output. It starts from a
new interpreter, not from the parent's main module, so a script that calls `sweep` needs no guard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeAlias

from lantern_bench import stopping
from lantern_bench.clock import now
from lantern_bench.errors import LanternError, RecordsFailedError
from lantern_bench.runs.store import done_images

if TYPE_CHECKING:
    from lantern_bench.runs.runner import Event
    from lantern_bench.runs.sweep import Request


Work: TypeAlias = Callable[[Any, Callable[[Any], None]], object]
"""What a worker process does with its request: `work(request, tell)`, a function of a module."""

SECONDS_TO_END = 30.0  # for a worker that was asked to stop, or has told its error, to end by itself
_BEAT = 2.0  # seconds after which a worker that decodes says so, between two steps
_ALIVE, _ENDED, _SILENT = None, object(), object()
_KEPT = "Its finished images are kept. The same command continues."


def decode_in_processes(request: Request, tell: Callable[[Event], None]) -> int:
    """Make the missing images in `processes` new processes, one at a time; return how many images failed.

    Raises the error that a worker raises, and `RecordsFailedError` for a worker that dies or hangs.
    """
    from lantern_bench.runs.runner import EncodedCaptions, ImageDone, Loaded, Started
    from lantern_bench.runs.sweep import decode_missing

    done = done_images(request.folder)
    waiting = [unit for unit in request.plan.units if (unit.cell.cell_id, unit.prompt.id, unit.repeat) not in done]
    left = replace(request.plan, units=tuple(waiting))
    count, failed = request.experiment.settings.processes, 0
    # Without anything to do one worker still checks that the run can be continued.
    parts = [part for part in request.plan.deal(left, count, request.experiment.settings.seed) if part.units] or [left]
    for number, part in enumerate(parts, start=1):
        name = f"worker process {number} of {len(parts)}"
        for event in events_of(decode_missing, request._replace(plan=part), name):
            failed += isinstance(event, ImageDone) and event.failed
            if isinstance(event, Started):
                event = Started(len(request.plan.units) - len(waiting), Counter(u.cell.cell_id for u in waiting))
            if number == 1 or not isinstance(event, Loaded | EncodedCaptions | Started):
                tell(event)
    return failed


class WorkerEndedError(RecordsFailedError):
    """A worker process ended without telling why."""


def events_of(work: Work, request: Request, name: str, *, said: IO[bytes] | None = None) -> Iterator[Any]:
    """Start a worker that calls `work(request, tell)` and yield its events; on the way out it is ended and waited for.

    What it writes to its standard error goes to `said`, by default to that of this process. Raises the error that the
    worker raises, `WorkerEndedError` for one that dies, and `RecordsFailedError` for one that gives no sign of life for
    `request.worker_timeout` seconds.
    """
    command = [sys.executable, "-m", __spec__.name]
    # A session of its own: Ctrl-C reaches only the parent, which ends the worker with one signal.
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
    assert worker.stdin is not None and worker.stdout is not None
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(worker.stdout, told), daemon=True)
    listener.start()
    last = "it started"
    try:
        pickle.dump((work, request), worker.stdin)
        worker.stdin.flush()  # and stays open: its end tells the worker that this process is gone
        while (event := _next(told, request.worker_timeout)) is not _ENDED:
            if event is _SILENT:
                worker.kill()
                what = f"{name} hangs: no sign of life in {request.worker_timeout:g} s after {last}; it was ended"
                raise RecordsFailedError(what, f"{_KEPT} --worker-timeout SECONDS waits longer.")
            if isinstance(event, LanternError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(SECONDS_TO_END)  # it has said its last word: a signal would interrupt its exit
                raise event
            if event is not _ALIVE:
                last = f"{getattr(getattr(event, 'unit', None), 'image', type(event).__name__)}"
                yield event
        if (code := worker.wait()) != 0:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise WorkerEndedError(f"{name} {how}", _KEPT)
    finally:
        _end(worker)
        listener.join(SECONDS_TO_END)


def _listen(pipe: BinaryIO, told: queue.SimpleQueue[object]) -> None:
    """Pass on what a worker sends, until it has ended."""
    with pipe:
        try:
            while True:
                told.put(pickle.load(pipe))
        except (EOFError, pickle.UnpicklingError):
            told.put(_ENDED)


def _next(told: queue.SimpleQueue[object], timeout: float) -> object:
    """The next thing that a worker sends; `_ENDED` behind the last, `_SILENT` after `timeout` seconds without one."""
    until = now() + timeout
    while (left := until - now()) > 0:
        with contextlib.suppress(queue.Empty):
            return told.get(timeout=min(left, 1.0))
        stopping.check()
    return _SILENT


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Ask a worker to stop where nothing is half done; kill it when it does not, or on a second signal."""
    try:
        worker.terminate()
        worker.wait(SECONDS_TO_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        worker.kill()
        worker.wait()
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()  # type: ignore[union-attr]  # it is a pipe


def work(requests: BinaryIO, events: BinaryIO) -> None:
    """Do what a request asks for and send its events, or the error that ended it."""
    (do, request), sent = pickle.load(requests), now()

    def tell(event: object) -> None:
        nonlocal sent
        pickle.dump(event, events)
        events.flush()
        sent = now()

    def live() -> None:
        if now() - sent > _BEAT:
            tell(_ALIVE)

    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), daemon=True).start()
    try:
        with stopping.on_check(live):
            do(request, tell)
    except LanternError as error:
        tell(error)
    except Exception as error:
        # The parent may hide this process's standard error.
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name} line {where.lineno}"
        said = f"internal: {type(error).__name__} in {at}: {' '.join(str(error).split())[:500]}"
        tell(LanternError(said, "This is a bug in lantern-bench."))


def _end_with_parent(requests: int) -> None:
    """Stop this process when the one that wrote the request is gone, so that the run directory is free again."""
    while os.read(requests, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the events
    try:
        with stopping.signals_noted():
            work(sys.stdin.buffer, events)
    except KeyboardInterrupt as stopped:
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the exit handlers of libraries print what interrupts them
    return 0


if __name__ == "__main__":
    sys.exit(_main())
