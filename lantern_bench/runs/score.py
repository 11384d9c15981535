"""Scoring: the pictures a run left behind in, rows of scores.jsonl out.

It reads records and PNG files only, so a run can be scored again, later, elsewhere, or with other judges; every row
carries the name of its protocol. How a score is computed is in `measure`; how the rows are averaged is in `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.lanterns.captions import attributes_of
from lantern_bench.lanterns.classifier import AttributeClassifier, load_classifier, prompt_accuracy
from lantern_bench.measure import clip, fidelity
from lantern_bench.runs.reference import Reference, held_out_reference, read_picture, reference_name
from lantern_bench.runs.store import RunStore, read_scores
from lantern_bench.spec.schema import SCHEMA_VERSION

__all__ = [
    "EMBEDDED_PROTOCOL",
    "Judges",
    "embedded_judges",
    "full_size_judges",
    "score_records",
    "score_run",
]

EMBEDDED_PROTOCOL = "embedded"

Row = dict[str, Any]


@dataclass(frozen=True)
class Judges:
    """What scores the pictures, under one protocol name. A judge that is None leaves its columns empty."""

    protocol: str
    clip: clip.ClipScorer | None = None
    extractor: fidelity.Extractor | None = None
    classifier: AttributeClassifier | None = None
    device: torch.device | str = "cpu"


class _Scored(NamedTuple):
    """The images of one cell that are there: their records, and pixels uint8 [n, 3, h, w]."""

    records: list[Mapping[str, Any]]
    pictures: Tensor
    missing: int


def embedded_judges(device: torch.device | str = "cpu") -> Judges:
    """The judges of the embedded family, from the weights in the package (`RefusedError` when they are missing)."""
    return Judges(
        EMBEDDED_PROTOCOL,
        clip.load_clip(device=device),
        fidelity.find_extractor(),
        load_classifier(device=device),
        device,
    )


def full_size_judges(
    extractor: str = "inception-v3-compat",
    clip_model: str = "ViT-B-32",
    *,
    extractor_weights: Path | None = None,
    clip_weights: Path | None = None,
    prefix: str = "",
    device: torch.device | str = "cpu",
) -> Judges:
    """Judges by the names published figures use; the protocol is `<extractor>+<clip model>`.

    Raises `UserError` and `RefusedError` as `fidelity.find_extractor` and `clip.load_clip` do.
    """
    found = fidelity.find_extractor(extractor, extractor_weights)
    scorer = clip.load_clip(clip_model, clip_weights, prefix=prefix, device=device)
    return Judges(f"{extractor}+{clip_model}", scorer, found, None, device)


def score_run(
    store: RunStore,
    judges: Judges,
    reference: Reference | None = None,
    on_cell: Callable[[str, int, int], None] = lambda _cell_id, _done, _total: None,
) -> int:
    """Score the cells of a run that these judges have not scored as they stand; return the number of rows written.

    A cell is scored anew when images were added to it, or when the reference or a judge's weights changed. Arguments
    as for `score_records`.
    """
    cells = _by_cell(store.records())
    largest = max((len(rows) for rows in cells.values()), default=0)
    name = reference_name(largest) if reference is None else reference.label
    kept = [row for row in read_scores(store.folder) if row["protocol"] == judges.protocol]
    pending = {cell_id: rows for cell_id, rows in cells.items() if not _is_scored(cell_id, rows, kept, judges, name)}
    if not pending:
        return 0
    if judges.extractor is not None and reference is None:
        reference = held_out_reference(largest)
    written = 0
    for row in score_records(
        [row for rows in pending.values() for row in rows], store.folder, judges, reference, on_cell
    ):
        store.append_score(row)
        written += 1
    return written


def _is_scored(
    cell_id: str, records: Sequence[Mapping[str, Any]], kept: Sequence[Row], judges: Judges, reference: str
) -> bool:
    """Whether the kept rows hold the last word of these judges on all of the cell's images."""
    mine = [row for row in kept if row["cell_id"] == cell_id]
    label = None if judges.clip is None else judges.clip.label
    images = {row["record_key"] for row in mine if row["level"] == "image" and row["clip_model"] == label}
    if not images.issuperset(record["record_key"] for record in records):
        return False
    if judges.extractor is None:
        return True
    whole = next((row for row in reversed(mine) if row["level"] == "cell"), None)
    return (
        whole is not None
        and whole["n"] == len(records)
        and whole["extractor"] == judges.extractor.label
        and str(whole["reference"]).startswith(reference)
    )


def score_records(
    records: Iterable[Mapping[str, Any]],
    folder: Path,
    judges: Judges,
    reference: Reference | None = None,
    on_cell: Callable[[str, int, int], None] = lambda _cell_id, _done, _total: None,
) -> Iterator[Row]:
    """Score the images of a run: for each cell one row of level `image` a picture, then one of level `cell`.

    `records` are rows of records.jsonl (the last of equal keys counts, failed ones are left out), `folder` is the
    run's, to which their `image` is relative. Rows have the columns of `spec.schema` table `scores` that apply.
    `reference` defaults to `held_out_reference`; `on_cell(cell_id, done, total)` is called after each cell.
    """
    cells = _by_cell(records)
    if judges.extractor is not None and reference is None and cells:
        reference = held_out_reference(max(len(rows) for rows in cells.values()))
    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        scored = _load(rows, folder)
        yield from _image_rows(cell_id, scored, judges)
        if judges.extractor is not None and reference is not None:
            yield _cell_row(cell_id, scored, judges, judges.extractor, reference)
        on_cell(cell_id, done, len(cells))


def _by_cell(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Finished records that left a picture, by cell, in the order they first appear."""
    last = {record["record_key"]: record for record in records}
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for record in last.values():
        if record["status"] == "ok" and record["image"]:
            cells.setdefault(record["cell_id"], []).append(record)
    return cells


def _load(records: Sequence[Mapping[str, Any]], folder: Path) -> _Scored:
    there = [record for record in records if (folder / record["image"]).is_file()]
    pictures = [read_picture(folder / record["image"]) for record in there]
    stacked = torch.stack(pictures) if pictures else torch.zeros((0, 3, 1, 1), dtype=torch.uint8)
    return _Scored(there, stacked, len(records) - len(there))


def _image_rows(cell_id: str, scored: _Scored, judges: Judges) -> Iterator[Row]:
    prompts = [record["prompt"] for record in scored.records]
    cosines = _maybe(judges.clip, lambda judge: judge.score(scored.pictures, prompts), len(prompts))
    right = _maybe(judges.classifier, lambda judge: _accuracy(judge, scored.pictures, prompts), len(prompts))
    for record, cosine, answer in zip(scored.records, cosines, right, strict=True):
        yield {
            "schema_version": SCHEMA_VERSION,
            "level": "image",
            "protocol": judges.protocol,
            "cell_id": cell_id,
            "record_key": record["record_key"],
            "clip_score": cosine,
            "prompt_accuracy": answer,
            "clip_model": None if judges.clip is None else judges.clip.label,
        }


def _maybe(judge: Any, ask: Callable[[Any], list[Any]], n: int) -> list[Any]:
    return [None] * n if judge is None or n == 0 else ask(judge)


def _accuracy(classifier: AttributeClassifier, pictures: Tensor, prompts: Sequence[str]) -> list[float | None]:
    """1.0 or 0.0 for each picture; None where the prompt is no caption of the embedded grammar."""
    wanted = attributes_of(prompts)
    asked = [row for row, attributes in enumerate(wanted) if attributes is not None]
    answers: list[float | None] = [None] * len(prompts)
    right = prompt_accuracy(classifier, pictures[asked], [item for item in wanted if item is not None])
    for row, answer in zip(asked, right.tolist(), strict=True):
        answers[row] = float(answer)
    return answers


def _cell_row(
    cell_id: str, scored: _Scored, judges: Judges, extractor: fidelity.Extractor, reference: Reference
) -> Row:
    scores = fidelity.measure_fidelity(scored.pictures, reference.pictures, extractor, device=judges.device)
    notes = [f"{scored.missing} images are missing in the run's folder"] if scored.missing else []
    return {
        "schema_version": SCHEMA_VERSION,
        "level": "cell",
        "protocol": judges.protocol,
        "cell_id": cell_id,
        "fid": scores.fid,
        "kid": scores.kid,
        "kid_std": scores.kid_std,
        "kid_subset": scores.kid_subset,
        "precision": scores.precision,
        "recall": scores.recall,
        "n": scores.n,
        "extractor": scores.fid_features,
        "reference": reference.label,
        "note": "; ".join([*notes, scores.note] if scores.note else notes) or None,
    }
