"""Reference sets of fidelity: the embedded one, a folder, an annotation file, or statistics; and their cached features.

A pass of thousands of pictures through Inception takes minutes and always gives the same result. The cache key is a
hash of the pictures' content, the extractor with its weights, and the preprocessing; file names do not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from lantern_bench.config.protocols import EMBEDDED, Preparation, Protocol
from lantern_bench.errors import UserError
from lantern_bench.metrics.features import Extractor, FeatureSet, Pictures, features_of, read_picture
from lantern_bench.models.io import files
from lantern_bench.models.lanterns import WEIGHTS_FOLDER

EMBEDDED_FEATURES = WEIGHTS_FOLDER / "reference.safetensors"

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class Reference(NamedTuple):
    """What fidelity is measured against."""

    pictures: Pictures | None  # None where there are only `statistics`
    label: str  # its name in results
    statistics: FeatureSet | None = None
    digest: str = ""  # of the content, for the cache
    extractor: str = ""  # label of the extractor behind `statistics`; empty where the file does not say


def find_reference(name: str | None, protocol: Protocol) -> Reference | None:
    """Return the reference that --reference names, by default the protocol's own; None for a protocol without one.

    Raises `UserError` for anything else than its message lists, and for `embedded` under another protocol.
    """
    name = name or protocol.reference
    if name is None:
        return None
    if name == EMBEDDED:
        if protocol.reference == EMBEDDED:
            return embedded_reference()
        problem = f"--reference {name}: the rendered scenes are not for the protocol {protocol.name}"
        raise UserError(problem, "Give a folder, a .json or a .npz, or --protocol embedded.")
    file, equals, folder = name.partition("=")
    path = Path(file)
    if path.suffix.lower() == ".json" and path.is_file():
        return _annotated(path, Path(folder) if equals else path.with_suffix(""))
    if path.suffix.lower() == ".npz" and path.is_file():
        return _statistics(path)
    if Path(name).is_dir():
        return folder_reference(Path(name))
    raise UserError(
        f"--reference {name}: no such folder or file",
        "What fidelity is measured against: embedded (scenes of the bundled family), a folder of pictures, a COCO "
        "annotation .json (its pictures in the folder of the same name, or FILE.json=FOLDER), or a .npz of mu, sigma.",
    )


def embedded_reference() -> Reference:
    """Return the features that ship with the bundled family: of 1,024 painted scenes of the held-out captions.

    They are those of the bundled extractor alone. `write_embedded` made the file; no training uses the scenes.
    """
    with safe_open(EMBEDDED_FEATURES, framework="pt") as file:
        metadata, features = file.metadata(), file.get_tensor("features")
    return Reference(None, metadata["label"], FeatureSet.of(features), extractor=metadata["extractor"])


def write_embedded(path: Path, scenes: Tensor, extractor: Extractor, label: str) -> None:
    """Write the features of painted scenes, uint8 [n, 3, 64, 64], with the extractor's fingerprint."""
    metadata = {"label": label, "extractor": extractor.label}
    files.write_atomically(path, save({"features": features_of(scenes, extractor)}, metadata))


def folder_reference(folder: Path) -> Reference:
    """All pictures of a folder, by name; raises `UserError` when there are none."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise UserError(f"no pictures in the reference folder {folder}", f"Allowed: {', '.join(_SUFFIXES)}")
    return _of_files(folder.name, paths)


def _annotated(annotations: Path, folder: Path) -> Reference:
    """The pictures in `folder` that a COCO annotation file lists under `images`."""
    flag, advice = f"--reference {annotations}", f"Write {annotations}=FOLDER."
    try:
        listed = json.loads(annotations.read_text(encoding="utf-8"))["images"]
        names = sorted({str(entry["file_name"]) for entry in listed})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag}: not a COCO annotation file: it needs images, each with file_name") from error
    if not folder.is_dir():
        raise UserError(f"{flag}: no folder {folder}", advice)
    if not names:
        raise UserError(f"{flag}: lists no pictures")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        problem = f"{len(missing)} of {len(names)} pictures are not in {folder}, the first is {missing[0]}"
        raise UserError(f"{flag}: {problem}", advice)
    return _of_files(annotations.stem, [folder / name for name in names])


def _statistics(path: Path) -> Reference:
    """Mean and covariance under `mu` and `sigma`, as clean-fid and pytorch-fid write them; `n` if the file has it.

    They must come from the extractor and preprocessing of the protocol: the file does not say which it used.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            mean, covariance = (np.asarray(file[name], dtype=np.float64) for name in ("mu", "sigma"))
            n = int(file["n"]) if "n" in file else None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--reference {path}: not a file of statistics: it needs the arrays mu and sigma") from error
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise UserError(f"--reference {path}: the shapes of mu {mean.shape} and sigma {covariance.shape} do not match")
    digest = hashlib.sha256(mean.tobytes() + covariance.tobytes()).hexdigest()
    label = f"{path.stem} (statistics), {'n unknown' if n is None else f'n={n}'}, sha256={digest[:8]}"
    return Reference(None, label, FeatureSet(mean, covariance, n), digest)


def _of_files(name: str, paths: Sequence[Path]) -> Reference:
    """A set of files; the digest covers their contents, not their names or order."""
    hashes = sorted(files.file_sha256(path) for path in paths)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Reference(paths, f"{name}, n={len(paths)}, sha256={digest[:8]}", digest=digest)


# ---- Features of references, and their cache


def cache_folder() -> Path:
    """The folder that `LANTERN_BENCH_CACHE` names, else lantern-bench in the user's cache."""
    folder = os.environ.get("LANTERN_BENCH_CACHE")
    return Path(folder) if folder else files.cache_folder()


def reference_features(
    reference: Reference,
    extractor: Extractor,
    preparation: Preparation,
    *,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> FeatureSet:
    """Return the features of a reference under an extractor, from `cache` if there, else computed and cached.

    Raises `UserError` for statistics of another width, and for pictures that differ in size after preprocessing.
    """
    if reference.pictures is None:
        return _checked_statistics(reference, extractor)
    steps = "-".join(f"{name}={value}" for name, value in asdict(preparation).items())
    covered = f"2|{reference.digest}|{extractor.label}|{steps}"
    path = None
    if cache is not None and reference.digest:
        path = cache / "references" / f"{hashlib.sha256(covered.encode()).hexdigest()[:32]}.safetensors"
        # A missing or damaged file is computed again.
        with contextlib.suppress(OSError, SafetensorError, KeyError):
            features = load_file(path)["features"]
            if features.shape == (len(reference.pictures), extractor.width):
                return FeatureSet.of(features)
    if not preparation.size and not preparation.features_size:
        pictures = (item if isinstance(item, Tensor) else read_picture(item) for item in reference.pictures)
        sizes = {tuple(picture.shape[1:]) for picture in pictures}
        if len(sizes) > 1:
            problem = f"the pictures of the reference {reference.label} differ in size: {sorted(sizes)[:3]}"
            raise UserError(problem, "This protocol does not resize pictures; lantern-coco crops and resizes them.")
    features = features_of(reference.pictures, extractor, preparation, device=device)
    if path is not None:
        # The figures do not depend on the cache: a read-only home is no error.
        with contextlib.suppress(OSError):
            files.write_atomically(path, save({"features": features}))
    return FeatureSet.of(features)


def _checked_statistics(reference: Reference, extractor: Extractor) -> FeatureSet:
    """The statistics of a reference without pictures; raises `UserError` for those of another extractor."""
    statistics = reference.statistics
    width = 0 if statistics is None else len(statistics.mean)
    if statistics is None or width != extractor.width:
        problem = f"the reference {reference.label} has {width} features, {extractor.name} has {extractor.width}"
        raise UserError(problem, "Give statistics of the protocol's own extractor, or a folder of pictures.")
    if reference.extractor not in ("", extractor.label):
        problem = f"the reference {reference.label} has features of {reference.extractor}, not of {extractor.label}"
        raise UserError(problem, "Give --reference a folder of pictures: it is measured by any extractor.")
    return statistics
