"""Two runs over the same prompts: effects, intervals, p-values against hand counts and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lantern_bench.report.stats import Sums, compare_sums, fewest_prompts, holm


def means(values):
    return Sums(np.asarray(values, dtype=float), np.ones(len(values)))


def test_difference_has_an_interval():
    a, b = means([1.0, 2.0, 3.0, 4.0]), means([2.0, 4.0, 6.0, 8.0])
    difference = compare_sums(a, b)
    assert difference.value == pytest.approx(2.5)
    assert difference.low < 2.5 < difference.high


def test_few_prompts_use_all_exchanges():
    """Of 16 ways to exchange four pairs only none and all give as large an effect."""
    a, b = means([1.0, 2.0, 3.0, 4.0]), means([2.0, 4.0, 6.0, 8.0])
    assert compare_sums(a, b).p_value == pytest.approx(2 / 16)


@pytest.mark.parametrize("size", [8, 40])
def test_p_value_equals_scipys(size):
    generator = np.random.default_rng(3)
    a = generator.normal(size=size)
    b = a + generator.normal(0.3, 0.8, size)
    theirs = stats.permutation_test(
        (b - a,), np.mean, permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(1)
    ).pvalue
    ours = compare_sums(means(a), means(b)).p_value
    assert ours == pytest.approx(theirs, abs=1e-12 if size == 8 else 0.02)


def test_false_positives_are_rare():
    same = means([1.0, 2.0, 3.0])
    assert compare_sums(same, same).p_value == 1.0
    generator = np.random.default_rng(5)
    p_values = []
    for _ in range(200):
        both = generator.normal(1, 0.1, (2, 10))
        p_values.append(compare_sums(means(both[0]), means(both[1])).p_value)
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.1


def test_sums_keep_the_weight_of_each_prompt():
    a = Sums(np.array([10.0, 1.0]), np.array([10.0, 1.0]))
    b = Sums(np.array([20.0, 1.0]), np.array([10.0, 1.0]))
    assert compare_sums(a, b).value == pytest.approx(21 / 11 - 1)


def test_one_prompt_has_an_effect_and_no_interval():
    effect = compare_sums(means([1.0]), means([2.0]))
    assert (effect.value, effect.low, effect.high, effect.p_value) == (1.0, None, None, None)


def test_holm_correction():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("comparisons", [1, 8, 40])
def test_fewest_prompts_is_where_the_smallest_p_passes(comparisons):
    needed = fewest_prompts(comparisons)
    assert comparisons * 2 / 2**needed <= 0.05 < comparisons * 2 / 2 ** (needed - 1)
