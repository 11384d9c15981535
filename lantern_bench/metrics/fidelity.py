"""FID, KID, precision and recall of pictures against a reference, by torch-fidelity; and FID-infinity.

They need only the features, so an extractor passes every set once and `metrics/reference_sets.py` can cache those of
references. Sets may be larger than memory: pictures are read and preprocessed one at a time. The extractor is part of
the figure: figures of different extractors are not comparable.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch_fidelity
from numpy.typing import NDArray
from PIL import Image
from scipy import stats
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity import metric_fid, metric_kid
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.utils import create_feature_extractor, get_featuresdict_from_dataset

from lantern_bench.config.protocols import Preparation
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.metrics.spread import NAMES, SubsetFigures, clipped, jackknife
from lantern_bench.models.io.files import remembered_sha256
from lantern_bench.models.io.hub_files import WEIGHTS_FOLDER_VARIABLE
from lantern_bench.models.lanterns import classifier

# ---- The weights of a scorer: finding them on this machine, naming them in results


def find_weights(scorer: str, file_name: str, given: Path | None, advice: str) -> Path:
    """Return the weights file of `scorer`: the given path, or the published `file_name` where it is found.

    It is searched in the folder that `LANTERN_BENCH_WEIGHTS` names, then in the cache of torch.hub. Raises `UserError`
    for a given path that is no file and `RefusedError` when no folder has it; both show `advice`.
    """
    if given is not None:
        if not given.is_file():
            raise UserError(f"the weights given for {scorer} are not a file: {given}", advice)
        return given
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    path = Path(os.environ.get(WEIGHTS_FOLDER_VARIABLE) or cache) / file_name
    if path.is_file() or (path := cache / file_name).is_file():
        return path
    raise RefusedError(
        f"the weights of {scorer} are not on this machine: {file_name} is neither in the folder named by "
        f"{WEIGHTS_FOLDER_VARIABLE} nor in the cache of torch.hub (scoring downloads nothing)",
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


class _Known(NamedTuple):
    """An extractor of torch-fidelity: the layer of all four metrics, its width, its published file.

    `key` is a parameter that distinguishes the file from other models'.
    """

    layer: str
    width: int
    file_name: str
    key: str


EXTRACTORS: dict[str, _Known] = {
    BUNDLED: _Known(str(classifier.FEATURES), classifier.FEATURES, classifier.WEIGHTS.name, "project.weight"),
    "inception-v3-compat": _Known(
        "2048", 2048, "weights-inception-2015-12-05-6726825d.pth", "Mixed_7c.branch_pool.conv.weight"
    ),
    "vgg16": _Known("fc2_relu", 4096, "vgg16-397923af.pth", "classifier.3.weight"),
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


class _LanternFeatures(FeatureExtractorBase):
    """The attribute classifier's penultimate layer, as an extractor of torch-fidelity."""

    def __init__(self, name: str, features_list: Sequence[str], **options: Any) -> None:
        super().__init__(name, list(features_list))
        path = options.get("feature_extractor_weights_path")
        self.model = classifier.load_classifier(None if path is None else Path(path))

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return (str(classifier.FEATURES),)

    @staticmethod
    def get_default_feature_layer_for_metric(_metric: str) -> str:
        return str(classifier.FEATURES)

    @staticmethod
    def can_be_compiled() -> bool:
        return False

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        return torch.zeros((1, 3, 64, 64), dtype=torch.uint8)

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Pictures uint8 [n, 3, 64, 64] to one feature tensor float32 [n, 64]."""
        return (self.model.features(pictures.float() / 255),)


torch_fidelity.register_feature_extractor(BUNDLED, _LanternFeatures)


def find_extractor(name: str = BUNDLED, weights: Path | None = None) -> Extractor:
    """Return the extractor called `name` (one of `EXTRACTORS`), with the given weights or those on this machine.

    Raises `UserError` for an unknown name, a path that is no file or a file that is not plain weights, and
    `RefusedError` for missing weights: they are never downloaded.
    """
    known = EXTRACTORS.get(name)
    if known is None:
        raise UserError(f"unknown feature extractor {name!r}", f"The extractors are {', '.join(EXTRACTORS)}.")
    if name == BUNDLED:
        path = weights or classifier.WEIGHTS
        classifier.load_classifier(path)
    else:
        advice = f"put {known.file_name} there, or give its path"
        path = find_weights(f"the feature extractor {name}", known.file_name, weights, advice)
        check_plain_weights(path, known.key)
    return Extractor(name, known.layer, known.width, path)


# ---- Features of a set


class Pictures(Protocol):
    """A set of pictures uint8 [3, h, w], by number; a tensor uint8 [n, 3, h, w] is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of pictures under one extractor, or their statistics alone.

    mean [d] and covariance [d, d] (unbiased) in float64, nan for too few pictures; features float32 [n, d] or None;
    n, where it is known.
    """

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    n: int | None
    features: Tensor | None = None

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """The set with these features float32 [n, d]."""
        values = features.double().numpy()
        n, width = values.shape
        mean = values.mean(axis=0) if n else np.full(width, np.nan)
        covariance = np.atleast_2d(np.cov(values, rowvar=False)) if n > 1 else np.full((width, width), np.nan)
        return cls(mean, covariance, n, features)

    @classmethod
    def merged(cls, parts: Sequence[FeatureSet]) -> FeatureSet:
        """Return the set of all pictures of these sets, in their order: mean and covariance are summed from theirs.

        Deviations from each set's own mean are added, and those of the means (Chan, Golub and LeVeque 1983), so nothing
        cancels. The size of every set must be known.
        """
        sizes = np.array([part.n or 0 for part in parts], dtype=np.float64)
        n, width = int(sizes.sum()), len(parts[0].mean)
        present = [(part, size) for part, size in zip(parts, sizes, strict=True) if size]
        mean = sum((size * part.mean for part, size in present), np.zeros(width)) / n if n else np.full(width, np.nan)
        spread = np.zeros((width, width))
        for part, size in present:
            shift = part.mean - mean
            spread += size * np.outer(shift, shift) + ((size - 1) * part.covariance if size > 1 else 0.0)
        covariance = spread / (n - 1) if n > 1 else np.full((width, width), np.nan)
        rows = [part.features for part in parts if part.features is not None]
        return cls(mean, covariance, n, torch.cat(rows) if len(rows) == len(parts) else None)


@dataclass(frozen=True)
class _Prepared(Dataset[Tensor]):
    """Pictures as the dataset that torch-fidelity reads."""

    pictures: Pictures
    prepared: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.prepared(self.pictures[index])


def features_of(
    pictures: Pictures,
    extractor: Extractor,
    *,
    prepared: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The features float32 [n, width] of pictures, on the CPU; `prepared` is applied to each picture first."""
    if len(pictures) == 0:
        return torch.zeros(0, extractor.width)
    cuda = torch.device(device).type == "cuda"
    network: Any = create_feature_extractor(
        extractor.name, [extractor.layer], cuda, verbose=False, feature_extractor_weights_path=str(extractor.weights)
    )
    # save_cpu_ram: loads in this process; worker processes cost more than pictures that are in memory.
    dataset = _Prepared(pictures, prepared or (lambda picture: picture))
    found = get_featuresdict_from_dataset(dataset, network, 64, cuda, save_cpu_ram=True, verbose=False)
    features: Tensor = found[extractor.layer].float()
    return features


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


# ---- FID, KID, precision and recall of a set against a reference


class FidelityScores(NamedTuple):
    """The figures of one set of pictures; None where a figure cannot be measured, with the reason in `note`.

    The ends of intervals are None for too few pictures. `inside`: for each picture whether it lies in the reference's
    manifold; precision is its mean.
    """

    fid: float | None
    fid_low: float | None
    fid_high: float | None
    kid: float | None
    kid_low: float | None
    kid_high: float | None
    kid_std: float | None
    precision: float | None
    precision_low: float | None
    precision_high: float | None
    recall: float | None
    recall_low: float | None
    recall_high: float | None
    n_reference: int | None
    kid_subset: int
    note: str
    inside: tuple[bool, ...] = ()


MANIFOLD_PICTURES = 256
"""Fewest pictures, and pictures of the reference, for precision and recall (docs/quality.md has the measurement)."""


def compare(
    pictures: FeatureSet,
    reference: FeatureSet,
    extractor: Extractor,
    *,
    manifold: tuple[Tensor, Tensor] | None = None,
    neighbours: int = 3,
    seed: int = 2020,
) -> FidelityScores:
    """Compare the features [n, width] of pictures with those of a reference; FID by the statistics of both sets.

    KID is over all pictures, what its mean over random subsets estimates; `kid_std` is the standard deviation over 100
    subsets of min(1000, n / 2, m / 2) pictures. Precision is the share of pictures inside the reference's
    manifold of nearest neighbours, recall the converse; both use `manifold` where it is given (features of the pictures
    and of the reference under another extractor). FID is None for fewer pictures than twice the width, since most of
    its covariance would be noise, precision and recall for fewer than `MANIFOLD_PICTURES`; with 4 pictures or fewer
    nothing is measured. A reference of mean and covariance alone gives FID only. Intervals are those of
    `metrics/spread.py`.

    KID of two sets of the same kind is about 0 only when their pictures are drawn independently. Prompts taken in
    turn leave a set without pairs of one caption, which shifts KID below 0 by the same amount in every cell.
    """
    features = pictures.features
    if features is None:
        raise ValueError("pictures without features")
    fewest = len(features) if reference.n is None else min(len(features), reference.n)
    names, notes = figures_of(fewest, reference, extractor)
    figures = SubsetFigures(features, reference, names, manifold=manifold, neighbours=neighbours)
    values: dict[str, float | None] = dict.fromkeys(NAMES) | figures(np.arange(len(features)))
    if "fid" in names:
        values["fid"] = figures.fid_of(pictures)
    subset, kid_std = 0, None
    if "kid" in names and reference.features is not None:
        subset = min(1000, fewest // 2)
        found = metric_kid.kid_features_to_metric(
            features, reference.features, kid_subsets=100, kid_subset_size=subset, rng_seed=seed, verbose=False
        )
        kid_std = found[metric_kid.KEY_METRIC_KID_STD]
    reach = jackknife(figures, len(features))
    ends = {
        f"{name}{end}": None if value is None or name not in reach else clipped(name, value + sign * reach[name])
        for name, value in values.items()
        for end, sign in (("_low", -1), ("_high", 1))
    }
    inside = tuple(figures.inside.tolist()) if "precision" in names else ()
    measured = {"n_reference": reference.n, "kid_subset": subset, "note": "; ".join(notes), "kid_std": kid_std}
    return FidelityScores(**values, **ends, **measured, inside=inside)  # type: ignore[arg-type]


def figures_of(fewest: int, reference: FeatureSet, extractor: Extractor) -> tuple[list[str], list[str]]:
    """Return the figures that so many pictures (the smaller of both sets) allow, and why the others are left out."""
    names, notes = [], []
    if fewest >= 2 * extractor.width:
        names.append("fid")
    else:
        notes.append(f"fid needs {2 * extractor.width} images, twice its features; there are {fewest}")
    if reference.features is None:
        return names, [*notes, "the reference holds statistics only: no kid, precision and recall"]
    if fewest > 4:
        names.append("kid")
    else:
        notes.append(f"kid needs 5 images; there are {fewest}")
    if fewest >= MANIFOLD_PICTURES:
        names += ["precision", "recall"]
    else:
        notes.append(f"precision and recall need {MANIFOLD_PICTURES} images; there are {fewest}")
    return names, notes


def frechet_distance(one: FeatureSet, other: FeatureSet) -> float:
    """The squared Frechet distance of two Gaussians (FID): |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))."""
    statistics = [{"mu": each.mean, "sigma": each.covariance} for each in (one, other)]
    return float(metric_fid.fid_statistics_to_metric(*statistics, verbose=False)[metric_fid.KEY_METRIC_FID])


# ---- FID-infinity: extrapolated to infinitely many pictures, since FID of few pictures is biased upwards

_SIZES = 15


class Extrapolated(NamedTuple):
    """The value at 1/n = 0 with the 95 % interval of the fit, or None with the reason in `note`."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


def fid_infinity(features: Tensor, reference: FeatureSet, rng: np.random.Generator) -> Extrapolated:
    """Extrapolate the FID of pictures with these features [n, width].

    Fifteen sizes, evenly from n / 2 (and at least twice the width) to n; one subset each, drawn without replacement.
    The interval is that of the intercept of the least-squares line; it is too narrow, since subsets share pictures.
    """
    n, width = features.shape
    smallest = max(n // 2, 2 * width)
    if n < 2 * width + _SIZES:
        return Extrapolated(None, note=f"fid_infinity needs {2 * width + _SIZES} images; there are {n}")
    sizes = np.unique(np.linspace(smallest, n, _SIZES).round().astype(int))
    subsets = (torch.from_numpy(rng.choice(n, size=int(size), replace=False)) for size in sizes)
    distances = [frechet_distance(FeatureSet.of(features[rows]), reference) for rows in subsets]
    line = stats.linregress(1 / sizes, distances)
    reach = float(stats.t.ppf((1 + 0.95) / 2, len(sizes) - 2) * line.intercept_stderr)
    value = float(line.intercept)
    return Extrapolated(value, value - reach, value + reach)
