"""Run a sweep: decode the missing images, score them, write the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lantern_bench.devices.environment import prepare_environment
from lantern_bench.storage.run_directory import RECORDS, done_images
from lantern_bench.sweeps.events import Event
from lantern_bench.sweeps.request import Request, or_without_quality
from lantern_bench.utils import signals
from lantern_bench.utils.errors import RecordsFailedError, RefusedError, joined
from lantern_bench.utils.progress import Emit, Note

if TYPE_CHECKING:
    import pandas as pd


def run(request: Request, emit: Emit) -> dict[str, pd.DataFrame]:
    """Decode the missing images of a request, score them and write the tables.

    Args:
        request: A sweep that `prepare` has checked.
        emit: Receives the events of `sweeps/events.py`.

    Returns:
        The tables as written to the CSV files, by name.

    Raises:
        UserError: A file of a model is malformed.
        RefusedError: Weights, drafters or scorers are missing, or images were decoded with other
            settings. Raised before the first image.
        RecordsFailedError: A worker process has ended or hangs.
    """
    prepare_environment()

    def emit_and_check(event: Event) -> None:
        emit(event)
        signals.check()

    try:
        _decode_and_score(request, emit_and_check)
    except KeyboardInterrupt:
        images = len(request.plan.tasks)
        count = images - len(request.missing())
        text = f"interrupted: {count} of {images} images are done and kept in {request.folder}"
        if count == 0:
            text = "interrupted before the first image; encoded captions are kept"
        emit(Note(text, "The same command continues."))
        raise
    from lantern_bench.analysis.tables import write_tables

    return write_tables(request.folder)


def _decode_and_score(request: Request, emit: Emit) -> None:
    if request.lacking:
        raise joined(request.lacking)
    settings = request.experiment.settings
    metrics = set(settings.metrics)
    device = settings.device if request.ray is None else "auto"  # this machine scores
    scorers = None
    if "quality" in metrics:
        # Missing weights of scorers must fail before decoding starts.
        from lantern_bench.metrics.score_run import load_scorers

        try:
            scorers = load_scorers(request.protocol, settings.reference, device)
        except RefusedError as error:
            raise or_without_quality(error) from error
    _decode(request, emit)
    if metrics == {"speed"} or not done_images(request.folder):
        return
    from lantern_bench.metrics.score_run import score_cells
    from lantern_bench.metrics.token_sums import score_tokens
    from lantern_bench.storage.run_store import RunStore

    with RunStore.to_score(request.folder) as store:
        if scorers is not None:
            score_cells(store, scorers, emit)
        if "distance" in metrics:
            score_tokens(store, device, emit)


def _decode(request: Request, emit: Emit) -> None:
    """Decode in this process, in worker processes or on a Ray cluster."""
    if not request.plan.tasks:
        from lantern_bench.sweeps.decode_missing import decode_missing as decode

        part = request.shard or {}
        number = f"{part.get('index')}/{part.get('count')}"
        emit(Note(f"shard {number} has no prompts: nothing to decode; `merge` takes it"))
    elif request.ray is not None:
        from lantern_bench.sweeps.ray_cluster import decode_on_ray as decode
    elif request.experiment.settings.processes > 1:
        from lantern_bench.sweeps.processes import decode_in_processes as decode
    else:
        from lantern_bench.sweeps.decode_missing import decode_missing as decode
    decode(request, emit)


def check_failed(request: Request) -> None:
    """Raise `RecordsFailedError` when images failed."""
    failed = len(request.missing())
    if failed:
        raise RecordsFailedError(
            f"{failed} of {len(request.plan.tasks)} images failed; see {request.folder / RECORDS}",
            "The same command tries them again.",
        )
