"""FID extrapolated to infinitely many pictures, since FID of few pictures is biased upwards.

After Chong and Forsyth (arXiv 1911.07023): FID falls nearly linearly with 1/n, so it is measured on random subsets of
several sizes and the line is followed to 1/n = 0. The reference's own finite size leaves its bias in; only figures
against the same reference are comparable.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lantern_bench.measure.features import FeatureSet
from lantern_bench.measure.fidelity import frechet_distance

__all__ = ["Extrapolated", "fid_infinity"]

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
