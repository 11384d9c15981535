"""Scoring: from the records and PNG files of a run to rows of scores.jsonl.

Nothing is decoded, so a run can be scored again, later, on another machine, or by another protocol; every row has the
name and version of its protocol. `metrics/` computes the scores and `report/` averages them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from typing import Protocol as Protocol_

import numpy as np
import torch
from torch import Tensor

from lantern_bench.config.protocols import Protocol, protocol_of
from lantern_bench.errors import RefusedError
from lantern_bench.methods.metrics import listed
from lantern_bench.methods.tables import METRICS, OF_IMAGES, OF_SETS
from lantern_bench.metrics.features import (
    Extractor,
    FeatureSet,
    features_of,
    find_extractor,
    preprocess,
    read_picture,
)
from lantern_bench.metrics.figures import FeatureSets, fid_infinity, figures_of, measurable, measure_sets
from lantern_bench.metrics.reference_sets import (
    Reference,
    cache_folder,
    find_reference,
    reference_features,
)
from lantern_bench.metrics.spread import ar_spread
from lantern_bench.runs.devices import choose_compute
from lantern_bench.runs.events import Emit, Share
from lantern_bench.runs.request import Request, default_protocol
from lantern_bench.runs.store import ScoreStore, read_manifest, read_scores
from lantern_bench.schema import CELL_COLUMNS, SCHEMA_VERSION

Row = dict[str, Any]
OnCell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Scorers:
    """The loaded scorers of one protocol."""

    protocol: Protocol
    images: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by metric: (pictures, prompts) -> figures
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

    @property
    def labels(self) -> tuple[str | None, ...]:
        """All scorers with the hashes of their weights."""
        extractors = (self.extractor, self.manifold)
        return (self.label, *(None if extractor is None else extractor.label for extractor in extractors))


def load_scorers(
    protocol: Protocol,
    *,
    clip_weights: Path | None = None,
    features_weights: Path | None = None,
    device: torch.device | str = "cpu",
) -> Scorers:
    """Load the scorers of a protocol.

    Raises `RefusedError` for weights that are not on this machine, `UserError` for weights of another model.
    """
    extractor = find_extractor(protocol.features, features_weights) if protocol.features else None
    manifold = protocol.manifold if protocol.manifold != protocol.features else None
    weights = {"clip_score": clip_weights}
    images = {name: METRICS[name].function()(protocol, weights.get(name), device) for name in protocol.metrics}
    return Scorers(protocol, images, extractor, find_extractor(manifold) if manifold else None, device)


def score_run(
    store: ScoreStore,
    scorers: Scorers,
    reference: Reference | None = None,
    on_cell: OnCell | None = None,
    *,
    cache: Path | None = None,
    infinity: bool = False,
    again: bool = False,
    measure: Measure | None = None,
) -> int:
    """Score the cells of a run that these scorers have not scored; return the number of rows written.

    A cell is scored again when it has new images, when the reference, the protocol's version or a scorer's weights
    changed, when `infinity` is asked for and missing, and always with `again`; sets of ar images with different seeds
    are scored again together. Other arguments as `score_records`.
    """
    cells, protocol = _by_cell(store.records()), scorers.protocol
    wanted = (protocol.name, protocol.version)
    kept = [row for row in read_scores(store.folder) if (row["protocol"], row["protocol_version"] or 1) == wanted]
    name = reference.label if reference is not None else ""
    left = [cell for cell in cells if again or not _is_scored(cell, cells[cell], kept, scorers, name, infinity)]
    banded = {row["cell_id"] for row in kept if row["level"] == "band"}
    for family in _ar_families(cells):
        if set(left) & set(family) or (scorers.extractor and family[0] not in banded):
            left += family
    pending = [row for cell in dict.fromkeys(left) for row in cells[cell]]
    if not pending:
        return 0
    store.update_manifest(protocols=store.manifest.get("protocols", {}) | {protocol.name: protocol.to_dict()})
    written = 0
    found = score_records(
        pending, store.folder, scorers, reference, on_cell, cache=cache, infinity=infinity, measure=measure
    )
    for row in found:
        store.append_score(row)
        written += 1
    return written


def _is_scored(
    cell_id: str, records: Sequence[Row], kept: Sequence[Row], scorers: Scorers, reference: str, infinity: bool
) -> bool:
    """Whether the kept rows have these scorers' scores of all images of the cell."""
    mine = [row for row in kept if row["cell_id"] == cell_id]
    images = {row["record_key"] for row in mine if row["level"] == "image" and row["clip_model"] == scorers.label}
    if not images.issuperset(record["record_key"] for record in records):
        return False
    if scorers.extractor is None:
        return True
    whole = next((row for row in reversed(mine) if row["level"] == "cell"), None)
    return (
        whole is not None
        and whole["n"] == len(records)
        and whole["extractor"] == scorers.extractor.label
        and str(whole["reference"] or "").startswith(reference)
        and not (infinity and whole["fid_infinity"] is None)
    )


def score_records(
    records: Iterable[Row],
    folder: Path,
    scorers: Scorers,
    reference: Reference | None = None,
    on_cell: OnCell | None = None,
    *,
    cache: Path | None = None,
    infinity: bool = False,
    measure: Measure | None = None,
) -> Iterator[Row]:
    """Score the images of a run: for each cell one row of level `image` per picture, then one of level `cell`.

    Sets of ar images with different seeds give one row of level `band` more, the last.

    `records` are rows of records.jsonl (the last of equal keys counts, failed ones are skipped); their `image` is
    relative to `folder`. Rows have columns of the `schema` table `scores`. Without a `reference`,
    fidelity is empty with a note. `cache` keeps the features of references; `infinity` adds the
    extrapolated FID. `on_cell(cell_id, done, total)` is called after each cell. `measure` replaces the work on single
    pictures (`measure_pictures`), for example by one on several machines.
    """
    cells, protocol = _by_cell(records), scorers.protocol
    # The features of the reference under the protocol's extractors: the first for FID, the last for the manifold.
    against: list[FeatureSet] = []
    if scorers.extractor is not None and reference is not None and cells:
        used = [scorers.extractor]
        if scorers.manifold is not None and reference.pictures is not None:
            used.append(scorers.manifold)
        prepare = partial(reference_features, reference, device=scorers.device, cache=cache)
        against = [prepare(extractor, protocol.preparation) for extractor in used]
    families = _ar_families(cells)
    sets: dict[str, _Features] = {}
    for done, (cell_id, rows) in enumerate(cells.items(), start=1):
        there = [record for record in rows if (folder / record["image"]).is_file()]
        measured = (measure or measure_pictures)(there, folder, scorers, manifold=len(against) > 1)
        common = {"schema_version": SCHEMA_VERSION, "protocol": protocol.name}
        common |= {"protocol_version": protocol.version, "cell_id": cell_id}
        images, whole = measured.rows, []
        if scorers.extractor is not None:
            row: Row = {"level": "cell", "n": len(there), "extractor": scorers.extractor.label}
            row["reference"] = None if reference is None else reference.label
            notes = (
                [f"{missing} images are missing in the run directory"] if (missing := len(rows) - len(there)) else []
            )
            if against:
                features = _features_of(there, measured)
                notes += _measure_fidelity(row, images, features, scorers, scorers.extractor, against, infinity)
                if any(cell_id in family for family in families):
                    sets[cell_id] = features
            else:
                notes.append(f"no reference: {listed(OF_SETS)} need one (--reference)")
            whole = [row | {"note": "; ".join(notes) or None}]
        yield from (common | row for row in (*images, *whole))
        for family in families:
            if family[-1] == cell_id and scorers.extractor is not None and against:
                row = _band_row([sets[one] for one in family], scorers, scorers.extractor, against)
                row |= {"extractor": scorers.extractor.label, "reference": whole[0]["reference"]}
                yield common | row | {"cell_id": family[0]}
        if on_cell is not None:
            on_cell(cell_id, done, len(cells))


def _ar_families(cells: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """The ar cells that differ in nothing but their seeds, where there are several: lists of cell ids."""
    settings = [column.name for column in CELL_COLUMNS if column.name not in ("cell_id", "seed_set")]
    families: dict[tuple[Any, ...], list[str]] = {}
    for cell_id, rows in cells.items():
        if rows[0].get("mode") == "ar":
            families.setdefault(tuple(rows[0].get(name) for name in settings), []).append(cell_id)
    return [family for family in families.values() if len(family) > 1]


def _by_cell(records: Iterable[Row]) -> dict[str, list[Row]]:
    """Finished records that have a picture, by cell, in the order they first appear."""
    cells: dict[str, list[Row]] = {}
    for record in {record["record_key"]: record for record in records}.values():
        if record["status"] == "ok" and record["image"]:
            cells.setdefault(record["cell_id"], []).append(record)
    return cells


def _image_rows(records: Sequence[Row], pictures: Sequence[Tensor], scorers: Scorers) -> Iterator[Row]:
    if not records:
        return
    prompts = [record["prompt"] for record in records]
    scores = {name: scorer(pictures, prompts) for name, scorer in scorers.images.items()}
    for number, record in enumerate(records):
        row = {"level": "image", "record_key": record["record_key"], "clip_model": scorers.label}
        yield row | dict.fromkeys(OF_IMAGES) | {name: values[number] for name, values in scores.items()}


class Measured(NamedTuple):
    """What is measured of single pictures."""

    rows: list[Row]  # of level `image`
    features: Tensor | None  # [n, width]; None without an extractor
    manifold: Tensor | None  # those for precision and recall, where they have another extractor


class Measure(Protocol_):
    """What measures single pictures, in their order: `measure_pictures`, or the same in parts elsewhere."""

    def __call__(self, records: Sequence[Row], folder: Path, scorers: Scorers, *, manifold: bool) -> Measured:
        """Measure the pictures of records, which lie in `folder`; with `manifold` also by the manifold's extractor."""
        ...


def measure_pictures(records: Sequence[Row], folder: Path, scorers: Scorers, *, manifold: bool) -> Measured:
    """Score the pictures of records one by one, and extract their features; `manifold`: also those of its extractor."""
    preparation = scorers.protocol.preparation
    pictures = [preprocess(read_picture(folder / record["image"]), preparation) for record in records]
    extract = partial(features_of, pictures, preparation=preparation, device=scorers.device)
    return Measured(
        list(_image_rows(records, pictures, scorers)),
        None if scorers.extractor is None else extract(scorers.extractor),
        extract(scorers.manifold) if manifold and scorers.manifold is not None else None,
    )


def joined(measured: Sequence[Measured]) -> Measured:
    """Join what was measured of several sets of pictures, in their order."""
    features = [each.features for each in measured if each.features is not None]
    manifolds = [each.manifold for each in measured if each.manifold is not None]
    rows = [row for each in measured for row in each.rows]
    return Measured(rows, torch.cat(features) if features else None, torch.cat(manifolds) if manifolds else None)


class _Features(NamedTuple):
    """Features of the pictures of a cell, and the prompt and repeat of each."""

    images: list[tuple[str, int]]
    features: Tensor  # [n, width]
    manifold: Tensor | None  # under the extractor of precision and recall, where it is another


def _features_of(records: Sequence[Row], measured: Measured) -> _Features:
    assert measured.features is not None
    images = [(str(record["prompt"]), int(record["repeat"])) for record in records]
    return _Features(images, measured.features, measured.manifold)


def _sets(
    features: Tensor, manifold: Tensor | None, against: Sequence[FeatureSet], scorers: Scorers
) -> tuple[FeatureSets, FeatureSets | None]:
    """Pictures and reference, and the same under the extractor of precision and recall where it is another."""
    neighbours = scorers.protocol.manifold_neighbours
    others = None if manifold is None else FeatureSets(manifold, against[-1], neighbours)
    return FeatureSets(features, against[0], neighbours), others


def _measure_fidelity(
    row: Row,
    images: Sequence[Row],
    cell: _Features,
    scorers: Scorers,
    extractor: Extractor,
    against: Sequence[FeatureSet],
    infinity: bool,
) -> list[str]:
    """Put the fidelity of a cell's pictures into its row and those of its images; return what cannot be measured."""
    sets, manifold = _sets(cell.features, cell.manifold, against, scorers)
    measured = measure_sets(sets, extractor, manifold)
    row |= measured.columns
    for name, figures in measured.of_images.items():
        for image, figure in zip(images, figures.tolist(), strict=False):
            image[name] = figure
    notes = list(measured.notes)
    if infinity:
        far = fid_infinity(cell.features, against[0], np.random.default_rng(2020))
        row |= {"fid_infinity": far.value, "fid_infinity_low": far.low, "fid_infinity_high": far.high}
        notes.append(far.note)
    return [note for note in notes if note]


def _band_row(cells: Sequence[_Features], scorers: Scorers, extractor: Extractor, against: Sequence[FeatureSet]) -> Row:
    """The spread of ar between sets of images with the same prompts and different seeds."""
    rows_of = [{image: row for row, image in enumerate(cell.images)} for cell in cells]
    shared = [image for image in rows_of[0] if all(image in other for other in rows_of)]
    n, reference = len(shared), against[0]
    names, notes = measurable(n if reference.n is None else min(n, reference.n), reference, extractor)
    row: Row = {"level": "band", "n": n, "band_sets": len(cells), "n_reference": reference.n}
    if names:
        starts = np.cumsum([0, *(len(cell.features) for cell in cells[:-1])])
        rows = np.array([[start + of[image] for image in shared] for start, of in zip(starts, rows_of, strict=True)])
        manifolds = [cell.manifold for cell in cells if cell.manifold is not None]
        features, manifold = torch.cat([cell.features for cell in cells]), torch.cat(manifolds) if manifolds else None
        figures = figures_of(names, *_sets(features, manifold, against, scorers))
        for name, (centre, low, high) in ar_spread(figures, rows).items():
            row |= {name: centre, f"{name}_low": low, f"{name}_high": high}
    return row | {"note": "; ".join(notes) or None}


# ---- Scoring a run directory


def score_run_directory(
    folder: Path,
    emit: Emit,
    *,
    protocol: str | None = None,
    reference: str | None = None,
    device: str = "auto",
    clip_weights: Path | None = None,
    features_weights: Path | None = None,
    infinity: bool = False,
    again: bool = False,
) -> tuple[Protocol, int]:
    """Score the pictures of a run by a quality protocol, by default the run's; nothing is decoded.

    Returns the protocol and the number of rows written. Raises as `load_scorers`, `find_reference` and `ScoreStore`.
    """
    recorded = read_manifest(folder).get("experiment", {})
    name = protocol or recorded.get("protocol") or default_protocol(recorded.get("model") or [])
    rules = protocol_of(name)
    compute = choose_compute(device)
    scorers = load_scorers(rules, clip_weights=clip_weights, features_weights=features_weights, device=compute.device)
    pictures = reference or (recorded.get("reference") if name == recorded.get("protocol") else None)
    against = find_reference(pictures, rules)
    return rules, score_folder(folder, scorers, against, emit, infinity=infinity, again=again)


def load_scorers_of(request: Request, device: str) -> tuple[Scorers, Reference | None]:
    """Load the scorers and the reference of the run's protocol.

    Raises `RefusedError` for missing weights, `UserError` for a malformed reference.
    """
    compute = choose_compute(device)
    try:
        # The reference first: it is found quickly, and scorers are large.
        reference = find_reference(request.experiment.settings.reference, request.protocol)
        return load_scorers(request.protocol, device=compute.device), reference
    except RefusedError as error:
        advice = f"{error.advice.rstrip('.')}. " if error.advice else ""
        raise RefusedError(error.message, f"{advice}Or leave quality out: --metrics speed.") from error


def score_folder(folder: Path, scorers: Scorers, reference: Reference | None, emit: Emit, **options: Any) -> int:
    """Score what these scorers have not scored in a run; `options` as in `score_run`. Returns the number of rows."""

    def on_cell(_cell_id: str, done: int, total: int) -> None:
        emit(Share("scoring", done, total))

    with ScoreStore(folder) as store:
        return score_run(store, scorers, reference, on_cell, cache=cache_folder(), **options)
