"""Intervals and paired tests over prompts: bootstrap, Wilson for proportions, exchanges, Holm's correction.

All modes see the same prompts, so prompts are resampled: the images of a prompt (its repeats) enter and leave a
resample together, and in a ratio of two modes so do both modes' images of that prompt. This removes the difference
between easy and hard prompts from the comparison. Both intervals are scipy's; this module adds what scipy leaves
undefined (constant data, too few prompts). FID gets no interval: its bias depends on the number of images.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["ratio", "difference"]

_LEVEL = 0.95
# Up to so many prompts all exchanges are counted; beyond, this many random ones.
_EXACT, _FLIPS = 13, 9_999


class Interval(NamedTuple):
    """A figure with its 95 % interval. An undefined figure is None and never nan; `note` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str | None = None
    p_value: float | None = None

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the columns of a figure: `name`, `name_low` and `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class Sums(NamedTuple):
    """The parts of a run's figure: numerator and denominator of each prompt, arrays [prompts]."""

    over: Array
    under: Array

    @property
    def value(self) -> float:
        """The figure: sum over sum."""
        return float(self.over.sum() / self.under.sum())


def ratio_of_sums(
    numerators: Iterable[float], denominators: Iterable[float], prompts: Iterable[str], *, seed: int = 0
) -> Interval:
    """Return sum of numerators over sum of denominators of images, with a bootstrap interval over prompts.

    Intervals are BCa (Efron 1987), or percentile where BCa is not defined. Data with the same ratio for every prompt
    yield an interval of width 0; fewer than two prompts yield no interval.
    """
    over, under = sums_per_prompt(numerators, denominators, prompts)
    total = float(under.sum())
    if over.size == 0 or total == 0.0:
        return Interval(None, note="no data")
    value = float(over.sum()) / total
    if over.size < 2:
        return Interval(value, note="no interval: fewer than 2 prompts")
    # Every prompt has the ratio of the whole, up to rounding, and so has each resample.
    if np.allclose(over, over.sum() / under.sum() * under, rtol=1e-12, atol=0.0):
        return Interval(value, value, value)
    return Interval(value, *_bootstrap((over, under), lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis), seed))


def mean_over_prompts(values: Sequence[float], prompts: Iterable[str]) -> Interval:
    """Return the mean of values, one an image, with a bootstrap interval over prompts as in `ratio_of_sums`."""
    return ratio_of_sums(values, [1.0] * len(values), prompts)


def proportion(successes: int, trials: int) -> Interval:
    """Return successes over trials with the Wilson interval (Wilson 1927); without trials no figure."""
    from scipy.stats import binomtest

    if trials == 0:
        return Interval(None, note="no trials")
    low, high = binomtest(successes, trials).proportion_ci(_LEVEL, method="wilson")
    return Interval(successes / trials, float(low), float(high))


def sums_per_prompt(numerators: Iterable[float], denominators: Iterable[float], prompts: Iterable[str]) -> Sums:
    """Return both sums of each prompt, prompts in sorted order: the seed alone decides the resamples.

    `fsum` because the repeats of a prompt are recorded in an order that differs between runs.
    """
    images: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for over, under, prompt in zip(numerators, denominators, prompts, strict=True):
        images[prompt].append((over, under))
    sums = [[math.fsum(part) for part in zip(*pairs, strict=True)] for _, pairs in sorted(images.items())]
    return Sums(*np.array(sums, dtype=np.float64).reshape(-1, 2).T)


def _bootstrap(sums: Sequence[Array], statistic: Callable[..., Array], seed: int) -> tuple[float, float]:
    """Return the ends of the 95 % interval of `statistic(*sums, axis=)` over prompts; nan where not defined.

    `sums` are arrays [prompts], resampled together. BCa (Efron 1987), percentile where BCa is not defined.
    """
    from scipy.stats import bootstrap

    size = sums[0].size
    options: dict[str, Any] = {"paired": True, "vectorized": True, "axis": -1, "confidence_level": _LEVEL}
    # Thousands of prompts get fewer resamples: their interval is smooth, and tables should take seconds. The batch
    # bounds the memory.
    options |= {"n_resamples": min(9_999, max(1_999, 10_000_000 // size)), "batch": max(1, 4_000_000 // size)}
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            warnings.simplefilter("ignore")  # A method that fails warns and returns nan; the loop tries the next one.
            found = bootstrap(tuple(sums), statistic, method=method, rng=np.random.default_rng(seed), **options)
            low, high = found.confidence_interval
        if math.isfinite(low) and math.isfinite(high):
            break
    return float(low), float(high)


def compare_sums(a: Sums, b: Sums, kind: Kind, *, seed: int = 0) -> Interval:
    """Return b / a or b - a over the same prompts, in the same order, with interval and p-value.

    A ratio needs figures above 0. Fewer than two prompts have no interval and no p-value.
    """

    def effect(*parts: Array, axis: int = -1) -> Array:
        over_a, under_a, over_b, under_b = (part.sum(axis=axis) for part in parts)
        first, second = over_a / under_a, over_b / under_b
        return np.asarray(second / first if kind == "ratio" else second - first)

    value = float(effect(*a, *b))
    if a.over.size < 2:
        return Interval(value)
    if np.array_equal(a, b):
        return Interval(value, value, value, p_value=1.0)
    low, high = _bootstrap((*a, *b), effect, seed)
    p_value = _exchange_test(a, b, kind, seed)
    defined = math.isfinite(low) and math.isfinite(high)
    return Interval(value, low if defined else None, high if defined else None, p_value=p_value)


def _exchange_test(a: Sums, b: Sums, kind: Kind, seed: int) -> float:
    """Return the share of exchanges with an effect as large as the observed one; two-sided, ratios on a log scale."""
    size = a.over.size
    if size <= _EXACT:
        flips = ((np.arange(2**size)[:, None] >> np.arange(size)) & 1).astype(np.float64)
    else:
        flips = np.random.default_rng(seed).integers(0, 2, (_FLIPS, size)).astype(np.float64)
    over, under = flips @ (b.over - a.over), flips @ (b.under - a.under)
    first = (a.over.sum() + over) / (a.under.sum() + under)
    second = (b.over.sum() - over) / (b.under.sum() - under)
    effects = np.abs(np.log(second / first) if kind == "ratio" else second - first)
    seen = abs(math.log(b.value / a.value) if kind == "ratio" else b.value - a.value)
    as_large = int((effects >= seen * (1 - 1e-9)).sum())  # an effect that differs by rounding alone is equal
    return as_large / len(flips) if size <= _EXACT else (as_large + 1) / (_FLIPS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction, in their order."""
    order, corrected = np.argsort(p_values, kind="stable"), np.empty(len(p_values))
    scaled = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return [float(p) for p in corrected]


def fewest_prompts(comparisons: int, level: float = 0.05) -> int:
    """Return how many prompts it takes until the smallest of so many p-values can pass Holm's correction."""
    return math.ceil(1 + math.log2(max(1, comparisons) / level))
