"""Score pictures: from the records and PNG files of a run to rows of scores.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    SetFigures,
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
    # By metric: (pictures, prompts) -> figures.
    images: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # The extractor of FID and KID, then the one of precision and recall if it is another. Without
    # any, nothing is measured against a reference.
    extractors: Sequence[Extractor] = ()
    device: torch.device | str = "cpu"

    @property
    def label(self) -> str | None:
        """The networks of the scorers of single pictures, with their weights; None without any."""
        labels = []
        for name, scorer in self.images.items():
            unnamed = f"{name}@{METRICS[name].fingerprint()}"
            labels.append(getattr(scorer, "label", unnamed))
        return "; ".join(label for label in labels if label) or None


def load_scorers(protocol: Protocol, device: torch.device | str = "cpu") -> Scorers:
    """Load the scorers of a protocol; raises `RefusedError` if weights are missing."""
    names = dict.fromkeys([protocol.features, protocol.manifold])
    extractors = [find_extractor(name) for name in names if name is not None]
    if protocol.metrics:
        # Registers the scorers of the shipped metrics; the import takes seconds.
        import lantern_bench.metrics.image_scorers  # noqa: F401
    return Scorers(
        protocol=protocol,
        images={name: METRICS[name].function()(protocol, device) for name in protocol.metrics},
        extractors=extractors,
        device=device,
    )


def score_records(
    records: Iterable[Row],
    folder: Path,
    scorers: Scorers,
    reference: Reference | None = None,
    emit: Emit | None = None,
    *,
    cache: Path | None = None,
    infinity: bool = False,
) -> Iterator[Row]:
    """Score the pictures of records.

    Args:
        records: Records of a run; the last one of each image counts.
        folder: The run directory.
        scorers: The scorers of the protocol.
        reference: What fidelity is measured against, if anything.
        emit: Receives progress.
        cache: Folder of the features of references.
        infinity: Also extrapolate FID to infinitely many pictures.

    Yields:
        For each cell a row of each picture, then a row of the cell. Last, a row of the spread of
        `ar` for cells of `ar` that differ only in their seeds.
    """
    cells = finished_by_cell(records)
    protocol = scorers.protocol
    common: Row = {
        "schema_version": SCHEMA_VERSION,
        "protocol": protocol.name,
        "protocol_version": protocol.version,
    }
    used = {
        "extractor": scorers.extractors[0].label if scorers.extractors else None,
        "reference": None if reference is None else reference.label,
    }
    against = _reference_sets(scorers, reference, cache) if cells else []
    families = ar_families(cells) if against else []
    of_families: dict[str, tuple[list[Row], list[FeatureSets]]] = {
        cell_id: ([], []) for cell_id in set[str]().union(*families)
    }

    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        # 1. The pictures themselves.
        existing = [record for record in rows if (folder / record["image"]).is_file()]
        pictures = [
            preprocess(read_picture(folder / record["image"]), protocol.preparation)
            for record in existing
        ]
        images = _score_images(existing, pictures, scorers)

        # 2. All of them against the reference.
        sets = []
        for extractor, reference_set in against:
            features = features_of(pictures, extractor, protocol.preparation, device=scorers.device)
            sets.append(FeatureSets(features, reference_set, protocol.manifold_neighbours))
        figures = _measure_cell(sets, infinity=infinity)
        for name, values in figures.of_images.items():
            for image, value in zip(images, values.tolist(), strict=True):
                image[name] = value

        yield from (common | {"cell_id": cell_id} | image for image in images)
        if scorers.extractors:
            notes = figures.notes
            if len(existing) < len(rows):
                missing = len(rows) - len(existing)
                notes.insert(0, f"{missing} images are missing in the run directory")
            cell = {"cell_id": cell_id, "level": "cell", "n": len(existing)}
            yield common | used | cell | figures.columns | {"note": "; ".join(notes) or None}
        if cell_id in of_families:
            of_families[cell_id] = (existing, sets)
        if emit is not None:
            emit(ProgressEvent("scoring", done, len(cells)))

    # 3. Sets of ar images with other seeds against each other.
    for family in families:
        spread = _spread_row([of_families[cell_id] for cell_id in family])
        yield common | used | {"cell_id": family[0]} | spread


def _measure_cell(sets: Sequence[FeatureSets], *, infinity: bool) -> SetFigures:
    """Measure the pictures of a cell against the reference, under each extractor."""
    if not sets:
        return SetFigures({}, {}, [f"no reference: {listed(OF_SETS)} need one (--reference)"])
    figures = measure_sets(sets[0], sets[-1])
    if infinity:
        columns, notes = fid_infinity(
            sets[0].pictures, sets[0].reference, np.random.default_rng(2020)
        )
        figures.columns.update(columns)
        figures.notes.extend(notes)
    return figures


def finished_by_cell(records: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the finished records that have a picture, by cell."""
    latest = {record["record_key"]: record for record in records}
    cells: dict[str, list[Row]] = {}
    for record in latest.values():
        if record["status"] == "ok" and record["image"]:
            cells.setdefault(record["cell_id"], []).append(record)
    return cells


def ar_families(cells: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """Return groups of at least two ids: cells of `ar` that differ only in their seeds."""
    names = {column.name for column in CELL_COLUMNS} - {"cell_id", "seed_set"}
    settings = sorted(names)
    families: dict[tuple[Any, ...], list[str]] = {}
    for cell_id, rows in cells.items():
        if rows[0].get("mode") == "ar":
            same = tuple(rows[0].get(name) for name in settings)
            families.setdefault(same, []).append(cell_id)
    return [family for family in families.values() if len(family) > 1]


def _reference_sets(
    scorers: Scorers, reference: Reference | None, cache: Path | None
) -> list[tuple[Extractor, FeatureSet]]:
    """Return the features of the reference under each extractor.

    A reference of statistics belongs to the first extractor alone.
    """
    if reference is None:
        return []
    extractors = scorers.extractors
    if reference.pictures is None:
        extractors = extractors[:1]
    sets = []
    preparation = scorers.protocol.preparation
    for extractor in extractors:
        features = reference_features(
            reference, extractor, preparation, device=scorers.device, cache=cache
        )
        sets.append((extractor, features))
    return sets


def _score_images(
    records: Sequence[Row], pictures: Sequence[Tensor], scorers: Scorers
) -> list[Row]:
    """Return a row of level `image` for each picture, with the answers of all scorers."""
    if not records:
        return []
    prompts = [record["prompt"] for record in records]
    scores = {name: scorer(pictures, prompts) for name, scorer in scorers.images.items()}
    common = {"level": "image", "clip_model": scorers.label, **dict.fromkeys(OF_IMAGES)}
    rows = []
    for number, record in enumerate(records):
        row: Row = common | {"record_key": record["record_key"]}
        row |= {name: values[number] for name, values in scores.items()}
        rows.append(row)
    return rows


def _spread_row(cells: Sequence[tuple[list[Row], list[FeatureSets]]]) -> Row:
    """Return the spread of `ar` between sets of images with different seeds.

    `cells` are the records of each set, with its features under each extractor.
    """
    # Rows, in all pictures of all sets, of the images that every set has.
    place_of: list[dict[tuple[str, int], int]] = []
    start = 0
    for records, _ in cells:
        images = [(record["prompt"], record["repeat"]) for record in records]
        place_of.append({image: start + row for row, image in enumerate(images)})
        start += len(records)
    shared = [image for image in place_of[0] if all(image in places for places in place_of)]
    rows = np.array([[places[image] for image in shared] for places in place_of])

    reference = cells[0][1][0].reference
    names, notes = measurable(len(shared), reference)
    row: Row = {
        "level": "ar_spread",
        "n": len(shared),
        "ar_spread_sets": len(cells),
        "n_reference": reference.n,
    }
    if names:
        pooled = []
        for parts in zip(*(sets for _, sets in cells), strict=True):
            features = torch.cat([part.pictures for part in parts])
            pooled.append(parts[0]._replace(pictures=features))
        figures = figures_of(names, pooled[0], pooled[-1])
        for name, (centre, low, high) in ar_spread(figures, rows).items():
            row |= {name: centre, f"{name}_low": low, f"{name}_high": high}
    row["note"] = "; ".join(notes) or None
    return row
