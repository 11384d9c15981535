"""How much figures of sets of pictures vary: intervals by jackknife, and the spread of autoregressive decoding.

The reference is fixed in both, and the number of pictures. An interval covers other pictures, of prompts drawn from the
same captions. The spread of ar covers other seeds for the same prompts, so it is narrower. FID and recall depend on the
number of pictures, so no set here has a picture twice: a bootstrap of FID does not cover even its own expectation
(tests/metrics/test_spread.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lantern_bench.methods.tables import METRICS

Rows: TypeAlias = NDArray[np.int64]

Figure: TypeAlias = Callable[[Rows], float]
"""The figure of any subset of the pictures, by their rows."""

_LEVEL = 0.95
# Groups of pictures that the jackknife leaves out, and mixed sets that the spread of ar is estimated from.
_GROUPS, _MIXED = 50, 200


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
    return {name: reach * float(np.std([figure(rows) for rows in remaining])) for name, figure in figures.items()}


def ar_spread(figures: Mapping[str, Figure], sets: Rows) -> dict[str, tuple[float, float, float]]:
    """Return centre and ends between which 95 % of further sets of ar lie: the same prompts, other seeds.

    `sets` [R, n] are rows of the pictures: R sets of the same n prompts, R >= 2. Mixed sets take each prompt's picture
    from a random one of the R, so they have n different pictures. They vary by (R - 1) / R of the variance between
    sets; their mean is as uncertain as that of R sets.
    """
    repeats, prompts = sets.shape
    rng = np.random.default_rng(0)
    mixed = [sets[rng.integers(0, repeats, prompts), np.arange(prompts)] for _ in range(_MIXED)]
    reach = float(stats.norm.ppf((1 + _LEVEL) / 2))
    ends = {}
    for name, figure in figures.items():
        values = [figure(rows) for rows in mixed]
        centre, between = float(np.mean(values)), float(np.var(values, ddof=1)) * repeats / (repeats - 1)
        width = reach * math.sqrt(between * (1 + 1 / repeats))
        ends[name] = centre, clipped(name, centre - width), clipped(name, centre + width)
    return ends


def clipped(name: str, end: float) -> float:
    """Return the end of an interval within the bounds of its metric: precision and recall are shares."""
    low, high = METRICS[name].bounds
    return min(max(end, low), high)
