"""FID, KID, precision and recall of a set of pictures against reference pictures, by torch-fidelity.

The arithmetic is the library's, on features that are extracted once (`metrics/features.py`). The extractor is part of
the figure: `FidelityScores.fid_features` names it, and figures under different names are not comparable. Which pictures
are compared is decided in `runs.scoring`; nothing here reads a run or downloads anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch_fidelity import metric_fid, metric_kid, metric_prc

from lantern_bench.metrics.features import (
    Extractor,
    FeatureSet,
    Pictures,
    features_of,
)

_SEED = 2020
_KID_SUBSET_MOST = 1000
_KID_SUBSETS = 100
_NEIGHBOURS = 3


@dataclass(frozen=True)
class FidelityScores:
    """The figures of one set of pictures; None where one cannot be had, with the reason in `note`."""

    fid: float | None
    kid: float | None
    kid_std: float | None
    precision: float | None
    recall: float | None
    n: int
    n_reference: int | None
    kid_subset: int
    fid_features: str
    note: str


def measure_fidelity(
    pictures: Pictures,
    reference: Pictures,
    extractor: Extractor,
    *,
    device: torch.device | str = "cpu",
    seed: int = _SEED,
    batch_size: int = 64,
) -> FidelityScores:
    """Compare `pictures` with `reference`, tensors [n, 3, h, w] or other sets of uint8 [3, h, w], as `compare` does."""
    mine, theirs = (features_of(one, extractor, device=device, batch_size=batch_size) for one in (pictures, reference))
    return compare(mine, FeatureSet.of(theirs), extractor, seed=seed)


def compare(
    features: Tensor,
    reference: FeatureSet,
    extractor: Extractor,
    *,
    manifold: tuple[Tensor, Tensor] | None = None,
    neighbours: int = _NEIGHBOURS,
    seed: int = _SEED,
) -> FidelityScores:
    """Compare the features [n, width] of pictures with those of a reference.

    The KID subset is min(1000, n / 2), m / 2 counting too; precision is the share of pictures inside the reference's
    manifold of nearest neighbours, recall the converse, both on `manifold` (features of the pictures and of the
    reference under another extractor) where it is given. FID is None for fewer than twice as many pictures as there
    are features, since its covariance would be mostly guessed; with 4 pictures or fewer nothing is measured. A
    reference of mean and covariance alone gives FID and no more.

    KID of two sets of the same kind is about 0 only when their pictures are drawn independently. Prompts taken in
    turn leave a set without pairs of one caption, which puts KID below 0 by the same amount in every cell.
    """
    n, m = len(features), reference.n
    fewest = n if m is None else min(n, m)
    notes: list[str] = []
    fid = kid = kid_std = precision = recall = None
    subset = 0
    if fewest >= 2 * extractor.width:
        fid = frechet_distance(FeatureSet.of(features), reference)
    else:
        notes.append(f"fid needs {2 * extractor.width} images, twice its features; there are {fewest}")
    if reference.features is None:
        notes.append("the reference holds statistics only: no kid, precision and recall")
    elif fewest <= neighbours + 1:
        notes.append(f"kid, precision and recall need {neighbours + 2} images; there are {fewest}")
    else:
        subset = min(_KID_SUBSET_MOST, fewest // 2)
        kid, kid_std = _kid(features, reference.features, subset, seed)
        precision, recall = _precision_recall(*(manifold or (features, reference.features)), neighbours)
    return FidelityScores(fid, kid, kid_std, precision, recall, n, m, subset, extractor.label, "; ".join(notes))


def frechet_distance(one: FeatureSet, other: FeatureSet) -> float:
    """The squared Frechet distance of two Gaussians (FID): |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))."""
    statistics = [{"mu": each.mean, "sigma": each.covariance} for each in (one, other)]
    return float(metric_fid.fid_statistics_to_metric(*statistics, verbose=False)[metric_fid.KEY_METRIC_FID])


def _kid(features: Tensor, reference: Tensor, subset: int, seed: int) -> tuple[float, float]:
    found = metric_kid.kid_features_to_metric(
        features, reference, kid_subsets=_KID_SUBSETS, kid_subset_size=subset, rng_seed=seed, verbose=False
    )
    return found[metric_kid.KEY_METRIC_KID_MEAN], found[metric_kid.KEY_METRIC_KID_STD]


def _precision_recall(features: Tensor, reference: Tensor, neighbours: int) -> tuple[float, float]:
    found = metric_prc.prc_features_to_metric(
        features, reference, prc_neighborhood=neighbours, save_cpu_ram=True, verbose=False
    )
    return found[metric_prc.KEY_METRIC_PRECISION], found[metric_prc.KEY_METRIC_RECALL]


# ---- FID extrapolated to infinitely many pictures, since FID of few pictures is biased upwards


_SIZES = 15
_LEVEL = 0.95


class Extrapolated(NamedTuple):
    """The value at 1/n = 0 with the 95 % interval of the fit, or None and why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


def fid_infinity(features: Tensor, reference: FeatureSet, rng: np.random.Generator) -> Extrapolated:
    """Extrapolate the FID of pictures with these features [n, width].

    Fifteen sizes, evenly from n / 2 (and at least twice the width) to n; one subset each, drawn without replacement.
    The interval is that of the intercept of the least-squares line; subsets share pictures, so it is rather narrow.
    """
    n, width = features.shape
    smallest = max(n // 2, 2 * width)
    if n < 2 * width + _SIZES:
        return Extrapolated(None, note=f"fid_infinity needs {2 * width + _SIZES} images; there are {n}")
    sizes = np.unique(np.linspace(smallest, n, _SIZES).round().astype(int))
    distances = []
    for size in sizes:
        rows = torch.from_numpy(rng.choice(n, size=int(size), replace=False))
        distances.append(frechet_distance(FeatureSet.of(features[rows]), reference))
    line = stats.linregress(1 / sizes, distances)
    reach = float(stats.t.ppf((1 + _LEVEL) / 2, len(sizes) - 2) * line.intercept_stderr)
    value = float(line.intercept)
    return Extrapolated(value, value - reach, value + reach)
