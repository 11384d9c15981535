"""Scorers of pictures with captions: CLIP scores equal open_clip called by hand; missing weights
are named.

The CLIP model is a tiny one with random weights, written to a folder as the bundled one is.
"""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lantern_bench.methods.catalog import METRICS
from lantern_bench.metrics import image_scorers
from lantern_bench.metrics.protocols import PROTOCOLS
from lantern_bench.utils.errors import LanternError, RefusedError, UserError
from scripts.train_lanterns.part_tasks import held_out_scenes

CONFIG = {
    "model_cfg": {
        "embed_dim": 8,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 16,
            "layers": 1,
            "width": 16,
            "head_width": 8,
        },
        "text_cfg": {
            "context_length": 12,
            "vocab_size": 49408,
            "width": 8,
            "heads": 2,
            "layers": 1,
        },
    },
    "preprocess_cfg": {
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.3, 0.4],
        "interpolation": "bilinear",
    },
}
WIDER = {**CONFIG, "model_cfg": {**CONFIG["model_cfg"], "embed_dim": 16}}
CAPTIONS = ["a red lantern", "two blue lanterns over a lake", "snow"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float16, as the bundled one is shipped."""
    folder = tmp_path_factory.mktemp("clip") / "tiny"
    folder.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.CLIP(**CONFIG["model_cfg"])
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG))
    save_file(
        {k: v.half().contiguous() for k, v in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return torch.randint(
        0, 256, (3, 3, 48, 64), generator=torch.Generator().manual_seed(2), dtype=torch.uint8
    )


def test_clip_score_equals_open_clip(folder: Path, pictures: torch.Tensor) -> None:
    scorer = image_scorers.load_clip(weights=folder)
    scores = scorer(pictures, CAPTIONS)
    assert scorer.label.startswith("lanterns-clip@")
    assert len(scorer.label) == len("lanterns-clip@") + 8
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    for picture, caption, score in zip(pictures, CAPTIONS, scores, strict=True):
        pixels = preprocess(Image.fromarray(picture.permute(1, 2, 0).numpy()))
        with torch.no_grad():
            image = model.encode_image(pixels[None])[0]
            text = model.encode_text(tokenizer([caption]))[0]
        assert score == pytest.approx(float(torch.cosine_similarity(image, text, dim=0)), abs=1e-5)


def test_captions_longer_than_the_context_are_counted(folder: Path) -> None:
    """The context of the tiny model has 12 tokens, two of which are the start and the end."""
    captions = ["", "red " * 10, "red " * 11, "red " * 100]
    assert image_scorers.load_clip(weights=folder).cut(captions) == [False, False, True, True]
    prefixed = image_scorers.load_clip(weights=folder, prefix="a photo ")
    assert prefixed.cut(captions[:2]) == [False, True]


def test_the_prefix_is_put_before_captions(folder: Path, pictures: torch.Tensor) -> None:
    plain = image_scorers.load_clip(weights=folder)
    prefixed = image_scorers.load_clip(weights=folder, prefix="a photo of ")
    by_hand = plain(pictures, [f"a photo of {caption}" for caption in CAPTIONS])
    assert prefixed(pictures, CAPTIONS) == by_hand != plain(pictures, CAPTIONS)


@pytest.mark.parametrize(
    ("configuration", "weights", "error", "problem"),
    [
        (json.dumps(CONFIG), None, RefusedError, "needs open_clip_config.json and weights in"),
        (json.dumps(WIDER), "model.safetensors", UserError, r"model\.safetensors does not fit"),
        ("{", "model.safetensors", UserError, r"model\.safetensors does not fit"),
        ("[]", "model.safetensors", UserError, r"model\.safetensors does not fit"),
        ("{}", "model.safetensors", UserError, r"model\.safetensors does not fit"),
    ],
)
def test_folders_without_a_whole_model_are_refused(
    configuration: str,
    weights: str | None,
    error: type[Exception],
    problem: str,
    *,
    folder: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "open_clip_config.json").write_text(configuration)
    if weights:
        shutil.copy(folder / "open_clip_model.safetensors", tmp_path / weights)
    with pytest.raises(error, match=problem):
        image_scorers.load_clip(weights=tmp_path)


def test_full_size_by_name_and_path(folder: Path, tmp_path: Path, pictures: torch.Tensor) -> None:
    """An architecture known by name, its checkpoint a plain file: the way ViT-B-32 goes, at a size
    for tests.
    """
    (tmp_path / "ViT-tiny.json").write_text(json.dumps(CONFIG["model_cfg"]))
    open_clip.add_model_config(tmp_path)
    checkpoint = tmp_path / "tiny.safetensors"
    checkpoint.write_bytes((folder / "open_clip_model.safetensors").read_bytes())
    scorer = image_scorers.load_clip("ViT-tiny", checkpoint)
    assert scorer.label.startswith("ViT-tiny@")
    assert all(-1 <= score <= 1 for score in scorer(pictures, CAPTIONS))


def test_bundled_clip_finds_captions_of_held_out_scenes() -> None:
    """Its bar is 70 % of 100; on 50 here, the full figure is in the training report."""
    pictures, attributes = held_out_scenes(50, seed=5)
    scorer = image_scorers.load_clip()
    images = scorer.embed_pictures(pictures)
    cosines = images @ scorer.embed_captions([item.caption() for item in attributes]).T
    assert float((cosines.argmax(1) == torch.arange(50)).float().mean()) >= 0.8
    assert float(cosines.diagonal().mean()) > float(cosines.mean()) + 0.5


# ---- Human-preference scores, by their protocols


def load(name: str) -> Any:
    return METRICS[name].function()(PROTOCOLS[name.replace("_", "-")], "cpu")


@pytest.mark.parametrize(
    ("scorer", "error", "problem", "advice"),
    [
        (
            image_scorers.load_clip,
            RefusedError,
            "lanterns-clip is missing",
            "scripts.train_lanterns --part clip",
        ),
        (
            lambda: image_scorers.load_clip("ViT-B-32"),
            RefusedError,
            "ViT-B-32",
            "Put ViT-B-32.safetensors there; docs",
        ),
        (
            lambda: load("hpsv2"),
            RefusedError,
            "weights of HPSv2 are not on this machine",
            "Put HPS_v2.1_compressed.pt",
        ),
        (
            lambda: PROTOCOLS["image-reward"].find_networks(),
            RefusedError,
            "ImageReward is not installed: [^|]*has ImageReward.pt",
            ".[image-reward]",
        ),
    ],
)
def test_missing_scorers_are_refused(
    scorer: Callable[[], object],
    error: type[LanternError],
    problem: str,
    advice: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_scorers, "BUNDLED_FOLDER", tmp_path / "clip")
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    for folder in ("TORCH_HOME", "LANTERN_BENCH_WEIGHTS"):
        monkeypatch.setenv(folder, str(tmp_path))
    with pytest.raises(error, match=problem) as caught:
        scorer()
    assert advice in str(caught.value.advice)


def test_image_reward_goes_through_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published interface is load(name, device, download_root) and score(prompt, image)."""
    calls: list[Any] = []

    class Model:
        blip = types.SimpleNamespace(tokenizer=lambda text: {"input_ids": text.split()})

        def score(self, prompt: str, image: Image.Image) -> float:
            calls.append((prompt, image.size))
            return float(len(prompt))

    def load_model(name: str, device: str, download_root: str) -> Model:
        assert device == "cpu"
        calls.append((name, download_root))
        return Model()

    package = types.ModuleType("ImageReward")
    package.load = load_model  # type: ignore[attr-defined]
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "ImageReward", package)
    torch.save({"a": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    monkeypatch.setenv("LANTERN_BENCH_WEIGHTS", str(tmp_path))
    with pytest.raises(RefusedError, match=r"med_config\.json"):
        load("image_reward")
    (tmp_path / "med_config.json").write_text("{}")
    scorer = load("image_reward")
    assert scorer.label.startswith("image-reward-1.0@")
    assert scorer(torch.zeros(2, 3, 8, 9, dtype=torch.uint8), ["red", "blue!"]) == [3.0, 5.0]
    assert scorer.cut(["red " * 35, "red " * 36]) == [False, True]
    assert calls == [
        (str(tmp_path / "ImageReward.pt"), str(tmp_path)),
        ("red", (9, 8)),
        ("blue!", (9, 8)),
    ]
