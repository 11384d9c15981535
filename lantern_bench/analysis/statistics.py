"""Intervals and tests: bootstrap over prompts, t over processes, Wilson, exchanges, Holm.

Prompts are resampled with all their images. Seconds also depend on the process
(docs/results-format.md, "Intervals"). `metrics/fidelity.py` has the intervals of FID, KID,
precision and recall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_LEVEL = 0.95

_ENDS = ((1.0 - _LEVEL) / 2.0, (1.0 + _LEVEL) / 2.0)  # of an interval

_SEED = 0  # of resamples and exchanges

# The exact exchange test is used where it has at most 2 ** 13 exchanges, the random one above that.
_EXACT_BITS = 13
_RANDOM_EXCHANGES = 9_999

# A bootstrap over fewer prompts misses the true figure far more often than in 1 of 20 cases.
_FEWEST_PROMPTS = 4

# Fewest effective processes for an interval. Three processes with 2, 2 and 1 images count as 2.8.
_FEWEST_PROCESSES = 2.5

# Minimum shift detectable with 80% power, in half-widths of the 95% interval.
_DETECTABLE = 1.0 + 0.8416 / 1.9600

# True figures that are tried in an interval, to find the fewest images that may settle it.
_TRUE_FIGURES = 81

NEEDS_PROCESSES = (
    "no interval of speed: needs 3 processes that share the images "
    "(lantern-bench sweep ... --processes 5 --no-resume)"
)


class Interval(NamedTuple):
    """A figure with its 95% interval.

    An undefined figure is None and never nan; `note` gives the reason.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str | None = None
    p_value: float | None = None

    @classmethod
    def read(cls, row: Mapping[str, Any], name: str) -> Interval:
        """Read the columns of a figure in a row, as `columns` returns them."""
        return cls(row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"))

    def columns(self, name: str) -> dict[str, float | None]:
        """Return the columns of a figure: `name`, `name_low` and `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def too_few_prompts(prompts: int) -> str | None:
    """Return the note of a figure without an interval; None if there are enough prompts."""
    if prompts >= _FEWEST_PROMPTS:
        return None
    return f"no interval: {prompts} of the {_FEWEST_PROMPTS} prompts that it needs"


class Sums(NamedTuple):
    """Numerator and denominator of a figure, summed over each prompt: arrays [prompts]."""

    numerator: Array
    denominator: Array

    @property
    def value(self) -> float:
        """The figure, sum over sum."""
        return float(self.numerator.sum() / self.denominator.sum())


def ratio_of_sums(
    numerators: Iterable[float], denominators: Iterable[float], prompts: Iterable[str]
) -> Interval:
    """Return sum over sum of images, with a bootstrap interval over prompts.

    Intervals are BCa (Efron 1987), or percentile where BCa is not defined. Data with the same
    ratio for every prompt have an interval of width 0; fewer than four prompts have no interval.

    Args:
        numerators: One number per image.
        denominators: One number per image.
        prompts: The prompt of each image.
    """
    return ratio(sums_per_prompt(numerators, denominators, prompts))


def ratio(sums: Sums) -> Interval:
    """Return `ratio_of_sums` of sums per prompt."""
    if sums.numerator.size == 0 or sums.denominator.sum() == 0.0:
        return Interval(None, note="no data")
    value = sums.value
    too_few = too_few_prompts(sums.numerator.size)
    if too_few:
        return Interval(value, note=too_few)
    # If every prompt has the ratio of the whole, up to rounding, so has each resample.
    if np.allclose(sums.numerator, value * sums.denominator, rtol=1e-12, atol=0.0):
        return Interval(value, value, value)

    def statistic(numerator: Array, denominator: Array, axis: int) -> Any:
        return numerator.sum(axis=axis) / denominator.sum(axis=axis)

    low, high = _bootstrap(sums, statistic)
    return Interval(value, low, high)


def ratio_of_images(images: pd.DataFrame) -> Interval:
    """Return `ratio_of_sums` of two columns, over the images that have both.

    Args:
        images: Numerator and denominator, indexed by `prompt_id`.
    """
    return ratio(sums_of_images(images))


def proportion(successes: int, trials: int) -> Interval:
    """Return successes / trials with the Wilson interval (1927); no figure without trials."""
    from scipy.special import ndtri

    if trials == 0:
        return Interval(None, note="no trials")
    share = successes / trials
    z = float(ndtri((1.0 + _LEVEL) / 2.0))
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    spread = share * (1 - share) / trials + z**2 / (4 * trials**2)
    reach = z * math.sqrt(spread) / (1 + z**2 / trials)
    # Exactly 0 and 1 at the ends, which rounding would miss on some machines.
    low = middle - reach if successes else 0.0
    high = middle + reach if successes < trials else 1.0
    return Interval(share, low, high)


def sums_per_prompt(
    numerators: Iterable[float], denominators: Iterable[float], prompts: Iterable[str]
) -> Sums:
    """Return both sums of each prompt.

    Args:
        numerators: One number per image.
        denominators: One number per image.
        prompts: The prompt of each image.
    """
    columns = np.array([list(numerators), list(denominators)], dtype=float)
    return Sums(*grouped_sums(columns.T, prompts).T)


def grouped_sums(columns: Array, groups: Iterable[Any]) -> Array:
    """Return the sums of columns [images, columns] over each group: an array [groups, columns].

    The result does not depend on the order of the images, so that the seed alone decides the
    resamples: groups are in sorted order, and the images of a group are added by size.

    Args:
        columns: Numbers of each image.
        groups: The group of each image, for example its prompt.
    """
    numbers, _ = pd.factorize(np.array(list(groups), dtype=object), sort=True)
    of_rows = np.broadcast_to(numbers[:, None], columns.shape)
    ordered = np.take_along_axis(columns, np.lexsort((columns, of_rows), axis=0), axis=0)
    starts = np.flatnonzero(np.diff(np.sort(numbers), prepend=-1))
    return np.asarray(np.add.reduceat(ordered, starts, axis=0))


def _bootstrap(
    sums: Sequence[Array] | Array, statistic: Callable[..., Any]
) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% interval of `statistic(*sums, axis=)` over prompts; None where not defined.

    `sums` are arrays [prompts], which are resampled together. The interval is BCa (Efron 1987), or
    percentile where BCa is not defined.
    """
    size = sums[0].size
    # Thousands of prompts have a smooth interval, so that fewer resamples suffice.
    resamples = min(9_999, max(1_999, 10_000_000 // size))
    rows_at_once = max(1, 4_000_000 // size)  # bounds the memory
    rng = np.random.default_rng(_SEED)

    def figures(rows: NDArray[np.int64]) -> Any:
        return statistic(*[part[rows] for part in sums], axis=-1)

    drawn = []
    left_out = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for done in range(0, resamples, rows_at_once):
            count = min(rows_at_once, resamples - done)
            drawn.append(figures(rng.integers(0, size, (count, size))))
        for done in range(0, size, rows_at_once):
            prompts = np.arange(done, min(done + rows_at_once, size))[:, None]
            others = np.arange(size - 1)
            left_out.append(figures(others + (others >= prompts)))
        resampled = np.concatenate(drawn)
        value = statistic(*sums, axis=-1)
        corrected = _bca_levels(value, resampled, np.concatenate(left_out))
    for levels in (corrected, _ENDS):
        if np.isfinite(levels).all():
            low, high = np.quantile(resampled, levels)
            if math.isfinite(low) and math.isfinite(high):
                return float(low), float(high)
    return None, None


def _bca_levels(value: float, resampled: Array, left_out: Array) -> Array:
    """Return the levels of the BCa interval (Efron 1987); nan where it is not defined.

    Args:
        value: The figure.
        resampled: The figure of each resample.
        left_out: The figure without each of the prompts.
    """
    from scipy.special import ndtr, ndtri

    below = 0.5 * ((resampled < value).mean() + (resampled <= value).mean())
    bias = ndtri(below)
    change = left_out.mean() - left_out
    acceleration = (change**3).sum() / (6.0 * (change**2).sum() ** 1.5)
    ends = bias + ndtri(np.array(_ENDS))
    levels: Array = ndtr(bias + ends / (1.0 - acceleration * ends))
    return levels


def sums_of_images(images: pd.DataFrame) -> Sums:
    """Return the sums of each prompt of two columns, over the images that have both.

    Args:
        images: Numerator and denominator, indexed by `prompt_id`.
    """
    figures = images.to_numpy()
    in_both = ~np.isnan(figures).any(axis=1)
    prompts = images.index.get_level_values("prompt_id")
    return Sums(*grouped_sums(figures[in_both], prompts[in_both]).T)


def compare_sums(a: Sums, b: Sums, others: Sequence[Sums] = ()) -> Interval:
    """Return b - a over the same prompts, with 95% interval and p-value.

    Fewer than four prompts have no interval, and one has no p-value. For counts, such as right
    pictures, the interval adds two pseudo-prompts, one in each direction (Bonett and Price 2012).
    Without them, a few equal prompts would give an interval of width 0.

    Args:
        a: Sums per prompt.
        b: Sums of the same prompts in the same order.
        others: Further sets drawn like `a`. b is compared with the mean of `a` and these sets, and
            the p-value allows for the noise of each.
    """
    of_b = np.array(b)
    sets = np.array([a, *others])
    mean = sets.mean(axis=0)

    def effect(*parts: Array, axis: int = -1) -> Any:
        over_a, under_a, over_b, under_b = (part.sum(axis=axis) for part in parts)
        return over_b / under_b - over_a / under_a

    parts = np.vstack([mean, of_b])
    value = float(effect(*parts))
    if b.numerator.size < 2:
        return Interval(value)

    all_sets = np.array([of_b, *sets])
    p_value = _exchange_test(all_sets)
    if too_few_prompts(b.numerator.size):
        return Interval(value, p_value=p_value)
    numerators = all_sets[:, 0]
    # Whether the numerators count a part of the denominators.
    if np.all((numerators % 1 == 0) & (numerators <= all_sets[:, 1])):
        pseudo_prompts = np.array([[0, 1], [1, 1], [1, 0], [1, 1]]) * b.denominator.mean()
        parts = np.append(parts, pseudo_prompts, axis=1)
    elif np.array_equal(mean, of_b):
        return Interval(value, value, value, p_value=p_value)
    low, high = _bootstrap(parts, effect)
    return Interval(value, low, high, p_value=p_value)


def _exchange_test(sets: Array) -> float:
    """Return the fraction of exchanges with an effect as large as the observed one; two-sided.

    `sets` [k, 2, prompts] holds numerators and denominators. The first set is compared with the
    mean of the others. An exchange draws, for each prompt, any of the sets as the first one.
    Without an effect all exchanges are equally likely.
    """
    count, _, size = sets.shape
    if size * math.log2(count) <= _EXACT_BITS:
        numbers = np.arange(count**size)[:, None]
        firsts = numbers // count ** np.arange(size) % count
    else:
        drawn = np.random.default_rng(_SEED).integers(0, count, (_RANDOM_EXCHANGES, size))
        firsts = np.vstack([np.zeros_like(drawn[:1]), drawn])

    # Sums of the first set and of the others under each exchange, [exchanges, 2].
    first = np.zeros((len(firsts), 2))
    for number, sums in enumerate(sets):
        first += (firsts == number).astype(np.float64) @ sums.T
    rest = sets.sum(axis=(0, 2)) - first

    effects = np.abs(first[:, 0] / first[:, 1] - rest[:, 0] / rest[:, 1])
    observed = effects[0] * (1 - 1e-9)  # so that rounding makes no effect smaller
    return float((effects >= observed).mean())


class Timing(NamedTuple):
    """A figure made of seconds, and how its logarithm varies over prompts and processes."""

    value: float
    influence: Array  # [prompts], what each prompt adds to the logarithm, around 0
    of_processes: float | None  # variance over processes; None with fewer than three in effect
    freedom: float  # degrees of freedom of `of_processes`


def timing(images: pd.DataFrame) -> Timing:
    """Return sum over sum of images, with the variances of its logarithm; at least one image.

    Seconds are steps times seconds per step. Tokens decide the number of steps, so steps vary over
    prompts. Seconds per step vary over processes.

    Args:
        images: Columns `numerator` and `denominator`, the decode steps behind each
            (`numerator_steps`, `denominator_steps`) and `process`; indexed by `prompt_id`.
    """
    seconds = images[["numerator", "denominator"]].to_numpy()
    # Steps that were not recorded count as one.
    steps = images[["numerator_steps", "denominator_steps"]].to_numpy().clip(min=1.0)
    value = float(np.divide(*seconds.sum(axis=0)))
    of_prompts = grouped_sums(steps, images.index.get_level_values("prompt_id"))
    over, under = (of_prompts / of_prompts.mean(axis=0)).T
    influence = over - under

    columns = np.column_stack([seconds, steps, np.ones(len(images))])
    by_process = grouped_sums(columns, images["process"])
    weights = by_process[:, -1] / len(images)
    # Number of equally large processes with the same information: one image counts little.
    effective = 1.0 / float((weights**2).sum())
    if effective < _FEWEST_PROCESSES:
        return Timing(value=value, influence=influence, of_processes=None, freedom=0.0)

    over, under, over_steps, under_steps, _ = np.log(by_process).T
    pace = (over - over_steps) - (under - under_steps)
    variance = float((weights * (pace - weights @ pace) ** 2).sum()) / (1.0 - 1.0 / effective)
    return Timing(
        value=value,
        influence=influence,
        of_processes=variance / effective,
        freedom=effective - 1.0,
    )


def repeat_interval(measured: Timing) -> Interval:
    """Return the figure with its 95% prediction interval for a repeat on this machine.

    A repeat has as many processes and as many other prompts, so its figure differs by sqrt(2) times
    the standard error of one figure. Half-widths of processes and prompts, each by Student's t, are
    added in quadrature. Fewer than three processes show too little of how processes differ. Then
    there is no interval, and the note says how to get one.
    """
    from scipy.special import stdtrit

    value = measured.value
    prompts = measured.influence.size
    too_few = too_few_prompts(prompts)
    if too_few:
        return Interval(value, note=too_few)
    if measured.of_processes is None:
        return Interval(value, note=NEEDS_PROCESSES)
    upper = (1.0 + _LEVEL) / 2.0
    of_prompts = measured.influence.var(ddof=1) / prompts
    variance = stdtrit(prompts - 1, upper) ** 2 * of_prompts
    variance += stdtrit(measured.freedom, upper) ** 2 * measured.of_processes
    factor = math.exp(math.sqrt(2.0 * variance))
    return Interval(value, value / factor, value * factor)


def compare_timings(a: Timing, b: Timing) -> Interval:
    """Return b / a over the same prompts with its 95% interval and p-value (Welch 1947).

    Without four prompts and three processes in each run there is neither. Two processes can differ
    by as much as two runs.
    """
    from scipy.special import stdtr, stdtrit

    value = b.value / a.value
    if a.of_processes is None or b.of_processes is None or too_few_prompts(a.influence.size):
        return Interval(value)

    change = b.influence - a.influence
    of_prompts = change.var(ddof=1) / change.size
    variances = np.array([a.of_processes, b.of_processes, of_prompts])
    variance = float(variances.sum())
    if variance == 0.0:
        return Interval(value, value, value, p_value=float(value == 1.0))

    freedoms = np.array([a.freedom, b.freedom, change.size - 1])
    freedom = variance**2 / float((variances**2 / freedoms).sum())
    error = math.sqrt(variance)
    factor = math.exp(error * stdtrit(freedom, (1.0 + _LEVEL) / 2.0))
    p_value = 2.0 * float(stdtr(freedom, -abs(math.log(value)) / error))
    return Interval(value, value / factor, value * factor, p_value=p_value)


def detectable(centre: float, low: float, high: float) -> float:
    """Return the minimum shift detectable with 80% power, by a normal approximation.

    A shift is detected if the figure leaves the prediction interval of a further set. The longer
    side of the interval counts, because the other end may be cut at the bound of the figure.

    Args:
        centre: Middle of the prediction interval.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """
    return _DETECTABLE * max(centre - low, high - centre)


def settle(
    figure: Interval, *, low: float, high: float, images: int, names: tuple[str, str]
) -> str:
    """Return whether the whole interval of a figure keeps or breaks the limits.

    This is the equivalence test by two one-sided tests at 2.5%, or with one infinite limit the test
    of non-inferiority.

    Args:
        figure: The figure with its 95% interval.
        low: Lower limit.
        high: Upper limit.
        images: Images behind the figure.
        names: The words for an interval inside the limits and for one outside.

    Returns:
        One of the names, or `not settled: more than n images`. With n images, the verdict would
        have 80% power if the true figure were the value in the interval that is easiest to tell
        from the limits. There is no upper bound, because the true figure may be at a limit.
    """
    value, lowest, highest = figure[:3]
    if value is None or lowest is None or highest is None:
        return "not settled"
    if low <= lowest and highest <= high:
        return names[0]
    if highest < low or lowest > high:
        return names[1]

    below = value - lowest
    above = highest - value
    truths = np.linspace(lowest, highest, num=_TRUE_FIGURES)
    times = min(_shrinkage(truth, below, above, limits=(low, high)) for truth in truths)
    return f"not settled: more than {max(images, math.floor(times**2 * images)):,} images"


def _shrinkage(truth: float, below: float, above: float, *, limits: tuple[float, float]) -> float:
    """How many times the interval around the true figure must shrink, until limits do not cut it.

    `below` and `above` are the lengths of the two sides of the interval.
    """
    low, high = limits
    rooms = [(below, truth - low), (above, high - truth)]
    if truth < low:
        rooms = [(above, low - truth)]
    elif truth > high:
        rooms = [(below, truth - high)]
    return max(_DETECTABLE * side / room if room else math.inf for side, room in rooms)


def add_holm_p_values(
    rows: Iterable[dict[str, Any]], name: str, *, into: str
) -> list[dict[str, Any]]:
    """Add p-values corrected by Holm's procedure, and return the rows that have a p-value.

    Args:
        rows: The rows, which are modified.
        name: The column of the p-values.
        into: The column of the corrected p-values; may be `name`.
    """
    tested = [row for row in rows if row.get(name) is not None]
    ordered = sorted(tested, key=lambda row: row[name])
    corrected = 0.0
    for number, row in enumerate(ordered):
        corrected = max(corrected, min(1.0, row[name] * (len(ordered) - number)))
        row[into] = corrected
    return tested


def fewest_prompts(comparisons: int) -> int:
    """Return the fewest prompts with which the smallest p-value can pass Holm's correction."""
    return math.ceil(1 + math.log2(comparisons / (1.0 - _LEVEL)))
