"""Score a run directory by a quality protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lantern_bench.devices.compute import choose_compute
from lantern_bench.metrics.extractors import Reference, find_reference
from lantern_bench.metrics.protocols import Protocol, default_protocol, protocol_of
from lantern_bench.metrics.score_pictures import (
    Scorers,
    ar_families,
    finished_by_cell,
    load_scorers,
    score_records,
)
from lantern_bench.metrics.score_tokens import score_tokens
from lantern_bench.storage.run_directory import read_manifest, read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Emit, Note


def score_run_directory(
    folder: Path,
    emit: Emit,
    *,
    protocol: str | None = None,
    reference: str | None = None,
    device: str = "auto",
    infinity: bool = False,
    rescore: bool = False,
) -> tuple[Protocol, int]:
    """Score the pictures of a run, and its tokens if the models that decoded it are here.

    Args:
        folder: The run directory.
        emit: Receives progress and notes.
        protocol: Name of the quality protocol, by default the run's own.
        reference: What fidelity is measured against, as `--reference`.
        device: Where scorers and models run.
        infinity: Also extrapolate FID to infinitely many pictures.
        rescore: Score again what these scorers have scored.

    Returns:
        The protocol, and the number of rows written.

    Raises:
        UserError: The protocol is unknown, or the reference cannot be used.
        RefusedError: Weights are missing, the run is in use, or it has no images.
    """
    recorded = read_manifest(folder).get("experiment", {})
    name = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    if reference is None and name == recorded.get("protocol"):
        reference = recorded.get("reference")
    chosen = protocol_of(name)
    scorers = load_scorers(chosen, choose_compute(device).device)
    pictures = find_reference(reference, chosen)
    with RunStore.to_score(folder) as store:
        count = score_cells(store, scorers, pictures, emit=emit, infinity=infinity, rescore=rescore)
        try:
            count += score_tokens(store, device, emit)
        except RefusedError as error:
            emit(Note(f"no distance from the target: {error.message}", error.advice, "warning"))
    return chosen, count


def load_scorers_of(
    protocol: Protocol, reference: str | None, device: str
) -> tuple[Scorers, Reference | None]:
    """Load the scorers and the reference of a sweep.

    Args:
        protocol: The quality protocol.
        reference: What `--reference` names, by default the protocol's own.
        device: Where the scorers run.

    Raises:
        UserError: The reference cannot be used.
        RefusedError: Weights are missing.
    """
    compute = choose_compute(device)
    try:
        # The reference first: it is found quickly, and scorers are large.
        pictures = find_reference(reference, protocol)
        return load_scorers(protocol, device=compute.device), pictures
    except RefusedError as error:
        advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
        raise RefusedError(
            error.message, f"{advice}Or leave quality out: --metrics speed."
        ) from error


def score_cells(
    store: RunStore,
    scorers: Scorers,
    reference: Reference | None = None,
    emit: Emit | None = None,
    *,
    infinity: bool = False,
    rescore: bool = False,
) -> int:
    """Score the pictures of the cells that these scorers have not scored.

    Args:
        store: The run, opened for scoring.
        scorers: The scorers of a protocol.
        reference: What fidelity is measured against, if anything.
        emit: Receives progress.
        infinity: Also extrapolate FID to infinitely many pictures.
        rescore: Score all cells.

    Returns:
        The number of rows written.
    """
    protocol = scorers.protocol
    cells = finished_by_cell(read_records(store.folder))
    scores: dict[str, list[Row]] = {cell_id: [] for cell_id in cells}
    with_spread = set[str]()
    for row in read_scores(store.folder):
        if row["protocol"] == protocol.name and row["protocol_version"] == protocol.version:
            scores.setdefault(row["cell_id"], []).append(row)
            if row["level"] == "ar_spread":
                with_spread.add(row["cell_id"])

    label = "" if reference is None else reference.label
    pending = []
    for cell_id, records in cells.items():
        done = _is_scored(records, scores[cell_id], scorers, reference=label, infinity=infinity)
        if rescore or not done:
            pending.append(cell_id)
    # Sets of ar images with different seeds are scored together.
    for family in ar_families(cells):
        without_spread = scorers.extractors and family[0] not in with_spread
        if without_spread or not set(pending).isdisjoint(family):
            pending += family
    if not pending:
        return 0

    protocols = store.manifest.get("protocols", {}) | {protocol.name: asdict(protocol)}
    store.update_manifest(protocols=protocols)
    chosen: list[Row] = []
    for cell_id in dict.fromkeys(pending):
        chosen += cells[cell_id]
    rows = score_records(
        records=chosen,
        folder=store.folder,
        scorers=scorers,
        reference=reference,
        emit=emit,
        cache=cache_folder(),
        infinity=infinity,
    )
    return len([store.append_score(row) for row in rows])


def _is_scored(
    records: Sequence[Row],
    scores: Sequence[Row],
    scorers: Scorers,
    *,
    reference: str,
    infinity: bool,
) -> bool:
    """Return whether the scores of a cell cover all its images, by these scorers."""
    images = {row["record_key"] for row in scores if row["clip_model"] == scorers.label}
    if not images.issuperset(record["record_key"] for record in records):
        return False
    if not scorers.extractors:
        return True
    of_cell = [row for row in scores if row["level"] == "cell"]
    if not of_cell:
        return False
    latest = of_cell[-1]
    if infinity and latest["fid_infinity"] is None:
        return False
    return (
        latest["n"] == len(records)
        and latest["extractor"] == scorers.extractors[0].label
        and str(latest["reference"] or "").startswith(reference)
    )
