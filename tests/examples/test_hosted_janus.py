"""The worked example of docs/adding-a-model.md, transformers' Janus in the decode loop, on a small
checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JanusForConditionalGeneration

import lantern_bench
from lantern_bench.cli import main as cli
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.registry import model_of
from tests.examples.tiny_hosted import CAPTIONS, EXAMPLE, SHAPE, write_model
from tests.helpers import tiny_hosted


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("janus"))


def loaded(path: Path) -> LoadedModel:
    return model_of(str(path)).load(torch.device("cpu"), torch.float32)


def test_example_has_under_120_lines() -> None:
    assert len((EXAMPLE / "hosted_janus.py").read_text().splitlines()) < 120


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4}, {"dim": 48, "heads": 3, "kv_heads": 3}])
def test_greedy_tokens_and_pixels_equal_those_of_transformers(
    changes: dict[str, int], tmp_path: Path
) -> None:
    """Whole pictures with guidance: autoregressive, and drafted without a drafter."""
    path = write_model(tmp_path, SHAPE._replace(**changes))
    theirs: Any = JanusForConditionalGeneration.from_pretrained(path.parent / "Janus-Pro-1B").eval()
    model = loaded(path)
    prompt = model.condition(CAPTIONS[:1]).values[0, 0]
    theirs.generation_config.generation_kwargs = {"boi_token_id": int(prompt[-1])}
    wanted = tiny_hosted.expect_janus(
        theirs, prompt=prompt, null=prompt, grid=model.grid, scale=3.0
    )
    whole_rows = {"mode": "zipar", "window": model.grid[1]}  # in raster order
    for values in ({"mode": "ar"}, {"mode": "sjd"}, whole_rows):
        (image,) = lantern_bench.decode(model, CAPTIONS[0], **values, temperature=0, cfg_scale=3)
        assert image.tokens.tolist() == wanted.tokens.tolist()
        assert image.picture is not None
    assert len(set(image.tokens.tolist())) > 2
    assert (model.draw(wanted.tokens[None])[0].float() - wanted.pixels.float()).abs().max() <= 1


def test_example_passes_every_check(janus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = []
    for caption in CAPTIONS:
        typed += ["--prompt", caption]
    assert cli.main(["check-model", str(janus), *typed, "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = dict(line.split(",")[:2] for line in lines[1:])
    assert results == dict.fromkeys(
        ("logits", "cache", "tree", "forced tokens", "guidance", "codebook"), "pass"
    )


def test_sweeps_take_the_model_file(janus: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "two.yaml"
    lines = [
        "name: two",
        f"model: {janus}",
        "images: 2",
        f"prompts: {tmp_path / 'captions.txt'}",
        "metrics: [speed]",
        "neighbours: 3",
        "cells: [{mode: ar}, {mode: sjd}, {mode: sjd, rule: multiplicative, lambda: 2}]",
    ]
    experiment.write_text("\n".join(lines) + "\n")
    (tmp_path / "captions.txt").write_text("\n".join(CAPTIONS))
    assert cli.main(["sweep", str(experiment), "--out", str(tmp_path / "run")]) == 0
    records = [
        json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    ]
    assert len(records) == 6
    assert {record["status"] for record in records} == {"ok"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "import missing_package_of_nobody",
            "python: hosted_janus.py: cannot be imported: ModuleNotFoundError",
        ),
        ("x = 1", "must define one subclass of HostedModel, and defines 0"),
        (
            "from lantern_bench.models.hosted import HostedModel\n"
            "class Model(HostedModel):\n    codes = 3\n",
            "python: Model lacks __init__, codebook, embed_codes, embed_words, logits, prompts",
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
    card = model_of(str(janus))
    assert card.defaults["cfg_scale"] == 5.0
    assert card.files()["code"].name == "hosted_janus.py"
    assert loaded(janus).weights.keys() == {"target", "code"}
    assert card.mode == "scd"
