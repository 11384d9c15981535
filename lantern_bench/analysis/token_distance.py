"""The distance of a cell from the target, from the sums of its images (docs/algorithms.md, section 6.2); no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lantern_bench.analysis.cells import CellRecords
from lantern_bench.analysis.statistics import Array, Interval, holm, ratio_of_sums, sums_per_prompt
from lantern_bench.storage.schema import Row

_RESAMPLES = 2_000
_ENDS = (0.025, 0.975)


def token_rows(scores: Iterable[Row]) -> dict[str, Row]:
    """Return the rows of level `tokens` by record key; of rows that score the same image the last counts."""
    return {str(row["record_key"]): row for row in scores if row["level"] == "tokens"}


def distance_columns(
    cells: Sequence[CellRecords], rows: Mapping[str, Row]
) -> dict[str, dict[str, Any]]:
    """Return the figures of each cell, by its id; `rows` of level `tokens` by record key.

    `distance_p` is corrected by Holm over all cells (of all models) that have one.
    """
    figures = {cell.cell_id: _figures(cell, rows) for cell in cells}
    tested = [cell_id for cell_id, row in figures.items() if row.get("distance_p") is not None]
    for cell_id, p_value in zip(
        tested, holm([figures[cell_id]["distance_p"] for cell_id in tested]), strict=True
    ):
        figures[cell_id]["distance_p"] = p_value
    return figures


def _figures(cell: CellRecords, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The figures of one cell, with an uncorrected `distance_p`; none where none of its images has a row."""
    records = cell.images[cell.images["record_key"].isin(rows.keys())]
    images = [rows[key] for key in records["record_key"]]
    prompts = records.index.get_level_values("prompt_id")
    if not images:
        return {}
    tokens = [row["tokens"] for row in images]
    figures: dict[str, Any] = {}
    for name, counted in (
        ("impossible", "impossible_tokens"),
        ("argmax_mismatch", "mismatched_tokens"),
    ):
        if images[0][counted] is not None:
            figures[name] = sum(row[counted] for row in images) / sum(tokens)
    if not images[0]["features"]:  # at temperature 0
        return figures
    for name in ("entropy", "largest_p", "ten_largest_p"):
        figures[name] = float(np.average([row[name] for row in images], weights=tokens))
    names = images[0]["features"].split()
    columns = np.array([row["feature_sums"] for row in images]).T
    for name, column in zip(names, columns, strict=False):
        if name in ("surprise", "prompt_information"):
            figures |= ratio_of_sums(column, tokens, prompts).columns(name)
    by_prompt = np.stack(
        [sums_per_prompt(column, tokens, prompts).over for column in columns], axis=-1
    )
    sums = FeatureSums.of(by_prompt, len(names))
    per_prompt = sums_per_prompt(tokens, tokens, prompts).over
    figures |= distance(sums.chosen(_compared(names)), per_prompt).columns("distance")
    return figures | {"distance_p": sums.total.p_value}


def distance_of_image(row: Row) -> float | None:
    """Return the distance of one image from its row of level `tokens`; None at temperature 0."""
    names = (row.get("features") or "").split()
    sums = FeatureSums.of(np.array([row.get("feature_sums")]), len(names)) if names else None
    return sums and distance(sums.chosen(_compared(names)), np.array([row["tokens"]])).value


def _compared(names: Sequence[str]) -> list[int]:
    """The features of the distance: modes without a drafter have them too."""
    return [number for number, name in enumerate(names) if name != "drafter_tilt"]


class FeatureSums(NamedTuple):
    """Sums of the features minus their means under the target, and the covariance that the target gives these sums."""

    sums: Array  # [..., m]
    covariance: Array  # [..., m, m]

    @classmethod
    def of(cls, columns: Array, features: int) -> FeatureSums:
        """Read columns [..., m + m (m + 1) / 2]: the sums, then the upper triangle of the covariance by rows."""
        covariance = np.zeros((*columns.shape[:-1], features, features))
        rows, others = np.triu_indices(features)
        covariance[..., rows, others] = covariance[..., others, rows] = columns[..., features:]
        return cls(columns[..., :features], covariance)

    def chosen(self, features: Sequence[int]) -> FeatureSums:
        """The sums of some of the features."""
        return FeatureSums(
            self.sums[..., features], self.covariance[..., features, :][..., features]
        )

    @property
    def total(self) -> FeatureSums:
        """The sums over the first axis."""
        return FeatureSums(self.sums.sum(axis=0), self.covariance.sum(axis=0))

    @property
    def inverse(self) -> Array:
        """The pseudo-inverse [..., m, m] of the covariance: a feature that cannot vary counts nothing."""
        scale = np.sqrt(np.diagonal(self.covariance, axis1=-2, axis2=-1))
        outer = scale[..., :, None] * np.where(scale > 0, scale, 1.0)[..., None, :]
        inverse_scale = np.divide(1.0, outer, out=np.zeros_like(outer), where=outer > 0)
        return (
            np.linalg.pinv(self.covariance * inverse_scale, rcond=1e-9, hermitian=True)
            * inverse_scale
        )

    @property
    def chi_square(self) -> Array:
        """Q [...] = S' C^-1 S: of a lossless mode, chi-square with `freedom` degrees of freedom."""
        return np.einsum("...i,...ij,...j->...", self.sums, self.inverse, self.sums)

    @property
    def freedom(self) -> int:
        """The rank of the covariance [m, m], at most the number of features."""
        return round(float(np.trace(self.inverse @ self.covariance)))

    @property
    def p_value(self) -> float:
        """The chance that a lossless mode has a larger Q."""
        from scipy.stats import chi2

        return float(chi2.sf(self.chi_square, self.freedom)) if self.freedom else 1.0


def distance(sums: FeatureSums, tokens: Array, seed: int = 0) -> Interval:
    """Return (Q - m) / tokens of sums per prompt, with a percentile interval by bootstrap over prompts.

    A resample has a Q that is larger by the spread between prompts, in units of C: this is subtracted from its Q.
    """
    total = sums.total
    n_tokens = float(tokens.sum())
    n = len(tokens)
    freedom = total.freedom
    if not freedom:
        return Interval(None, note="no distance: the target's tokens cannot vary")
    value = (float(total.chi_square) - freedom) / n_tokens
    if n < 2:
        return Interval(value, note="no interval: fewer than 2 prompts")
    resamples = (
        np.random.default_rng(seed)
        .multinomial(n, np.full(n, 1.0 / n), size=_RESAMPLES)
        .astype(np.float64)
    )
    resampled = FeatureSums(resamples @ sums.sums, np.tensordot(resamples, sums.covariance, axes=1))
    spread = FeatureSums(
        sums.sums - sums.sums.mean(axis=0), np.broadcast_to(total.covariance, sums.covariance.shape)
    )
    values = (resampled.chi_square - float(spread.chi_square.sum()) - freedom) / (
        resamples @ tokens
    )
    low, high = np.quantile(values, _ENDS)
    return Interval(value, float(low), float(high))
