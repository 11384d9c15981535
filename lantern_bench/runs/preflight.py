"""Preflight checks of a sweep: what can be known of the run directory and the models without torch.

They write nothing, so that a refused sweep leaves no trace. `RunStore` checks again when it opens the run directory,
under the lock and with the hashes of the weights.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from lantern_bench.config.experiment import ResolvedExperiment
from lantern_bench.config.protocols import EMBEDDED, LANTERN_COCO
from lantern_bench.errors import UserError
from lantern_bench.models.registry import card_of
from lantern_bench.runs.keys import check_same_experiment
from lantern_bench.runs.store import (
    LOCK,
    MANIFEST,
    cannot_write,
    check_is_run,
    done_images,
    lock_run,
    read_manifest,
    read_records,
)

# The family whose pictures the bundled scorers were trained on.
_BUNDLED_FAMILY = "lanterns"


def check_folder(folder: Path, experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a folder that cannot be a run directory, `RefusedError` if in use or of other settings."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"--out {folder}: {there} is a file, not a folder", "Give a folder that you may write to.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise cannot_write(folder)
    if not folder.is_dir():
        return
    if (folder / LOCK).exists():
        lock_run(folder).release()
    check_is_run(folder)
    if (folder / MANIFEST).exists() and (finished := len(done_images(folder))):
        recorded = read_manifest(folder).get("experiment", {})
        check_same_experiment(folder.name, recorded, experiment.to_dict(), finished)


def check_neighbours(experiment: ResolvedExperiment) -> None:
    """Raise `UserError` for a cell that asks for more neighbours than its model has other codes."""
    for cell in experiment.cells:
        codes, asked = card_of(cell.model).vocab_size, cell.decoding.neighbours
        if codes is not None and asked is not None and asked >= codes:
            raise UserError(f"--neighbours {asked}: the model {cell.model} has {codes} codes", f"At most {codes - 1}.")


def default_protocol(models: Sequence[str]) -> str:
    """Return the quality protocol of a run of these models: the bundled scorers only for the bundled family."""
    bundled = all(card_of(model).family == _BUNDLED_FAMILY for model in models)
    return EMBEDDED if bundled else LANTERN_COCO


def seconds_per_image(folder: Path) -> dict[str, float]:
    """Return mean seconds per image by cell id, pixels included, of the finished images; empty without any."""
    spent: dict[str, list[float]] = defaultdict(list)
    for row in read_records(folder):
        if row["status"] == "ok" and row["seconds"] is not None:
            spent[row["cell_id"]].append(row["seconds"] + (row["pixel_seconds"] or 0.0))
    return {cell_id: sum(values) / len(values) for cell_id, values in spent.items()}
