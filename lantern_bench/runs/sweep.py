"""Run a request: decode the missing images and score them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lantern_bench import stopping
from lantern_bench.config.protocols import EMBEDDED
from lantern_bench.errors import RecordsFailedError
from lantern_bench.runs.events import Emit, Event, Note
from lantern_bench.runs.request import Request
from lantern_bench.runs.store import done_images
from lantern_bench.runs.threads import prepare_environment

if TYPE_CHECKING:
    from lantern_bench.metrics.features import Reference
    from lantern_bench.runs.scoring import Scorers


def run(request: Request, emit: Emit) -> int:
    """Decode the missing images of a request and score them; return how many images failed.

    Raises, before the first image, `RefusedError` for missing weights, drafters or scorers and for images that were
    decoded in another way, `UserError` for malformed files; later `RecordsFailedError` when a worker dies or hangs.
    """
    prepare_environment()

    def emit_and_check(event: Event) -> None:
        emit(event)
        stopping.check()

    try:
        if request.ray is None:
            return run_here(request, emit_and_check)
        from lantern_bench.runs.ray_engine import run_on_ray

        return run_on_ray(request, emit_and_check)
    except KeyboardInterrupt:
        done = done_images(request.folder)
        count = sum(task.key in done for task in request.plan.tasks)
        text = f"interrupted: {count} of {len(request.plan.tasks)} images are done and kept in {request.folder}"
        before_first = "interrupted before the first image; encoded captions are kept"
        emit(Note(text if count else before_first, "The same command continues."))
        raise


def run_here(request: Request, emit: Emit) -> int:
    """Run a request on this machine. Returns and raises as `run`."""
    settings = request.experiment.settings
    # Of the bundled scorers none can be missing; loading them first would delay the first image.
    bundled = request.protocol.name == EMBEDDED and settings.reference is None
    quality = _load_scorers(request) if "quality" in settings.metrics and not bundled else None
    if settings.processes == 1:
        from lantern_bench.runs.runner import decode_missing

        failed = decode_missing(request, emit)
    else:
        from lantern_bench.runs.processes import decode_in_processes

        failed = decode_in_processes(request, emit)
    if "quality" in settings.metrics and done_images(request.folder):
        from lantern_bench.runs.scoring import score_run

        score_run(request.folder, *(quality or _load_scorers(request)), emit)
    if "distance" in settings.metrics and done_images(request.folder):
        from lantern_bench.runs.scoring import score_tokens

        score_tokens(request.folder, settings.device, emit)
    return failed


def _load_scorers(request: Request) -> tuple[Scorers, Reference | None]:
    from lantern_bench.runs.scoring import load_scorers_of  # importing the scorers takes seconds

    return load_scorers_of(request, request.experiment.settings.device)


def check_failed(request: Request, failed: int) -> None:
    """Raise `RecordsFailedError` when images failed."""
    if failed:
        message = f"{failed} of {len(request.plan.tasks)} images failed; see {request.folder / 'records.jsonl'}"
        raise RecordsFailedError(message, "The same command tries them again.")
