"""Agreement with the references: clean-fid's formula on the same features, FID-infinity, preparation, optional scorers.

clean-fid itself is no dependency: it calls scipy in a way that newer ones refuse. Its formula is written out here,
with scipy's matrix square root, independently of how ours is computed.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image

from lantern_bench.config.protocols import PROTOCOLS, Preparation
from lantern_bench.errors import RefusedError
from lantern_bench.metrics import clip
from lantern_bench.metrics.fidelity import FeatureSet, fid_infinity, frechet_distance, preprocess, resize_for_features


def draw(n: int, width: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    """Correlated, skewed features, as networks make them: float32 [n, width]."""
    noise, mixing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1)
    mixed = torch.randn(n, width, generator=noise) @ torch.randn(width, width, generator=mixing)
    return torch.relu(mixed / width**0.5 + shift)


def clean_fid(one: np.ndarray, other: np.ndarray) -> float:
    """The formula of clean-fid's frechet_distance on its feature statistics (mean, np.cov with rows as pictures)."""
    mu1, mu2 = one.mean(axis=0), other.mean(axis=0)
    sigma1, sigma2 = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    root = scipy.linalg.sqrtm(sigma1.dot(sigma2)).real
    diff = mu1 - mu2
    return float(diff.dot(diff) + np.trace(sigma1) + np.trace(sigma2) - 2 * np.trace(root))


@pytest.mark.parametrize(("n", "m", "width"), [(300, 400, 64), (500, 300, 128), (129, 200, 64)])
def test_fid_agrees_with_clean_fid_on_the_same_features(n: int, m: int, width: int) -> None:
    mine, theirs = draw(n, width, 2), draw(m, width, 3, shift=0.2)
    expected = clean_fid(mine.double().numpy(), theirs.double().numpy())
    assert frechet_distance(FeatureSet.of(mine), FeatureSet.of(theirs)) == pytest.approx(expected, rel=1e-3)
    assert expected > 0.1


def test_fid_of_known_gaussians() -> None:
    one = FeatureSet(np.random.default_rng(0).normal(size=5), np.eye(5), None)
    other = FeatureSet(np.zeros(5), 4 * np.eye(5), None)
    expected = float(one.mean @ one.mean) + 5 * (1 + 4 - 2 * 2)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-9)


def test_fid_infinity_is_nearer_to_the_truth_than_fid() -> None:
    width = 16
    truth = FeatureSet.of(draw(60_000, width, 11))
    mine = draw(400, width, 12)
    plain = frechet_distance(FeatureSet.of(mine), truth)
    far = fid_infinity(mine, truth, np.random.default_rng(0))
    assert far.value is not None and far.low is not None and far.high is not None
    assert abs(far.value) < 0.5 * plain, "both sets are of one kind: the distance is 0"
    assert far.low < far.value < far.high
    assert fid_infinity(mine, truth, np.random.default_rng(0)) == far


def test_fid_infinity_needs_enough_pictures() -> None:
    few = draw(40, 16, 1)
    far = fid_infinity(few, FeatureSet.of(draw(100, 16, 2)), np.random.default_rng(0))
    assert far.value is None and "needs 47 images; there are 40" in far.note


def test_lantern_coco_preprocesses_as_the_authors() -> None:
    protocol = PROTOCOLS["lantern-coco"]
    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    picture = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    by_hand = Image.fromarray(pixels).crop((80, 0, 560, 480)).resize((256, 256), Image.Resampling.LANCZOS)
    prepared = preprocess(picture, protocol.preparation)
    assert np.array_equal(prepared.permute(1, 2, 0).numpy(), np.asarray(by_hand))
    seen = resize_for_features(prepared, protocol.preparation)
    larger = by_hand.resize((299, 299), Image.Resampling.BICUBIC)
    assert np.array_equal(seen.permute(1, 2, 0).numpy(), np.asarray(larger))
    assert protocol.clip_prefix == "A photo depicts " and protocol.manifold_neighbours == 3
    assert torch.equal(preprocess(picture, Preparation()), picture)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol_to_dict_is_complete(name: str) -> None:
    said = PROTOCOLS[name].to_dict()
    assert said["name"] == name and said["version"] >= 1 and len(said["about"]) > 5
    assert {"preparation", "features", "manifold", "clip_model", "clip_prefix", "rewards", "reference"} <= set(said)


def test_hpsv2_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv("LANTERN_BENCH_WEIGHTS", raising=False)
    with pytest.raises(RefusedError, match=r"weights of HPSv2 are not on this machine: HPS_v2\.1_compressed\.pt"):
        clip.load_reward("hpsv2")


def test_missing_image_reward_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="ImageReward is not installed") as caught:
        clip.load_reward("image_reward")
    assert "pip install 'lantern-bench[image-reward]'" in str(caught.value.advice)


def test_image_reward_goes_through_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own interface, as published: load(name, device, download_root), score(prompt, image)."""
    asked: list[Any] = []

    class Model:
        def score(self, prompt: str, image: Image.Image) -> float:
            asked.append((prompt, image.size))
            return float(len(prompt))

    package = types.ModuleType("ImageReward")
    package.load = lambda name, device, download_root: asked.append((name, download_root)) or Model()  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "ImageReward", package)
    torch.save({"a": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    with pytest.raises(RefusedError, match=r"med_config\.json"):
        clip.load_reward("image_reward")
    (tmp_path / "med_config.json").write_text("{}")
    judge = clip.load_reward("image_reward")
    assert judge.label.startswith("image-reward-1.0@")
    assert judge.score(torch.zeros(2, 3, 8, 9, dtype=torch.uint8), ["red", "blue!"]) == [3.0, 5.0]
    assert asked == [(str(tmp_path / "ImageReward.pt"), str(tmp_path)), ("red", (9, 8)), ("blue!", (9, 8))]
