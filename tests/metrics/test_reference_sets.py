"""Reference sets: their sources, their labels, and the cache of their features."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from experiments.train_lanterns.recipe import write_embedded, write_weights
from experiments.train_lanterns.tasks import reference_scenes
from lantern_bench.config.protocols import PROTOCOLS, Preparation
from lantern_bench.errors import UserError
from lantern_bench.metrics import features
from lantern_bench.models.lanterns.modules import AttributeClassifier

EMBEDDED = PROTOCOLS["embedded"]
PLAIN = Preparation()
CROPPED = Preparation(crop=True, size=64)


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> features.Extractor:
    path = tmp_path_factory.mktemp("weights") / "features.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        write_weights(AttributeClassifier().state_dict(), path)
    return features.find_extractor(weights=path)


def paint(folder: Path, names: str = "abcdef", size: tuple[int, int] = (64, 64)) -> Path:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
    return folder


@pytest.mark.long
def test_the_embedded_features_are_those_of_the_painted_scenes() -> None:
    """Painting takes half a minute; processors round features differently, in their last digits."""
    scenes, label = reference_scenes()
    embedded = features.embedded_reference()
    assert embedded.label == label and embedded.statistics is not None
    torch.testing.assert_close(
        embedded.statistics.features, features.features_of(scenes, features.find_extractor()), rtol=1e-4, atol=1e-5
    )


def test_the_embedded_reference_belongs_to_the_bundled_extractor(extractor: features.Extractor) -> None:
    embedded = features.find_reference("embedded", EMBEDDED)
    assert embedded is not None and embedded.label == features.embedded_reference().label
    embedded_set = features.reference_features(embedded, features.find_extractor(), PLAIN)
    assert embedded_set.n == EMBEDDED.reference_pictures and embedded_set.features is not None
    with pytest.raises(UserError, match=f"of {embedded.extractor}, not of {extractor.label}"):
        features.reference_features(embedded, extractor, PLAIN)


def test_written_features_are_read_back(
    tmp_path: Path, extractor: features.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = torch.stack([features.read_picture(path) for path in sorted(paint(tmp_path / "set").iterdir())])
    monkeypatch.setattr(features, "EMBEDDED_FEATURES", tmp_path / "reference.safetensors")
    write_embedded(features.EMBEDDED_FEATURES, pictures, extractor, "six pictures")
    embedded = features.embedded_reference()
    assert embedded.label == "six pictures"
    written = features.reference_features(embedded, extractor, PLAIN).features
    assert written is not None and torch.equal(written, features.features_of(pictures, extractor))


def test_folder_reference_reads_pictures_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pictures"):
        features.folder_reference(tmp_path)
    for name, size in (("b.png", 16), ("a.png", 20)):
        Image.new("RGB", (size, size), (200 if name == "a.png" else 10, 0, 0)).save(tmp_path / name)
    reference = features.find_reference(str(tmp_path), EMBEDDED)
    assert reference is not None and reference.pictures is not None
    assert [int(features.read_picture(path)[0, 0, 0]) for path in reference.pictures] == [200, 10]
    assert f"{tmp_path.name}, n=2, sha256=" in reference.label


def test_reference_digest_ignores_file_names(tmp_path: Path) -> None:
    first_folder, other = paint(tmp_path / "one"), tmp_path / "other"
    other.mkdir()
    for file in first_folder.iterdir():
        shutil.copy(file, other / f"picture-{file.name}")
    first, second = (features.folder_reference(folder) for folder in (first_folder, other))
    assert first.digest == second.digest
    Image.new("RGB", (64, 64)).save(other / "one-more.png")
    assert features.folder_reference(other).digest != first.digest


def test_a_coco_annotation_lists_the_pictures(tmp_path: Path) -> None:
    folder = paint(tmp_path / "val")
    listed = {"images": [{"id": 1, "file_name": "b.png"}, {"id": 2, "file_name": "d.png"}], "annotations": []}
    (tmp_path / "val.json").write_text(json.dumps(listed))
    for name in (f"{tmp_path / 'val.json'}", f"{tmp_path / 'val.json'}={folder}"):
        reference = features.find_reference(name, EMBEDDED)
        assert reference is not None and reference.pictures is not None and len(reference.pictures) == 2
        assert reference.pictures[1] == folder / "d.png"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"images": [{"file_name": "z.png"}]}', "1 of 1 pictures are not in"),
        ('{"images": []}', "lists no pictures"),
        ('{"pictures": []}', "not a COCO annotation file"),
        ("[", "not a COCO annotation file"),
    ],
)
def test_annotations_that_are_wrong(tmp_path: Path, text: str, problem: str) -> None:
    paint(tmp_path / "val")
    (tmp_path / "val.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        features.find_reference(str(tmp_path / "val.json"), EMBEDDED)


def test_statistics_from_a_file(tmp_path: Path, extractor: features.Extractor) -> None:
    path = tmp_path / "coco.npz"
    np.savez(path, mu=np.zeros(64), sigma=np.eye(64), n=np.int64(5000))
    reference = features.find_reference(str(path), EMBEDDED)
    assert (
        reference is not None
        and reference.statistics is not None
        and reference.label.startswith("coco (statistics), n=5000")
    )
    assert features.reference_features(reference, extractor, PLAIN).n == 5000
    np.savez(path, mu=np.zeros(10), sigma=np.eye(10))
    narrow = features.find_reference(str(path), EMBEDDED)
    assert narrow is not None
    with pytest.raises(UserError, match="has 10 features, lanterns-features has 64"):
        features.reference_features(narrow, extractor, PLAIN)


@pytest.mark.parametrize("arrays", [{"mu": np.zeros(3)}, {"mu": np.zeros(3), "sigma": np.eye(4)}])
def test_statistics_that_are_wrong(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(UserError, match="mu"):
        features.find_reference(str(tmp_path / "wrong.npz"), EMBEDDED)


def test_unknown_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder or file"):
        features.find_reference(str(tmp_path / "nowhere"), EMBEDDED)
    assert features.find_reference(None, PROTOCOLS["lantern-coco"]) is None
    with pytest.raises(UserError, match="not for the protocol lantern-coco"):
        features.find_reference("embedded", PROTOCOLS["lantern-coco"])


def test_cache_key_is_content_extractor_and_preprocessing(
    tmp_path: Path, extractor: features.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    features_of = features.features_of

    def counted(pictures: Any, *more: Any, **named: Any) -> torch.Tensor:
        passes.append(len(pictures))
        return features_of(pictures, *more, **named)

    monkeypatch.setattr(features, "features_of", counted)
    cache, folder = tmp_path / "cache", paint(tmp_path / "set")

    def measured(preparation: Preparation = PLAIN) -> features.FeatureSet:
        reference = features.folder_reference(folder)
        return features.reference_features(reference, extractor, preparation, cache=cache)

    first, second = measured(), measured()
    assert passes == [6] and first.features is not None and second.features is not None
    assert torch.equal(first.features, second.features) and np.array_equal(first.mean, second.mean)
    folder = folder.rename(tmp_path / "renamed")
    measured()
    assert passes == [6]
    measured(CROPPED)
    paint(folder, "g")
    measured()
    assert passes == [6, 6, 7]
    (cached,) = [path for path in (cache / "references").iterdir() if load_file(path)["features"].shape[0] == 7]
    cached.write_bytes(b"damaged")
    measured()
    assert passes == [6, 6, 7, 7]


def test_unwritable_cache_is_not_used(tmp_path: Path, extractor: features.Extractor) -> None:
    (tmp_path / "file").write_text("")
    reference = features.folder_reference(paint(tmp_path / "set"))
    assert features.reference_features(reference, extractor, PLAIN, cache=tmp_path / "file").n == 6


def test_reference_sizes_must_agree_unless_resized(tmp_path: Path, extractor: features.Extractor) -> None:
    folder = paint(tmp_path / "set")
    paint(folder, "z", (90, 70))
    reference = features.folder_reference(folder)
    with pytest.raises(UserError, match="differ in size"):
        features.reference_features(reference, extractor, PLAIN)
    assert features.reference_features(reference, extractor, CROPPED).n == 7
