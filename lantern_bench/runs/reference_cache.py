"""Features of reference sets, kept on the disk by what is in them.

Passing thousands of pictures through Inception takes minutes and gives the same every time. What is kept is found by a
hash of the pictures' content, the extractor with its weights, and the preparation: a folder that changes is another
reference, and one that is only called otherwise is not. A cache that cannot be written is done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lantern_bench.errors import UserError
from lantern_bench.measure.extractors import Extractor
from lantern_bench.measure.features import FeatureSet, features_of
from lantern_bench.measure.preparing import for_features, prepare
from lantern_bench.runs.jsonl import write_atomically
from lantern_bench.runs.reference import Reference
from lantern_bench.spec.protocols import Preparation

__all__ = ["CACHE_VARIABLE", "cache_folder", "reference_features"]

CACHE_VARIABLE = "LANTERN_BENCH_CACHE"
_VERSION = "1"


def cache_folder() -> Path:
    """The folder that `LANTERN_BENCH_CACHE` names, else lantern-bench in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "lantern-bench"


def reference_features(
    reference: Reference,
    extractor: Extractor,
    preparation: Preparation,
    *,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> FeatureSet:
    """What is known of a reference under an extractor; from `cache` where it is there, else made and kept there.

    Raises `UserError` for statistics of another width, and for pictures that differ in size after preparation.
    """
    if reference.pictures is None:
        return _given(reference, extractor)
    path = None
    if cache is not None and reference.digest:
        path = cache / "references" / _name(reference, extractor, preparation)
    kept = _read(path, extractor, len(reference.pictures)) if path is not None else None
    if kept is not None:
        return FeatureSet.of(torch.from_numpy(kept))
    _check_sizes(reference, preparation)
    features = features_of(
        reference.pictures,
        extractor,
        prepared=lambda picture: for_features(prepare(picture, preparation), preparation),
        device=device,
    )
    if path is not None:
        _keep(path, features.numpy())
    return FeatureSet.of(features)


def _given(reference: Reference, extractor: Extractor) -> FeatureSet:
    found = reference.statistics
    width = 0 if found is None else len(found.mean)
    if found is None or width != extractor.width:
        raise UserError(
            f"the reference {reference.label} has {width} features, {extractor.name} has {extractor.width}",
            "Give statistics of the protocol's own extractor, or a folder of pictures.",
        )
    return found


def _check_sizes(reference: Reference, preparation: Preparation) -> None:
    """Raise `UserError` when pictures that are taken as they are differ in size; one that is resized has its size."""
    if reference.pictures is None or preparation.size or preparation.features_size:
        return
    sizes = {tuple(reference.pictures[number].shape[1:]) for number in range(len(reference.pictures))}
    if len(sizes) > 1:
        raise UserError(
            f"the pictures of the reference {reference.label} differ in size: {sorted(sizes)[:3]}",
            "This protocol takes pictures as they are; lantern-coco crops and resizes them.",
        )


def _name(reference: Reference, extractor: Extractor, preparation: Preparation) -> str:
    steps = "-".join(f"{name}={value}" for name, value in asdict(preparation).items())
    covered = f"{_VERSION}|{reference.digest}|{extractor.label}|{steps}"
    return f"{hashlib.sha256(covered.encode()).hexdigest()[:32]}.npz"


def _read(path: Path, extractor: Extractor, n: int) -> np.ndarray | None:
    """The features kept in a file; None when there are none or the file is damaged, and they are made again."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError), np.load(path, allow_pickle=False) as file:
        features = np.asarray(file["features"], dtype=np.float32)
        if features.shape == (n, extractor.width):
            return features
    return None


def _keep(path: Path, features: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, features=features)
    # The figures are the same without: a read-only home is no reason to stop.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())
