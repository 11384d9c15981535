"""Fidelity through torch-fidelity: known answers on small sets, missing figures, missing weights.

A newly initialised classifier serves as the extractor, since only the measuring is tested.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from experiments.train_lanterns.scenes import render
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.metrics import fidelity
from lantern_bench.models.lanterns.captions import ALL_ATTRIBUTES
from lantern_bench.models.lanterns.classifier import AttributeClassifier, load_classifier
from lantern_bench.models.lanterns.model import write_weights


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> fidelity.Extractor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AttributeClassifier()
    with torch.no_grad():  # an untrained network's features are tiny; trained ones are of the order of 1
        model.project.weight *= 300
    path = tmp_path_factory.mktemp("weights") / "features.safetensors"
    write_weights(model.state_dict(), path)
    return fidelity.find_extractor(weights=path)


@pytest.fixture(scope="module")
def scenes() -> torch.Tensor:
    painted = render(ALL_ATTRIBUTES[:: len(ALL_ATTRIBUTES) // 256][:256], seed=3)
    return torch.from_numpy(np.ascontiguousarray(painted.transpose(0, 3, 1, 2)))


def measure(pictures: torch.Tensor, reference: torch.Tensor, extractor: fidelity.Extractor) -> fidelity.FidelityScores:
    mine, theirs = (fidelity.features_of(one, extractor) for one in (pictures, reference))
    return fidelity.compare(fidelity.FeatureSet.of(mine), fidelity.FeatureSet.of(theirs), extractor)


def _noisy(pictures: torch.Tensor, strength: float) -> torch.Tensor:
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(1)) * strength
    return (pictures + noise).clamp(0, 255).to(torch.uint8)


def test_fidelity_of_a_set_against_itself(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    scores = measure(scenes, scenes, extractor)
    assert scores.fid == pytest.approx(0, abs=1e-4)
    assert scores.precision == scores.recall == 1.0
    assert (scores.n_reference, scores.kid_subset, scores.note) == (256, 128, "")


def test_figures_worsen_with_the_pictures(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    little, much = (measure(_noisy(scenes, strength), scenes, extractor) for strength in (10.0, 60.0))
    assert None not in (little.fid, much.fid, little.kid, much.kid, little.precision, much.precision)
    assert 0 < little.fid < much.fid  # type: ignore[operator]
    assert little.kid < much.kid  # type: ignore[operator]
    assert little.precision > much.precision  # type: ignore[operator]


def test_fid_is_the_frechet_distance_of_the_features(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    noisy = _noisy(scenes, 40.0)
    model = load_classifier(extractor.weights)
    a, b = (model.features(pictures.float() / 255).double().numpy() for pictures in (noisy, scenes))
    root = scipy.linalg.sqrtm(np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    measured = measure(noisy, scenes, extractor).fid
    assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_fidelity_is_deterministic(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    first, second = (measure(scenes[:128], scenes[128:], extractor) for _ in range(2))
    assert first == second


def test_few_pictures_have_no_fid(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    scores = measure(scenes[:48], scenes, extractor)
    assert scores.fid is None
    assert "128" in scores.note and "48" in scores.note
    assert scores.kid_subset == 24 and scores.kid is not None
    assert (scores.precision, scores.recall, scores.inside) == (None, None, ())
    assert "precision and recall need 256 images; there are 48" in scores.note


def test_figures_lie_in_their_intervals(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    scores = measure(_noisy(scenes, 30.0), scenes, extractor)
    for name in ("fid", "kid", "precision", "recall"):
        value, low, high = (getattr(scores, f"{name}{end}") for end in ("", "_low", "_high"))
        assert low <= value <= high and (low < high or value == 1.0), name
    assert scores.precision == pytest.approx(np.mean(scores.inside))


def test_too_few_pictures_give_no_figures(extractor: fidelity.Extractor, scenes: torch.Tensor) -> None:
    scores = measure(scenes[:3], scenes, extractor)
    assert (scores.fid, scores.kid, scores.precision, scores.recall) == (None, None, None, None)
    assert scores.kid_subset == 0 and "3" in scores.note


def test_the_label_names_extractor_layer_and_weights(extractor: fidelity.Extractor, tmp_path: Path) -> None:
    name, _, digits = extractor.label.partition("@")
    assert name == "lanterns-features-64" and len(digits) == 8
    other = tmp_path / "other.safetensors"
    write_weights(AttributeClassifier().state_dict(), other)
    assert dataclasses.replace(extractor, weights=other).label != extractor.label


def test_missing_full_size_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    with pytest.raises(RefusedError, match=r"weights-inception-2015-12-05-6726825d\.pth") as caught:
        fidelity.find_extractor("inception-v3-compat")
    assert "LANTERN_BENCH_WEIGHTS" in caught.value.message
    assert caught.value.advice


def test_full_size_weights_are_found_in_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    path = tmp_path / "weights-inception-2015-12-05-6726825d.pth"
    torch.save({"Mixed_7c.branch_pool.conv.weight": torch.zeros(3)}, path)
    found = fidelity.find_extractor("inception-v3-compat")
    assert found.weights == path
    assert found.label.startswith("inception-v3-compat-2048@")


def test_a_given_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.pth"):
        fidelity.find_extractor("inception-v3-compat", tmp_path / "nowhere.pth")


def test_weights_of_another_model(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pth")
    with pytest.raises(UserError, match=r"resnet\.pth has the weights of another model"):
        fidelity.find_extractor("inception-v3-compat", tmp_path / "resnet.pth")


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("a pickle ran code",))


def test_a_pickle_with_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"a": _Code()}, path)
    with pytest.raises(UserError, match="plain weights"):
        fidelity.find_extractor("inception-v3-compat", path)
    assert "a pickle ran code" not in capsys.readouterr().out


def test_unknown_extractor() -> None:
    with pytest.raises(UserError, match="inception-v4") as caught:
        fidelity.find_extractor("inception-v4")
    assert "lanterns-features" in str(caught.value.advice)
