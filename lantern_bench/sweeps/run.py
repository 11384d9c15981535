"""Run a request: decode the missing images and score them."""

from __future__ import annotations

from lantern_bench.devices.threads import prepare_environment
from lantern_bench.metrics.protocols import EMBEDDED
from lantern_bench.storage.run_directory import done_images
from lantern_bench.sweeps.events import Event
from lantern_bench.sweeps.request import Request
from lantern_bench.utils import signals
from lantern_bench.utils.errors import RecordsFailedError
from lantern_bench.utils.progress import Emit, Note


def run(request: Request, emit: Emit) -> int:
    """Decode the missing images of a request and score them; return how many images failed.

    Raises, before the first image, `RefusedError` for missing weights, drafters or scorers and for images that were
    decoded in another way, `UserError` for malformed files; later `RecordsFailedError` when a worker dies or hangs.
    """
    prepare_environment()

    def emit_and_check(event: Event) -> None:
        emit(event)
        signals.check()

    try:
        return _decode_and_score(request, emit_and_check)
    except KeyboardInterrupt:
        done = done_images(request.folder)
        count = sum(task.key in done for task in request.plan.tasks)
        text = f"interrupted: {count} of {len(request.plan.tasks)} images are done and kept in {request.folder}"
        before_first = "interrupted before the first image; encoded captions are kept"
        emit(Note(text if count else before_first, "The same command continues."))
        raise


def _decode_and_score(request: Request, emit: Emit) -> int:
    settings = request.experiment.settings
    metrics = set(request.experiment.settings.metrics)
    device = settings.device if request.ray is None else "auto"  # this machine scores
    scorers = None
    # Of the bundled scorers none can be missing; loading them first would delay the first image.
    if "quality" in metrics and (
        request.protocol.name != EMBEDDED or settings.reference is not None
    ):
        from lantern_bench.metrics.score_run import load_scorers_of

        scorers = load_scorers_of(request, device)
    if request.ray is not None:
        from lantern_bench.sweeps.ray_cluster import decode_on_ray

        failed = decode_on_ray(request, emit)
    elif settings.processes == 1:
        from lantern_bench.sweeps.runner import decode_missing

        failed = decode_missing(request, emit)
    else:
        from lantern_bench.sweeps.processes import decode_in_processes

        failed = decode_in_processes(request, emit)
    if metrics == {"speed"} or not done_images(request.folder):
        return failed
    from lantern_bench.metrics import score_run, token_sums

    if "quality" in metrics:
        score_run.score_run(
            request.folder, *(scorers or score_run.load_scorers_of(request, device)), emit
        )
    if "distance" in metrics:
        token_sums.score_tokens(request.folder, device, emit)
    return failed


def check_failed(request: Request, failed: int) -> None:
    """Raise `RecordsFailedError` when images failed."""
    if failed:
        message = f"{failed} of {len(request.plan.tasks)} images failed; see {request.folder / 'records.jsonl'}"
        raise RecordsFailedError(message, "The same command tries them again.")
