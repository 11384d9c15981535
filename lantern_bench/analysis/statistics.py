"""Intervals and tests: bootstrap over prompts, t over processes, Wilson for proportions, exchanges, Holm's correction.

Prompts are resampled with all their images; seconds also depend on the process (docs/results-format.md, "Intervals").
Intervals of FID, KID, precision and recall: `metrics/fidelity.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


Array: TypeAlias = NDArray[np.float64]

_LEVEL = 0.95
# Up to so many prompts all exchanges are counted; beyond, this many random ones.
_EXACT = 13
_FLIPS = 9_999
# Processes in effect: three that share few images unevenly, such as 2, 2 and 1, are 2.8; two and a bit are less.
_SEVERAL = 2.5
# A test sees a shift of so many times half the width of its 95 % interval with probability .8.
_SEEN = 1.0 + 0.8416 / 1.9600

NEEDS_PROCESSES = "no interval of speed: needs 3 processes that share the images (lantern-bench sweep ... --processes 5 --no-resume)"


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
    numerators: Iterable[float],
    denominators: Iterable[float],
    prompts: Iterable[str],
    *,
    seed: int = 0,
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
    return Interval(
        value,
        *_bootstrap((over, under), lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis), seed),
    )


def proportion(successes: int, trials: int) -> Interval:
    """Return successes over trials with the Wilson interval (Wilson 1927); without trials no figure."""
    from scipy.stats import binomtest

    if trials == 0:
        return Interval(None, note="no trials")
    low, high = binomtest(successes, trials).proportion_ci(_LEVEL, method="wilson")
    return Interval(successes / trials, float(low), float(high))


def sums_per_prompt(
    numerators: Iterable[float], denominators: Iterable[float], prompts: Iterable[str]
) -> Sums:
    """Return both sums of each prompt, prompts in sorted order: the seed alone decides the resamples.

    They are added by size, because the repeats of a prompt are recorded in an order that differs between runs.
    """
    parts = np.array([list(numerators), list(denominators)], dtype=np.float64)
    places = _places(prompts)
    orders = parts.argsort(axis=1)
    sums = [
        np.bincount(places[order], row[order]) for row, order in zip(parts, orders, strict=True)
    ]
    return Sums(*np.array(sums, dtype=np.float64))


def _places(groups: Any) -> NDArray[np.intp]:
    """Return the place of each one's group among the sorted groups; hashing takes less time than sorting all."""
    import pandas as pd

    listed = (
        groups if isinstance(groups, pd.Index | pd.Series) else np.array(list(groups), dtype=object)
    )
    return pd.factorize(np.asarray(listed), sort=True)[0]


def _bootstrap(
    sums: Sequence[Array], statistic: Callable[..., Array], seed: int
) -> tuple[float, float] | tuple[None, None]:
    """Return the ends of the 95 % interval of `statistic(*sums, axis=)` over prompts; None where not defined.

    `sums` are arrays [prompts], resampled together. BCa (Efron 1987), percentile where BCa is not defined.
    """
    from scipy.stats import bootstrap

    size = sums[0].size
    options: dict[str, Any] = {
        "paired": True,
        "vectorized": True,
        "axis": -1,
        "confidence_level": _LEVEL,
    }
    # Thousands of prompts get fewer resamples: their interval is smooth, and tables should take seconds. The batch
    # bounds the memory.
    options |= {
        "n_resamples": min(9_999, max(1_999, 10_000_000 // size)),
        "batch": max(1, 4_000_000 // size),
    }
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            # A method that fails warns and returns nan; the loop tries the next one.
            warnings.simplefilter("ignore")
            result = bootstrap(
                tuple(sums), statistic, method=method, rng=np.random.default_rng(seed), **options
            )
            low, high = result.confidence_interval
        if math.isfinite(low) and math.isfinite(high):
            return float(low), float(high)
    return None, None


def compare_sums(a: Sums, b: Sums, *others: Sums, seed: int = 0) -> Interval:
    """Return b - a over the same prompts, in the same order, with 95 % interval and p-value.

    `others` are further sets of what `a` is a set of: b is compared with their mean, and the p-value allows for the
    noise of each. Fewer than two prompts have no interval and no p-value. The interval of counts, as of right pictures,
    has two more prompts that differ either way: a few equal ones do not show that none differs (Bonett, Price 2012).
    """
    sets = [a, *others]
    a = Sums(*np.mean(sets, axis=0))

    def effect(*parts: Array, axis: int = -1) -> Array:
        over_a, under_a, over_b, under_b = (part.sum(axis=axis) for part in parts)
        return np.asarray(over_b / under_b - over_a / under_a)

    value = float(effect(*a, *b))
    if a.over.size < 2:
        return Interval(value)
    ends: tuple[float | None, float | None] = (value, value)
    if all(np.all((part.over % 1 == 0) & (part.over <= part.under)) for part in (b, *sets)):
        size = np.full(2, b.under.mean())
        over_a, over_b = (
            np.append(part.over, size * either) for part, either in ((a, [0, 1]), (b, [1, 0]))
        )
        ends = _bootstrap(
            (over_a, np.append(a.under, size), over_b, np.append(b.under, size)), effect, seed
        )
    elif not np.array_equal(a, b):
        ends = _bootstrap((*a, *b), effect, seed)
    return Interval(value, *ends, p_value=_exchange_test(np.array([b, *sets]), seed))


def _exchange_test(sets: Array, seed: int) -> float:
    """Return the share of exchanges with an effect as large as the observed one; two-sided.

    sets: [k, 2, prompts], numerators and denominators; the first is compared with the mean of the others. An exchange
    takes for each prompt any of the sets as the first: all are alike if there is no effect.
    """
    count, _, size = sets.shape
    if size * math.log2(count) <= _EXACT:
        firsts = np.arange(count**size)[:, None] // count ** np.arange(size) % count
    else:
        drawn = np.random.default_rng(seed).integers(0, count, (_FLIPS, size))
        firsts = np.vstack([np.zeros_like(drawn[:1]), drawn])
    # a set of images by exchange: [exchanges, 2]
    first = sum((firsts == number).astype(np.float64) @ sums.T for number, sums in enumerate(sets))
    rest = sets.sum(axis=(0, 2)) - first
    effects = np.abs(first[:, 0] / first[:, 1] - rest[:, 0] / rest[:, 1])  # the observed one first
    return float((effects >= effects[0] * (1 - 1e-9)).mean())  # rounding makes no effect smaller


class Timing(NamedTuple):
    """A figure made of seconds, and what its logarithm owes to prompts and to processes.

    `influence` [prompts]: what each prompt adds to the logarithm, around 0. `of_processes`: variance of the logarithm
    from process to process, None with fewer than three in effect; `freedom`: its degrees of freedom.
    """

    value: float
    influence: Array
    of_processes: float | None
    freedom: float


def timing(images: pd.DataFrame) -> Timing:
    """Return sum over sum of images, with the variances of its logarithm; at least one image.

    images: columns `over` and `under`, the decode steps behind each, `process`; indexed by `prompt_id`.
    Seconds = steps x seconds a step. The tokens decide the steps, so their spread is one of prompts; seconds a step
    belong to the process.
    """
    parts = np.array([images[name] for name in ("over", "under", "over_steps", "under_steps")])
    parts[2:] = np.maximum(parts[2:], 1.0)  # steps that were not recorded count as one
    over, under = parts[:2].sum(axis=1)
    processes = images["process"]
    prompts = images.index.get_level_values("prompt_id")
    weights = _group_sums(np.ones((1, parts.shape[1])), processes)[0] / parts.shape[1]
    # How many processes as large as each other know as much: a process with one image counts little.
    several = 1.0 / float((weights**2).sum())
    steps = _group_sums(parts[2:], prompts)
    influence = steps[0] / steps[0].mean() - steps[1] / steps[1].mean()
    if several < _SEVERAL:
        return Timing(
            value=float(over / under), influence=influence, of_processes=None, freedom=0.0
        )
    sums = np.log(_group_sums(parts, processes))
    pace = sums[0] - sums[2] - sums[1] + sums[3]
    spread = float((weights * (pace - weights @ pace) ** 2).sum()) / (1.0 - 1.0 / several)
    return Timing(
        value=float(over / under),
        influence=influence,
        of_processes=spread / several,
        freedom=several - 1.0,
    )


def _group_sums(parts: Array, groups: Any) -> Array:
    """Return the sums [k, groups] of parts [k, images], groups in sorted order."""
    places = _places(groups)
    return np.array([np.bincount(places, weights=row) for row in parts])


def repeat_interval(measured: Timing) -> Interval:
    """Return the figure with the interval in which 95 % of repeats on this machine in the same state have theirs.

    A repeat has as many processes and as many other prompts: its figure differs by sqrt(2) times the standard error of
    one. Half-widths of processes and prompts, each by Student's t, are added in quadrature. Fewer than three processes
    say too little of how processes differ: no interval, and the note says what gives one.
    """
    from scipy.stats import t

    if measured.influence.size < 2:
        return Interval(measured.value, note="no interval: fewer than 2 prompts")
    if measured.of_processes is None:
        return Interval(measured.value, note=NEEDS_PROCESSES)
    upper = (1.0 + _LEVEL) / 2.0
    half = (
        t.ppf(upper, measured.influence.size - 1) ** 2
        * measured.influence.var(ddof=1)
        / measured.influence.size
    )
    half += t.ppf(upper, measured.freedom) ** 2 * measured.of_processes
    factor = math.exp(math.sqrt(2.0 * half))
    return Interval(measured.value, measured.value / factor, measured.value * factor)


def compare_timings(a: Timing, b: Timing) -> Interval:
    """Return b / a over the same prompts with its 95 % confidence interval and p-value (Welch 1947).

    Without three processes in both runs there is neither: a difference may be that of two processes.
    """
    from scipy.stats import t

    value = b.value / a.value
    if a.of_processes is None or b.of_processes is None or a.influence.size < 2:
        return Interval(value)
    moved = b.influence - a.influence
    parts = np.array([a.of_processes, b.of_processes, moved.var(ddof=1) / moved.size])
    variance = float(parts.sum())
    if variance == 0.0:
        return Interval(value, value, value, p_value=float(value == 1.0))
    freedom = variance**2 / float((parts**2 / [a.freedom, b.freedom, moved.size - 1]).sum())
    error = math.sqrt(variance)
    factor = math.exp(t.ppf((1.0 + _LEVEL) / 2.0, freedom) * error)
    p_value = 2.0 * float(t.sf(abs(math.log(value)) / error, freedom))
    return Interval(value, value / factor, value * factor, p_value=p_value)


def detectable(centre: float, low: float, high: float) -> float:
    """Return the shift that leaves the interval of further sets with probability .8, by a normal approximation.

    The longer side counts: an end may be cut at the bound of the figure.
    """
    return _SEEN * max(centre - low, high - centre)


def settle(figure: Interval, low: float, high: float, images: int, names: tuple[str, str]) -> str:
    """Return the first name if the whole interval of a figure keeps limits, the second if none of it does.

    Else `not settled`, with the images that would settle it with probability .8 if the figure stays: the interval
    shrinks with the root of their number. This is the equivalence test by two one-sided tests at 2.5 %; with one
    infinite limit, the test of non-inferiority.
    """
    value, lowest, highest = figure[:3]
    if value is None or lowest is None or highest is None:
        return "not settled"
    if low <= lowest and highest <= high:
        return names[0]
    if highest < low or lowest > high:
        return names[1]
    reach_and_room = [(value - lowest, value - low), (highest - value, high - value)]
    if not low <= value <= high:  # until all of it is beyond
        reach_and_room = [
            (highest - value, low - value) if value < low else (value - lowest, value - high)
        ]
    times = max(_SEEN * reach / room if room else math.inf for reach, room in reach_and_room) ** 2
    if not math.isfinite(times):
        return "not settled"
    step = 10 ** max(0, int(math.log10(times * images)) - 1)  # two digits
    return f"not settled: {math.ceil(times * images / step) * step:,} images"


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction, in their order."""
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    scaled = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return [float(p) for p in corrected]


def fewest_prompts(comparisons: int, level: float = 0.05) -> int:
    """Return how many prompts it takes until the smallest of so many p-values can pass Holm's correction."""
    return math.ceil(1 + math.log2(max(1, comparisons) / level))
