"""Features of reference sets, kept on the disk by what is in them.

Passing thousands of pictures through Inception takes minutes and gives the same every time. What is kept is found by a
hash of the pictures' content, the extractor with its weights, and the preparation: a folder that changes is another
reference, and one that is only called otherwise is not. A cache that cannot be written is done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lantern_bench.config.protocols import Preparation, Protocol
from lantern_bench.errors import UserError
from lantern_bench.metrics.features import Extractor, FeatureSet, Pictures, features_of, for_features, prepare
from lantern_bench.models.io.files import write_atomically
from lantern_bench.models.lanterns.captions import HELD_OUT
from lantern_bench.training.lanterns.scenes import render

# ---- What fidelity is measured against: painted scenes, a folder, an annotation file with its folder, or statistic

EMBEDDED_REFERENCE = "embedded"
REFERENCE_HELP = (
    "What fidelity is measured against: embedded (freshly painted scenes), a folder of pictures, a COCO annotation "
    ".json (its pictures in the folder of the same name, or FILE.json=FOLDER), or a .npz of mu and sigma."
)

# Fewest reference scenes; a cell with more than half as many images gets twice its own number.
_LEAST = 500
_SEED = 730_113
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_DIGITS = 8


class Reference(NamedTuple):
    """What fidelity is measured against, and how results name it.

    pictures: uint8 [3, h, w] each, None where only `statistics` are there; digest: of the content, for the cache.
    """

    pictures: Pictures | None
    label: str
    statistics: FeatureSet | None = None
    digest: str = ""


@dataclass(frozen=True)
class FilePictures:
    """Pictures read from files when they are asked for."""

    files: tuple[Path, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return read_picture(self.files[index])


def find_reference(given: str | None, protocol: Protocol) -> Reference | None:
    """The reference a person named (`REFERENCE_HELP`); None for the protocol's own, whose size depends on the run.

    Raises `UserError` for what is no reference, and for painted scenes under a protocol that is not made for them.
    """
    if given is None or given == protocol.reference:
        return None
    if given == EMBEDDED_REFERENCE:
        raise UserError(
            f"--reference {given}: the painted scenes are not for the protocol {protocol.name}",
            "Give a folder, a .json or a .npz, or --protocol embedded.",
        )
    file, equals, folder = given.partition("=")
    path = Path(file)
    if path.suffix.lower() == ".json" and path.is_file():
        return annotated_reference(path, Path(folder) if equals else path.with_suffix(""))
    if path.suffix.lower() == ".npz" and path.is_file():
        return statistics_reference(path)
    if Path(given).is_dir():
        return folder_reference(Path(given))
    raise UserError(f"--reference {given}: no such folder or file", REFERENCE_HELP)


def held_out_reference(largest_cell: int, seed: int = _SEED) -> Reference:
    """Freshly painted scenes of the held-out captions, each caption as often as any other (one more at most).

    There are twice as many as the largest cell has images, and 500 at least, the same for all cells of a run. The
    seed is used nowhere in training.
    """
    n = _size(largest_cell)
    attributes = [HELD_OUT[number % len(HELD_OUT)] for number in range(n)]
    pictures = torch.from_numpy(np.ascontiguousarray(render(attributes, seed).transpose(0, 3, 1, 2)))
    digest = hashlib.sha256(pictures.numpy().tobytes()).hexdigest()
    return Reference(pictures, f"{reference_name(largest_cell, seed)}, sha256={digest[:_DIGITS]}", digest=digest)


def reference_name(largest_cell: int, seed: int = _SEED) -> str:
    """How the label of `held_out_reference` begins: all of it but the hash, which takes the painting to know."""
    return f"lanterns held-out scenes, n={_size(largest_cell)}, seed={seed}"


def _size(largest_cell: int) -> int:
    return max(_LEAST, 2 * largest_cell)


def folder_reference(folder: Path) -> Reference:
    """All pictures of a folder, by name; `UserError` when there are none."""
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise UserError(f"no pictures in the reference folder {folder}", f"it takes {', '.join(_SUFFIXES)}")
    return _of_files(folder.name, files)


def annotated_reference(annotations: Path, folder: Path) -> Reference:
    """The pictures that a COCO annotation file lists under `images`, in `folder`.

    Raises `UserError` for a file that is no such annotation and for pictures that the folder lacks.
    """
    try:
        listed = json.loads(annotations.read_text(encoding="utf-8"))["images"]
        names = sorted({str(entry["file_name"]) for entry in listed})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--reference {annotations}: not a COCO annotation file: it needs images, each with file_name"
        ) from error
    if not folder.is_dir():
        raise UserError(f"--reference {annotations}: no folder {folder}", f"Write {annotations}=FOLDER.")
    missing = [name for name in names if not (folder / name).is_file()]
    if not names:
        raise UserError(f"--reference {annotations}: lists no pictures")
    if missing:
        what = f"{len(missing)} of {len(names)} pictures are not in {folder}, the first is {missing[0]}"
        raise UserError(f"--reference {annotations}: {what}", f"Write {annotations}=FOLDER.")
    return _of_files(annotations.stem, [folder / name for name in names])


def statistics_reference(path: Path) -> Reference:
    """Mean and covariance under `mu` and `sigma`, as clean-fid and pytorch-fid keep them; `n` where it is there.

    They must come from the extractor and the preparation of the protocol: a file does not say. Raises `UserError` for
    a file without the two, or of shapes that do not belong together.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            mean, covariance = (np.asarray(file[name], dtype=np.float64) for name in ("mu", "sigma"))
            n = int(file["n"]) if "n" in file else None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--reference {path}: not a file of statistics: it needs the arrays mu and sigma") from error
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise UserError(f"--reference {path}: mu {mean.shape} and sigma {covariance.shape} do not belong together")
    digest = hashlib.sha256(mean.tobytes() + covariance.tobytes()).hexdigest()
    size = "n unknown" if n is None else f"n={n}"
    label = f"{path.stem} (statistics), {size}, sha256={digest[:_DIGITS]}"
    return Reference(None, label, FeatureSet(mean, covariance, n), digest)


def _of_files(name: str, files: Sequence[Path]) -> Reference:
    """A set of files; its hash is that of their contents, whatever they are called and in whichever order."""
    hashes = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Reference(FilePictures(tuple(files)), f"{name}, n={len(files)}, sha256={digest[:_DIGITS]}", digest=digest)


def read_picture(path: Path) -> Tensor:
    """A picture file as uint8 [3, h, w]; `UserError` for one that cannot be read."""
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1)))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path}: cannot be read as a picture") from error


# ----

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
