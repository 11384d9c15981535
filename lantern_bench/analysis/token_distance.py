"""The distance of a cell from the target, a lower bound, from sums of token features of its images.

See docs/algorithms.md, section 6.2. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lantern_bench.analysis.cells import CellRecords
from lantern_bench.analysis.statistics import (
    Array,
    Interval,
    add_holm_p_values,
    ratio,
    sums_per_prompt,
    too_few_prompts,
)
from lantern_bench.analysis.tails import valid_p
from lantern_bench.storage.schema import Row

_RESAMPLES = 2_000
_ENDS = (0.025, 0.975)

# Figures that are shares of tokens, and the counts of these tokens.
_SHARES = {"impossible": "impossible_tokens", "argmax_mismatch": "mismatched_tokens"}

# Features that have columns of their own. Columns of sums are named as the features.
_SHOWN = ("surprise", "prompt_information")


def distance_columns(cells: Sequence[CellRecords], scores: Iterable[Row]) -> dict[str, Row]:
    """Return the figures of the tokens of each cell, by cell id.

    `distance_p` is corrected by Holm over all cells (of all models) that have one.

    Args:
        cells: The cells of a run.
        scores: The scores of the run, of which the rows of level `tokens` are used.
    """
    rows = {row["record_key"]: row for row in scores if row["level"] == "tokens"}
    figures = {cell.cell_id: _figures(cell, rows) for cell in cells}
    add_holm_p_values(figures.values(), "distance_p", into="distance_p")
    return figures


def _figures(cell: CellRecords, rows: Mapping[str, Row]) -> Row:
    """The figures of one cell, with an uncorrected `distance_p`; empty if no image has a row."""
    records = cell.images[cell.images["record_key"].isin(rows.keys())]
    images = [rows[key] for key in records["record_key"]]
    if not images:
        return {}
    prompts = records.index.get_level_values("prompt_id")
    tokens = [row["tokens"] for row in images]
    first = images[0]

    figures: Row = {}
    for name, counted in _SHARES.items():
        if first[counted] is not None:
            # Older scores have no edge tokens, and neither has greedy decoding.
            counts = [row[counted] - (row["edge_tokens"] or 0) for row in images]
            figures[name] = sum(counts) / sum(tokens)
    if not first["features"]:  # at temperature 0
        return figures

    for name in ("entropy", "largest_p", "ten_largest_p"):
        figures[name] = np.average([row[name] for row in images], weights=tokens)
    names = first["features"].split()
    columns = np.array([row["feature_sums"] for row in images]).T
    by_prompt = [sums_per_prompt(column, tokens, prompts) for column in columns]
    for name in _SHOWN:
        if name in names:
            figures |= ratio(by_prompt[names.index(name)]).columns(name)
    sums = FeatureSums.of(np.stack([part.numerator for part in by_prompt], axis=-1), len(names))
    shift = distance(_compared(sums, names), by_prompt[0].denominator)
    figures |= shift.columns("distance")
    figures["note"] = shift.note
    figures["distance_p"] = p_value(
        FeatureSums.of(columns.T, len(names)),
        ranges=[row["feature_ranges"] for row in images],
        tokens=tokens,
    )
    if figures.get("impossible"):
        figures["distance_p"] = 0.0
    return figures


def p_value(
    images: FeatureSums, *, ranges: Sequence[Sequence[float] | None], tokens: Sequence[int]
) -> float:
    """Return the p-value of the sums of images, whose tail is valid if all ranges are recorded.

    Args:
        images: Sums of m features for each image.
        ranges: For each image, how far a feature of a token could be above its mean, then how far
            below; None in older scores.
        tokens: Tokens of each image.
    """
    approximate = images.total.p_value
    recorded = [values for values in ranges if values is not None]
    if len(recorded) < len(ranges):
        return approximate
    above, below = np.split(np.array(recorded), 2, axis=1)
    return valid_p(
        approximate,
        sums=images.sums,
        variances=np.diagonal(images.covariance, axis1=-2, axis2=-1),
        above=above,
        below=below,
        counts=np.array(tokens, dtype=float),
    )


def distance_of_image(row: Row) -> float | None:
    """Return the distance of one image from its row of level `tokens`; None at temperature 0."""
    names = (row.get("features") or "").split()
    if not names:
        return None
    sums = FeatureSums.of(np.array([row["feature_sums"]]), len(names))
    return distance(_compared(sums, names), np.array([row["tokens"]])).value


def _compared(sums: FeatureSums, names: Sequence[str]) -> FeatureSums:
    """The sums of the features of the distance, which modes without a drafter have too."""
    return sums.chosen([number for number, name in enumerate(names) if name != "drafter_tilt"])


class FeatureSums(NamedTuple):
    """Sums S of features minus their means under the target, and the covariance C of these sums."""

    sums: Array  # [..., m]
    covariance: Array  # [..., m, m], under the target

    @classmethod
    def of(cls, columns: Array, features: int) -> FeatureSums:
        """Read columns [..., m + m (m + 1) / 2].

        The first m columns are the sums. The upper triangle of the covariance follows by rows.
        """
        triangle = columns[..., features:]
        rows, others = np.triu_indices(features)
        covariance = np.zeros((*columns.shape[:-1], features, features))
        covariance[..., rows, others] = triangle
        covariance[..., others, rows] = triangle
        return cls(columns[..., :features], covariance)

    def chosen(self, features: Sequence[int]) -> FeatureSums:
        """Return the sums of some of the features."""
        return FeatureSums(
            sums=self.sums[..., features],
            covariance=self.covariance[..., features, :][..., features],
        )

    @property
    def total(self) -> FeatureSums:
        """The sums over the first axis."""
        return FeatureSums(self.sums.sum(axis=0), self.covariance.sum(axis=0))

    @property
    def inverse(self) -> Array:
        """The pseudo-inverse [..., m, m] of the covariance; features that cannot vary count 0."""
        scale = np.sqrt(np.diagonal(self.covariance, axis1=-2, axis2=-1))
        # A feature that cannot vary has scale 0, so that its row of `outer` is 0.
        outer = scale[..., :, None] * np.where(scale > 0, scale, 1.0)[..., None, :]
        inverse_scale = np.divide(1.0, outer, out=np.zeros_like(outer), where=outer > 0)
        correlation = self.covariance * inverse_scale
        return np.linalg.pinv(correlation, rcond=1e-9, hermitian=True) * inverse_scale

    @property
    def chi_square(self) -> Array:
        """Q [...] = S' C^-1 S; chi-square with `freedom` degrees of freedom if lossless."""
        return np.einsum("...i,...ij,...j->...", self.sums, self.inverse, self.sums)

    @property
    def freedom(self) -> int:
        """The rank of the covariance [m, m], at most the number of features."""
        return round(float(np.trace(self.inverse @ self.covariance)))

    @property
    def p_value(self) -> float:
        """The probability that a lossless mode has a larger Q."""
        from scipy.stats import chi2

        if not self.freedom:
            return 1.0
        return float(chi2.sf(self.chi_square, self.freedom))


def distance(sums: FeatureSums, tokens: Array) -> Interval:
    """Return the distance per token, with a percentile interval by bootstrap over prompts.

    Q of the summed features contains the noise of each prompt's sums. With d_i the centred sums of
    prompt i, its mean is n / (n - 1) sum_i d_i' C^-1 d_i. Q minus this amount is a U-statistic,
    n / (n - 1) (Q - sum_i s_i' C^-1 s_i), which also has no bias if prompts differ. One prompt has
    no spread; there the noise of a lossless mode, m, is subtracted.

    Args:
        sums: Sums of m features for each prompt.
        tokens: Tokens of each prompt [prompts].
    """
    total = sums.total
    freedom = total.freedom
    if not freedom:
        return Interval(None, note="no distance: the target's tokens cannot vary")
    chi_square = float(total.chi_square)
    prompts = len(tokens)
    if prompts == 1:
        return Interval((chi_square - freedom) / float(tokens.sum()), note=too_few_prompts(prompts))

    centred = sums.sums - sums.sums.mean(axis=0)
    spread = np.einsum("ni,ij,nj->", centred, total.inverse, centred)
    noise = float(spread) * prompts / (prompts - 1)
    value = (chi_square - noise) / float(tokens.sum())
    too_few = too_few_prompts(prompts)
    if too_few:
        return Interval(value, note=too_few)

    # Centred sums of n prompts vary too little by the factor (n - 1) / n.
    uniform = np.full(prompts, 1.0 / prompts)
    counts = np.random.default_rng(0).multinomial(prompts, uniform, size=_RESAMPLES).astype(float)
    varied = (counts - 1.0) @ centred * (prompts / (prompts - 1)) ** 0.5
    resampled = FeatureSums(
        sums=total.sums + varied,
        covariance=np.tensordot(counts, sums.covariance, axes=1),
    )
    # A resample has the noise twice: of the images, and of the choice of prompts.
    excess = resampled.chi_square - 2.0 * noise
    low, high = np.quantile(excess / (counts @ tokens), _ENDS)
    return Interval(value, float(low), float(high))
