"""Intervals of figures of sets, and the spread of ar: coverage where the truth is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lantern_bench.analysis.statistics import detectable
from lantern_bench.metrics.extractors import FeatureSet
from lantern_bench.metrics.fidelity import FeatureSets, Figure, ar_spread, figures_of, jackknife

WIDTH = 8


def draw(n: int, seed: int, width: int = WIDTH, shift: float = 0.3) -> torch.Tensor:
    scale = torch.linspace(0.5, 1.5, width)
    return shift + scale * torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def exact(width: int = WIDTH) -> FeatureSet:
    """A reference whose mean and covariance are known."""
    return FeatureSet(np.zeros(width), np.eye(width), None)


def figures(
    names: Sequence[str], features: torch.Tensor, reference: FeatureSet
) -> dict[str, Figure]:
    return figures_of(names, [FeatureSets(features, reference)])


@pytest.mark.parametrize(
    "sets", [pytest.param(20, id="small"), pytest.param(100, marks=pytest.mark.long)]
)
def test_the_interval_of_fid_covers_its_expectation_and_a_bootstrap_does_not(sets: int) -> None:
    n = 64
    width = 24
    reference = exact(24)
    rng = np.random.default_rng(0)
    distances = [
        figures(["fid"], draw(n, seed, width), reference)["fid"] for seed in range(9 * sets)
    ]
    values = [distance(np.arange(n)) for distance in distances]
    reaches = [jackknife({"fid": distance}, n)["fid"] for distance in distances[:sets]]
    covered = [
        abs(value - np.mean(values)) <= reach for value, reach in zip(values, reaches, strict=False)
    ]
    assert 0.9 <= np.mean(covered) <= 1.0
    for distance in distances[:5]:
        resampled = [distance(rng.integers(0, n, n)) for _ in range(20)]
        assert min(resampled) > np.mean(values), "resampling with replacement inflates FID"


@pytest.mark.parametrize(
    ("sets", "share"), [(30, 0.8), pytest.param(60, 0.9, marks=pytest.mark.long)]
)
def test_intervals_of_kid_precision_and_recall_cover(sets: int, share: float) -> None:
    n = 100
    reference = FeatureSet.of(draw(150, 5, shift=0.0))
    names = ("kid", "precision", "recall")
    drawn = [figures(names, draw(n, seed), reference) for seed in range(5 * sets)]
    reaches = [jackknife(figures_of_set, n) for figures_of_set in drawn[:sets]]
    for name in names:
        values = [figures_of_set[name](np.arange(n)) for figures_of_set in drawn]
        covered = [
            abs(value - np.mean(values)) <= reach[name]
            for value, reach in zip(values, reaches, strict=False)
        ]
        assert np.mean(covered) >= share, name


@pytest.mark.parametrize(
    ("repeats", "runs"),
    [
        (2, 10),
        pytest.param(2, 60, marks=pytest.mark.long),
        pytest.param(4, 60, marks=pytest.mark.long),
    ],
)
def test_the_spread_of_ar_holds_other_seeds_and_not_another_distribution(
    repeats: int, runs: int
) -> None:
    n = 60
    reference = exact()
    # Each prompt has a mean of its own: the variance between prompts is in no set's seed.
    prompts = 3 * draw(n, 7, shift=0.0)
    within = []
    drifted = []
    for run in range(runs):
        sets = [prompts + draw(n, 100 * run + number, shift=0.0) for number in range(repeats + 1)]
        pool = figures(["fid"], torch.cat(sets), reference)
        rows = np.arange((repeats + 1) * n).reshape(-1, n)
        (_, low, high) = ar_spread(pool, rows[:-1]).values()
        other_seed = pool["fid"](rows[-1])
        blurred = figures(["fid"], 0.8 * sets[-1], reference)["fid"](np.arange(n))
        within.append(low <= other_seed <= high)
        drifted.append(low <= blurred <= high)
        assert blurred < other_seed, "a gain is drift too"
    assert np.mean(within) >= 0.87
    assert np.mean(drifted) <= 0.1


@pytest.mark.parametrize("repeats", [2, 4])
def test_the_detectable_shift_leaves_the_spread_in_four_of_five_sets(repeats: int) -> None:
    """And twenty sets with a standard deviation of 1.49 show what a smaller shift does: +3 and +4
    stay inside.
    """
    generator = np.random.default_rng(3)
    n = 40
    deviation = 1.49
    sizes = {"detectable": 0, "3": 0, "4": 0}
    for _ in range(300):
        # A figure that is a mean over pictures: sets of n vary by `deviation`.
        pictures = 17.6 + generator.normal(0, deviation * np.sqrt(n), (repeats + 1) * n)
        rows = np.arange((repeats + 1) * n).reshape(-1, n)
        centre, low, high = ar_spread(
            {"fid": lambda chosen, of=pictures: float(of[chosen].mean())}, rows[:-1]
        ).values()
        other = pictures[rows[-1]].mean()
        shifts = {"detectable": detectable(centre, low, high), "3": 3.0, "4": 4.0}
        for name, shift in shifts.items():
            sizes[name] += not low <= other + shift <= high
    shares = {name: count / 300 for name, count in sizes.items()}
    assert shares["detectable"] == pytest.approx(0.8, abs=0.06)
    assert shares["3"] < 0.5
    assert shares["4"] < 0.75
    assert shares["3"] < shares["4"]


def test_few_pictures_have_no_interval() -> None:
    assert jackknife(figures(["fid"], draw(3, 1), exact()), 3) == {}
