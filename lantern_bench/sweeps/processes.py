"""Decode in worker processes, one after the other. The parent relays their events."""

from __future__ import annotations

from dataclasses import replace

from lantern_bench.sweeps.events import ImageDone, Started
from lantern_bench.sweeps.request import Request
from lantern_bench.sweeps.worker_process import events_of
from lantern_bench.utils.progress import Emit, Note, ProgressEvent


def decode_in_processes(request: Request, emit: Emit) -> None:
    """Decode the missing images in new processes, one at a time.

    Args:
        request: The sweep, whose experiment says how many processes share its prompts.
        emit: Receives the events of all workers, as one run would send them.

    Raises:
        RecordsFailedError: A worker has ended or hangs.
        LanternError: Any error of a worker.
    """
    settings = request.experiment.settings
    missing = replace(request.plan, tasks=tuple(request.missing()))
    dealt = request.plan.deal(missing, settings.processes, settings.seed)
    # If nothing is missing, one worker still checks that the run can be continued.
    plans = [plan for plan in dealt if plan.tasks] or [missing]
    notes = set[Note]()
    for number, plan in enumerate(plans, start=1):
        name = f"worker process {number} of {len(plans)}"
        for event in events_of(_decode_missing, replace(request, plan=plan), name):
            match event:
                case Started() if number == 1:
                    emit(Started.of(request.plan, missing.tasks))
                case Note() if event not in notes:
                    notes.add(event)
                    emit(event)
                case ProgressEvent() if number == 1:
                    emit(event)
                case ImageDone():
                    emit(event)


def _decode_missing(request: Request, emit: Emit) -> None:
    # Imported here, because it imports torch, which the parent does not need.
    from lantern_bench.sweeps.decode_missing import decode_missing

    decode_missing(request, emit)
