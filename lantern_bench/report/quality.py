"""One cell's rows of `quality.csv`: one for each protocol that scored it.

The scores are made elsewhere (`scores.jsonl`); here they are averaged over a cell's good images and set beside what
names them: the feature extractor, the CLIP model and the reference set are part of a figure. A cell that nobody
scored keeps its row, empty, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lantern_bench.report.cells import CellRecords, Row, joined
from lantern_bench.report.stats import Interval, ratio_of_sums

__all__ = ["Scores", "quality_rows", "sort_scores"]

_FIDELITY = ("fid", "fid_infinity", "fid_infinity_low", "fid_infinity_high", "kid", "kid_std", "kid_subset")
_OF_CELL = (*_FIDELITY, "precision", "recall", "n_reference", "reference")
_OF_IMAGE = ("clip_score", "prompt_accuracy", "hpsv2", "image_reward")
# Rows from before protocols had versions are of the first.
_FIRST_VERSION = 1


@dataclass
class Scores:
    """What one protocol said: rows of level `image` by record key, rows of level `cell` by cell id."""

    images: dict[str, Row] = field(default_factory=dict)
    cells: dict[str, Row] = field(default_factory=dict)


def sort_scores(rows: Iterable[Row]) -> dict[str, Scores]:
    """Sort the rows of `scores.jsonl` by protocol; of rows that score the same thing the last counts."""
    protocols: dict[str, Scores] = {}
    for row in rows:
        scores = protocols.setdefault(str(row["protocol"]), Scores())
        if row["level"] == "image":
            scores.images[str(row["record_key"])] = row
        else:
            scores.cells[str(row["cell_id"])] = row
    return dict(sorted(protocols.items()))


def quality_rows(cell: CellRecords, protocols: Mapping[str, Scores]) -> Iterator[dict[str, Any]]:
    """Yield the cell's row for each protocol that scored it, or one empty row."""
    scored = 0
    for protocol, scores in protocols.items():
        images = [(row, scores.images[key]) for row in cell.good if (key := str(row["record_key"])) in scores.images]
        whole = scores.cells.get(cell.cell_id, {})
        if images or whole:
            scored += 1
            yield _row(cell, protocol, images, whole)
    if not scored:
        missing = {"images": 0, "failed": cell.failed, "moved_mass": _moved_mass(cell), "note": "not scored"}
        yield {**cell.columns, **missing}


def _row(cell: CellRecords, protocol: str, images: Sequence[tuple[Row, Row]], whole: Row) -> dict[str, Any]:
    count = len(images) or whole.get("n")
    notes = [str(whole["note"])] if whole.get("note") else []
    if count != len(cell.good):
        notes.append(f"{count} of {len(cell.good)} images scored")
    elif images and whole and whole.get("n") != count:
        notes.append(f"fid, kid, precision and recall over {whole.get('n')} images")
    row: dict[str, Any] = {**cell.columns, "images": count, "failed": cell.failed, "protocol": protocol}
    row |= {name: whole.get(name) for name in _OF_CELL}
    scored_by = whole or images[0][1]
    row["protocol_version"] = scored_by.get("protocol_version") or _FIRST_VERSION
    row["fid_features"] = whole.get("extractor")
    row["clip_model"] = next((score["clip_model"] for _, score in images if score.get("clip_model")), None)
    for name in _OF_IMAGE:
        mean = _mean(images, name)
        row |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    row["moved_mass"] = _moved_mass(cell)
    row["note"] = joined(notes)
    return row


def _mean(images: Sequence[tuple[Row, Row]], name: str) -> Interval:
    known = [(score[name], str(row["prompt_id"])) for row, score in images if score.get(name) is not None]
    return ratio_of_sums([value for value, _ in known], [1.0] * len(known), [prompt for _, prompt in known])


def _moved_mass(cell: CellRecords) -> float | None:
    """Mean mass taken per accepted draft; None where no draft was accepted."""
    rows = [row for row in cell.good if row.get("moved_mass") is not None]
    accepted = sum(sum(row.get("accepted_per_step") or ()) for row in rows)
    return sum(row["moved_mass"] for row in rows) / accepted if accepted else None
