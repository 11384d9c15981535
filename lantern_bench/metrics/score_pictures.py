"""Scoring: from the records and PNG files of a run to rows of scores.jsonl; `metrics/` computes the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lantern_bench.methods.catalog import METRICS, OF_IMAGES, OF_SETS
from lantern_bench.metrics.extractors import (
    Extractor,
    FeatureSet,
    Reference,
    features_of,
    find_extractor,
    preprocess,
    read_picture,
    reference_features,
)
from lantern_bench.metrics.fidelity import (
    FeatureSets,
    ar_spread,
    fid_infinity,
    figures_of,
    measurable,
    measure_sets,
)
from lantern_bench.metrics.protocols import Protocol
from lantern_bench.storage.schema import CELL_COLUMNS, SCHEMA_VERSION, Row
from lantern_bench.utils.progress import Emit, ProgressEvent
from lantern_bench.utils.text import listed


@dataclass(frozen=True)
class Scorers:
    """The loaded scorers of one protocol."""

    protocol: Protocol
    # by metric: (pictures, prompts) -> figures
    images: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    extractor: Extractor | None = None  # None: nothing is measured against a reference
    manifold: Extractor | None = None  # the extractor of precision and recall, where it is another
    device: torch.device | str = "cpu"

    @property
    def label(self) -> str | None:
        """The scorers of pictures with captions, and their weights; None without any."""
        labels = (
            scorer.label if hasattr(scorer, "label") else f"{name}@{METRICS[name].fingerprint()}"
            for name, scorer in self.images.items()
        )
        return "; ".join(label for label in labels if label) or None


def load_scorers(protocol: Protocol, device: torch.device | str = "cpu") -> Scorers:
    """Load the scorers of a protocol; raises `RefusedError` where weights are missing."""
    extractor = find_extractor(protocol.features) if protocol.features else None
    manifold = protocol.manifold if protocol.manifold != protocol.features else None
    if protocol.metrics:
        # Registers the scorers of the shipped metrics; the import takes seconds.
        import lantern_bench.metrics.image_scorers  # noqa: F401
    images = {name: METRICS[name].function()(protocol, device) for name in protocol.metrics}
    return Scorers(
        protocol=protocol,
        images=images,
        extractor=extractor,
        manifold=find_extractor(manifold) if manifold else None,
        device=device,
    )


class Measured(NamedTuple):
    """What is measured of single pictures."""

    rows: list[Row]  # of level `image`
    features: Tensor | None  # [n, width]; None without an extractor
    manifold: Tensor | None  # those for precision and recall, where they have another extractor


def measure_pictures(
    records: Sequence[Row], folder: Path, scorers: Scorers, *, manifold: bool
) -> Measured:
    """Score the pictures of records in `folder` and extract features, with `manifold` by both extractors."""
    preparation = scorers.protocol.preparation
    pictures = [
        preprocess(read_picture(folder / record["image"]), preparation) for record in records
    ]
    extract = partial(features_of, pictures, preparation=preparation, device=scorers.device)
    rows: list[Row] = []
    if records:
        prompts = [record["prompt"] for record in records]
        scores = {name: scorer(pictures, prompts) for name, scorer in scorers.images.items()}
        for number, record in enumerate(records):
            row = {
                "level": "image",
                "record_key": record["record_key"],
                "clip_model": scorers.label,
            }
            rows.append(
                row
                | dict.fromkeys(OF_IMAGES)
                | {name: values[number] for name, values in scores.items()}
            )
    return Measured(
        rows,
        None if scorers.extractor is None else extract(scorers.extractor),
        extract(scorers.manifold) if manifold and scorers.manifold is not None else None,
    )


def score_records(
    records: Iterable[Row],
    folder: Path,
    scorers: Scorers,
    reference: Reference | None = None,
    emit: Emit | None = None,
    *,
    cache: Path | None = None,  # of features of references
    infinity: bool = False,  # also extrapolate FID to infinitely many pictures
) -> Iterator[Row]:
    """Yield rows of the pictures, then of the cell, for each cell; last those of sets of ar images with other seeds."""
    cells = _by_cell(records)
    protocol = scorers.protocol
    against = _reference_sets(scorers, reference, cache) if cells else []
    families = _ar_families(cells) if against else []
    common: Row = {
        "schema_version": SCHEMA_VERSION,
        "protocol": protocol.name,
        "protocol_version": protocol.version,
    }
    used = {
        "extractor": scorers.extractor and scorers.extractor.label,
        "reference": reference and reference.label,
    }
    of_seeds: dict[str, tuple[list[Row], Measured]] = {}
    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        existing = [record for record in rows if (folder / record["image"]).is_file()]
        measured = measure_pictures(existing, folder, scorers, manifold=len(against) > 1)
        cell: Row = {"cell_id": cell_id, "level": "cell", "n": len(existing)}
        missing = len(rows) - len(existing)
        notes = [f"{missing} images are missing in the run directory"] if missing else []
        if against:
            cell |= _measure_cell(
                measured=measured, scorers=scorers, against=against, infinity=infinity, notes=notes
            )
        else:
            notes.append(f"no reference: {listed(OF_SETS)} need one (--reference)")
        yield from (common | {"cell_id": cell_id} | image for image in measured.rows)
        if scorers.extractor is not None:
            yield common | used | cell | {"note": "; ".join(notes) or None}
        if any(cell_id in family for family in families):
            of_seeds[cell_id] = existing, measured
        if emit is not None:
            emit(ProgressEvent("scoring", done, len(cells)))
    for family in families:
        spread = _spread_row([of_seeds[cell_id] for cell_id in family], scorers, against)
        yield common | used | {"cell_id": family[0]} | spread


def _by_cell(records: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the finished records that have a picture, by cell."""
    cells: dict[str, list[Row]] = {}
    for record in {record["record_key"]: record for record in records}.values():
        if record["status"] == "ok" and record["image"]:
            cells.setdefault(record["cell_id"], []).append(record)
    return cells


def _ar_families(cells: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """Return the ids of the ar cells that differ only in their seeds, where there are several."""
    settings = [
        column.name for column in CELL_COLUMNS if column.name not in ("cell_id", "seed_set")
    ]
    families: dict[tuple[Any, ...], list[str]] = {}
    for cell_id, rows in cells.items():
        if rows[0].get("mode") == "ar":
            families.setdefault(tuple(rows[0].get(name) for name in settings), []).append(cell_id)
    return [family for family in families.values() if len(family) > 1]


def _reference_sets(
    scorers: Scorers, reference: Reference | None, cache: Path | None
) -> list[FeatureSet]:
    """Return the features of the reference by the extractor of FID, then by that of recall if it is another."""
    if scorers.extractor is None or reference is None:
        return []
    extractors = [scorers.extractor]
    if scorers.manifold is not None and reference.pictures is not None:
        extractors.append(scorers.manifold)
    preparation = scorers.protocol.preparation
    return [
        reference_features(reference, extractor, preparation, device=scorers.device, cache=cache)
        for extractor in extractors
    ]


def _sets(
    features: Tensor, manifold: Tensor | None, against: Sequence[FeatureSet], scorers: Scorers
) -> tuple[FeatureSets, FeatureSets | None]:
    """Pictures and reference; also by the extractor of precision and recall where it is another."""
    neighbours = scorers.protocol.manifold_neighbours
    others = None if manifold is None else FeatureSets(manifold, against[-1], neighbours)
    return FeatureSets(features, against[0], neighbours), others


def _measure_cell(
    measured: Measured,
    scorers: Scorers,
    against: Sequence[FeatureSet],
    infinity: bool,
    notes: list[str],
) -> Row:
    """Return the figures of a cell; those of pictures go into `measured`, what is missing into `notes`."""
    assert measured.features is not None
    assert scorers.extractor is not None
    sets, manifold = _sets(
        features=measured.features, manifold=measured.manifold, against=against, scorers=scorers
    )
    figures = measure_sets(sets, scorers.extractor, manifold)
    for name, values in figures.of_images.items():
        for image, value in zip(measured.rows, values.tolist(), strict=False):
            image[name] = value
    row = dict(figures.columns)
    notes += figures.notes
    if infinity:
        extrapolated, reasons = fid_infinity(
            measured.features, against[0], np.random.default_rng(2020)
        )
        row |= extrapolated
        notes += reasons
    return row


def _spread_row(
    cells: Sequence[tuple[list[Row], Measured]], scorers: Scorers, against: Sequence[FeatureSet]
) -> Row:
    """Return the spread of ar between sets of images with different seeds."""
    assert scorers.extractor is not None
    row_of = [
        {(record["prompt"], record["repeat"]): row for row, record in enumerate(rows)}
        for rows, _ in cells
    ]
    shared = [image for image in row_of[0] if all(image in other for other in row_of)]
    n = len(shared)
    reference = against[0]
    names, notes = measurable(
        n if reference.n is None else min(n, reference.n), reference, scorers.extractor
    )
    row: Row = {
        "level": "ar_spread",
        "n": n,
        "ar_spread_sets": len(cells),
        "n_reference": reference.n,
    }
    if names:
        features = torch.cat(
            [measured.features for _, measured in cells if measured.features is not None]
        )
        manifolds = [measured.manifold for _, measured in cells if measured.manifold is not None]
        manifold = torch.cat(manifolds) if manifolds else None
        starts = np.cumsum([0, *(len(rows) for rows, _ in cells[:-1])])
        rows = np.array(
            [
                [start + of[image] for image in shared]
                for start, of in zip(starts, row_of, strict=True)
            ]
        )
        figures = figures_of(
            names, *_sets(features=features, manifold=manifold, against=against, scorers=scorers)
        )
        for name, (centre, low, high) in ar_spread(figures, rows).items():
            row |= {name: centre, f"{name}_low": low, f"{name}_high": high}
    return row | {"note": "; ".join(notes) or None}
