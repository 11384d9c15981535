"""P-values far in the tail: valid where the target is almost certain, and still powerful."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, norm

from lantern_bench.analysis.statistics import Array
from lantern_bench.analysis.tails import valid_p


def surprises(p: Array) -> Array:
    """-log p of each token minus its mean."""
    surprise = -np.log(p)
    return np.asarray(surprise - p @ surprise)


def p_values(sums: Array, deviations: Array, p: Array, *, tokens: int) -> tuple[Array, Array]:
    """The normal and the valid p-value of each sum of surprises of independent tokens."""
    variance = tokens * float(p @ deviations**2)
    normal = 2.0 * norm.sf(np.abs(sums) / variance**0.5)
    valid = [
        valid_p(
            float(approximate),
            sums=np.array([[total]]),
            variances=np.array([[variance]]),
            above=np.array([[deviations.max()]]),
            below=np.array([[-deviations.min()]]),
            counts=np.array([float(tokens)]),
        )
        for approximate, total in zip(normal, sums, strict=True)
    ]
    return normal, np.array(valid)


@pytest.mark.parametrize("tokens", [256, 2048])
@pytest.mark.parametrize("largest", [0.9, 0.99, 0.999])
def test_a_nearly_certain_target_is_rejected_no_more_often_than_the_level(
    largest: float, tokens: int
) -> None:
    """Exact: of two possible tokens, the number of rare ones is binomial."""
    p = np.array([largest, 1.0 - largest])
    deviations = surprises(p)
    rare = np.arange(200)
    probability = binom.pmf(rare, tokens, p[1])
    sums = (tokens - rare) * deviations[0] + rare * deviations[1]
    normal, valid = p_values(sums, deviations, p, tokens=tokens)
    for level in (1e-4, 1e-6):
        assert probability[valid <= level].sum() <= level
    if largest > 0.95:
        assert probability[normal <= 1e-6].sum() > 5e-6  # which a normal tail does not see


def test_targets_of_many_tokens_are_rejected_no_more_often_than_the_level() -> None:
    """400,000 simulated cells of 256 tokens, most of them certain by 0.98."""
    p = np.array([0.98, 0.01, 0.005, 0.003, 0.0015, 0.0005])
    deviations = surprises(p)
    counts = np.random.default_rng(0).multinomial(256, p, size=400_000)
    normal, valid = p_values(counts @ deviations, deviations, p, tokens=256)
    assert (normal <= 1e-4).mean() > 5e-4
    assert (valid <= 1e-4).mean() <= 1e-4
    assert np.array_equal(valid[normal > 0.01], normal[normal > 0.01])


@pytest.mark.parametrize(("z", "most"), [(5.0, 1e-3), (8.0, 1e-10), (10.0, 1e-19)])
def test_a_large_shift_of_many_tokens_stays_far_in_the_tail(z: float, most: float) -> None:
    tokens = 2048
    p = valid_p(
        2.0 * float(norm.sf(z)),
        sums=np.array([[z * tokens**0.5]]),
        variances=np.array([[float(tokens)]]),
        above=np.array([[1.0]]),
        below=np.array([[1.0]]),
        counts=np.array([float(tokens)]),
    )
    assert 2.0 * norm.sf(z) < p < most


def test_groups_and_features_share_one_capital() -> None:
    """One feature of two is shifted, in both images; the other cannot vary."""
    shifted = valid_p(
        1e-9,
        sums=np.array([[150.0, 0.0], [150.0, 0.0]]),
        variances=np.array([[1024.0, 0.0], [1024.0, 0.0]]),
        above=np.array([[1.0, 0.0], [1.0, 0.0]]),
        below=np.array([[1.0, 0.0], [1.0, 0.0]]),
        counts=np.array([1024.0, 1024.0]),
    )
    assert 1e-9 < shifted < 1e-6


def test_equal_evidence_in_several_blocks_multiplies() -> None:
    """1 / p is a capital, and the capital of one block is bet on in the next."""

    def with_blocks(blocks: int) -> float:
        one = np.ones((1, blocks, 1))
        return valid_p(
            0.0,
            sums=60.0 * one,
            variances=100.0 * one,
            above=one,
            below=one,
            counts=np.array([400.0]),
        )

    assert with_blocks(1) < 1e-4
    assert np.log(with_blocks(3)) == pytest.approx(3.0 * np.log(with_blocks(1)))
