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

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEVEL", "Interval", "bootstrap_interval", "proportion", "ratio_of_sums", "sums_per_prompt"]

LEVEL = 0.95
# Fewer resamples for thousands of prompts, where the interval is smooth and tables are to come in seconds.
_MOST, _LEAST, _DRAWS = 9_999, 1_999, 10_000_000
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
    resamples = min(_MOST, max(_LEAST, _DRAWS // size))
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
