"""A run made by several worker processes, one after the other: the parent deals the prompts and relays events.

A worker (`python -m lantern_bench.runs.processes`) reads its request from the standard input, decodes as a sweep of one
process does, locks and writes the run directory itself, and sends events through its standard output. It starts from a
new interpreter, not from the parent's main module, so a script that calls `sweep` needs no guard.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from lantern_bench.errors import LanternError, RecordsFailedError
from lantern_bench.runs.store import done_images

if TYPE_CHECKING:
    from lantern_bench.runs.runner import Event
    from lantern_bench.runs.sweep import Request


SECONDS_TO_END = 30.0  # for a worker that has told its error to end by itself


def decode_in_processes(request: Request, tell: Callable[[Event], None]) -> int:
    """Make the missing images in `processes` new processes, one at a time; return how many images failed.

    Raises the error that a worker raises, and `RecordsFailedError` for a worker that dies.
    """
    from lantern_bench.runs.runner import EncodedCaptions, ImageDone, Loaded, Started

    done = done_images(request.folder)
    waiting = [unit for unit in request.plan.units if (unit.cell.cell_id, unit.prompt.id, unit.repeat) not in done]
    left = replace(request.plan, units=tuple(waiting))
    count, failed = request.experiment.settings.processes, 0
    # Without anything to do one worker still checks that the run can be continued.
    parts = [part for part in request.plan.deal(left, count, request.experiment.settings.seed) if part.units] or [left]
    for number, part in enumerate(parts, start=1):
        for event in _events(request._replace(plan=part), f"worker process {number} of {len(parts)}"):
            failed += isinstance(event, ImageDone) and event.failed
            if isinstance(event, Started):
                event = Started(len(request.plan.units) - len(waiting), Counter(u.cell.cell_id for u in waiting))
            if number == 1 or not isinstance(event, Loaded | EncodedCaptions | Started):
                tell(event)
    return failed


def _events(request: Request, name: str) -> Any:
    """Start a worker and yield its events; on the way out it is ended and waited for."""
    command = [sys.executable, "-m", __spec__.name]
    # A session of its own: Ctrl-C reaches only the parent, which ends the worker with one signal.
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdin is not None and worker.stdout is not None
    try:
        with worker.stdin:
            pickle.dump(request, worker.stdin)
        while True:
            try:
                event = pickle.load(worker.stdout)
            except (EOFError, pickle.UnpicklingError):
                break
            if isinstance(event, LanternError):
                worker.wait(SECONDS_TO_END)  # it has said its last word: a signal now would only interrupt its exit
                raise event
            yield event
        if (code := worker.wait()) != 0:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise RecordsFailedError(f"{name} {how}", "Its finished images are kept. The same command continues.")
    finally:
        worker.terminate()
        worker.wait()
        worker.stdout.close()


def work(requests: BinaryIO, events: BinaryIO) -> None:
    """Decode what a request asks for and send its events, or the error that ended it."""
    request = pickle.load(requests)

    def tell(event: object) -> None:
        pickle.dump(event, events)
        events.flush()

    from lantern_bench.runs.sweep import decode_missing

    try:
        decode_missing(request, tell)
    except LanternError as error:
        tell(error)


def _main() -> int:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the events
    try:
        work(sys.stdin.buffer, events)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the exit handlers of libraries print what interrupts them
    return 0


if __name__ == "__main__":
    sys.exit(_main())
