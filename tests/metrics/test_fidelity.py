"""FID, KID, precision and recall of features: known answers, torch-fidelity and clean-fid, too few
pictures.

clean-fid itself is no dependency: it calls scipy in a way that newer ones refuse. Its formula is
written out here, with scipy's matrix square root, independently of how ours is computed.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch_fidelity import metric_fid, metric_kid, metric_prc

from lantern_bench.methods.catalog import OF_SETS
from lantern_bench.metrics.extractors import FeatureSet
from lantern_bench.metrics.fidelity import (
    FeatureSets,
    fid_infinity,
    figures_of,
    frechet_distance,
    measure_sets,
)

WIDTH = 16


def draw(n: int, seed: int, shift: float = 0.0, width: int = WIDTH) -> torch.Tensor:
    """Correlated, skewed features, as networks give them: float32 [n, width]."""
    noise = torch.Generator().manual_seed(seed)
    mixing = torch.Generator().manual_seed(1)
    mixed = torch.randn(n, width, generator=noise) @ torch.randn(width, width, generator=mixing)
    return torch.relu(mixed / width**0.5 + shift)


def sets_of(pictures: torch.Tensor, reference: torch.Tensor) -> list[FeatureSets]:
    return [FeatureSets(pictures, FeatureSet.of(reference))]


def clean_fid(x: torch.Tensor, y: torch.Tensor) -> float:
    """The formula of clean-fid's frechet_distance on its feature statistics (mean, np.cov with rows
    as pictures).
    """
    (mu_x, mu_y), (cov_x, cov_y) = zip(
        *((f.double().numpy().mean(0), np.cov(f.double().T)) for f in (x, y)), strict=True
    )
    root = scipy.linalg.sqrtm(cov_x @ cov_y).real
    return float(
        (mu_x - mu_y) @ (mu_x - mu_y) + np.trace(cov_x) + np.trace(cov_y) - 2 * np.trace(root)
    )


@pytest.mark.parametrize(("n", "m", "width"), [(300, 400, 64), (500, 300, 128), (129, 200, 64)])
def test_fid_agrees_with_clean_fid_and_torch_fidelity(n: int, m: int, width: int) -> None:
    pictures = draw(n, 2, width=width)
    reference = draw(n=m, seed=3, shift=0.2, width=width)
    fid = frechet_distance(FeatureSet.of(reference))(pictures)
    statistics = [
        {"mu": each.mean, "sigma": each.covariance}
        for each in map(FeatureSet.of, (pictures, reference))
    ]
    by_library = metric_fid.fid_statistics_to_metric(*statistics, verbose=False)[
        metric_fid.KEY_METRIC_FID
    ]
    assert fid == pytest.approx(by_library, rel=1e-6)
    assert fid > 0.1
    assert fid == pytest.approx(clean_fid(pictures, reference), rel=1e-3)


def test_figures_are_those_of_torch_fidelity() -> None:
    (sets,) = sets_of(draw(120, 1, 0.1), draw(120, 2))
    (manifold,) = sets_of(
        draw(n=120, seed=3, shift=0.2, width=12), draw(n=120, seed=4, shift=0.0, width=12)
    )
    figures = {
        name: figure(np.arange(120))
        for name, figure in figures_of(OF_SETS, [sets, manifold]).items()
    }
    # A subset of all pictures: no choice is left to chance.
    options = {"kid_subsets": 1, "kid_subset_size": 120, "rng_seed": 0, "verbose": False}
    kid = metric_kid.kid_features_to_metric(sets.pictures, sets.reference.features, **options)
    prc = metric_prc.prc_features_to_metric(
        manifold.pictures,
        manifold.reference.features,
        prc_neighborhood=3,
        save_cpu_ram=True,
        verbose=False,
    )
    assert figures["kid"] == pytest.approx(kid[metric_kid.KEY_METRIC_KID_MEAN], rel=1e-5)
    for name in ("precision", "recall"):
        assert figures[name] == pytest.approx(prc[name])
        assert 0 < figures[name] < 1
    assert figures["precision"] != figures_of(OF_SETS, [sets])["precision"](np.arange(120)), (
        "another extractor's sets"
    )


def test_a_set_against_itself() -> None:
    features = draw(256, 3)
    columns, of_images, notes = measure_sets(sets_of(features, features))
    assert columns["fid"] == pytest.approx(0, abs=1e-4)
    assert columns["precision"] == columns["recall"] == 1.0
    assert set(of_images["precision"]) == {1.0}
    assert (columns["n_reference"], columns["kid_subset"], notes) == (256, 128, [])


def test_figures_worsen_with_the_pictures_and_lie_in_their_intervals() -> None:
    little, much = (
        measure_sets(sets_of(draw(256, 5, shift), draw(256, 6))) for shift in (0.2, 0.8)
    )
    assert 0 < little.columns["fid"] < much.columns["fid"]
    assert little.columns["kid"] < much.columns["kid"]
    assert little.columns["precision"] > much.columns["precision"]
    assert little.columns["precision"] == pytest.approx(np.mean(little.of_images["precision"]))
    for name in OF_SETS:
        value, low, high = (little.columns[f"{name}{end}"] for end in ("", "_low", "_high"))
        assert low <= value <= high, name
        assert low < high, name
    again = measure_sets(sets_of(draw(256, 5, 0.2), draw(256, 6)))
    assert again.columns == little.columns


@pytest.mark.parametrize(
    ("n", "measured", "notes"),
    [
        (255, ["fid", "kid"], ["precision and recall need 256 images; there are 255"]),
        (31, [], ["fid and kid need 32 images, twice its features; there are 31"]),
        (4, [], ["fid and kid need 32 images, twice its features; there are 4"]),
    ],
)
def test_few_pictures_have_few_figures(n: int, measured: list[str], notes: list[str]) -> None:
    columns, of_images, reasons = measure_sets(sets_of(draw(n, 1), draw(300, 2)))
    assert [name for name in OF_SETS if name in columns] == measured
    assert not of_images
    assert columns.get("kid_subset") == (n // 2 if "kid" in measured else None)
    assert set(notes) <= set(reasons)


def test_a_reference_of_statistics_gives_fid_alone() -> None:
    reference = FeatureSet(np.zeros(WIDTH), np.eye(WIDTH), None)
    columns, _, notes = measure_sets([FeatureSets(draw(300, 1), reference)])
    assert columns["fid"] > 0
    assert not {"kid", "precision", "recall"} & set(columns)
    assert notes == ["the reference holds statistics only: no kid, precision and recall"]


def test_fid_infinity_is_nearer_to_the_truth_than_fid() -> None:
    truth = FeatureSet.of(draw(60_000, 11))
    features = draw(400, 12)
    sets = FeatureSets(features, truth)
    far, notes = fid_infinity(sets)
    value, low, high = far.values()
    assert not notes
    assert abs(value) < 0.5 * frechet_distance(truth)(features), (
        "both sets are of one kind: the distance is 0"
    )
    assert low < value < high
    assert fid_infinity(sets) == (far, [])


def test_fid_infinity_needs_enough_pictures() -> None:
    far, (note,) = fid_infinity(*sets_of(draw(40, 1), draw(100, 2)))
    assert far == {}
    assert "needs 47 images; there are 40" in note
