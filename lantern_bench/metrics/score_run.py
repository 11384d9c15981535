"""Score a run directory by a quality protocol: from its records and PNG files to scores.jsonl."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lantern_bench.devices.compute import choose_compute
from lantern_bench.methods.catalog import METRICS
from lantern_bench.metrics.extractors import (
    Extractor,
    FeatureReference,
    FeatureSet,
    Reference,
    features_of,
    find_extractor,
    find_reference,
    preprocess,
    read_picture,
)
from lantern_bench.metrics.fidelity import (
    FeatureSets,
    ar_spread,
    figures_of,
    measurable,
    measure_sets,
)
from lantern_bench.metrics.protocols import Protocol, default_protocol, protocol_of
from lantern_bench.metrics.token_sums import finished_by_cell, score_tokens
from lantern_bench.storage.run_directory import (
    no_pixels,
    read_manifest,
    read_records,
    read_scores,
)
from lantern_bench.storage.run_store import RunStore
from lantern_bench.storage.schema import CELL_NAMES, SCHEMA_VERSION, Row
from lantern_bench.utils.errors import RefusedError
from lantern_bench.utils.progress import Emit, Note, ProgressEvent

# ---- The scorers of a protocol


@dataclass(frozen=True)
class Scorers:
    """The loaded scorers of one protocol."""

    protocol: Protocol
    # By metric: (pictures, prompts) -> figures.
    of_pictures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # The extractor of FID and KID, then the one of precision and recall if it is another. Without
    # any, nothing is measured against a reference.
    extractors: Sequence[Extractor] = ()
    reference: Reference | None = None  # what fidelity is measured against, if anything
    device: torch.device | str = "cpu"

    @property
    def label(self) -> str | None:
        """The networks of the scorers of single pictures, with their weights; None without any."""
        labels = [
            getattr(scorer, "label", f"{name}@{METRICS[name].fingerprint()}")
            for name, scorer in self.of_pictures.items()
        ]
        return "; ".join(filter(None, labels)) or None

    def cut(self, captions: Sequence[str]) -> set[tuple[str, str]]:
        """Return the captions that a metric sees the beginning of, after the metric's name."""
        found = set[tuple[str, str]]()
        for name, scorer in self.of_pictures.items():
            if hasattr(scorer, "cut"):
                too_long = zip(captions, scorer.cut(captions), strict=True)
                found |= {(name, caption) for caption, is_cut in too_long if is_cut}
        return found


def load_scorers(protocol: Protocol, reference: str | None, device: str) -> Scorers:
    """Load the scorers and the reference of a protocol.

    Args:
        protocol: The quality protocol.
        reference: What `--reference` names, by default the protocol's own.
        device: Where the scorers run.

    Raises:
        UserError: The reference cannot be used.
        RefusedError: Weights are missing.
    """
    chosen = choose_compute(device).device
    # The reference first: it is found quickly, and scorers are large.
    found = find_reference(reference, protocol)
    protocol.find_networks()
    names = dict.fromkeys([protocol.features, protocol.manifold])
    extractors = [find_extractor(name) for name in names if name is not None]
    of_pictures = {name: METRICS[name].function()(protocol, chosen) for name in protocol.metrics}
    return Scorers(protocol, of_pictures, extractors, reference=found, device=chosen)


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
    manifest = read_manifest(folder)
    without_pixels = no_pixels(manifest)
    if without_pixels is not None:
        raise RefusedError(
            f"{folder}: {without_pixels}",
            "The sweep scores tokens: repeat its command if quality.csv lacks their distance.",
        )
    recorded = manifest.get("experiment", {})
    images = [row["image"] for row in read_records(folder) if row["image"]]
    if images and not any((folder / image).is_file() for image in images):
        raise RefusedError(
            f"{folder}: nothing can be scored: none of its {len(images)} pictures is here",
            f"Copy {images[0].split('/')[0]}/ of the original run too, or score that run.",
        )
    name = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    if reference is None and name == recorded.get("protocol"):
        reference = recorded.get("reference")
    scorers = load_scorers(protocol_of(name), reference, device)
    with RunStore.to_score(folder) as store:
        count = score_cells(store, scorers, emit, infinity=infinity, rescore=rescore)
        try:
            count += score_tokens(store, device, emit)
        except RefusedError as error:
            emit(Note(f"no distance from the target: {error.message}", error.advice, "warning"))
    return scorers.protocol, count


# ---- Which cells are scored


def score_cells(
    store: RunStore,
    scorers: Scorers,
    emit: Emit,
    *,
    infinity: bool = False,
    rescore: bool = False,
) -> int:
    """Score the pictures of the cells that these scorers have not scored.

    Args:
        store: The run, opened for scoring.
        scorers: The scorers of a protocol.
        emit: Receives progress.
        infinity: Also extrapolate FID to infinitely many pictures.
        rescore: Score all cells.

    Returns:
        The number of rows written.
    """
    protocol = scorers.protocol
    cells = finished_by_cell(read_records(store.folder))
    scores: dict[str, list[Row]] = defaultdict(list)
    for row in read_scores(store.folder):
        if row["protocol"] == protocol.name and row["protocol_version"] == protocol.version:
            scores[row["cell_id"]].append(row)

    pending = [
        cell_id
        for cell_id, records in cells.items()
        if rescore or not _is_scored(records, scores[cell_id], scorers, infinity=infinity)
    ]
    # Sets of ar images with different seeds are scored together.
    for family in ar_families(cells):
        has_spread = any(row["level"] == "ar_spread" for row in scores[family[0]])
        lacks_spread = scorers.extractors and not has_spread
        if lacks_spread or not set(pending).isdisjoint(family):
            pending += family
    if not pending:
        return 0

    store.update_manifest(
        protocols={**store.manifest.get("protocols", {}), protocol.name: asdict(protocol)}
    )
    chosen = {cell_id: cells[cell_id] for cell_id in dict.fromkeys(pending)}
    rows = score_pictures(chosen, store.folder, scorers, emit=emit, infinity=infinity)
    return len([store.append_score(row) for row in rows])


def _is_scored(
    records: Sequence[Row], scores: Sequence[Row], scorers: Scorers, *, infinity: bool
) -> bool:
    """Return whether the scores of a cell cover all its pictures, by these scorers."""
    scored = {row["record_key"] for row in scores if row["clip_model"] == scorers.label}
    if not scored.issuperset(record["record_key"] for record in records):
        return False
    if not scorers.extractors:
        return True
    of_cell = [row for row in scores if row["level"] == "cell"]
    if not of_cell:
        return False
    latest = of_cell[-1]
    if infinity and latest["fid_infinity"] is None:
        return False
    reference = scorers.reference
    return (
        latest["n"] == len(records)
        and latest["extractor"] == scorers.extractors[0].label
        and (reference is None or latest["reference"] == reference.label)
    )


def ar_families(cells: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """Return groups of at least two ids: cells of `ar` that differ only in their seeds."""
    settings = set(CELL_NAMES) - {"cell_id", "seed_set"}
    families: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for cell_id, rows in cells.items():
        if rows[0].get("mode") == "ar":
            families[tuple(rows[0].get(name) for name in settings)].append(cell_id)
    return [family for family in families.values() if len(family) > 1]


# ---- The rows of cells


def score_pictures(
    cells: Mapping[str, Sequence[Row]],
    folder: Path,
    scorers: Scorers,
    *,
    emit: Emit,
    infinity: bool = False,
) -> Iterator[Row]:
    """Score the pictures of cells.

    Args:
        cells: Records of finished images, by cell.
        folder: The run directory.
        scorers: The scorers of the protocol.
        emit: Receives progress.
        infinity: Also extrapolate FID to infinitely many pictures.

    Yields:
        For each cell a row of each picture, then a row of the cell. Last, a row of the spread of
        `ar` for cells of `ar` that differ only in their seeds.
    """
    protocol = scorers.protocol
    preparation = protocol.preparation
    common: Row = {
        "schema_version": SCHEMA_VERSION,
        "protocol": protocol.name,
        "protocol_version": protocol.version,
    }
    used = common | {
        "extractor": scorers.extractors[0].label if scorers.extractors else None,
        "reference": None if scorers.reference is None else scorers.reference.label,
    }
    against = _reference_sets(scorers) if cells else []
    families = ar_families(cells) if against else []
    # The records and the features of the cells of `families`.
    of_families: dict[str, tuple[list[Row], list[FeatureSets]]] = {}
    captions = set[str]()
    cut = set[tuple[str, str]]()  # metrics, and captions of which they saw the beginning

    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        # 1. All pictures of the cell against the reference.
        existing = [record for record in rows if (folder / record["image"]).is_file()]
        pictures = [
            preprocess(read_picture(folder / record["image"]), preparation) for record in existing
        ]
        sets = [
            FeatureSets(
                features_of(pictures, extractor, preparation.features_size, device=scorers.device),
                reference_set,
            )
            for extractor, reference_set in against
        ]
        figures = measure_sets(sets, infinity=infinity)
        if any(cell_id in family for family in families):
            of_families[cell_id] = (existing, sets)

        # 2. A row of each picture.
        scores = dict[str, Any](figures.of_images)
        if existing:
            prompts = [record["prompt"] for record in existing]
            captions.update(prompts)
            cut |= scorers.cut(prompts)
            scores |= {
                name: scorer(pictures, prompts) for name, scorer in scorers.of_pictures.items()
            }
        image = {"cell_id": cell_id, "level": "image", "clip_model": scorers.label}
        for number, record in enumerate(existing):
            row = common | image | {"record_key": record["record_key"]}
            yield row | {name: values[number] for name, values in scores.items()}

        # 3. A row of the cell.
        if scorers.extractors:
            notes = figures.notes
            missing = len(rows) - len(existing)
            if missing:
                notes.insert(0, f"{missing} pictures are missing in the run directory")
            cell = {"cell_id": cell_id, "level": "cell", "n": len(existing)}
            yield used | cell | figures.columns | {"note": "; ".join(notes) or None}
        emit(ProgressEvent("scoring", done, len(cells)))

    for name, count in Counter(name for name, _ in cut).items():
        text = f"{name}: {count:,} of {len(captions):,} captions are longer than its network reads"
        emit(Note(text, "Their scores are of their first words.", "warning"))

    # 4. Sets of ar images with other seeds against each other.
    for family in families:
        spread = _spread_row([of_families[cell_id] for cell_id in family])
        yield used | {"cell_id": family[0]} | spread


def _reference_sets(scorers: Scorers) -> list[tuple[Extractor, FeatureSet]]:
    """Return the features of the reference under each extractor."""
    reference = scorers.reference
    if reference is None:
        return []
    if isinstance(reference, FeatureReference):
        # They belong to the first extractor alone.
        return [(extractor, reference.features(extractor)) for extractor in scorers.extractors[:1]]
    return [
        (extractor, reference.features(extractor, scorers.protocol.preparation, scorers.device))
        for extractor in scorers.extractors
    ]


def _spread_row(cells: Sequence[tuple[list[Row], list[FeatureSets]]]) -> Row:
    """Return the spread of `ar` between sets of images with different seeds.

    `cells` are the records of each set, with its features under each extractor.
    """
    # Rows, in all pictures of all sets, of the images that every set has.
    rows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    pooled = []
    for records, _ in cells:
        pooled += records
    for row, record in enumerate(pooled):
        rows_of[record["prompt"], record["repeat"]].append(row)
    shared = [rows for rows in rows_of.values() if len(rows) == len(cells)]

    reference = cells[0][1][0].reference
    names, notes = measurable(len(shared), reference)
    spread: Row = {
        "level": "ar_spread",
        "n": len(shared),
        "ar_spread_sets": len(cells),
        "n_reference": reference.n,
        "note": "; ".join(notes) or None,
    }
    if names:
        sets = []
        for parts in zip(*(sets_of_cell for _, sets_of_cell in cells), strict=True):
            sets.append(parts[0]._replace(pictures=torch.cat([part.pictures for part in parts])))
        spread |= ar_spread(figures_of(names, sets), np.array(shared).T)
    return spread
