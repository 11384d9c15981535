"""Feature extractors, preprocessing, and reference sets: their sources, labels and the cache of
their features.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lantern_bench.metrics import extractors
from lantern_bench.metrics.protocols import PROTOCOLS, Preparation
from lantern_bench.models.families.lanterns.modules import AttributeClassifier, load_classifier
from lantern_bench.utils.errors import RefusedError, UserError
from lantern_bench.utils.progress import heard_by
from scripts.train_lanterns.part_tasks import reference_scenes
from scripts.train_lanterns.parts import write_embedded, write_weights

EMBEDDED = PROTOCOLS["embedded"]
PLAIN = Preparation()
CROPPED = Preparation(crop=True, size=64)


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> extractors.Extractor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AttributeClassifier()
    # an untrained network's features are tiny; trained ones are of the order of 1
    with torch.no_grad():
        model.project.weight *= 300
    path = tmp_path_factory.mktemp("weights") / "features.safetensors"
    write_weights(model.state_dict(), path)
    return extractors.find_extractor(weights=path)


def test_features_are_those_of_the_network(extractor: extractors.Extractor) -> None:
    pictures = torch.randint(
        0, 256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    expected = load_classifier(extractor.weights).features(pictures.float() / 255)
    torch.testing.assert_close(
        extractors.features_of(pictures, extractor), expected, rtol=1e-5, atol=1e-5
    )
    small = [extractors.preprocess(picture, Preparation(size=8)) for picture in pictures]
    blurred = extractors.features_of(small, extractor, 64)
    assert blurred.shape == (3, 64)
    assert not torch.allclose(blurred, expected, atol=1e-3)
    assert extractors.features_of(pictures[:0], extractor).shape == (0, 64)


def test_the_label_names_extractor_layer_and_weights(
    extractor: extractors.Extractor, tmp_path: Path
) -> None:
    name, _, digits = extractor.label.partition("@")
    assert name == "lanterns-features-64"
    assert len(digits) == 8
    other = tmp_path / "other.safetensors"
    write_weights(AttributeClassifier().state_dict(), other)
    assert dataclasses.replace(extractor, weights=other).label != extractor.label


def test_full_size_weights_are_found_in_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    path = tmp_path / "weights-inception-2015-12-05-6726825d.pth"
    torch.save({"Mixed_7c.branch_pool.conv.weight": torch.zeros(3)}, path)
    extractor_of_folder = extractors.find_extractor("inception-v3-compat")
    assert extractor_of_folder.weights == path
    assert extractor_of_folder.label.startswith("inception-v3-compat-2048@")


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("a pickle ran code",))


@pytest.mark.parametrize(
    ("name", "weights", "error", "problem"),
    [
        (
            "inception-v3-compat",
            None,
            RefusedError,
            r"LANTERN_BENCH_WEIGHTS names .* has weights-inception-2015-12-05-6726825d\.pth",
        ),
        ("inception-v3-compat", "nowhere.pth", UserError, r"nowhere\.pth"),
        (
            "inception-v3-compat",
            "resnet.pth",
            UserError,
            r"resnet\.pth: is not the weights of inception-v3-compat",
        ),
        ("inception-v3-compat", "code.pth", UserError, r"code\.pth: is a pickle with code in it"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(
    name: str,
    weights: str | None,
    error: type[Exception],
    problem: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in ("TORCH_HOME", "LANTERN_BENCH_WEIGHTS"):
        monkeypatch.setenv(folder, str(tmp_path))
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pth")
    torch.save({"a": _Code()}, tmp_path / "code.pth")
    with pytest.raises(error, match=problem):
        extractors.find_extractor(name, tmp_path / weights if weights else None)
    assert "a pickle ran code" not in capsys.readouterr().out


def test_lantern_coco_preprocesses_as_the_authors() -> None:
    protocol = PROTOCOLS["lantern-coco"]
    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    picture = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    by_hand = (
        Image.fromarray(pixels).crop((80, 0, 560, 480)).resize((256, 256), Image.Resampling.LANCZOS)
    )
    prepared = extractors.preprocess(picture, protocol.preparation)
    assert np.array_equal(prepared.permute(1, 2, 0).numpy(), np.asarray(by_hand))
    for_features = extractors.resized(
        prepared, protocol.preparation.features_size, Image.Resampling.BICUBIC
    )
    larger = by_hand.resize((299, 299), Image.Resampling.BICUBIC)
    assert np.array_equal(for_features.permute(1, 2, 0).numpy(), np.asarray(larger))
    assert protocol.clip_prefix == "A photo depicts "
    assert torch.equal(extractors.preprocess(picture, Preparation()), picture)


# ---- Reference sets


def paint(folder: Path, names: str = "abcdef", size: tuple[int, int] = (64, 64)) -> Path:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
    return folder


@pytest.mark.long
def test_the_embedded_features_are_those_of_the_painted_scenes() -> None:
    """Painting takes half a minute.

    Processors round a few pixels differently: the hash of all pixels changes, and a few features
    change by less than 0.001. Scenes of another seed differ by 0.3 on average.
    """
    scenes, label = reference_scenes()
    embedded = extractors.embedded_reference()
    assert embedded.label.partition(", sha256=")[0] == label.partition(", sha256=")[0]
    torch.testing.assert_close(
        embedded.statistics.features,
        extractors.features_of(scenes, extractors.find_extractor()),
        rtol=1e-3,
        atol=1e-3,
    )


def test_the_embedded_reference_belongs_to_the_bundled_extractor(
    extractor: extractors.Extractor,
) -> None:
    embedded = extractors.find_reference("embedded", EMBEDDED)
    assert isinstance(embedded, extractors.FeatureReference)
    assert embedded.label == extractors.embedded_reference().label
    embedded_set = embedded.features(extractors.find_extractor())
    assert embedded_set.n == 1024
    assert embedded_set.features is not None
    with pytest.raises(UserError, match=f"of {embedded.extractor}, not of {extractor.label}"):
        embedded.features(extractor)


def test_written_features_are_read_back(
    tmp_path: Path, extractor: extractors.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = torch.stack(
        [extractors.read_picture(path) for path in sorted(paint(tmp_path / "set").iterdir())]
    )
    monkeypatch.setattr(extractors, "EMBEDDED_FEATURES", tmp_path / "reference.safetensors")
    write_embedded(
        path=extractors.EMBEDDED_FEATURES,
        scenes=pictures,
        extractor=extractor,
        label="six pictures",
    )
    embedded = extractors.embedded_reference()
    assert embedded.label == "six pictures"
    written = embedded.features(extractor).features
    assert written is not None
    assert torch.equal(written, extractors.features_of(pictures, extractor))


def test_folder_reference_reads_pictures_by_name(tmp_path: Path) -> None:
    for name, size in (("b.png", 16), ("a.png", 20)):
        Image.new("RGB", (size, size), (200 if name == "a.png" else 10, 0, 0)).save(tmp_path / name)
    reference = extractors.find_reference(str(tmp_path), EMBEDDED)
    assert isinstance(reference, extractors.PictureReference)
    assert [int(extractors.read_picture(path)[0, 0, 0]) for path in reference.paths] == [200, 10]
    assert f"{tmp_path.name}, n=2, sha256=" in reference.label


def test_files_that_are_no_pictures_are_counted(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.PNG")
    for name in ("a.pgm", "b.PGM", "notes.txt", "LICENSE"):
        (tmp_path / name).touch()
    heard: list[Any] = []
    with heard_by(heard.append):
        assert len(extractors.folder_reference(tmp_path).paths) == 1
    assert "that are not read: 2 .pgm, " in heard[0].text
    assert "1 .txt" in heard[0].text
    assert "1 LICENSE" in heard[0].text


def test_a_link_to_a_picture_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("gone.png")
    with pytest.raises(UserError, match=r"a\.png: cannot be read: No such file"):
        extractors.folder_reference(tmp_path)


def test_pictures_in_subfolders_belong_to_a_reference(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    names = ("set/n01/a.JPEG", "set/n02/a.JPEG", "set/n02/deep/b.bmp", "elsewhere/c.png")
    for name in (*names, "set/.hidden/d.png", "set/__MACOSX/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    for name in ("set/._a.png", "set/n01/._a.JPEG"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "set" / "linked").symlink_to(elsewhere)
    (tmp_path / "set" / "n01" / "up").symlink_to(tmp_path / "set")
    reference = extractors.folder_reference(tmp_path / "set")
    found = [path.relative_to(tmp_path / "set").as_posix() for path in reference.paths]
    assert found == ["linked/c.png", "n01/a.JPEG", "n02/a.JPEG", "n02/deep/b.bmp"]


def test_float32_statistics_are_possible(tmp_path: Path) -> None:
    """Of fewer pictures than features, so that many eigenvalues are 0 up to rounding."""
    features = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    covariance = np.cov(features, rowvar=False).astype(np.float32)
    np.savez(tmp_path / "a.npz", mu=features.mean(axis=0), sigma=covariance)
    assert extractors.find_reference(str(tmp_path / "a.npz"), EMBEDDED) is not None


def test_a_coco_annotation_lists_the_pictures(tmp_path: Path) -> None:
    folder = paint(tmp_path / "val")
    listed = {
        "images": [{"id": 1, "file_name": "b.png"}, {"id": 2, "file_name": "d.png"}],
        "annotations": [],
    }
    (tmp_path / "val.json").write_text(json.dumps(listed))
    for name in (f"{tmp_path / 'val.json'}", f"{tmp_path / 'val.json'}={folder}"):
        reference = extractors.find_reference(name, EMBEDDED)
        assert isinstance(reference, extractors.PictureReference)
        assert len(reference.paths) == 2
        assert reference.paths[1] == folder / "d.png"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("val.json", '{"images": [{"file_name": "z.png"}]}', "1 of 1 pictures are not in"),
        ("val.json", '{"images": []}', "lists no pictures"),
        ("val.json", '{"pictures": []}', "not a COCO annotation file"),
        ("val.json", "[", "not a COCO annotation file"),
        ("wrong.npz", {"mu": np.zeros(3)}, "mu"),
        ("wrong.npz", {"mu": np.zeros(3), "sigma": np.eye(4)}, "mu"),
        ("a.npz", {"mu": np.array([0, np.nan, 0]), "sigma": np.eye(3)}, "mu has 1 values that are"),
        (
            "a.npz",
            {"mu": np.zeros(3), "sigma": np.full((3, 3), np.inf)},
            "sigma has 9 values that are",
        ),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.tri(3)}, "sigma is not symmetric"),
        ("a.npz", {"mu": np.zeros(3), "sigma": -np.eye(3)}, "the largest variance in sigma is -1"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.diag([1, 2, -0.1])}, "negative variance -0.1"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.zeros((3, 3))}, "the largest variance"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.eye(3), "n": 1}, "n is 1, and a covariance"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.eye(3), "n": 9.5}, "n is 9.5"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.eye(3), "n": [5, 6]}, "not a file of stat"),
        ("a.npz", {"mu": np.zeros(3), "sigma": np.eye(3) * 1j}, "not a file of statistics"),
        ("a.npz", "PK broken", "not a file of statistics"),
        ("nowhere", None, "no such folder or file"),
        ("others", None, "no pictures in the reference folder others, which holds 2 .npy, 1 .tar"),
    ],
)
def test_references_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: Any, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "val")
    (tmp_path / "others").mkdir()
    for name in ("a.npy", "b.npy", "c.tar", "._d.png"):
        (tmp_path / "others" / name).touch()
    if isinstance(content, str):
        (tmp_path / file).write_text(content)
    elif content:
        np.savez(tmp_path / file, **content)
    with pytest.raises(UserError, match=problem):
        extractors.find_reference(file, EMBEDDED)


def test_statistics_from_a_file(tmp_path: Path, extractor: extractors.Extractor) -> None:
    path = tmp_path / "coco.npz"
    np.savez(path, mu=np.zeros(64), sigma=np.eye(64), n=np.int64(5000))
    reference = extractors.find_reference(str(path), EMBEDDED)
    assert isinstance(reference, extractors.FeatureReference)
    assert reference.label.startswith("coco (statistics), n=5000")
    assert reference.features(extractor).n == 5000
    np.savez(path, mu=np.zeros(10), sigma=np.eye(10))
    narrow = extractors.find_reference(str(path), EMBEDDED)
    assert isinstance(narrow, extractors.FeatureReference)
    with pytest.raises(UserError, match="has 10 features, lanterns-features has 64"):
        narrow.features(extractor)


def test_the_embedded_reference_is_for_its_protocol_alone() -> None:
    assert extractors.find_reference(None, PROTOCOLS["lantern-coco"]) is None
    with pytest.raises(UserError, match="not for the protocol lantern-coco"):
        extractors.find_reference("embedded", PROTOCOLS["lantern-coco"])


def test_cache_key_is_content_extractor_and_preprocessing(
    tmp_path: Path, extractor: extractors.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    features_of = extractors.features_of

    def counted(pictures: Any, *settings: Any, device: str) -> torch.Tensor:
        read = list(pictures)
        passes.append(len(read))
        return features_of(read, *settings, device=device)

    monkeypatch.setattr(extractors, "features_of", counted)
    cache = tmp_path / "cache"
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(cache))
    folder = paint(tmp_path / "set")

    def measured(preparation: Preparation = PLAIN) -> extractors.FeatureSet:
        return extractors.folder_reference(folder).features(extractor, preparation, "cpu")

    first = measured()
    second = measured()
    assert passes == [6]
    assert first.features is not None
    assert second.features is not None
    assert torch.equal(first.features, second.features)
    assert np.array_equal(first.mean, second.mean)
    folder = folder.rename(tmp_path / "renamed")
    (folder / "a.png").rename(folder / "later.png")
    measured()
    assert passes == [6]
    measured(CROPPED)
    paint(folder, "g")
    measured()
    assert passes == [6, 6, 7]
    (cached,) = [
        path
        for path in (cache / "references").iterdir()
        if load_file(path)["features"].shape[0] == 7
    ]
    cached.write_bytes(b"damaged")
    measured()
    assert passes == [6, 6, 7, 7]


def test_reference_sizes_must_agree_unless_resized(
    tmp_path: Path, extractor: extractors.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the cache cannot be written, which is no error."""
    folder = paint(tmp_path / "set")
    no_folder = tmp_path / "file"
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(no_folder))
    paint(folder, "z", (90, 70))
    no_folder.write_text("")
    reference = extractors.folder_reference(folder)
    with pytest.raises(UserError, match="differ in size"):
        reference.features(extractor, PLAIN, "cpu")
    assert reference.features(extractor, CROPPED, "cpu").n == 7
