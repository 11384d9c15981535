"""The worked example of docs/adding-a-model.md, transformers' Janus in the decode loop, on a small checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, JanusForConditionalGeneration

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from tests.examples.tiny_hosted import CAPTIONS, EXAMPLE, write_model


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("janus"))


def loaded(path: Path) -> LoadedModel:
    return model_of(str(path)).load(torch.device("cpu"), torch.float32)


def test_example_has_under_120_lines() -> None:
    assert len((EXAMPLE / "hosted_janus.py").read_text().splitlines()) < 120


@pytest.mark.parametrize("text", [{}, {"num_key_value_heads": 4}, {"hidden_size": 48, "num_attention_heads": 3}])
def test_greedy_tokens_and_pixels_equal_those_of_transformers(
    text: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole pictures with guidance: autoregressive, and drafted without a drafter."""
    path = write_model(tmp_path, **({"num_key_value_heads": 3} if "hidden_size" in text else {}) | text)
    theirs: Any = JanusForConditionalGeneration.from_pretrained(path.parent / "Janus-Pro-1B").eval()
    ids = torch.tensor([loaded(path).condition(CAPTIONS[:1]).values[0, 0].tolist()])
    settings = GenerationConfig(guidance_scale=3.0, do_sample=False, bos_token_id=1, pad_token_id=0, max_length=64)
    settings.generation_kwargs = {"boi_token_id": 2}
    seen = torch.ones_like(ids)
    wanted = theirs.generate(ids, attention_mask=seen, generation_mode="image", generation_config=settings)
    for mode in ("ar", "sjd"):
        (image,) = lantern_bench.decode(loaded(path), CAPTIONS[0], mode=mode, temperature=0, cfg_scale=3)
        assert image.tokens.tolist() == wanted[0].tolist() and image.picture is not None
    with torch.no_grad():
        drawn = theirs.decode_image_tokens(wanted)
    picture = ((drawn.clamp(-1, 1) + 1) * 127.5).round()
    assert (loaded(path).pixels.pixels(wanted).float() - picture).abs().max() <= 1


def test_example_passes_every_check(janus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [word for caption in CAPTIONS for word in ("--prompt", caption)]
    assert cli.main(["check-model", str(janus), *typed, "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = dict(line.split(",")[:2] for line in lines[1:])
    assert results == dict.fromkeys(("logits", "cache", "tree", "forced tokens", "guidance", "codebook"), "pass")


def test_sweeps_take_the_model_file(janus: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "two.yaml"
    experiment.write_text(
        f"name: two\nmodel: {janus}\nimages: 2\nprompts: {tmp_path / 'captions.txt'}\nmetrics: [speed]\n"
        "neighbours: 3\ncells: [{mode: ar}, {mode: sjd}, {mode: sjd, rule: multiplicative, lambda: 2}]\n"
    )
    (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
    assert cli.main(["sweep", str(experiment), "--out", str(tmp_path / "run")]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert len(records) == 6 and {record["status"] for record in records} == {"ok"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import missing_package_of_nobody", "python: hosted_janus.py: cannot be imported: ModuleNotFoundError"),
        ("x = 1", "must define one subclass of HostedModel, and defines 0"),
        (
            "from lantern_bench.models.hosted import HostedModel\nclass Model(HostedModel):\n    codes = 3\n",
            "python: Model lacks __init__, codebook, embed_codes, embed_words, logits, pixels, prompts",
        ),
    ],
)
def test_files_that_are_no_model_are_refused(
    code: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Janus-Pro-1B").mkdir()
    shutil.copy(EXAMPLE / "janus.yaml", tmp_path / "janus.yaml")
    (tmp_path / "hosted_janus.py").write_text(code)
    assert cli.main(["check-model", str(tmp_path / "janus.yaml")]) == 2
    assert expected in capsys.readouterr().err


def test_cards_know_the_files(janus: Path) -> None:
    from lantern_bench.models.registry import model_of

    card = model_of(str(janus))
    assert card.defaults["cfg_scale"] == 5.0 and card.files()["code"].name == "hosted_janus.py"
    assert loaded(janus).weights.keys() == {"target", "code"} and card.mode == "scd"


def test_drafters_cannot_be_trained_for_it(janus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
    typed = ["train", "drafter", "--target", str(janus), "--data", str(tmp_path / "captions.txt")]
    assert cli.main([*typed, "--out", str(tmp_path / "drafter"), "--dry-run"]) == 2
    assert "has no features to learn from" in capsys.readouterr().err
