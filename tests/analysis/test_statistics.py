"""Intervals, effects and p-values, against scipy and closed forms, and where scipy has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, permutation_test

from lantern_bench.analysis import statistics
from lantern_bench.analysis.statistics import (
    Interval,
    Sums,
    add_holm_p_values,
    compare_sums,
    fewest_prompts,
    proportion,
    ratio_of_sums,
    settle,
    sums_per_prompt,
)


def _paired(n: int = 60) -> tuple[list[float], list[float], list[str]]:
    """Baseline and mode times whose difficulty varies far more between prompts than their ratio
    does.
    """
    generator = np.random.default_rng(5)
    slow = generator.lognormal(0.0, 0.5, n)
    fast = slow / 1.8 * generator.normal(1.0, 0.03, n)
    return slow.tolist(), fast.tolist(), [f"p{number:03d}" for number in range(n)]


def test_interval_is_scipys_paired_bca():
    slow, fast, prompts = _paired()
    ours = ratio_of_sums(slow, fast, prompts)
    theirs = bootstrap(
        (np.array(slow), np.array(fast)),
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert ours.value == pytest.approx(sum(slow) / sum(fast))


def test_pairing_removes_differences_between_prompts():
    """Resampling the two modes apart would give an interval many times wider."""
    slow, fast, prompts = _paired()
    paired = ratio_of_sums(slow, fast, prompts)
    assert paired.low is not None
    assert paired.high is not None
    assert paired.value is not None
    assert paired.low < paired.value < paired.high
    apart = ratio_of_sums(slow, [1.0] * len(slow), prompts)
    assert apart.low is not None
    assert apart.high is not None
    assert apart.value is not None
    assert (paired.high - paired.low) / paired.value < 0.2 * (apart.high - apart.low) / apart.value


def test_repeats_stay_inside_their_prompt():
    """The same images ten times are no new prompts: the interval does not shrink."""
    slow, fast, prompts = _paired(20)
    once = ratio_of_sums(slow, fast, prompts)
    tenfold = ratio_of_sums(slow * 10, fast * 10, prompts * 10)
    assert (once.low, once.high) == pytest.approx((tenfold.low, tenfold.high), rel=1e-12)


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_sums_of_prompts_do_not_depend_on_the_order_of_images(repeats):
    noise = np.random.default_rng(repeats)
    prompts = noise.permutation(np.repeat([f"p{number}" for number in range(30)], repeats)).tolist()
    numerator, denominator = 10.0 ** noise.uniform(-9, 9, (2, len(prompts)))
    sums = sums_per_prompt(numerator, denominator, iter(prompts))
    order = noise.permutation(len(prompts))
    np.testing.assert_array_equal(
        sums, sums_per_prompt(numerator[order], denominator[order], [prompts[n] for n in order])
    )
    for number, name in enumerate(sorted(set(prompts))):
        images = [image for image, prompt in enumerate(prompts) if prompt == name]
        exact = math.fsum(numerator[images]), math.fsum(denominator[images])
        assert (sums.numerator[number], sums.denominator[number]) == pytest.approx(exact, rel=1e-14)


def test_order_of_images_does_not_matter():
    slow, fast, prompts = _paired(20)
    order = np.random.default_rng(0).permutation(20)
    shuffled = ([slow[i] for i in order], [fast[i] for i in order], [prompts[i] for i in order])
    assert ratio_of_sums(slow, fast, prompts) == ratio_of_sums(*shuffled)


@pytest.mark.parametrize("values", [[0.3] * 5, [1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.7, 0.3]])
def test_constant_ratio_has_an_interval_of_no_width(values):
    thrice = [3 * value for value in values]
    interval = ratio_of_sums(thrice, values, [str(number) for number in range(len(values))])
    assert interval.value == pytest.approx(3.0)
    assert interval.low == interval.high == interval.value
    zero = ratio_of_sums([0.0] * 4, [1.0] * 4, list("abcd"))
    assert (zero.value, zero.low, zero.high) == (0.0, 0.0, 0.0)


def test_too_little_data_has_no_interval():
    alone = ratio_of_sums([2.0, 4.0], [1.0, 1.0], ["a", "a"])
    assert (alone.value, alone.low, alone.high) == (3.0, None, None)
    assert alone.note == "no interval: 1 of the 4 prompts that it needs"
    three = ratio_of_sums([2.0, 4.0, 5.0], [1.0, 1.0, 1.0], ["a", "b", "c"])
    assert (three.low, three.note) == (None, "no interval: 3 of the 4 prompts that it needs")
    assert ratio_of_sums([2.0, 4.0, 5.0, 3.0], [1.0] * 4, list("abcd")).low is not None
    assert ratio_of_sums([], [], []).value is None
    assert ratio_of_sums([1.0], [0.0], ["a"]).value is None


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(1e-3, 1e3)), min_size=4, max_size=6))
def test_intervals_are_never_nan(pairs):
    interval = ratio_of_sums(
        [a for a, _ in pairs], [b for _, b in pairs], [str(number) for number in range(len(pairs))]
    )
    assert all(
        end is not None and math.isfinite(end)
        for end in (interval.value, interval.low, interval.high)
    )
    assert interval.low <= interval.high


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (3, 10), (650, 1000)])
def test_proportion_equals_wilsons_formula(successes, trials):
    z = 1.959963984540054
    share = successes / trials
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = (
        z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    )
    interval = proportion(successes, trials)
    assert interval.value == share
    assert interval.low == pytest.approx(max(0.0, centre - half), abs=1e-9)
    assert interval.high == pytest.approx(min(1.0, centre + half), abs=1e-9)
    assert proportion(0, 0).value is None


# ---- Two runs over the same prompts


def means(values):
    return Sums(np.asarray(values, dtype=float), np.ones(len(values)))


def test_difference_has_an_interval_and_few_prompts_use_all_exchanges():
    """Of 16 ways to exchange four pairs only none and all give as large an effect."""
    difference = compare_sums(means([1.0, 2.0, 3.0, 4.0]), means([2.0, 4.0, 6.0, 8.0]))
    assert difference.value == pytest.approx(2.5)
    assert difference.low < 2.5 < difference.high
    assert difference.p_value == pytest.approx(2 / 16)


@pytest.mark.parametrize("size", [8, 40])
def test_p_value_equals_scipys(size):
    generator = np.random.default_rng(3)
    a = generator.normal(size=size)
    b = a + generator.normal(0.3, 0.8, size)
    theirs = permutation_test(
        (b - a,),
        np.mean,
        permutation_type="samples",
        n_resamples=9_999,
        rng=np.random.default_rng(1),
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


@pytest.mark.parametrize("sets", [1, 3])
def test_lossless_cells_are_worse_than_ar_no_more_often_than_the_level(sets, monkeypatch):
    """Of all cells of a run; scores are skewed, and prompts differ by far more than seeds."""
    monkeypatch.setattr(
        statistics, "_bootstrap", lambda *_: (0.0, 0.0)
    )  # slow, and of no concern here
    generator = np.random.default_rng(6)
    p_values = []
    one_sided = []
    for _ in range(250):
        scores = generator.normal(0, 5, 6) + generator.exponential(1, (sets + 6, 6))
        ar = [means(row) for row in scores[:sets]]
        cells = [means(row) for row in scores[sets:]]
        effects = [compare_sums(ar[0], cell, ar[1:]) for cell in cells]
        p_values += [effect.p_value for effect in effects]
        one_sided.append(len({effect.value > 0 for effect in effects}) == 1)
    assert 0.02 <= np.mean(np.array(p_values) <= 0.05) <= 0.07
    # With one set of ar images all six cells lie on one side of it in 2 of 7 runs: they share its
    # noise.
    assert np.mean(one_sided) > 0.2 if sets == 1 else np.mean(one_sided) < 0.2


def test_several_baselines_are_exchanged_with_the_cell():
    """Of 3^2 ways to pick the cell's set at two prompts only the one observed has so large an
    effect.
    """
    effect = compare_sums(means([0.0, 1.0]), means([5.0, 6.0]), [means([2.0, 1.0])])
    assert effect.value == pytest.approx(5.5 - 1.0)
    assert effect.p_value == pytest.approx(1 / 9)


def test_sums_keep_the_weight_of_each_prompt():
    a = Sums(np.array([10.0, 1.0]), np.array([10.0, 1.0]))
    b = Sums(np.array([20.0, 1.0]), np.array([10.0, 1.0]))
    assert compare_sums(a, b).value == pytest.approx(21 / 11 - 1)


@pytest.mark.parametrize(("prompts", "reach"), [(6, 0.35), (100, 0.028), (400, 0.007)])
def test_equal_counts_of_a_few_prompts_do_not_show_that_none_differs(prompts, reach):
    """The standard error of a sum of two prompts that differ by one either way is the root of 2."""
    right = means([1.0] * (prompts - 1) + [0.0])
    effect = compare_sums(right, right)
    assert (effect.value, effect.p_value) == (0.0, 1.0)
    assert (-effect.low, effect.high) == pytest.approx((reach, reach), rel=0.4)
    assert compare_sums(means([0.5] * prompts), means([0.5] * prompts)).high == 0.0


def test_one_prompt_has_an_effect_and_no_interval():
    effect = compare_sums(means([1.0]), means([2.0]))
    assert (effect.value, effect.low, effect.high, effect.p_value) == (1.0, None, None, None)


def test_three_prompts_have_an_exact_p_value_and_no_interval():
    effect = compare_sums(means([1.0, 2.0, 3.0]), means([2.0, 3.0, 5.0]))
    assert (effect.low, effect.high, effect.p_value) == (None, None, 0.25)


@pytest.mark.parametrize(
    ("figure", "low", "high", "verdict"),
    [
        ((0.0, -0.1, 0.1), -0.2, 0.2, "yes"),
        ((0.3, 0.25, 0.4), -0.2, 0.2, "no"),
        ((-0.3, -0.4, -0.25), -0.2, math.inf, "no"),
        ((0.3, 0.25, 0.4), -0.2, math.inf, "yes"),  # better by any amount is not worse
        # 100 (0.4 / 0.2 x 2.8 / 1.96)^2 = 817 if the figure stays, and as few at either end
        ((0.0, -0.4, 0.4), -0.2, 0.2, "not settled: more than 817 images"),
        ((0.0, -0.8, 0.8), -0.2, 0.2, "not settled: more than 363 images"),
        # 100 (0.4 / 0.6 x 2.8 / 1.96)^2 = 90 at the lower end, fewer than there are
        ((0.0, -0.4, 0.4), -math.inf, 0.2, "not settled: more than 100 images"),
        ((0.2, 0.1, 0.3), -math.inf, 0.2, "not settled: more than 204 images"),
        ((0.1, None, None), -math.inf, 0.2, "not settled"),
    ],
)
def test_a_figure_keeps_limits_by_its_whole_interval(figure, low, high, verdict):
    assert (
        settle(figure=Interval(*figure), low=low, high=high, images=100, names=("yes", "no"))
        == verdict
    )


@pytest.mark.parametrize("truth", [0.3, 0.9, 1.2])
def test_what_is_not_settled_needs_more_images_than_it_says(truth):
    """Of 2,000 runs with 6 images each, whose figures vary by chance around the true one."""
    generator = np.random.default_rng(0)
    limit = 1.5
    images = 6
    half = 1.96 / math.sqrt(images)
    needed = ((1.96 + 0.8416) / (limit - truth)) ** 2  # settles in 80% of repeats
    right = []
    for value in generator.normal(truth, 1 / math.sqrt(images), 2000):
        figure = Interval(value, value - half, value + half)
        words = settle(figure, low=-math.inf, high=limit, images=images, names=("yes", "no"))
        if words.startswith("not settled"):
            right.append(int(words.split()[4]) <= max(needed, images))
    assert len(right) > 300
    assert np.mean(right) > 0.85


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.01, None, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([], []),
    ],
)
def test_holm_correction(p_values, corrected):
    tested = add_holm_p_values([{"p": p} for p in p_values], "p", into="p")
    assert [row["p"] for row in tested] == pytest.approx(corrected)


@pytest.mark.parametrize("comparisons", [1, 8, 40])
def test_fewest_prompts_is_where_the_smallest_p_passes(comparisons):
    needed = fewest_prompts(comparisons)
    assert comparisons * 2 / 2**needed <= 0.05 < comparisons * 2 / 2 ** (needed - 1)
