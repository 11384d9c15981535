"""Anole and Lumina-mGPT through `generate`: recordings, pictures in every mode, sizes, prompts as token ids.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), section 8 of its README.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lantern_bench.cli import main as cli
from lantern_bench.config.methods import MODES
from lantern_bench.models import registry
from lantern_bench.models.chameleon import ChameleonVocabulary
from lantern_bench.models.chameleon.family import FAMILY
from tests.models import golden_models, tiny_chameleon
from tests.models.golden_models import GOLDEN

RECORDING = GOLDEN / "chameleon"


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "families", lambda: {"chameleon": FAMILY})


def test_logits_equal_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prefix of the recorded prompts has recorded logits: those of the image's tokens, in the order of codes."""
    expected = load_file(RECORDING / "chameleon_expected.safetensors")
    stated = json.loads((RECORDING / "config.json").read_text())
    codes = list(ChameleonVocabulary(stated["vocabulary_map"], "the recording").codes)
    for swin in (0, 1):
        config = {"swin_norm": bool(swin)}
        target = {"checkpoint": RECORDING / "model.safetensors", "layout": "hf", "config": config}
        model = golden_models.write_model(tmp_path, family="anole-7b", target=target, grid=[2, 3])
        recorded = expected[f"swin{swin}.logits_unmasked"][..., codes].numpy()
        for length in (5, recorded.shape[1]):
            np.savez(tmp_path / "prompts.npz", input_ids=expected["input_ids"][:, :length].numpy())
            flags = ["--mode", "ar", "--temperature", "0", "--cfg-scale", "1", "--save-logits", "--force"]
            flags += ["--condition", str(tmp_path / "prompts.npz"), "--save-tokens", str(tmp_path / "made.npz")]
            assert cli.main(["generate", "--model", str(model), *flags]) == 0
            with np.load(tmp_path / "made.npz") as made:
                assert made["tokens"].shape == (2, 6) and made["logits"].shape == (2, 6, len(codes))
                assert np.abs(made["logits"][:, 0] - recorded[:, length - 1]).max() < 2e-4
                assert (made["tokens"][:, 0] == recorded[:, length - 1].argmax(-1)).all()
    assert "no picture" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "tokens"), [("anole", 16), ("lumina-mgpt", 20)])
def test_pictures_in_every_mode(family: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_chameleon.write_model_file(tmp_path, family, (4, 4))
    picture, made = tmp_path / "picture.png", tmp_path / "made.npz"
    flags = ["--out", str(picture), "--neighbours", "5", "--nodes", "12", "--depth", "3", "--beam", "3"]
    flags += ["--images", "2", "--format", "json"]
    assert cli.main(["generate", "a red lantern", "--model", str(model), "--mode", "all", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * len(MODES) and {row["tokens"] for row in rows} == {tokens}
    assert Image.open(picture).size == (len(MODES) * 8, 2 * 8)
    flags = ["--out", str(picture), "--mode", "speculative", "--save-tokens", str(made), "--force"]
    assert cli.main(["generate", "a red lantern", "--model", str(model), *flags]) == 0
    with np.load(made) as arrays:
        lines = arrays["tokens"].reshape(4, -1)
    assert (lines[:, :4] < tiny_chameleon.CODES).all() and (lines[:, 4:] == tiny_chameleon.CODES).all()


@pytest.mark.parametrize(("name", "rows"), [("anole-7b", 8192), ("lumina-mgpt-7b-768", 8193)])
def test_dry_run_states_sizes_without_allocating(
    name: str, rows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of more than ten million elements is allocated outside the meta device."""
    real = torch.empty

    def watched(*arguments: object, **named: object) -> torch.Tensor:
        made = real(*arguments, **named)
        assert made.is_meta or made.numel() < 10**7
        return made

    monkeypatch.setattr(torch, "empty", watched)
    flags = ["--random-weights", "--dry-run", "--dtype", "bfloat16", "--format", "json"]
    assert cli.main(["generate", "--model", name, *flags]) == 0
    parts = {row["part"]: row for row in json.loads(capsys.readouterr().out)}
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096 + 4 * 4096)
    assert parts["target"]["parameters"] == layers + (65536 + rows + 1) * 4096


def test_malformed_token_ids_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_chameleon.write_model_file(tmp_path, "anole", (4, 4))
    np.savez(tmp_path / "features.npz", embeddings=np.zeros((1, 4, 8)), mask=np.ones((1, 4)))
    typed = ["generate", "--model", str(model), "--condition", str(tmp_path / "features.npz"), "--out"]
    assert cli.main([*typed, str(tmp_path / "picture.png")]) == 2
    told = capsys.readouterr().err
    assert "input_ids must be there, whole numbers" in told and "Traceback" not in told


def test_too_long_caption_is_refused_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_chameleon.write_model_file(tmp_path, "anole", (4, 4))
    (tmp_path / "drafter" / "config.json").unlink()
    typed = ["generate", "red " * 300, "--model", str(model), "--out", str(tmp_path / "picture.png")]
    assert cli.main(typed) == 2
    assert "has 303 tokens, and at most 256 are taken" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()
