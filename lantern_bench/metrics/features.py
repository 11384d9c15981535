"""Features of sets of pictures, by the extractors of torch-fidelity and that of the bundled family.

FID, KID, precision and recall need only the features (`metrics/figures.py`), so an extractor sees every set once. Sets
may be larger than memory: pictures are read and preprocessed one at a time. The extractor is part of the figure:
figures of different extractors are not comparable.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch_fidelity.utils import create_feature_extractor

from lantern_bench.config.protocols import Preparation
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.models.hub import WEIGHTS_VARIABLE
from lantern_bench.models.io.files import remembered_sha256
from lantern_bench.models.lanterns import modules as classifier

# ---- The weights of a scorer: finding them on this machine, naming them in results


def find_weights(scorer: str, file_name: str, weights: Path | None, advice: str) -> Path:
    """Return the weights file of `scorer`: `weights`, or else the published file of that name on this machine.

    It is searched in the folder that `LANTERN_BENCH_WEIGHTS` names, then in the cache of torch.hub. Raises `UserError`
    for a path that is no file and `RefusedError` when no folder has it; both show `advice`.
    """
    if weights is not None:
        if not weights.is_file():
            raise UserError(f"the weights given for {scorer} are not a file: {weights}", advice)
        return weights
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    path = Path(os.environ.get(WEIGHTS_VARIABLE) or cache) / file_name
    if path.is_file() or (path := cache / file_name).is_file():
        return path
    raise RefusedError(
        f"the weights of {scorer} are not on this machine: {file_name} is neither in the folder named by "
        f"{WEIGHTS_VARIABLE} nor in the cache of torch.hub (scoring downloads nothing)",
        advice,
    )


def check_plain_weights(path: Path, with_key: str | None = None) -> None:
    """Raise `UserError` for a checkpoint that is not a dictionary of tensors: a pickle may contain code.

    `with_key`, when given, is a name that the dictionary of the right model has.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as problem:
        advice = "Give tensors saved with torch.save; pickles with code and scripted models are not loaded."
        raise UserError(f"{path} cannot be read as plain weights", advice) from problem
    if not isinstance(loaded, dict):
        raise UserError(f"{path} contains a {type(loaded).__name__}, not a dictionary of tensors")
    if with_key is not None and with_key not in loaded:
        raise UserError(f"{path} has the weights of another model: it has no {with_key}")


def fingerprint(path: Path) -> str:
    """The first eight hex digits of the file's SHA-256."""
    return remembered_sha256(path)[:8]


# ---- Feature extractors

BUNDLED = "lanterns-features"


class ExtractorRow(NamedTuple):
    """An extractor of torch-fidelity."""

    layer: str  # its layer that all metrics use
    width: int  # features of that layer
    file_name: str  # the published file of its weights
    key: str  # a parameter that other models' files lack


EXTRACTORS: dict[str, ExtractorRow] = {
    BUNDLED: ExtractorRow(str(classifier.FEATURES), classifier.FEATURES, classifier.WEIGHTS.name, "project.weight"),
    "inception-v3-compat": ExtractorRow(
        "2048", 2048, "weights-inception-2015-12-05-6726825d.pth", "Mixed_7c.branch_pool.conv.weight"
    ),
    "vgg16": ExtractorRow("fc2_relu", 4096, "vgg16-397923af.pth", "classifier.3.weight"),
}


@dataclass(frozen=True)
class Extractor:
    """A feature extractor whose weights are on this machine."""

    name: str
    layer: str
    width: int
    weights: Path

    @property
    def label(self) -> str:
        """The name in results: `<extractor>-<layer>@<first digits of the weights' hash>`."""
        layer = "" if self.name.endswith(f"-{self.layer}") else f"-{self.layer}"
        return f"{self.name}{layer}@{fingerprint(self.weights)}"


def find_extractor(name: str = BUNDLED, weights: Path | None = None) -> Extractor:
    """Return the extractor called `name` (one of `EXTRACTORS`), with the given weights or those on this machine.

    Raises `UserError` for an unknown name, a path that is no file or a file that is not plain weights, and
    `RefusedError` for missing weights: they are never downloaded.
    """
    row = EXTRACTORS.get(name)
    if row is None:
        raise UserError(f"unknown feature extractor {name!r}", f"The extractors are {', '.join(EXTRACTORS)}.")
    if name == BUNDLED:
        path = weights or classifier.WEIGHTS
        classifier.load_classifier(path)
    else:
        advice = f"put {row.file_name} there, or give its path"
        path = find_weights(f"the feature extractor {name}", row.file_name, weights, advice)
        check_plain_weights(path, row.key)
    return Extractor(name, row.layer, row.width, path)


# ---- Features of a set

Pictures: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Path]
"""Pictures uint8 [3, h, w], or their files, which are read one at a time."""

_BATCH = 64


def read_picture(path: Path) -> Tensor:
    """Read a picture file as uint8 [3, h, w]; raises `UserError` for one that cannot be read."""
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1)))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path}: cannot be read as a picture") from error


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of pictures under one extractor, or their statistics alone."""

    mean: NDArray[np.float64]  # [width]; nan without pictures
    covariance: NDArray[np.float64]  # [width, width], unbiased; nan for fewer than two pictures
    n: int | None  # number of pictures, None where a file of statistics does not say
    features: Tensor | None = None  # float32 [n, width]

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """The set with these features float32 [n, d]."""
        values = features.double().numpy()
        n, width = values.shape
        mean = values.mean(axis=0) if n else np.full(width, np.nan)
        covariance = np.atleast_2d(np.cov(values, rowvar=False)) if n > 1 else np.full((width, width), np.nan)
        return cls(mean, covariance, n, features)


@torch.inference_mode()
def features_of(
    pictures: Pictures,
    extractor: Extractor,
    preparation: Preparation = Preparation(),  # noqa: B008  # frozen
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the features float32 [n, width] of pictures, on the CPU; after preprocessing they have one size."""
    if extractor.name == BUNDLED:
        classify = classifier.load_classifier(extractor.weights, device)
        network: Callable[[Tensor], Tensor] = lambda batch: classify.features(batch.float() / 255)  # noqa: E731
    else:
        cuda, weights = torch.device(device).type == "cuda", str(extractor.weights)
        of_library: Any = create_feature_extractor(
            extractor.name, [extractor.layer], cuda, verbose=False, feature_extractor_weights_path=weights
        )
        network = lambda batch: of_library(batch)[0]  # noqa: E731
    features = [torch.zeros(0, extractor.width)]
    for start in range(0, len(pictures), _BATCH):
        read = (item if isinstance(item, Tensor) else read_picture(item) for item in pictures[start : start + _BATCH])
        batch = [resize_for_features(preprocess(picture, preparation), preparation) for picture in read]
        features.append(network(torch.stack(batch).to(device)).float().cpu())
    return torch.cat(features)


# ---- Preprocessing: crop and resize as a protocol says


def preprocess(picture: Tensor, preparation: Preparation) -> Tensor:
    """Crop and resize a picture uint8 [3, h, w] as every scorer of the protocol sees it: uint8 [3, h', w']."""
    if preparation.crop:
        height, width = picture.shape[1:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        picture = picture[:, top : top + side, left : left + side]
    return _resized(picture, preparation.size, Image.Resampling.LANCZOS)


def resize_for_features(picture: Tensor, preparation: Preparation) -> Tensor:
    """Resize a preprocessed picture as the fidelity features see it."""
    return _resized(picture, preparation.features_size, Image.Resampling.BICUBIC)


def _resized(picture: Tensor, side: int | None, filter: Image.Resampling) -> Tensor:
    """The picture with `side` pixels a side; unchanged when it has them or `side` is None."""
    if side is None or tuple(picture.shape[1:]) == (side, side):
        return picture
    pixels = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    resized = np.asarray(Image.fromarray(pixels).resize((side, side), filter))
    return torch.from_numpy(resized.transpose(2, 0, 1).copy())
