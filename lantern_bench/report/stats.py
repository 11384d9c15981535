"""Intervals: paired bootstrap over prompts, Wilson for proportions.

All modes see the same prompts, so prompts are what is resampled: the images of a prompt (its repeats) enter and leave a
resample together, and in a ratio of two modes so do the two modes' images of that prompt. That takes the difference
between easy and hard prompts out of the comparison. Both methods are scipy's; what is added here is what scipy leaves
undefined (constant data, too few prompts). No interval is made for FID: its bias depends on the number of images.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
# Fewer resamples for thousands of prompts, where the interval is smooth and tables are to come in seconds.
_MOST, _LEAST, _ELEMENTS = 9_999, 1_999, 10_000_000
# Elements of one block of resamples: bounds the memory.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval. What is not defined is None and never nan; `note` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str | None = None


def ratio_of_sums(
    numerators: Sequence[float],
    denominators: Sequence[float],
    prompts: Sequence[str],
    *,
    seed: int = 0,
) -> Interval:
    """Sum of numerators over sum of denominators, with a bootstrap interval over prompts.

    The three sequences run over images. With `denominators` all 1 this is a mean; with the seconds of `ar` over the
    seconds of a mode on the same prompts it is the speedup. BCa intervals (Efron 1987), percentile ones where BCa is
    not defined. The result does not depend on the order of the images. Data that give every prompt the same ratio
    yield an interval of width 0; fewer than two prompts yield no interval.
    """
    over, under = sums_per_prompt(numerators, denominators, prompts)
    total = float(under.sum())
    if over.size == 0 or total == 0.0:
        return Interval(None, note="no data")
    value = float(over.sum()) / total
    if over.size < 2:
        return Interval(value, note="no interval: fewer than 2 prompts")
    if _constant(over, under):
        return Interval(value, value, value)
    low, high = bootstrap_interval((over, under), _ratio, seed)
    return Interval(value, low, high)


def proportion(successes: int, trials: int) -> Interval:
    """Successes over trials with the Wilson interval (Wilson 1927); no trials, no figure."""
    from scipy.stats import binomtest

    if trials == 0:
        return Interval(None, note="no trials")
    low, high = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return Interval(successes / trials, float(low), float(high))


def sums_per_prompt(
    numerators: Sequence[float], denominators: Sequence[float], prompts: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both sums of each prompt as arrays [prompts], in sorted order: the seed alone decides the resamples.

    `fsum` because a prompt's repeats arrive in the order they were recorded, which differs between runs.
    """
    labels = sorted(set(prompts))
    index = {label: number for number, label in enumerate(labels)}
    groups: list[tuple[list[float], list[float]]] = [([], []) for _ in labels]
    for over, under, prompt in zip(numerators, denominators, prompts, strict=True):
        groups[index[prompt]][0].append(over)
        groups[index[prompt]][1].append(under)
    sums = np.array([[math.fsum(over), math.fsum(under)] for over, under in groups], dtype=np.float64).reshape(-1, 2)
    return sums[:, 0], sums[:, 1]


def _constant(over: NDArray[np.float64], under: NDArray[np.float64]) -> bool:
    """Whether every prompt has the ratio of the whole, up to rounding: each resample has it then."""
    ratio = over.sum() / under.sum()
    return bool(np.allclose(over, ratio * under, rtol=1e-12, atol=0.0))


def _ratio(over: NDArray[np.float64], under: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    return over.sum(axis=axis) / under.sum(axis=axis)


def bootstrap_interval(
    sums: Sequence[NDArray[np.float64]], statistic: Callable[..., NDArray[np.float64]], seed: int = 0
) -> tuple[float, float]:
    """Return the ends of the 95 % interval of `statistic(*sums, axis=)` over prompts.

    `sums` are arrays [prompts], resampled together. BCa (Efron 1987), percentile where BCa is not defined.
    """
    from scipy.stats import bootstrap

    size = sums[0].size
    resamples = min(_MOST, max(_LEAST, _ELEMENTS // size))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            # What scipy warns of is handled: a method that fails gives nan, and the next one is taken.
            warnings.simplefilter("ignore")
            low, high = bootstrap(
                tuple(sums),
                statistic,
                paired=True,
                vectorized=True,
                axis=-1,
                n_resamples=resamples,
                batch=max(1, _BLOCK // size),
                confidence_level=LEVEL,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(low) and math.isfinite(high):
            break
    return float(low), float(high)


# ---- Two runs over the same prompts: effect, interval, p-value, and what many comparisons do to it


Array: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["ratio", "difference"]

_EXACT = 13
_FLIPS = 9_999
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
        flips = np.random.default_rng(seed).integers(0, 2, (_FLIPS, size)).astype(np.float64)
    over, under = flips @ (b.over - a.over), flips @ (b.under - a.under)
    first = (a.over.sum() + over) / (a.under.sum() + under)
    second = (b.over.sum() - over) / (b.under.sum() - under)
    effects = np.abs(np.log(second / first) if kind == "ratio" else second - first)
    seen = abs(math.log(b.value / a.value) if kind == "ratio" else b.value - a.value)
    as_large = int((effects >= seen * (1 - _EQUAL)).sum())
    return as_large / len(flips) if size <= _EXACT else (as_large + 1) / (_FLIPS + 1)
