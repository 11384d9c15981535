"""Whether a sweep may begin, and what it would cost: what can be known of its folder and its models without torch.

It writes nothing, so what is refused here leaves no trace. `RunStore` checks again when it opens the folder, under the
lock and with the weights at hand.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.protocols import EMBEDDED, LANTERN_COCO
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.registry import card_of
from lantern_bench.runs.keys import check_same_experiment
from lantern_bench.runs.store import LOCK, MANIFEST, RECORDS, SCORES, done_images, read_manifest, read_records

# The family whose pictures the shipped judges were trained on.
_EMBEDDED_FAMILY = "lanterns"


def check_folder(folder: Path, experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a folder that cannot be a run's, `RefusedError` for one in use or of other settings."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"--out {folder}: {there} is a file, not a folder", "Give a folder that you may write to.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: cannot be written", "Give a folder that you may write to.")
    if folder.is_dir():
        _check_unlocked(folder)
        _check_contents(folder, experiment)


def _check_unlocked(folder: Path) -> None:
    if not (folder / LOCK).exists():
        return
    try:
        FileLock(folder / LOCK).acquire(timeout=0).lock.release()
    except Timeout as error:
        raise RefusedError(
            f"{folder} is in use: another process is writing to it", "Wait for it to end, or give another --out."
        ) from error
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error


def _check_contents(folder: Path, experiment: ResolvedExperiment) -> None:
    if not (folder / MANIFEST).exists():
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, RECORDS, SCORES))
        if strangers:
            raise UserError(
                f"--out {folder}: the folder holds {strangers[0]} and is no run", "Give a new folder, or a run's own."
            )
        return
    finished = len(done_images(folder))
    if finished:
        recorded = read_manifest(folder).get("experiment", {})
        check_same_experiment(folder.name, recorded, experiment.to_dict(), finished)


def check_neighbours(experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a cell that asks for more neighbours than its model has other codes."""
    for cell in experiment.cells:
        codes, asked = card_of(cell.model).vocab_size, cell.decoding.neighbours
        if codes is not None and asked is not None and asked >= codes:
            raise UserError(f"--neighbours {asked}: the model {cell.model} has {codes} codes", f"At most {codes - 1}.")


def default_protocol(models: Sequence[str]) -> str:
    """Return the protocol a run of these models is judged by where none is named: the embedded one only for its own."""
    embedded = all(card_of(model).family == _EMBEDDED_FAMILY for model in models)
    return EMBEDDED if embedded else LANTERN_COCO


def seconds_per_image(folder: Path) -> dict[str, float]:
    """Mean seconds an image took by cell id, pixels included, from the good records of a folder; empty without any."""
    spent: dict[str, list[float]] = defaultdict(list)
    for row in read_records(folder):
        if row["status"] == "ok" and row.get("seconds") is not None:
            spent[row["cell_id"]].append(row["seconds"] + (row.get("pixel_seconds") or 0.0))
    return {cell_id: sum(values) / len(values) for cell_id, values in spent.items()}
