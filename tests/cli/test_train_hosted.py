"""`train drafter` for models that none was published for, from captions alone; and what needs no
drafter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lantern_bench.checks.check_model import TOLERANCE, check_model
from lantern_bench.cli.main import main
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.models.networks.packed_linear import pack_for_decoding
from lantern_bench.models.registry import model_of
from tests.examples.tiny_hosted import write_model
from tests.helpers import tiny_hosted as tiny

CPU = torch.device("cpu")
SHAPE = tiny.Shape(kv_heads=2)
WRITE = {"janus": tiny.write_janus, "emu3": tiny.write_emu3}
CAPTIONS = ("a red lantern", "the lake at dusk", "a lantern over the lake", "red dusk over a lake")
QUICK = [
    "--images",
    "8",
    "--steps",
    "4",
    "--batch",
    "2",
    "--set",
    "autocast=false",
    "--eval-every",
    "2",
]
QUICK += ["--eval-images", "2", "--final-images", "2", "--device", "cpu"]


@pytest.fixture(params=[*WRITE, "python"])
def hosted(request: pytest.FixtureRequest, folder: Path) -> str:
    """A model file in the current folder: of a family here, or of one that transformers computes,
    with wide heads.
    """
    if request.param == "python":
        write_model(folder, SHAPE._replace(side=3, head_dim=12)).rename("model.yaml")
    else:
        WRITE[request.param](folder / "weights", SHAPE)
        grid = "grid: [3, 4]\n" if request.param == "emu3" else ""
        Path("model.yaml").write_text(
            f"family: {request.param}\n{grid}target: {{checkpoint: weights}}\n"
        )
    Path("captions.txt").write_text("\n".join(CAPTIONS) + "\n")
    return str(request.param)


def test_a_drafter_is_trained_and_decodes(hosted: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [
        "train",
        "drafter",
        "--target",
        "model.yaml",
        "--data",
        "captions.txt",
        "--out",
        "drafter",
        *QUICK,
    ]
    typed += ["--set", "guided=true"] if hosted == "python" else []  # its head is not linear
    assert main(typed) == 0, capsys.readouterr().err
    report = json.loads(Path("drafter/training_report.json").read_text())
    assert report["steps"] == 4
    assert 1 <= report["drafters"]["trained"]["mal"] <= 6
    described = json.loads(Path("drafter/config.json").read_text())
    model = model_of("drafter/model.yaml").load(CPU, torch.float32)
    assert described["vocab_size"] == model.target.config.embedded_tokens
    assert described["mask_padding"] is True
    images = []
    for shape in ({"mode": "ar"}, {"mode": "speculative", "tree": "small-7"}):
        greedy = Decoding(temperature=0, cfg_scale=3.0, **shape)
        images.append(
            decode(
                model=model,
                condition=model.condition([CAPTIONS[0]]),
                decoding=greedy,
                generators=[torch.Generator()],
            )[0].tokens.tolist()
        )
    assert images[0] == images[1]
    assert (model_of("model.yaml").mode, model_of("drafter/model.yaml").mode) == (
        "scd",
        "lantern++",
    )
    assert (
        main(
            [
                "generate",
                CAPTIONS[0],
                "--model",
                "drafter/model.yaml",
                "--neighbours",
                "8",
                "--out",
                "one.png",
            ]
        )
        == 0
    )
    assert "lantern++" in capsys.readouterr().out
    assert Path("one.png").is_file()


def test_generate_needs_no_drafter(hosted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", CAPTIONS[0], "--model", "model.yaml", "--out", "one.png"]) == 0
    assert "scd" in capsys.readouterr().out
    assert Path("one.png").is_file()
    space = "raw" if hosted == "emu3" else "normalised"
    assert model_of("model.yaml").load(CPU, torch.float32).neighbour_space == space


def test_hosted_models_keep_the_protocol(hosted: str) -> None:
    model = model_of("model.yaml").load(CPU, torch.float32)
    results = check_model(
        model,
        CAPTIONS[:2],
        tolerance=TOLERANCE["float32"],
        generator=torch.Generator().manual_seed(1),
    )
    assert {row.check: row.result for row in results if row.result == "fail"} == {}


def test_packed_layers_give_the_same_tokens(hosted: str) -> None:
    """The head has a bias in Janus, which packing keeps."""
    model = model_of("model.yaml").load(CPU, torch.float32)
    greedy = Decoding(mode="ar", temperature=0, cfg_scale=3.0)
    condition = model.condition([CAPTIONS[0]])
    plain = decode(
        model=model,
        condition=condition,
        decoding=greedy,
        generators=[torch.Generator()],
        keep_logits=True,
    )[0]
    pack_for_decoding(model.target, model.drafter)
    packed = decode(
        model=model,
        condition=condition,
        decoding=greedy,
        generators=[torch.Generator()],
        keep_logits=True,
    )[0]
    assert plain.logits is not None
    assert packed.logits is not None
    assert packed.tokens.equal(plain.tokens)
    assert (packed.logits - plain.logits).abs().max() < 1e-3
