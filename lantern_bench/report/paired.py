"""Two runs over the same prompts: effect, interval, p-value, and what many comparisons do to it.

The effect of two ratios of sums is their quotient or their difference. Its interval is the bootstrap's over prompts
(`stats.py`). The p-value asks what would be seen if the runs' names meant nothing: each prompt's two results are
exchanged or not, in all ways where there are few prompts and in 9,999 random ways else (a paired permutation test,
Fisher 1935). It needs no shape of the distribution, and with n prompts cannot fall below 2 / 2^n. Several comparisons
at once are corrected by Holm's step-down method (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lantern_bench.report.stats import bootstrap_interval

__all__ = ["Effect", "Kind", "Sums", "compare_sums", "fewest_prompts", "holm"]

Array: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["ratio", "difference"]

_EXACT = 13
_DRAWS = 9_999
# Exchanges that only rounding tells from the one seen count as equal to it.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Sums:
    """What a run's figure is made of: numerator and denominator of each prompt, arrays [prompts]."""

    over: Array
    under: Array

    @property
    def value(self) -> float:
        """The figure: sum over sum."""
        return float(self.over.sum() / self.under.sum())


@dataclass(frozen=True)
class Effect:
    """b / a or b - a with its 95 % interval and p-value; None where there are too few prompts."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None


def compare_sums(a: Sums, b: Sums, kind: Kind, *, seed: int = 0) -> Effect:
    """Compare two figures over the same prompts, in the same order; a ratio needs figures above 0."""
    four = (a.over, a.under, b.over, b.under)

    def effect(*parts: Array, axis: int = -1) -> Array:
        over_a, under_a, over_b, under_b = (part.sum(axis=axis) for part in parts)
        first, second = over_a / under_a, over_b / under_b
        return np.asarray(second / first if kind == "ratio" else second - first)

    value = float(effect(*four))
    if a.over.size < 2:
        return Effect(value, None, None, None)
    if _identical(a, b):
        return Effect(value, value, value, 1.0)
    low, high = bootstrap_interval(four, effect, seed)
    if not (math.isfinite(low) and math.isfinite(high)):
        return Effect(value, None, None, _exchanged(a, b, kind, seed))
    return Effect(value, low, high, _exchanged(a, b, kind, seed))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values after Holm's correction, in their order; None stays None and is not counted."""
    known = sorted((p, number) for number, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, number) in enumerate(known):
        worst = max(worst, min(1.0, (len(known) - rank) * p))
        corrected[number] = worst
    return corrected


def fewest_prompts(comparisons: int, level: float = 0.05) -> int:
    """Return how many prompts it takes until the smallest of so many p-values can pass Holm at all."""
    return math.ceil(1 + math.log2(max(1, comparisons) / level))


def _identical(a: Sums, b: Sums) -> bool:
    return bool(np.array_equal(a.over, b.over) and np.array_equal(a.under, b.under))


def _exchanged(a: Sums, b: Sums, kind: Kind, seed: int) -> float:
    """The share of exchanges whose effect is at least as large as the one seen; two-sided on a log or linear scale."""
    size = a.over.size
    if size <= _EXACT:
        flips = ((np.arange(2**size)[:, None] >> np.arange(size)) & 1).astype(np.float64)
    else:
        flips = np.random.default_rng(seed).integers(0, 2, (_DRAWS, size)).astype(np.float64)
    over, under = flips @ (b.over - a.over), flips @ (b.under - a.under)
    first = (a.over.sum() + over) / (a.under.sum() + under)
    second = (b.over.sum() - over) / (b.under.sum() - under)
    effects = np.abs(np.log(second / first) if kind == "ratio" else second - first)
    seen = abs(math.log(b.value / a.value) if kind == "ratio" else b.value - a.value)
    as_large = int((effects >= seen * (1 - _EQUAL)).sum())
    return as_large / len(flips) if size <= _EXACT else (as_large + 1) / (_DRAWS + 1)
