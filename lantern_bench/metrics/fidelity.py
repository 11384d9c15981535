"""Figures of a set of pictures against a reference: FID, KID, precision, recall, and FID-infinity.

A metric of sets returns a function of rows. Confidence intervals call it for many subsets of the
pictures, and nothing of the reference is computed again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch_fidelity import metric_kid

from lantern_bench.methods.catalog import METRICS, OF_SETS
from lantern_bench.metrics.extractors import FeatureSet
from lantern_bench.utils.text import listed

_NEIGHBOURS = 3  # k of the manifolds of precision and recall

Rows: TypeAlias = NDArray[np.int64]

Figure: TypeAlias = Callable[[Rows], float]
"""The figure of any subset of the pictures, by their rows."""


class FeatureSets(NamedTuple):
    """The input of a metric of sets: pictures and reference under one extractor."""

    pictures: Tensor  # float32 [n, width]
    reference: FeatureSet

    def subset(self, rows: Rows) -> Tensor:
        """Return the features of some of the pictures."""
        return self.pictures[torch.from_numpy(rows)]

    def reference_features(self) -> Tensor:
        """Return the features [m, width] of a reference that has more than statistics."""
        assert self.reference.features is not None
        return self.reference.features


def frechet_distance(reference: FeatureSet) -> Callable[[Tensor], float]:
    """Return the distance of features [n, width]: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))."""
    trace = np.trace(reference.covariance)
    values, vectors = np.linalg.eigh(reference.covariance)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T

    def distance(features: Tensor) -> float:
        pictures = FeatureSet.of(features)
        # This symmetric matrix has the eigenvalues of the product of both covariances.
        product = root @ pictures.covariance @ root
        between = np.sqrt(np.linalg.eigvalsh(product).clip(0)).sum()
        shift = ((pictures.mean - reference.mean) ** 2).sum()
        return float(shift + np.trace(pictures.covariance) + trace - 2 * between)

    return distance


def fid(sets: FeatureSets) -> Figure:
    """Return the Frechet distance of the two sets (Heusel et al. 2017)."""
    distance = frechet_distance(sets.reference)
    return lambda rows: distance(sets.subset(rows))


def kid(sets: FeatureSets) -> Figure:
    """Return the kernel distance (Binkowski et al. 2018), over all pictures."""
    reference = sets.reference_features().double().numpy()
    pictures = sets.pictures.double().numpy()
    among_reference = _mean_kernel(reference)

    def distance(rows: Rows) -> float:
        chosen = pictures[rows]
        between = _kernel_sum(chosen, reference) / (len(chosen) * len(reference))
        return _mean_kernel(chosen) + among_reference - 2 * between

    return distance


def _kernel_sum(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the sum of (x . y / width + 1)^3 over all pairs."""
    total = 0.0
    for start in range(0, len(x), 2048):
        kernel = (x[start : start + 2048] @ y.T / x.shape[1] + 1) ** 3
        total += float(kernel.sum())
    return total


def _mean_kernel(x: NDArray[np.float64]) -> float:
    """Return the mean of the kernel over the pairs of different x."""
    squares = (x**2).sum(axis=1)
    with_themselves = float(((squares / x.shape[1] + 1) ** 3).sum())
    return (_kernel_sum(x, x) - with_themselves) / (len(x) * (len(x) - 1))


def _kid_std(sets: FeatureSets) -> dict[str, Any]:
    """Return the columns of KID over random subsets, as torch-fidelity computes it."""
    reference = sets.reference_features()
    subset = min(1000, min(len(sets.pictures), len(reference)) // 2)
    figures = metric_kid.kid_features_to_metric(
        sets.pictures,
        reference,
        kid_subsets=100,
        kid_subset_size=subset,
        rng_seed=2020,
        verbose=False,
    )
    return {"kid_subset": subset, "kid_std": figures[metric_kid.KEY_METRIC_KID_STD]}


def precision(sets: FeatureSets) -> Figure:
    """Return the fraction of pictures in the reference's manifold (Kynkaanniemi et al. 2019)."""
    inside = _is_inside(sets.pictures, sets.reference_features())
    return lambda rows: float(inside[rows].mean())


def recall(sets: FeatureSets) -> Figure:
    """Return the fraction of the reference inside the pictures' manifold."""
    reference = sets.reference_features()
    return lambda rows: float(_is_inside(reference, sets.subset(rows)).mean())


def _is_inside(features: Tensor, manifold: Tensor) -> NDArray[np.bool_]:
    """Return whether each feature lies in a ball of the manifold, [n].

    The ball around each point of `manifold` reaches its k-th nearest neighbour.
    """
    # The nearest point is the point itself.
    radii = [
        torch.cdist(chunk, manifold).kthvalue(_NEIGHBOURS + 1).values
        for chunk in manifold.split(2048)
    ]
    reach = torch.cat(radii)
    inside = [(torch.cdist(chunk, manifold) <= reach).any(dim=1) for chunk in features.split(2048)]
    return torch.cat(inside).numpy()


def measurable(n: int, reference: FeatureSet) -> tuple[list[str], list[str]]:
    """Decide which metrics of sets can be measured on n pictures.

    Returns:
        Names of the metrics, and notes that say why the others cannot be measured.
    """
    width = len(reference.mean)
    if reference.n is not None:
        n = min(n, reference.n)
    names: list[str] = []
    # Names by the reason, a text with places for the names and the verb.
    others: dict[str, list[str]] = defaultdict(list)
    for name in OF_SETS:
        metric = METRICS[name]
        times = metric.min_images_per_feature
        needed = max(metric.min_images, times * width)
        if reference.features is None and metric.needs_features:
            others["the reference holds statistics only: no {}"].append(name)
        elif n >= needed:
            names.append(name)
        else:
            reason = f"{needed} images"
            if times:
                reason += ", twice its features" if times == 2 else f", {times} times its features"
            others[f"{{}} {{}} {reason}; there are {n}"].append(name)
    notes = [
        reason.format(listed(few), "needs" if len(few) == 1 else "need")
        for reason, few in others.items()
    ]
    return names, notes


def figures_of(names: Sequence[str], sets: Sequence[FeatureSets]) -> dict[str, Figure]:
    """Return the figures of metrics of sets.

    Args:
        names: Names of the metrics.
        sets: Pictures and reference under the protocol's extractor; then, if precision and recall
            have another one, the same under that one.
    """
    figures = {}
    for name in names:
        metric = METRICS[name]
        figures[name] = metric.function()(sets[-1] if metric.is_manifold else sets[0])
    return figures


class SetFigures(NamedTuple):
    """The figures of one set of pictures."""

    columns: dict[str, Any]  # by column; figures that cannot be measured are left out
    of_images: dict[str, list[float]]  # by metric, for each picture
    notes: list[str]


def measure_sets(sets: Sequence[FeatureSets], *, infinity: bool = False) -> SetFigures:
    """Measure pictures against a reference with all metrics of sets; intervals are by jackknife.

    If prompts are taken in turn, no two pictures share a caption. That shifts KID below 0 by the
    same amount in every cell.

    Args:
        sets: As in `figures_of`; empty without a reference.
        infinity: Also extrapolate FID to infinitely many pictures.
    """
    if not sets:
        return SetFigures({}, {}, [f"no reference: {listed(OF_SETS)} need one (--reference)"])
    n = len(sets[0].pictures)
    everything = np.arange(n)
    names, notes = measurable(n, sets[0].reference)
    figures = figures_of(names, sets)

    columns: dict[str, Any] = {"n_reference": sets[0].reference.n}
    for name, figure in figures.items():
        columns[name] = float(figure(everything))
    for name, reach in jackknife(figures, n).items():
        columns |= _interval(name, columns[name], reach)
    if "kid" in figures:
        columns |= _kid_std(sets[0])
    if infinity:
        further, more = fid_infinity(sets[0])
        columns |= further
        notes += more

    of_images = {}
    for name, figure in figures.items():
        if METRICS[name].is_paired:
            of_images[name] = [figure(row) for row in everything[:, None]]
    return SetFigures(columns, of_images, notes)


def _interval(name: str, value: float, reach: float) -> dict[str, float]:
    """Return the columns of a figure and of its interval, within the bounds of the metric."""
    low, high = np.clip([value - reach, value + reach], *METRICS[name].bounds).tolist()
    return {name: value, f"{name}_low": low, f"{name}_high": high}


_LEVEL = 0.95  # of all intervals
_SUBSETS = 15  # that FID is extrapolated from


def fid_infinity(sets: FeatureSets) -> tuple[dict[str, float], list[str]]:
    """Extrapolate FID to infinitely many pictures (arXiv 1911.07023).

    Few pictures bias FID upward. The interval is of the intercept of the least-squares line of FID
    over 1 / n. It is too narrow, since the subsets share pictures.

    Returns:
        The columns of FID-infinity, none with too few pictures; and notes.
    """
    n, width = sets.pictures.shape
    needed = 2 * width + _SUBSETS
    if n < needed:
        return {}, [f"fid_infinity needs {needed} images; there are {n}"]

    figure = fid(sets)
    rng = np.random.default_rng(2020)
    smallest = max(n // 2, 2 * width)
    sizes = np.unique(np.linspace(smallest, n, _SUBSETS).round().astype(int))
    distances = [figure(rng.choice(n, size=size, replace=False)) for size in sizes.tolist()]
    line = stats.linregress(1 / sizes, distances)
    reach = float(stats.t.ppf((1 + _LEVEL) / 2, len(sizes) - 2) * line.intercept_stderr)
    value = float(line.intercept)
    return {
        "fid_infinity": value,
        "fid_infinity_low": value - reach,
        "fid_infinity_high": value + reach,
    }, []


# ---- How much figures vary: intervals by jackknife, and the spread of autoregressive decoding

_GROUPS = 50  # groups of pictures that the jackknife leaves out
_MIXED = 200  # mixed sets that the spread of ar is estimated from


def jackknife(figures: Mapping[str, Figure], n: int) -> dict[str, float]:
    """Return half the width of the 95% interval of each figure.

    Random groups of pictures are left out in turn. For recall this errs toward wide intervals
    (Efron and Stein 1981).

    Args:
        figures: Figures of n pictures, by name.
        n: Number of pictures. With fewer than four there are no intervals.
    """
    groups = min(_GROUPS, n // 2)
    if groups < 2:
        return {}
    group_of = np.random.default_rng(0).permutation(n) % groups
    remaining = [np.flatnonzero(group_of != group) for group in range(groups)]
    scale = float(stats.t.ppf((1 + _LEVEL) / 2, groups - 1)) * math.sqrt(groups - 1)
    reaches = {}
    for name, figure in figures.items():
        reaches[name] = scale * float(np.std([figure(rows) for rows in remaining]))
    return reaches


def ar_spread(figures: Mapping[str, Figure], sets: Rows) -> dict[str, float]:
    """Return the 95% prediction interval of `ar` for the same prompts and other seeds.

    Mixed sets take the picture of each prompt from a random set. They vary by (R - 1) / R of the
    variance between sets, and their mean varies as the mean of R sets.

    Args:
        figures: Figures of all pictures of all sets, by name.
        sets: Rows of the pictures, [R, n]: R >= 2 sets of the same n prompts.

    Returns:
        The columns of centre, low and high end of each figure.
    """
    repeats, prompts = sets.shape
    rng = np.random.default_rng(0)
    mixed = [sets[rng.integers(0, repeats, prompts), np.arange(prompts)] for _ in range(_MIXED)]
    quantile = float(stats.norm.ppf((1 + _LEVEL) / 2))
    spread: dict[str, float] = {}
    for name, figure in figures.items():
        values = [figure(rows) for rows in mixed]
        between = float(np.var(values, ddof=1)) * repeats / (repeats - 1)
        reach = quantile * math.sqrt(between * (1 + 1 / repeats))
        spread |= _interval(name, float(np.mean(values)), reach)
    return spread
