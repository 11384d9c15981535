"""Reference sets of fidelity: rendered scenes, a folder, an annotation file, or statistics; and their cached features.

A pass of thousands of pictures through Inception takes minutes and always gives the same result. The cache key is a
hash of the pictures' content, the extractor with its weights, and the preprocessing; file names do not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lantern_bench.config.protocols import Preparation, Protocol
from lantern_bench.errors import UserError
from lantern_bench.metrics.fidelity import (
    Extractor,
    FeatureSet,
    Pictures,
    features_of,
    preprocess,
    resize_for_features,
)
from lantern_bench.models.io import files
from lantern_bench.models.lanterns import captions
from lantern_bench.training.lanterns import scenes

CACHE_VARIABLE = "LANTERN_BENCH_CACHE"

_SEED = 730_113
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class Reference(NamedTuple):
    """What fidelity is measured against, and its name in results.

    pictures: uint8 [3, h, w] each, None when there are only `statistics`; digest: of the content, for the cache.
    """

    pictures: Pictures | None
    label: str
    statistics: FeatureSet | None = None
    digest: str = ""


@dataclass(frozen=True)
class _FilePictures:
    """Pictures read from files on access."""

    files: tuple[Path, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return read_picture(self.files[index])


def find_reference(given: str | None, protocol: Protocol) -> Reference | None:
    """Return the reference given by --reference; None for the protocol's own.

    Raises `UserError` for anything else than its message lists, and for scenes under a protocol without them.
    """
    if given is None or given == protocol.reference:
        return None
    if given == "embedded":
        what = f"--reference {given}: the rendered scenes are not for the protocol {protocol.name}"
        raise UserError(what, "Give a folder, a .json or a .npz, or --protocol embedded.")
    file, equals, folder = given.partition("=")
    path = Path(file)
    if path.suffix.lower() == ".json" and path.is_file():
        return _annotated(path, Path(folder) if equals else path.with_suffix(""))
    if path.suffix.lower() == ".npz" and path.is_file():
        return _statistics(path)
    if Path(given).is_dir():
        return folder_reference(Path(given))
    raise UserError(
        f"--reference {given}: no such folder or file",
        "What fidelity is measured against: embedded (newly rendered scenes), a folder of pictures, a COCO annotation "
        ".json (its pictures in the folder of the same name, or FILE.json=FOLDER), or a .npz of mu and sigma.",
    )


@dataclass(frozen=True)
class _Scenes:
    """Scenes of the held-out captions in turn, rendered on first access."""

    size: int
    seed: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return self.rendered[index]

    @cached_property
    def rendered(self) -> Tensor:
        attributes = [captions.HELD_OUT[number % len(captions.HELD_OUT)] for number in range(self.size)]
        return torch.from_numpy(np.ascontiguousarray(scenes.render(attributes, self.seed).transpose(0, 3, 1, 2)))


def held_out_reference(size: int, seed: int = _SEED, cache: Path | None = None) -> Reference:
    """Newly rendered scenes of the held-out captions in turn; no training uses the seed.

    `cache` keeps their hash for the code that renders them, so that cached features need no rendering.
    """
    pictures, digest, path = _Scenes(size, seed), "", None
    if cache is not None:
        sources = (Path(str(module.__file__)).read_bytes() for module in (captions, scenes))
        code = hashlib.sha256(b"".join((*sources, np.__version__.encode()))).hexdigest()[:16]
        path = cache / "references" / f"scenes-{size}-{seed}-{code}.sha256"
        with contextlib.suppress(OSError):
            digest = path.read_text(encoding="ascii", errors="replace")
    if re.fullmatch("[0-9a-f]{64}", digest) is None:
        digest = hashlib.sha256(pictures.rendered.numpy().tobytes()).hexdigest()
        if path is not None:
            # A read-only home is no error: the scenes are rendered again.
            with contextlib.suppress(OSError):
                files.write_atomically(path, digest.encode())
    return Reference(pictures, f"{reference_name(size, seed)}, sha256={digest[:8]}", digest=digest)


def reference_name(size: int, seed: int = _SEED) -> str:
    """The label of `held_out_reference` without the hash, for which the scenes would have to be rendered."""
    return f"lanterns held-out scenes, n={size}, seed={seed}"


def folder_reference(folder: Path) -> Reference:
    """All pictures of a folder, by name; raises `UserError` when there are none."""
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)
    if not found:
        raise UserError(f"no pictures in the reference folder {folder}", f"Allowed: {', '.join(_SUFFIXES)}")
    return _of_files(folder.name, found)


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
        what = f"{len(missing)} of {len(names)} pictures are not in {folder}, the first is {missing[0]}"
        raise UserError(f"{flag}: {what}", advice)
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


def _of_files(name: str, found: Sequence[Path]) -> Reference:
    """A set of files; the digest covers their contents, not their names or order."""
    hashes = sorted(files.file_sha256(path) for path in found)
    digest = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return Reference(_FilePictures(tuple(found)), f"{name}, n={len(found)}, sha256={digest[:8]}", digest=digest)


def read_picture(path: Path) -> Tensor:
    """Read a picture file as uint8 [3, h, w]; raises `UserError` for one that cannot be read."""
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1)))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path}: cannot be read as a picture") from error


# ---- Features of references, and their cache


def cache_folder() -> Path:
    """The folder that `LANTERN_BENCH_CACHE` names, else lantern-bench in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else files.cache_folder()


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
        found = reference.statistics
        width = 0 if found is None else len(found.mean)
        if found is None or width != extractor.width:
            what = f"the reference {reference.label} has {width} features, {extractor.name} has {extractor.width}"
            raise UserError(what, "Give statistics of the protocol's own extractor, or a folder of pictures.")
        return found
    path = None
    if cache is not None and reference.digest:
        steps = "-".join(f"{name}={value}" for name, value in asdict(preparation).items())
        covered = f"1|{reference.digest}|{extractor.label}|{steps}"
        path = cache / "references" / f"{hashlib.sha256(covered.encode()).hexdigest()[:32]}.npz"
        # A missing or damaged file is computed again.
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError), np.load(path, allow_pickle=False) as file:
            kept = np.asarray(file["features"], dtype=np.float32)
            if kept.shape == (len(reference.pictures), extractor.width):
                return FeatureSet.of(torch.from_numpy(kept))
    if not preparation.size and not preparation.features_size:
        sizes = {tuple(reference.pictures[number].shape[1:]) for number in range(len(reference.pictures))}
        if len(sizes) > 1:
            what = f"the pictures of the reference {reference.label} differ in size: {sorted(sizes)[:3]}"
            raise UserError(what, "This protocol does not resize pictures; lantern-coco crops and resizes them.")

    def prepared(picture: Tensor) -> Tensor:
        return resize_for_features(preprocess(picture, preparation), preparation)

    features = features_of(reference.pictures, extractor, prepared=prepared, device=device)
    if path is not None:
        buffer = io.BytesIO()
        np.savez(buffer, features=features.numpy())
        # The figures do not depend on the cache: a read-only home is no error.
        with contextlib.suppress(OSError):
            files.write_atomically(path, buffer.getvalue())
    return FeatureSet.of(features)
