"""Figures of a set of pictures against a reference: FID, KID, precision, recall, and FID-infinity.

A metric returns a figure, so that intervals measure subsets without computing anything of the reference again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch_fidelity import metric_kid

from lantern_bench.methods.catalog import METRICS, OF_SETS
from lantern_bench.methods.metrics import measures
from lantern_bench.metrics.extractors import Extractor, FeatureSet
from lantern_bench.utils.text import listed

Rows: TypeAlias = NDArray[np.int64]

Figure: TypeAlias = Callable[[Rows], float]
"""The figure of any subset of the pictures, by their rows."""


class FeatureSets(NamedTuple):
    """What a metric of sets measures: two sets under one extractor."""

    pictures: Tensor  # float32 [n, width]
    reference: FeatureSet
    neighbours: int = 3  # of the manifolds of precision and recall


def frechet_distance(reference: FeatureSet) -> Callable[[Tensor], float]:
    """Return the distance of features [n, width]: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))."""
    trace = np.trace(reference.covariance)
    values, vectors = np.linalg.eigh(reference.covariance)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T

    def distance(features: Tensor) -> float:
        pictures = FeatureSet.of(features)
        # The root of the product of both covariances has the trace of this symmetric matrix's root.
        between = np.sqrt(np.linalg.eigvalsh(root @ pictures.covariance @ root).clip(0)).sum()
        shift = ((pictures.mean - reference.mean) ** 2).sum()
        return float(shift + np.trace(pictures.covariance) + trace - 2 * between)

    return distance


@measures("fid")
def fid(sets: FeatureSets) -> Figure:
    """The Frechet distance of the two sets (Heusel et al. 2017)."""
    distance = frechet_distance(sets.reference)
    return lambda rows: distance(sets.pictures[torch.from_numpy(rows)])


@measures("kid")
def kid(sets: FeatureSets) -> Figure:
    """The kernel distance (Binkowski et al. 2018), over all pictures."""
    assert sets.reference.features is not None
    reference = sets.reference.features.double().numpy()
    pictures = sets.pictures.double().numpy()
    among_reference = _mean_kernel(reference)

    def distance(rows: Rows) -> float:
        return (
            _mean_kernel(pictures[rows])
            + among_reference
            - 2 * _mean_kernel(pictures[rows], reference)
        )

    return distance


def _kid_spread(sets: FeatureSets) -> dict[str, Any]:
    """The standard deviation of KID over random subsets, as torch-fidelity computes it, and their size."""
    assert sets.reference.features is not None
    subset = min(1000, min(len(sets.pictures), len(sets.reference.features)) // 2)
    spread = metric_kid.kid_features_to_metric(
        sets.pictures,
        sets.reference.features,
        kid_subsets=100,
        kid_subset_size=subset,
        rng_seed=2020,
        verbose=False,
    )
    return {"kid_subset": subset, "kid_std": spread[metric_kid.KEY_METRIC_KID_STD]}


def _mean_kernel(x: NDArray[np.float64], y: NDArray[np.float64] | None = None) -> float:
    """The mean of KID's kernel (x . y / width + 1)^3 over pairs; of one set alone over pairs of different pictures."""
    others = x if y is None else y
    width = x.shape[1]
    total = 0.0
    for start in range(0, len(x), 2048):
        total += float(((x[start : start + 2048] @ others.T / width + 1) ** 3).sum())
    if y is not None:
        return total / (len(x) * len(y))
    with_themselves = float((((x**2).sum(axis=1) / width + 1) ** 3).sum())
    return (total - with_themselves) / (len(x) * (len(x) - 1))


@measures("precision")
def precision(sets: FeatureSets) -> Figure:
    """The share of pictures inside the reference's manifold of nearest neighbours (Kynkaanniemi et al. 2019)."""
    assert sets.reference.features is not None
    inside = _is_inside(sets.pictures, sets.reference.features, sets.neighbours)
    return lambda rows: float(inside[rows].mean())


@measures("recall")
def recall(sets: FeatureSets) -> Figure:
    """The share of the reference inside the pictures' manifold: precision with the sets exchanged."""
    reference = sets.reference.features
    assert reference is not None
    return lambda rows: float(
        _is_inside(reference, sets.pictures[torch.from_numpy(rows)], sets.neighbours).mean()
    )


def _is_inside(features: Tensor, manifold: Tensor, neighbours: int) -> NDArray[np.bool_]:
    """Whether each feature lies in a ball around one of `manifold` that reaches its k-th neighbour: [n]."""
    # The nearest of a point is the point itself.
    radii = torch.cat(
        [
            torch.cdist(chunk, manifold).kthvalue(neighbours + 1).values
            for chunk in manifold.split(2048)
        ]
    )
    inside = [(torch.cdist(chunk, manifold) <= radii).any(dim=1) for chunk in features.split(2048)]
    return torch.cat(inside).numpy()


def measurable(n: int, reference: FeatureSet, extractor: Extractor) -> tuple[list[str], list[str]]:
    """Return the metrics that n pictures (of the smaller set) allow, and why others cannot be measured."""
    names: list[str] = []
    too_few: dict[str, list[str]] = {}
    without_features = [
        name for name in OF_SETS if reference.features is None and METRICS[name].needs_features
    ]
    for name in OF_SETS:
        times = METRICS[name].min_images_per_feature
        needed = max(METRICS[name].min_images, times * extractor.width)
        if name in without_features:
            continue
        if n >= needed:
            names.append(name)
        else:
            reason = (
                f", {'twice' if times == 2 else f'{times} times'} its features" if times else ""
            )
            too_few.setdefault(f"{needed} images{reason}; there are {n}", []).append(name)
    notes = [
        f"{listed(few)} need{'s' if len(few) == 1 else ''} {reason}"
        for reason, few in too_few.items()
    ]
    if without_features:
        notes.append(f"the reference holds statistics only: no {listed(without_features)}")
    return names, notes


def figures_of(
    names: Sequence[str], sets: FeatureSets, manifold: FeatureSets | None = None
) -> dict[str, Figure]:
    """Return the figures of these metrics; `manifold` holds the sets under another extractor, of manifolds."""
    metrics = [METRICS[name] for name in names]
    return {
        row.name: row.function()(manifold if manifold and row.is_manifold else sets)
        for row in metrics
    }


class SetFigures(NamedTuple):
    """The figures of one set of pictures."""

    columns: dict[str, Any]  # by name of the column; None where a figure cannot be measured
    of_images: dict[str, NDArray[np.float64]]  # by metric, for each picture
    notes: list[str]


def measure_sets(
    sets: FeatureSets, extractor: Extractor, manifold: FeatureSets | None = None
) -> SetFigures:
    """Measure pictures against a reference with all metrics of sets; intervals are by jackknife.

    Prompts taken in turn leave a set without pairs of one caption, which shifts KID below 0 alike in every cell.
    """
    n = len(sets.pictures)
    reference = sets.reference
    names, notes = measurable(
        n if reference.n is None else min(n, reference.n), reference, extractor
    )
    figures = figures_of(names, sets, manifold)
    columns: dict[str, Any] = {
        f"{name}{end}": None for name in OF_SETS for end in ("", "_low", "_high")
    }
    columns["n_reference"] = reference.n
    columns |= {name: float(figure(np.arange(n))) for name, figure in figures.items()}
    for name, reach in jackknife(figures, n).items():
        ends = np.clip([columns[name] - reach, columns[name] + reach], *METRICS[name].bounds)
        columns[f"{name}_low"], columns[f"{name}_high"] = ends.tolist()
    if "kid" in figures:
        columns |= _kid_spread(sets)
    of_images = {
        name: np.array([figure(np.array([row])) for row in range(n)])
        for name, figure in figures.items()
        if METRICS[name].is_paired
    }
    return SetFigures(columns, of_images, notes)


_LEVEL = 0.95
_SIZES = 15  # of subsets


def fid_infinity(
    features: Tensor, reference: FeatureSet, rng: np.random.Generator
) -> tuple[dict[str, float | None], list[str]]:
    """Extrapolate FID, which few pictures bias upwards, to infinitely many (arXiv 1911.07023); columns and notes.

    The interval is that of the intercept of the least-squares line; it is too narrow, since subsets share pictures.
    """
    n, width = features.shape
    names = ("fid_infinity", "fid_infinity_low", "fid_infinity_high")
    if n < 2 * width + _SIZES:
        return dict.fromkeys(names), [
            f"fid_infinity needs {2 * width + _SIZES} images; there are {n}"
        ]
    distance = frechet_distance(reference)
    sizes = np.unique(np.linspace(max(n // 2, 2 * width), n, _SIZES).round().astype(int))
    subsets = (torch.from_numpy(rng.choice(n, size=int(size), replace=False)) for size in sizes)
    line = stats.linregress(1 / sizes, [distance(features[rows]) for rows in subsets])
    reach = float(stats.t.ppf((1 + _LEVEL) / 2, len(sizes) - 2) * line.intercept_stderr)
    value = float(line.intercept)
    return dict(zip(names, (value, value - reach, value + reach), strict=True)), []


# ---- How much figures vary: intervals by jackknife, and the spread of autoregressive decoding

# Groups of pictures that the jackknife leaves out, and mixed sets that the spread of ar is estimated from.
_GROUPS = 50
_MIXED = 200


def jackknife(figures: Mapping[str, Figure], n: int) -> dict[str, float]:
    """Return half the width of the 95 % interval of each figure of n pictures; empty for fewer than two groups of two.

    Random groups of pictures are left out in turn. For recall it errs towards wide intervals (Efron and Stein 1981).
    """
    groups = min(_GROUPS, n // 2)
    if groups < 2:
        return {}
    group_of = np.random.default_rng(0).permutation(n) % groups
    remaining = [np.flatnonzero(group_of != group) for group in range(groups)]
    reach = float(stats.t.ppf((1 + _LEVEL) / 2, groups - 1)) * math.sqrt(groups - 1)
    return {
        name: reach * float(np.std([figure(rows) for rows in remaining]))
        for name, figure in figures.items()
    }


def ar_spread(figures: Mapping[str, Figure], sets: Rows) -> dict[str, tuple[float, float, float]]:
    """Return centre and ends between which 95 % of further sets of ar lie: the same prompts, other seeds.

    `sets` [R, n] are rows of the pictures: R >= 2 sets of the same n prompts. Mixed sets take each prompt's picture
    from a random one; they vary by (R - 1) / R of the variance between sets, their mean as that of R sets.
    """
    repeats, prompts = sets.shape
    rng = np.random.default_rng(0)
    mixed = [sets[rng.integers(0, repeats, prompts), np.arange(prompts)] for _ in range(_MIXED)]
    reach = float(stats.norm.ppf((1 + _LEVEL) / 2))
    ends = {}
    for name, figure in figures.items():
        values = [figure(rows) for rows in mixed]
        centre = float(np.mean(values))
        between = float(np.var(values, ddof=1)) * repeats / (repeats - 1)
        width = reach * math.sqrt(between * (1 + 1 / repeats))
        low, high = np.clip([centre - width, centre + width], *METRICS[name].bounds).tolist()
        ends[name] = centre, low, high
    return ends
