"""Score the pictures and tokens of a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lantern_bench.devices.compute import choose_compute
from lantern_bench.metrics.extractors import (
    Reference,
    find_reference,
)
from lantern_bench.metrics.protocols import Protocol, default_protocol, protocol_of
from lantern_bench.metrics.score_pictures import (
    Scorers,
    _ar_families,
    _by_cell,
    load_scorers,
    score_records,
)
from lantern_bench.metrics.token_sums import score_tokens
from lantern_bench.storage.run_directory import read_manifest, read_records, read_scores
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import Row
from lantern_bench.sweeps.request import Request
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.files import cache_folder
from lantern_bench.utils.progress import Emit, Note

# ---- Scoring a run directory


def score_run(
    folder: Path,
    scorers: Scorers,
    reference: Reference | None = None,
    emit: Emit | None = None,
    *,
    infinity: bool = False,
    rescore: bool = False,
) -> int:
    """Score the cells of a run that these scorers have not scored, or all (`rescore`); return the number of rows."""
    with RunStore.to_score(folder) as store:
        cells = _by_cell(read_records(folder))
        protocol = scorers.protocol
        version = (protocol.name, protocol.version)
        scores = [
            row
            for row in read_scores(folder)
            if (row["protocol"], row["protocol_version"]) == version
        ]
        label = reference.label if reference is not None else ""
        pending = [
            cell_id
            for cell_id, records in cells.items()
            if rescore
            or not _is_scored(
                cell_id=cell_id,
                records=records,
                scores=scores,
                scorers=scorers,
                reference=label,
                infinity=infinity,
            )
        ]
        with_spread = {row["cell_id"] for row in scores if row["level"] == "ar_spread"}
        # Sets of ar images with different seeds are scored together.
        for family in _ar_families(cells):
            if set(pending) & set(family) or (scorers.extractor and family[0] not in with_spread):
                pending += family
        if not pending:
            return 0
        store.update_manifest(
            protocols=store.manifest.get("protocols", {}) | {protocol.name: asdict(protocol)}
        )
        records = [record for cell_id in dict.fromkeys(pending) for record in cells[cell_id]]
        rows = score_records(
            records=records,
            folder=folder,
            scorers=scorers,
            reference=reference,
            emit=emit,
            cache=cache_folder(),
            infinity=infinity,
        )
        return len([store.append_score(row) for row in rows])


def _is_scored(
    cell_id: str,
    records: Sequence[Row],
    scores: Sequence[Row],
    scorers: Scorers,
    reference: str,
    infinity: bool,
) -> bool:
    """Return whether the rows have these scorers' scores of all images of the cell."""
    rows = [row for row in scores if row["cell_id"] == cell_id]
    images = {
        row["record_key"]
        for row in rows
        if row["level"] == "image" and row["clip_model"] == scorers.label
    }
    if not images.issuperset(record["record_key"] for record in records):
        return False
    if scorers.extractor is None:
        return True
    latest = next((row for row in reversed(rows) if row["level"] == "cell"), None)
    return (
        latest is not None
        and latest["n"] == len(records)
        and latest["extractor"] == scorers.extractor.label
        and str(latest["reference"] or "").startswith(reference)
        and not (infinity and latest["fid_infinity"] is None)
    )


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
    """Score a run, by default by its own protocol; return the protocol and how many rows it wrote."""
    recorded = read_manifest(folder).get("experiment", {})
    name = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    rules = protocol_of(name)
    compute = choose_compute(device)
    scorers = load_scorers(rules, compute.device)
    pictures = reference or (
        recorded.get("reference") if name == recorded.get("protocol") else None
    )
    against = find_reference(pictures, rules)
    count = score_run(
        folder=folder,
        scorers=scorers,
        reference=against,
        emit=emit,
        infinity=infinity,
        rescore=rescore,
    )
    try:
        count += score_tokens(folder, device, emit)
    except RefusedError as error:
        emit(Note(f"no distance from the target: {error.message}", error.advice, "warning"))
    return rules, count


def load_scorers_of(request: Request, device: str) -> tuple[Scorers, Reference | None]:
    """Load the scorers and the reference of the run's protocol."""
    compute = choose_compute(device)
    try:
        # The reference first: it is found quickly, and scorers are large.
        reference = find_reference(request.experiment.settings.reference, request.protocol)
        return load_scorers(request.protocol, device=compute.device), reference
    except RefusedError as error:
        advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
        raise RefusedError(
            error.message, f"{advice}Or leave quality out: --metrics speed."
        ) from error
