"""Tails of sums of martingale differences, valid at every level (docs/algorithms.md, section 6.4).

A normal or chi-square tail is an approximation. It is far too small where the target is almost
certain of its tokens: few tokens then carry all the variance.
"""

from __future__ import annotations

import numpy as np

from lantern_bench.analysis.statistics import Array

# Tilts of the sums, which must not depend on the data. A factor of 2 between two of them costs at
# most 11% of the exponent; the ends are for a million tokens and for one.
_TILTS = 2.0 ** np.arange(-12, 3)

# Above this p-value the approximation counts, which is accurate there and has more power.
_FAR = 0.01


def valid_p(
    approximate: float, *, sums: Array, variances: Array, above: Array, below: Array, counts: Array
) -> float:
    """Return a p-value: the approximate one, or in the tail one that is at least the valid bound.

    With d the differences, the capital exp(theta sum(d) - sum(log E exp(theta d))) does not grow
    under the null hypothesis, so 1 / capital is a p-value. The capital of a block is averaged over
    tilts and both signs. Blocks share no differences, so the product of their capitals does not
    grow either; it is averaged over features. E exp(theta d) has the bound of Bennett (1962), which
    depends on the variance and the largest value of d; it is exact for two values. It is concave in
    the variance (Hoeffding 1963, theorem 3), so a group of differences counts as its mean variance.

    Args:
        approximate: The two-sided p-value, or the p-value of chi-square.
        sums: Sums of differences of each group and feature, [groups, features] or
            [groups, blocks, features].
        variances: Sums of the variances of the differences, likewise.
        above: How far a difference of the group could be above 0, likewise.
        below: How far it could be below 0.
        counts: Differences of each group [groups]; of blocks, an upper limit.
    """
    if approximate > _FAR:
        return approximate
    counts = np.expand_dims(counts, tuple(range(1, sums.ndim)))
    bets = []
    for sign, reach in ((1.0, above), (-1.0, below)):
        for tilt in _TILTS:
            growth = _log_moment(tilt, variances / counts, reach=reach)
            bets.append((tilt * sign * sums - counts * growth).sum(axis=0))
    of_blocks = _log_mean(np.array(bets))
    log_capital = float(_log_mean(of_blocks.reshape(-1, sums.shape[-1]).sum(axis=0)))
    return max(approximate, float(np.exp(-max(log_capital, -np.log(_FAR)))))


def _log_mean(logarithms: Array) -> Array:
    """The logarithm of the mean over the first axis."""
    return np.logaddexp.reduce(logarithms, axis=0) - np.log(len(logarithms))


def _log_moment(tilt: float, variance: Array, reach: Array) -> Array:
    """The largest log E exp(tilt d) of differences d <= reach with mean 0 and this variance."""
    varies = (variance > 0) & (reach > 0)
    v = np.where(varies, variance, 1.0)
    b = np.where(varies, reach, 1.0)
    low = 2.0 * np.log(b) - tilt * v / b
    high = np.log(v) + tilt * b
    return np.where(varies, np.logaddexp(low, high) - np.log(b * b + v), 0.0)
