"""Feature extractors: their features, their labels, missing or wrong weights; and the preprocessing of pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.train_lanterns.recipe import write_weights
from lantern_bench.config.protocols import PROTOCOLS, Preparation
from lantern_bench.errors import RefusedError, UserError
from lantern_bench.metrics.features import (
    Extractor,
    features_of,
    find_extractor,
    preprocess,
    resized,
)
from lantern_bench.models.lanterns.modules import AttributeClassifier, load_classifier


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> Extractor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AttributeClassifier()
    with torch.no_grad():  # an untrained network's features are tiny; trained ones are of the order of 1
        model.project.weight *= 300
    path = tmp_path_factory.mktemp("weights") / "features.safetensors"
    write_weights(model.state_dict(), path)
    return find_extractor(weights=path)


def test_features_are_those_of_the_network(extractor: Extractor) -> None:
    pictures = torch.randint(0, 256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = load_classifier(extractor.weights).features(pictures.float() / 255)
    torch.testing.assert_close(features_of(pictures, extractor), expected, rtol=1e-5, atol=1e-5)
    blurred = features_of(pictures, extractor, Preparation(size=8, features_size=64))
    assert blurred.shape == (3, 64) and not torch.allclose(blurred, expected, atol=1e-3)
    assert features_of(pictures[:0], extractor).shape == (0, 64)


def test_the_label_names_extractor_layer_and_weights(extractor: Extractor, tmp_path: Path) -> None:
    name, _, digits = extractor.label.partition("@")
    assert name == "lanterns-features-64" and len(digits) == 8
    other = tmp_path / "other.safetensors"
    write_weights(AttributeClassifier().state_dict(), other)
    assert dataclasses.replace(extractor, weights=other).label != extractor.label


def test_missing_full_size_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    with pytest.raises(RefusedError, match=r"weights-inception-2015-12-05-6726825d\.pth") as caught:
        find_extractor("inception-v3-compat")
    assert "LANTERN_BENCH_WEIGHTS" in caught.value.message
    assert caught.value.advice


def test_full_size_weights_are_found_in_the_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    path = tmp_path / "weights-inception-2015-12-05-6726825d.pth"
    torch.save({"Mixed_7c.branch_pool.conv.weight": torch.zeros(3)}, path)
    extractor_of_folder = find_extractor("inception-v3-compat")
    assert extractor_of_folder.weights == path
    assert extractor_of_folder.label.startswith("inception-v3-compat-2048@")


def test_a_given_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.pth"):
        find_extractor("inception-v3-compat", tmp_path / "nowhere.pth")


def test_weights_of_another_model(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pth")
    with pytest.raises(UserError, match=r"resnet\.pth: is not the weights of inception-v3-compat"):
        find_extractor("inception-v3-compat", tmp_path / "resnet.pth")


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("a pickle ran code",))


def test_a_pickle_with_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"a": _Code()}, path)
    with pytest.raises(UserError, match=r"weights\.pth: is a pickle with code in it"):
        find_extractor("inception-v3-compat", path)
    assert "a pickle ran code" not in capsys.readouterr().out


def test_unknown_extractor() -> None:
    with pytest.raises(UserError, match="inception-v4") as caught:
        find_extractor("inception-v4")
    assert "lanterns-features" in str(caught.value.advice)


def test_lantern_coco_preprocesses_as_the_authors() -> None:
    protocol = PROTOCOLS["lantern-coco"]
    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    picture = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    by_hand = Image.fromarray(pixels).crop((80, 0, 560, 480)).resize((256, 256), Image.Resampling.LANCZOS)
    prepared = preprocess(picture, protocol.preparation)
    assert np.array_equal(prepared.permute(1, 2, 0).numpy(), np.asarray(by_hand))
    for_features = resized(prepared, protocol.preparation.features_size, Image.Resampling.BICUBIC)
    larger = by_hand.resize((299, 299), Image.Resampling.BICUBIC)
    assert np.array_equal(for_features.permute(1, 2, 0).numpy(), np.asarray(larger))
    assert protocol.clip_prefix == "A photo depicts " and protocol.manifold_neighbours == 3
    assert torch.equal(preprocess(picture, Preparation()), picture)
