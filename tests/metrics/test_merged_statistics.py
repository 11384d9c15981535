"""Statistics summed from shards are those of one pass: mean, covariance and FID."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lantern_bench.metrics.fidelity import FeatureSet, frechet_distance
from lantern_bench.metrics.spread import SubsetFigures

WIDTH = 24


def draw(n: int, seed: int, mean: float = 0.4) -> torch.Tensor:
    """Features like those of a network: above zero, correlated, with a mean that is large beside the spread."""
    noise = torch.Generator().manual_seed(seed)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / 5
    return (torch.randn(n, WIDTH, generator=noise) @ mix + mean).relu()


@pytest.mark.parametrize("sizes", [(400,), (137, 263), (1, 64, 64, 64, 64, 143), (0, 399, 1)])
@pytest.mark.parametrize("mean", [0.4, 1000.0])
def test_merged_statistics_equal_one_pass(sizes: tuple[int, ...], mean: float) -> None:
    features, reference = draw(400, 1, mean), FeatureSet.of(draw(500, 2, mean))
    whole = FeatureSet.of(features)
    merged = FeatureSet.merged([FeatureSet.of(part) for part in features.split(sizes)])
    assert merged.n == 400 and merged.features is not None and torch.equal(merged.features, features)
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(merged.covariance, whole.covariance, rtol=1e-9, atol=1e-12)
    assert frechet_distance(merged, reference) == pytest.approx(frechet_distance(whole, reference), rel=1e-6)
    figures = SubsetFigures(features, reference, ["fid"])
    assert figures.fid_of(merged) == pytest.approx(figures(np.arange(400))["fid"], rel=1e-6)


def test_sets_without_features_merge_by_their_statistics() -> None:
    features = draw(300, 3)
    parts = [FeatureSet.of(part) for part in features.split(100)]
    bare = [FeatureSet(part.mean, part.covariance, part.n) for part in parts]
    merged = FeatureSet.merged(bare)
    assert merged.features is None
    np.testing.assert_allclose(merged.covariance, FeatureSet.of(features).covariance, rtol=1e-9, atol=1e-12)


def test_the_average_of_the_covariances_is_not_that_of_all() -> None:
    """Shards differ in their means: the test above would not notice a merge that forgets them if they did not."""
    parts = [FeatureSet.of(draw(100, 4, mean)) for mean in (0.2, 0.9)]
    merged = FeatureSet.merged(parts)
    assert np.abs(merged.covariance - (parts[0].covariance + parts[1].covariance) / 2).max() > 0.05
