"""Intervals and bands of fidelity: figures of torch-fidelity, coverage where the truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_fidelity import metric_fid, metric_kid, metric_prc

from lantern_bench.metrics.fidelity import FeatureSet
from lantern_bench.metrics.spread import NAMES, SubsetFigures, band, jackknife

WIDTH = 8


def draw(n: int, seed: int, width: int = WIDTH, shift: float = 0.3) -> torch.Tensor:
    scale = torch.linspace(0.5, 1.5, width)
    return shift + scale * torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def exact(width: int = WIDTH) -> FeatureSet:
    """A reference whose mean and covariance are known."""
    return FeatureSet(np.zeros(width), np.eye(width), None)


def test_figures_are_those_of_torch_fidelity() -> None:
    mine, theirs = draw(120, 1), draw(120, 2, shift=0.0)
    wide = draw(120, 3, 12), draw(120, 4, 12, 0.0)
    found = SubsetFigures(mine, FeatureSet.of(theirs), NAMES, manifold=wide)(np.arange(120))
    sets = [{"mu": one.mean, "sigma": one.covariance} for one in map(FeatureSet.of, (mine, theirs))]
    fid = metric_fid.fid_statistics_to_metric(*sets, verbose=False)[metric_fid.KEY_METRIC_FID]
    # A subset of all pictures: no choice is left to chance.
    options = {"kid_subsets": 1, "kid_subset_size": 120, "rng_seed": 0}
    kid = metric_kid.kid_features_to_metric(mine, theirs, **options, verbose=False)[metric_kid.KEY_METRIC_KID_MEAN]
    prc = metric_prc.prc_features_to_metric(*wide, prc_neighborhood=3, save_cpu_ram=True, verbose=False)
    assert found["fid"] == pytest.approx(fid, rel=1e-6)
    assert found["kid"] == pytest.approx(kid, rel=1e-5)
    assert found["precision"] == pytest.approx(prc["precision"]) and found["recall"] == pytest.approx(prc["recall"])
    assert 0 < found["precision"] < 1 and 0 < found["recall"] < 1


def test_the_interval_of_fid_covers_its_expectation_and_a_bootstrap_does_not() -> None:
    n, width, reference, rng = 64, 24, exact(24), np.random.default_rng(0)
    made = [SubsetFigures(draw(n, seed, width), reference, ["fid"]) for seed in range(900)]
    values = [figures(np.arange(n))["fid"] for figures in made]
    covered = [
        abs(value - np.mean(values)) <= jackknife(one, n)["fid"] for value, one in zip(values, made[:100], strict=False)
    ]
    assert 0.9 <= np.mean(covered) <= 1.0
    for figures in made[:20]:
        resampled = [figures(rng.integers(0, n, n))["fid"] for _ in range(40)]
        assert min(resampled) > np.mean(values), "resampling with replacement inflates FID"


def test_intervals_of_kid_precision_and_recall_cover() -> None:
    n, reference = 100, FeatureSet.of(draw(150, 5, shift=0.0))
    made = [SubsetFigures(draw(n, seed), reference, ("kid", "precision", "recall")) for seed in range(300)]
    values = [figures(np.arange(n)) for figures in made]
    reaches = [jackknife(figures, n) for figures in made[:60]]
    for name in ("kid", "precision", "recall"):
        mean = np.mean([one[name] for one in values])
        covered = [abs(one[name] - mean) <= reach[name] for one, reach in zip(values, reaches, strict=False)]
        assert np.mean(covered) >= 0.9, name


@pytest.mark.parametrize("repeats", [2, 4])
def test_the_band_holds_other_seeds_and_not_another_distribution(repeats: int) -> None:
    n, reference = 60, exact()
    # Each prompt has a mean of its own: the variance between prompts is in no set's seed.
    prompts = 3 * draw(n, 7, shift=0.0)
    held, drifted = [], []
    for run in range(60):
        sets = [prompts + draw(n, 100 * run + number, shift=0.0) for number in range(repeats + 1)]
        pool = SubsetFigures(torch.cat(sets), reference, ["fid"])
        rows = np.arange((repeats + 1) * n).reshape(-1, n)
        (_, low, high) = band(pool, rows[:-1])["fid"]
        held.append(low <= pool(rows[-1])["fid"] <= high)
        blurred = SubsetFigures(0.8 * sets[-1], reference, ["fid"])(np.arange(n))["fid"]
        drifted.append(low <= blurred <= high)
        assert blurred < pool(rows[-1])["fid"], "a gain is drift too"
    assert np.mean(held) >= 0.87
    assert np.mean(drifted) <= 0.1


def test_few_pictures_have_no_interval() -> None:
    assert jackknife(SubsetFigures(draw(3, 1), exact(), ["fid"]), 3) == {}
