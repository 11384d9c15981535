"""FID, KID, precision and recall of pictures against a reference, by torch-fidelity; and FID-infinity.

torch-fidelity computes them from features that are extracted once (`metrics/features.py`). The extractor is part of the
figure: figures of different extractors are not comparable.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch_fidelity import metric_fid, metric_kid, metric_prc

from lantern_bench.metrics.features import Extractor, FeatureSet


class FidelityScores(NamedTuple):
    """The figures of one set of pictures; None where a figure cannot be measured, with the reason in `note`."""

    fid: float | None
    kid: float | None
    kid_std: float | None
    precision: float | None
    recall: float | None
    n_reference: int | None
    kid_subset: int
    note: str


def compare(
    features: Tensor,
    reference: FeatureSet,
    extractor: Extractor,
    *,
    manifold: tuple[Tensor, Tensor] | None = None,
    neighbours: int = 3,
    seed: int = 2020,
) -> FidelityScores:
    """Compare the features [n, width] of pictures with those of a reference.

    The KID subset is min(1000, n / 2, m / 2) pictures. Precision is the share of pictures inside the reference's
    manifold of nearest neighbours, recall the converse; both use `manifold` where it is given (features of the pictures
    and of the reference under another extractor). FID is None for fewer pictures than twice the width, since most of
    its covariance would be noise; with `neighbours + 1` pictures or fewer nothing is measured. A reference of mean and
    covariance alone gives FID only.

    KID of two sets of the same kind is about 0 only when their pictures are drawn independently. Prompts taken in
    turn leave a set without pairs of one caption, which shifts KID below 0 by the same amount in every cell.
    """
    fewest = len(features) if reference.n is None else min(len(features), reference.n)
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
        subset = min(1000, fewest // 2)
        found = metric_kid.kid_features_to_metric(
            features, reference.features, kid_subsets=100, kid_subset_size=subset, rng_seed=seed, verbose=False
        )
        found |= metric_prc.prc_features_to_metric(
            *(manifold or (features, reference.features)), prc_neighborhood=neighbours, save_cpu_ram=True, verbose=False
        )
        kid, kid_std = found[metric_kid.KEY_METRIC_KID_MEAN], found[metric_kid.KEY_METRIC_KID_STD]
        precision, recall = found[metric_prc.KEY_METRIC_PRECISION], found[metric_prc.KEY_METRIC_RECALL]
    return FidelityScores(fid, kid, kid_std, precision, recall, reference.n, subset, "; ".join(notes))


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
