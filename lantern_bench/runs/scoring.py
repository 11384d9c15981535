"""Scoring: the pictures a run left behind in, rows of scores.jsonl out.

It reads records and PNG files only, so a run can be scored again, later, elsewhere, or by another protocol, and nothing
is decoded; every row carries the name and version of its protocol. How a score is computed is in `measure`; how the
rows are averaged is in `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from typing import Protocol as Interface

import numpy as np
import torch
from torch import Tensor

from lantern_bench.config.protocols import EMBEDDED, PROTOCOLS, Protocol
from lantern_bench.metrics import clip, fidelity
from lantern_bench.metrics.clip import Reward, load_reward
from lantern_bench.metrics.features import Extractor, FeatureSet, features_of, find_extractor, for_features, prepare
from lantern_bench.metrics.fidelity import fid_infinity
from lantern_bench.metrics.reference_sets import (
    Reference,
    held_out_reference,
    read_picture,
    reference_features,
    reference_name,
)
from lantern_bench.models.lanterns.captions import attributes_of
from lantern_bench.models.lanterns.classifier import AttributeClassifier, load_classifier, prompt_accuracy
from lantern_bench.runs.store import read_scores
from lantern_bench.schema import SCHEMA_VERSION

# ---- From a protocol to the judges that carry it out, with their weights at hand


@dataclass(frozen=True)
class Judges:
    """What scores the pictures, under one protocol. A judge that is None leaves its columns empty.

    `manifold` is the extractor of precision and recall where it is another than `extractor`.
    """

    protocol: Protocol
    clip: clip.ClipScorer | None = None
    extractor: Extractor | None = None
    classifier: AttributeClassifier | None = None
    device: torch.device | str = "cpu"
    manifold: Extractor | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)

    @property
    def label(self) -> str | None:
        """What judges pictures with their captions, and its weights; None where nothing does."""
        judges = [*([] if self.clip is None else [self.clip]), *self.rewards.values()]
        return "; ".join(judge.label for judge in judges) or None


def judges_of(
    protocol: Protocol,
    *,
    clip_weights: Path | None = None,
    features_weights: Path | None = None,
    device: torch.device | str = "cpu",
) -> Judges:
    """Find what a protocol needs.

    Raises `RefusedError` for what is not on this machine and `UserError` for a file that is of another model.
    """
    manifold = protocol.manifold if protocol.manifold != protocol.features else None
    return Judges(
        protocol,
        extractor=find_extractor(protocol.features, features_weights) if protocol.features else None,
        manifold=find_extractor(manifold) if manifold else None,
        clip=clip.load_clip(protocol.clip_model, clip_weights, prefix=protocol.clip_prefix, device=device)
        if protocol.clip_model
        else None,
        classifier=load_classifier(device=device) if protocol.accuracy else None,
        device=device,
        rewards={name: load_reward(name, device=device) for name in protocol.rewards},
    )


def embedded_judges(device: torch.device | str = "cpu") -> Judges:
    """The judges of the embedded family, from the weights in the package (`RefusedError` when they are missing)."""
    return judges_of(PROTOCOLS[EMBEDDED], device=device)


# ----

Row = dict[str, Any]
OnCell = Callable[[str, int, int], None]
_INFINITY_SEED = 2020
_NO_REFERENCE = "no reference: fid, kid, precision and recall need one (--reference)"


class Scorable(Interface):
    """A run that can be scored: `RunStore` while it is made, `ScoreBook` afterwards."""

    folder: Path

    def records(self) -> list[dict[str, Any]]:
        """The last word on every image."""
        ...

    def append_score(self, score: Mapping[str, Any]) -> None:
        """Keep a row."""
        ...

    def note_protocol(self, protocol: Mapping[str, Any]) -> None:
        """Keep what a protocol says in the manifest."""
        ...


class _Scored(NamedTuple):
    """The images of one cell that are there: their records, and pixels as every judge sees them."""

    records: list[Mapping[str, Any]]
    pictures: list[Tensor]
    missing: int


@dataclass(frozen=True)
class _Fidelity:
    """The reference under the protocol's extractors, and what is asked for."""

    reference: Reference
    features: FeatureSet
    manifold: FeatureSet | None
    infinity: bool


def _unheard(_cell_id: str, _done: int, _total: int) -> None:
    """Tell nobody."""


def score_run(
    store: Scorable,
    judges: Judges,
    reference: Reference | None = None,
    on_cell: OnCell = _unheard,
    *,
    cache: Path | None = None,
    infinity: bool = False,
    again: bool = False,
) -> int:
    """Score the cells of a run that these judges have not scored as they stand; return the number of rows written.

    A cell is scored anew when images were added to it, when the reference, the protocol's version or a judge's weights
    changed, when FID-infinity is asked for and not there, and `again` in any case. Arguments as for `score_records`.
    """
    cells = _by_cell(store.records())
    largest = max((len(rows) for rows in cells.values()), default=0)
    name = reference.label if reference is not None else _default_name(judges, largest)
    version = judges.protocol.version
    kept = [
        row
        for row in read_scores(store.folder)
        if row["protocol"] == judges.protocol.name and (row.get("protocol_version") or 1) == version
    ]
    pending = {
        cell_id: rows
        for cell_id, rows in cells.items()
        if again or not _is_scored(cell_id, rows, kept, judges, name, infinity)
    }
    if not pending:
        return 0
    store.note_protocol(judges.protocol.to_dict())
    if reference is None and judges.protocol.reference is not None:
        reference = held_out_reference(largest)
    written = 0
    records = [row for rows in pending.values() for row in rows]
    for row in score_records(records, store.folder, judges, reference, on_cell, cache=cache, infinity=infinity):
        store.append_score(row)
        written += 1
    return written


def _default_name(judges: Judges, largest: int) -> str:
    return reference_name(largest) if judges.protocol.reference is not None else ""


def _is_scored(
    cell_id: str,
    records: Sequence[Mapping[str, Any]],
    kept: Sequence[Row],
    judges: Judges,
    reference: str,
    infinity: bool,
) -> bool:
    """Whether the kept rows hold the last word of these judges on all of the cell's images."""
    mine = [row for row in kept if row["cell_id"] == cell_id]
    images = {row["record_key"] for row in mine if row["level"] == "image" and row["clip_model"] == judges.label}
    if not images.issuperset(record["record_key"] for record in records):
        return False
    if judges.extractor is None:
        return True
    whole = next((row for row in reversed(mine) if row["level"] == "cell"), None)
    return (
        whole is not None
        and whole["n"] == len(records)
        and whole["extractor"] == judges.extractor.label
        and str(whole["reference"] or "").startswith(reference)
        and not (infinity and whole.get("fid_infinity") is None)
    )


def score_records(
    records: Iterable[Mapping[str, Any]],
    folder: Path,
    judges: Judges,
    reference: Reference | None = None,
    on_cell: OnCell = _unheard,
    *,
    cache: Path | None = None,
    infinity: bool = False,
) -> Iterator[Row]:
    """Score the images of a run: for each cell one row of level `image` a picture, then one of level `cell`.

    `records` are rows of records.jsonl (the last of equal keys counts, failed ones are left out), `folder` is the
    run's, to which their `image` is relative. Rows have the columns of `schema` table `scores` that apply.
    `reference` defaults to the protocol's own; without any, fidelity is empty with a note. Features of references are
    kept in `cache`; `infinity` adds the extrapolated FID. `on_cell(cell_id, done, total)` is called after each cell.
    """
    cells = _by_cell(records)
    if reference is None and judges.protocol.reference is not None and judges.extractor is not None and cells:
        reference = held_out_reference(max(len(rows) for rows in cells.values()))
    against = _against(judges, reference, cache, infinity) if cells else None
    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        scored = _load(rows, folder, judges)
        yield from _image_rows(cell_id, scored, judges)
        if judges.extractor is not None:
            yield _cell_row(cell_id, scored, judges, judges.extractor, against)
        on_cell(cell_id, done, len(cells))


def _against(judges: Judges, reference: Reference | None, cache: Path | None, infinity: bool) -> _Fidelity | None:
    if reference is None or judges.extractor is None:
        return None
    preparation = judges.protocol.preparation
    features = reference_features(reference, judges.extractor, preparation, device=judges.device, cache=cache)
    manifold = None
    if judges.manifold is not None and reference.pictures is not None:
        manifold = reference_features(reference, judges.manifold, preparation, device=judges.device, cache=cache)
    return _Fidelity(reference, features, manifold, infinity)


def _by_cell(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Finished records that left a picture, by cell, in the order they first appear."""
    last = {record["record_key"]: record for record in records}
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for record in last.values():
        if record["status"] == "ok" and record["image"]:
            cells.setdefault(record["cell_id"], []).append(record)
    return cells


def _load(records: Sequence[Mapping[str, Any]], folder: Path, judges: Judges) -> _Scored:
    there = [record for record in records if (folder / record["image"]).is_file()]
    preparation = judges.protocol.preparation
    pictures = [prepare(read_picture(folder / record["image"]), preparation) for record in there]
    return _Scored(there, pictures, len(records) - len(there))


def _image_rows(cell_id: str, scored: _Scored, judges: Judges) -> Iterator[Row]:
    prompts = [record["prompt"] for record in scored.records]
    answers: dict[str, list[Any]] = {
        "clip_score": _maybe(judges.clip, lambda judge: judge.score(scored.pictures, prompts), len(prompts)),
        "prompt_accuracy": _maybe(judges.classifier, lambda judge: _accuracy(judge, scored, prompts), len(prompts)),
    }
    for name, reward in judges.rewards.items():
        answers[name] = reward.score(scored.pictures, prompts) if prompts else []
    for number, record in enumerate(scored.records):
        yield {
            "schema_version": SCHEMA_VERSION,
            "level": "image",
            "protocol": judges.protocol.name,
            "protocol_version": judges.protocol.version,
            "cell_id": cell_id,
            "record_key": record["record_key"],
            **{name: values[number] for name, values in answers.items()},
            "clip_model": judges.label,
        }


def _maybe(judge: Any, ask: Callable[[Any], list[Any]], n: int) -> list[Any]:
    return [None] * n if judge is None or n == 0 else ask(judge)


def _accuracy(classifier: AttributeClassifier, scored: _Scored, prompts: Sequence[str]) -> list[float | None]:
    """1.0 or 0.0 for each picture; None where the prompt is no caption of the embedded grammar."""
    import torch

    wanted = attributes_of(prompts)
    asked = [row for row, attributes in enumerate(wanted) if attributes is not None]
    answers: list[float | None] = [None] * len(prompts)
    if asked:
        pictures = torch.stack([scored.pictures[row] for row in asked])
        right = prompt_accuracy(classifier, pictures, [item for item in wanted if item is not None])
        for row, answer in zip(asked, right.tolist(), strict=True):
            answers[row] = float(answer)
    return answers


def _cell_row(cell_id: str, scored: _Scored, judges: Judges, extractor: Extractor, against: _Fidelity | None) -> Row:
    notes = [f"{scored.missing} images are missing in the run's folder"] if scored.missing else []
    row: Row = {
        "schema_version": SCHEMA_VERSION,
        "level": "cell",
        "protocol": judges.protocol.name,
        "protocol_version": judges.protocol.version,
        "cell_id": cell_id,
        "n": len(scored.records),
        "extractor": extractor.label,
        "reference": None if against is None else against.reference.label,
    }
    if against is None:
        return row | {"note": "; ".join([*notes, _NO_REFERENCE])}
    figures, note = _figures(scored, judges, extractor, against)
    return row | figures | {"note": "; ".join([*notes, *([note] if note else [])]) or None}


def _figures(scored: _Scored, judges: Judges, extractor: Extractor, against: _Fidelity) -> tuple[Row, str]:
    """The fidelity of one cell's pictures, and what is to be said about it."""
    preparation = judges.protocol.preparation

    def passed(through: Extractor) -> Tensor:
        return features_of(
            scored.pictures,
            through,
            prepared=lambda picture: for_features(picture, preparation),
            device=judges.device,
        )

    features, manifold = passed(extractor), None
    if judges.manifold is not None and against.manifold is not None and against.manifold.features is not None:
        manifold = (passed(judges.manifold), against.manifold.features)
    neighbours = judges.protocol.manifold_neighbours
    scores = fidelity.compare(features, against.features, extractor, manifold=manifold, neighbours=neighbours)
    names = ("fid", "kid", "kid_std", "kid_subset", "precision", "recall", "n_reference")
    row: Row = {name: getattr(scores, name) for name in names}
    notes = [scores.note] if scores.note else []
    if against.infinity:
        far = fid_infinity(features, against.features, np.random.default_rng(_INFINITY_SEED))
        row |= {"fid_infinity": far.value, "fid_infinity_low": far.low, "fid_infinity_high": far.high}
        notes += [far.note] if far.note else []
    return row, "; ".join(notes)
