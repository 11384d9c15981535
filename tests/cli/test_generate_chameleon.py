"""Anole and Lumina-mGPT: recordings as token ids, pictures in every mode, sizes.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), section 8 of its README.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.methods.catalog import MODES
from lantern_bench.models import registry
from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.families.chameleon import Chameleon
from lantern_bench.models.networks.target import prompt_condition
from tests.helpers import golden_models, tiny_chameleon
from tests.helpers.golden_models import GOLDEN

RECORDING = GOLDEN / "chameleon"


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {
        name: model for name, model in registry.models().items() if model.family == "chameleon"
    }
    monkeypatch.setattr(registry, "models", lambda: shipped)


def test_logits_equal_recording(tmp_path: Path) -> None:
    """Every prefix of the recorded prompts has recorded logits: those of the image's tokens, in the
    order of codes.
    """
    expected = load_file(RECORDING / "chameleon_expected.safetensors")
    stated = json.loads((RECORDING / "config.json").read_text())
    codes = list(
        Chameleon(
            "recorded",
            ModelSpec(about="", config=stated, vq={}, grid=(4, 4)),
            {"target": RECORDING},
        ).image_words()
    )
    for swin in (0, 1):
        config = {"swin_norm": bool(swin)}
        target = {"checkpoint": RECORDING / "model.safetensors", "layout": "hf", "config": config}
        model = golden_models.load(
            golden_models.write_model(tmp_path, family="anole-7b", target=target, grid=[2, 3])
        )
        recorded = expected[f"swin{swin}.logits_unmasked"][..., codes]
        for length in (5, recorded.shape[1]):
            rows = [row[:length].tolist() for row in expected["input_ids"]]
            conditions = [prompt_condition([(row, row)]) for row in rows]
            images = lantern_bench.decode(
                model,
                ["a", "b"],
                mode="ar",
                temperature=0,
                cfg_scale=1,
                conditions=conditions,
                logits=True,
            )
            for image, wanted in zip(images, recorded[:, length - 1], strict=True):
                assert image.picture is None
                assert image.logits is not None
                assert image.tokens.shape == (6,)
                assert image.logits.shape == (6, len(codes))
                assert (image.logits[0] - wanted).abs().max() < 2e-4
                assert image.tokens[0] == wanted.argmax()


@pytest.mark.parametrize(("family", "tokens"), [("anole", 16), ("lumina-mgpt", 20)])
def test_pictures_in_every_mode(
    family: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_chameleon.write_model_file(tmp_path, family, (4, 4))
    picture = tmp_path / "picture.png"
    flags = [
        "--out",
        str(picture),
        "--neighbours",
        "5",
        "--nodes",
        "12",
        "--depth",
        "3",
        "--beam",
        "3",
    ]
    flags += ["--images", "2", "--format", "json"]
    assert (
        cli.main(["generate", "a red lantern", "--model", str(model), "--mode", "all", *flags]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * len(MODES)
    assert {row["tokens"] for row in rows} == {tokens}
    drawn = Image.open(picture)
    assert drawn.size == (len(MODES) * 8, 14 + 2 * 8)
    labels = [drawn.crop((left, 0, left + 8, 14)).tobytes() for left in range(0, drawn.width, 8)]
    assert len(set(labels)) > 5, "the modes have different names"
    assert all(label.count(255) > 100 for label in labels), "every mode has a name"
    assert all(row["distance"] is not None for row in rows)
    (image,) = lantern_bench.decode(golden_models.load(model), "a red lantern", mode="speculative")
    lines = image.tokens.reshape(4, -1)
    assert (lines[:, :4] < tiny_chameleon.CODES).all()
    assert (lines[:, 4:] == tiny_chameleon.CODES).all()


@pytest.mark.parametrize(("name", "rows"), [("anole-7b", 8192), ("lumina-mgpt-7b-768", 8193)])
def test_dry_run_states_sizes_without_allocating(
    name: str, rows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of more than ten million elements is allocated outside the meta device."""
    real = torch.empty

    def watched(*arguments: object, **named: object) -> torch.Tensor:
        tensor = real(*arguments, **named)
        assert tensor.is_meta or tensor.numel() < 10**7
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    flags = ["--random-weights", "--dry-run", "--dtype", "bfloat16", "--format", "json"]
    assert cli.main(["generate", "--model", name, *flags]) == 0
    parts = {row["part"]: row for row in json.loads(capsys.readouterr().out)}
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 4 * 4096)
    assert parts["target"]["parameters"] == layers + (65536 + rows + 1) * 4096


def test_too_long_caption_is_refused_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_chameleon.write_model_file(tmp_path, "anole", (4, 4))
    (tmp_path / "drafter" / "config.json").unlink()
    typed = [
        "generate",
        "red " * 300,
        "--model",
        str(model),
        "--out",
        str(tmp_path / "picture.png"),
    ]
    assert cli.main(typed) == 2
    assert "has 303 tokens, and at most 256 are taken" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()
