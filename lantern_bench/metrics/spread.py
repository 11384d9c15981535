"""How much FID, KID, precision and recall vary: intervals by jackknife, and the band of autoregressive decoding.

The reference is fixed in both, and the number of pictures. An interval covers other pictures, of prompts drawn from the
same captions. The band covers other seeds for the same prompts, so it is narrower. FID and recall depend on the number
of pictures, so no set here has a picture twice: a bootstrap of FID does not cover even its own expectation
(tests/metrics/test_spread.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

if TYPE_CHECKING:
    from lantern_bench.metrics.fidelity import FeatureSet

NAMES = ("fid", "kid", "precision", "recall")
"""The figures of a set of pictures against a reference."""

_LEVEL = 0.95
# Groups of pictures that the jackknife leaves out, and mixed sets that the band is estimated from.
_GROUPS, _MIXED = 50, 200

Rows = NDArray[np.int64]


class SubsetFigures:
    """The figures `NAMES` of any subset of pictures with these features [n, width], as torch-fidelity defines them.

    `names` are the figures wanted. `manifold` are features of the pictures and of the reference for precision and
    recall, where they have another extractor. KID is the mean over all subsets, without the noise of random ones.
    """

    def __init__(
        self,
        features: Tensor,
        reference: FeatureSet,
        names: Sequence[str],
        *,
        manifold: tuple[Tensor, Tensor] | None = None,
        neighbours: int = 3,
    ) -> None:
        self.names = tuple(names)
        self._values, self._reference, self._neighbours = features.double().numpy(), reference, neighbours
        if "fid" in names:
            values, vectors = np.linalg.eigh(reference.covariance)
            self._root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        if reference.features is not None:
            self._others = reference.features.double().numpy()
            self._manifold, theirs = manifold or (features, reference.features)
            self._theirs, self.inside = theirs, _inside(self._manifold, theirs, neighbours)
        if "kid" in names:
            self._among = _mean_kernel(self._others, self._others, among=True)

    def __call__(self, rows: Rows) -> dict[str, float]:
        """Return the figures of the pictures `rows`."""
        return {name: float(getattr(self, f"_{name}")(rows)) for name in self.names}

    def _fid(self, rows: Rows) -> float:
        mine, other = self._values[rows], self._reference
        centred = mine - mine.mean(axis=0)
        part = centred @ self._root
        # The root of the product of both covariances has the trace of this symmetric matrix's root.
        between = np.sqrt(np.linalg.eigvalsh(part.T @ part / (len(rows) - 1)).clip(0)).sum()
        variance = (centred**2).sum() / (len(rows) - 1) + np.trace(other.covariance)
        return float(((mine.mean(axis=0) - other.mean) ** 2).sum() + variance - 2 * between)

    def fid_of(self, pictures: FeatureSet) -> float:
        """Return the FID of a set by its mean and covariance, which may have been summed from parts."""
        other, root = self._reference, self._root
        between = np.sqrt(np.linalg.eigvalsh(root @ pictures.covariance @ root).clip(0)).sum()
        traces = np.trace(pictures.covariance) + np.trace(other.covariance)
        return float(((pictures.mean - other.mean) ** 2).sum() + traces - 2 * between)

    def _kid(self, rows: Rows) -> float:
        mine = self._values[rows]
        return _mean_kernel(mine, mine, among=True) + self._among - 2 * _mean_kernel(mine, self._others)

    def _precision(self, rows: Rows) -> float:
        return float(self.inside[rows].mean())

    def _recall(self, rows: Rows) -> float:
        return float(_inside(self._theirs, self._manifold[torch.from_numpy(rows)], self._neighbours).mean())


def _mean_kernel(one: NDArray[np.float64], other: NDArray[np.float64], *, among: bool = False) -> float:
    """The mean of KID's kernel (x . y / width + 1)^3 over pairs; `among` one set: over pairs of different pictures."""
    total = 0.0
    for start in range(0, len(one), 2048):
        total += float(((one[start : start + 2048] @ other.T / one.shape[1] + 1) ** 3).sum())
    if not among:
        return total / (len(one) * len(other))
    itself = float((((one**2).sum(axis=1) / one.shape[1] + 1) ** 3).sum())
    return (total - itself) / (len(one) * (len(one) - 1))


def _inside(features: Tensor, manifold: Tensor, neighbours: int) -> NDArray[np.bool_]:
    """Whether each feature lies in a ball around one of `manifold` that reaches its k-th neighbour: [n]."""
    radii = torch.cat([torch.cdist(part, manifold).kthvalue(neighbours + 1).values for part in manifold.split(2048)])
    found = [(torch.cdist(part, manifold) <= radii).any(dim=1) for part in features.split(2048)]
    return torch.cat(found).numpy()


def jackknife(figures: SubsetFigures, n: int) -> dict[str, float]:
    """Return half the width of the 95 % interval of each figure of n pictures; empty for fewer than two groups of two.

    Random groups of pictures are left out in turn. For recall it errs towards wide intervals (Efron and Stein 1981).
    """
    count = min(_GROUPS, n // 2)
    if count < 2:
        return {}
    group = np.random.default_rng(0).permutation(n) % count
    left_out = [figures(np.flatnonzero(group != one)) for one in range(count)]
    reach = float(stats.t.ppf((1 + _LEVEL) / 2, count - 1)) * math.sqrt(count - 1)
    return {name: reach * float(np.std([one[name] for one in left_out])) for name in figures.names}


def band(figures: SubsetFigures, sets: Rows) -> dict[str, tuple[float, float, float]]:
    """Return centre and ends of the band in which 95 % of further sets lie: the same prompts, other seeds.

    `sets` [R, n] are rows of the pictures: R sets of the same n prompts, R >= 2. Mixed sets take each prompt's picture
    from a random one of the R, so they have n different pictures. They vary by (R - 1) / R of the variance between
    sets; their mean is as uncertain as that of R sets.
    """
    repeats, slots = sets.shape
    rng = np.random.default_rng(0)
    mixed = [figures(sets[rng.integers(0, repeats, slots), np.arange(slots)]) for _ in range(_MIXED)]
    reach = float(stats.norm.ppf((1 + _LEVEL) / 2))
    ends = {}
    for name in figures.names:
        values = [one[name] for one in mixed]
        centre, between = float(np.mean(values)), float(np.var(values, ddof=1)) * repeats / (repeats - 1)
        width = reach * math.sqrt(between * (1 + 1 / repeats))
        ends[name] = centre, clipped(name, centre - width), clipped(name, centre + width)
    return ends


def clipped(name: str, end: float) -> float:
    """Return the end of an interval within what the figure can be: precision and recall are shares."""
    return end if name == "kid" else max(end, 0.0) if name == "fid" else min(max(end, 0.0), 1.0)
