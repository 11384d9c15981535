"""The distance of a cell from the target, a lower bound, from sums of token features of its images.

See docs/algorithms.md, section 6.2. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lantern_bench.analysis.cells import CellRecords, join_notes
from lantern_bench.analysis.statistics import (
    Array,
    Interval,
    add_holm_p_values,
    grouped_sums,
    ratio_of_sums,
    too_few_prompts,
)
from lantern_bench.analysis.tails import valid_p
from lantern_bench.storage.schema import Row

_RESAMPLES = 2_000
_ENDS = (0.025, 0.975)

# Figures that are shares of tokens, and the counts of these tokens.
_SHARES = {"impossible": "impossible_tokens", "argmax_mismatch": "mismatched_tokens"}

BLOCKS = 8
"""Blocks of positions: parity of the row, parity of the column, half of the image."""

ALIKE = "alike"
"""The feature that counts earlier images with the same token. Older scores do not have it."""

_MIXED = "1 and 2"
_OLDER = (
    "distance by version 1, not comparable with the others; `lantern-bench score` measures it by "
    "version 2"
)

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
    is_mixed = distance_version(rows.values()) == _MIXED
    figures = {cell.cell_id: _figures(cell, rows, is_mixed=is_mixed) for cell in cells}
    add_holm_p_values(figures.values(), "distance_p", into="distance_p")
    return figures


def is_current(row: Row) -> bool:
    """Return whether a row of level `tokens` has the features of this version, or needs none."""
    return not row["features"] or ALIKE in row["features"].split()


def distance_version(scores: Iterable[Row]) -> str | None:
    """Return the version of the distances of a run, `1` before there were blocks; None without.

    A run that was scored in part by each has `1 and 2`.
    """
    sampled = [row for row in scores if row["level"] == "tokens" and row["features"]]
    if not sampled:
        return None
    current = sum(map(is_current, sampled))
    if 0 < current < len(sampled):
        return _MIXED
    return "2" if current else "1"


def _figures(cell: CellRecords, rows: Mapping[str, Row], *, is_mixed: bool) -> Row:
    """The figures of one cell, with an uncorrected `distance_p`; empty if no image has a row."""
    scored = [key for key in cell.images["record_key"] if key in rows]
    if not scored:
        return {}
    # Sums of two versions are never added.
    current = [key for key in scored if is_current(rows[key])]
    chosen = current or scored
    notes = [_OLDER] if is_mixed and not current else []
    if len(chosen) < len(scored):
        older = len(scored) - len(chosen)
        notes.append(f"distance without {older} images, which were scored by version 1")
    records = cell.images[cell.images["record_key"].isin(chosen)]
    images = [rows[key] for key in records["record_key"]]
    prompts = records.index.get_level_values("prompt_id")
    tokens = [row["tokens"] for row in images]
    first = images[0]

    figures = token_shares(images) | {"images": len(images)}
    if not first["features"]:  # at temperature 0
        return figures

    for name in ("entropy", "largest_p", "ten_largest_p"):
        figures[name] = np.average([row[name] for row in images], weights=tokens)
    names = first["features"].split()
    columns = np.array([row["feature_sums"] for row in images])
    of_images = FeatureSums.of(columns, len(names))
    for name in _SHOWN:
        if name in names:
            sums = of_images.sums[..., names.index(name)].sum(axis=1)
            figures |= ratio_of_sums(sums, tokens, prompts).columns(name)
    of_prompts = grouped_sums(np.column_stack([columns, tokens]), prompts)
    shift = distance(
        _compared(FeatureSums.of(of_prompts[:, :-1], len(names)), names),
        tokens=of_prompts[:, -1],
    )
    figures |= shift.columns("distance")
    figures["note"] = join_notes([shift.note, *notes])
    figures["distance_p"] = p_value(
        of_images,
        ranges=[row["feature_ranges"] for row in images],
        tokens=tokens,
    )
    if figures.get("impossible"):
        figures["distance_p"] = 0.0
    return figures


def token_shares(images: Sequence[Row]) -> Row:
    """Return the shares of tokens that the target cannot give, and that are not its largest.

    Args:
        images: Rows of level `tokens` of one cell.
    """
    tokens = sum(row["tokens"] for row in images)
    shares: Row = {}
    for name, counted in _SHARES.items():
        if images[0].get(counted) is not None:
            # Older scores have no edge tokens, and neither has greedy decoding.
            counts = [row[counted] - (row.get("edge_tokens") or 0) for row in images]
            shares[name] = sum(counts) / tokens
    return shares


def p_value(
    images: FeatureSums, *, ranges: Sequence[Sequence[float] | None], tokens: Sequence[int]
) -> float:
    """Return the p-value of the sums of images, whose tail is valid if all ranges are recorded.

    It is twice the smaller p-value of two: of the sums of whole images, and of the sums of blocks.

    Args:
        images: Sums of m features for each image and block.
        ranges: For each image, how far a feature of a token could be above its mean, then how far
            below; None in older scores.
        tokens: Tokens of each image.
    """
    p_of_whole = _tail(images.whole, ranges=ranges, tokens=tokens)
    if images.sums.shape[1] == 1:
        return p_of_whole
    return min(1.0, 2.0 * min(p_of_whole, _tail(images, ranges=ranges, tokens=tokens)))


def _tail(
    images: FeatureSums, *, ranges: Sequence[Sequence[float] | None], tokens: Sequence[int]
) -> float:
    """The p-value of the sums of images in blocks."""
    approximate = images.total.p_value
    recorded = [values for values in ranges if values is not None]
    if len(recorded) < len(ranges):
        return approximate
    above, below = np.split(np.array(recorded)[:, None], 2, axis=2)
    return valid_p(
        approximate,
        sums=images.sums,
        variances=np.diagonal(images.covariance, axis1=-2, axis2=-1),
        above=above,
        below=below,
        # A block has fewer tokens. More tokens of the same variance only weaken the bound.
        counts=np.array(tokens, dtype=float),
    )


def distance_of_image(row: Row) -> float | None:
    """Return the distance of one image from its row of level `tokens`; None at temperature 0.

    The image is one block: eight would make the figure of so few tokens three times as noisy.
    """
    names = (row.get("features") or "").split()
    if not names:
        return None
    sums = FeatureSums.of(np.array([row["feature_sums"]]), len(names)).whole
    return distance(_compared(sums, names), np.array([row["tokens"]])).value


def _compared(sums: FeatureSums, names: Sequence[str]) -> FeatureSums:
    """The sums of the features of the distance, which modes without a drafter have too."""
    return sums.chosen([number for number, name in enumerate(names) if name != "drafter_tilt"])


@dataclass(frozen=True, eq=False)
class FeatureSums:
    """Sums S of features minus their means under the target, and the covariance C of these sums.

    The leading axes are images or prompts, then blocks.
    """

    sums: Array  # [..., m]
    covariance: Array  # [..., m, m], under the target

    @classmethod
    def of(cls, columns: Array, features: int) -> FeatureSums:
        """Read columns [..., blocks (m + m (m + 1) / 2)].

        The first m columns of a block are the sums. The upper triangle of the covariance follows
        by rows. Older scores have one block, the whole image.
        """
        width = features * (features + 3) // 2
        columns = columns.reshape(*columns.shape[:-1], -1, width)
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
    def whole(self) -> FeatureSums:
        """The sums over blocks, as one block."""
        return FeatureSums(
            sums=self.sums.sum(axis=-2, keepdims=True),
            covariance=self.covariance.sum(axis=-3, keepdims=True),
        )

    @cached_property
    def total(self) -> FeatureSums:
        """The sums over the first axis."""
        return FeatureSums(self.sums.sum(axis=0), self.covariance.sum(axis=0))

    @cached_property
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
        """Q [...] = S' C^-1 S, summed over blocks; chi-square with `freedom` if lossless."""
        return np.einsum("...ki,...kij,...kj->...", self.sums, self.inverse, self.sums)

    @property
    def freedom(self) -> int:
        """The rank of the covariance [blocks, m, m], at most the features of all blocks."""
        return round(float(np.einsum("kij,kji->", self.inverse, self.covariance)))

    @property
    def p_value(self) -> float:
        """The probability that a lossless mode has a larger Q."""
        from scipy.special import chdtrc

        if not self.freedom:
            return 1.0
        return float(chdtrc(self.freedom, self.chi_square))


def distance(sums: FeatureSums, tokens: Array) -> Interval:
    """Return the distance per token, with its 95% interval over prompts.

    Q of the summed features contains the noise of each prompt's sums. With d_i the centred sums of
    prompt i, its mean is n / (n - 1) sum_i d_i' C^-1 d_i. Q minus this amount is a U-statistic,
    n / (n - 1) (Q - sum_i s_i' C^-1 s_i), which also has no bias if prompts differ. One prompt has
    no spread; there the noise of a lossless mode, m, is subtracted.

    Sums of one block are of version 1. Their interval stays the percentile bootstrap that the
    figures of version 1 were published with.

    Args:
        sums: Sums of m features for each prompt and block.
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
    spread = np.einsum("nki,kij,nkj->", centred, total.inverse, centred, optimize=True)
    noise = float(spread) * prompts / (prompts - 1)
    value = (chi_square - noise) / float(tokens.sum())
    too_few = too_few_prompts(prompts)
    if too_few:
        return Interval(value, note=too_few)
    if sums.sums.shape[1] > 1:
        return _with_interval(value, sums, tokens)

    # Centred sums of n prompts vary too little by the factor (n - 1) / n.
    uniform = np.full(prompts, 1.0 / prompts)
    counts = np.random.default_rng(0).multinomial(prompts, uniform, size=_RESAMPLES).astype(float)
    varied = np.tensordot(counts - 1.0, centred, axes=1) * (prompts / (prompts - 1)) ** 0.5
    resampled = FeatureSums(
        sums=total.sums + varied,
        covariance=np.tensordot(counts, sums.covariance, axes=1),
    )
    # A resample has the noise twice: of the images, and of the choice of prompts.
    excess = resampled.chi_square - 2.0 * noise
    low, high = np.quantile(excess / (counts @ tokens), _ENDS)
    return Interval(value, float(low), float(high))


def _with_interval(value: float, sums: FeatureSums, tokens: Array) -> Interval:
    """Return a distance with the interval of section 6.2 of docs/algorithms.md.

    The variance of a U-statistic has two parts. The part of single prompts grows with the true
    distance. The part of pairs of prompts is the noise of a lossless mode. The interval has the
    true distances d with (d - value)^2 <= single d + pairs.
    """
    from scipy.special import ndtri, stdtrit

    total = sums.total
    prompts = len(tokens)
    per_token = prompts / (prompts - 1) / float(tokens.sum())
    lossless = total.freedom / prompts**2  # trace of the squared covariance of a prompt, if so

    # 1. Pairs: an unbiased estimate of this trace.
    centred = sums.sums - sums.sums.mean(axis=0)
    whitened = np.einsum("nki,kij->nkj", centred, total.inverse)
    covariance = whitened.reshape(prompts, -1).T @ centred.reshape(prompts, -1) / (prompts - 1)
    squared = float((covariance * covariance.T).sum()) - np.trace(covariance) ** 2 / (prompts - 1)
    trace = max(lossless, squared * (prompts - 1) ** 2 / ((prompts - 2) * (prompts + 1)))
    quantile = float(ndtri(_ENDS[1]))
    pairs = quantile**2 * 2.0 * prompts * (prompts - 1) * trace * per_token**2

    # 2. Single prompts: the influence of each, less the noise in it.
    direction = np.einsum("kij,kj->ki", total.inverse, total.sums)
    own = np.einsum("nki,kij,nkj->n", sums.sums, total.inverse, sums.sums, optimize=True)
    of_sums = 2.0 * (np.einsum("nki,ki->n", sums.sums, direction) - own)
    of_covariance = np.einsum("ki,nkij,kj->n", direction, sums.covariance, direction, optimize=True)
    influence = (of_sums - of_covariance) * per_token - value * tokens / tokens.sum()
    noise = 4.0 * prompts * (prompts - 1) * lossless * per_token**2
    variance = max(0.0, prompts * float(influence.var(ddof=1)) - noise)
    single = float(stdtrit(prompts - 1, _ENDS[1])) ** 2 * variance / max(value, pairs**0.5)

    root = max(0.0, single * value + single**2 / 4.0 + pairs) ** 0.5
    middle = value + single / 2.0
    return Interval(value, middle - root, middle + root)
