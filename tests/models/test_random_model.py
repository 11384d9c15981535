"""Models without checkpoints: sizes on the meta device and random weights, also from the command
line.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lantern_bench.cli import main as cli
from lantern_bench.models import registry
from lantern_bench.models.checkpoint_model import ModelSpec
from lantern_bench.models.families.llamagen import TextToImage
from lantern_bench.models.random_weights import meta_model, random_model, sizes_of

SMALL = {
    "dim": 32,
    "n_layer": 2,
    "n_head": 2,
    "intermediate_size": 64,
    "cls_token_num": 6,
    "caption_dim": 8,
}
SMALL |= {"vocab_size": 64}
SMALL_VQ = {"codes": 64, "channels": 32, "z_channels": 32, "channel_mult": (1, 1), "res_blocks": 1}


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the published model have small sizes."""
    spec = ModelSpec(about="small", config=SMALL, vq=SMALL_VQ, grid=(2, 2))
    described = TextToImage("llamagen-t2i-stage1", spec)
    monkeypatch.setattr(registry, "models", lambda: {described.name: described})


def test_sizes_are_computed_on_the_meta_device() -> None:
    model: Any = meta_model("llamagen-t2i-stage1")
    for module in (model.target, model.drafter, model.pixels.model):
        assert all(parameter.is_meta for parameter in module.parameters())
    sizes = {size.part: size for size in sizes_of(model, torch.bfloat16, guided=True, nodes=26)}
    assert sizes["target"].parameters == 777923840
    assert sizes["target"].bytes == 2 * 777923840
    assert sizes["drafter"].parameters == 44567040
    assert sizes["tokenizer"].bytes == 4 * sizes["tokenizer"].parameters
    rows = 2
    positions = math.ceil((120 + 256 + 2 * 26) / 8) * 8
    assert sizes["target's cache"].bytes == 2 * 36 * rows * positions * 1280 * 2


def test_dry_run_prints_sizes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "picture.png"
    typed = [
        "generate",
        "--model",
        "llamagen-c2i-3B",
        "--random-weights",
        "--dry-run",
        "--dtype",
        "bfloat16",
    ]
    assert cli.main([*typed, "--out", str(out)]) == 0
    written = capsys.readouterr()
    table = pd.read_csv(io.StringIO(written.out)).set_index("part")
    assert table.loc["target", "gigabytes"] == pytest.approx(2 * 3.097, abs=0.01)
    assert "memory needed" in written.err
    assert not out.exists()


def test_random_weights_depend_only_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    models = [
        random_model(
            name="llamagen-t2i-stage1",
            device=torch.device("cpu"),
            dtype=dtype,
            generator=torch.Generator().manual_seed(3),
        )
        for dtype in (torch.float32, torch.float32, torch.bfloat16)
    ]
    targets: list[Any] = [model.target for model in models]
    first, second, half = (dict(target.named_parameters()) for target in targets)
    assert all(torch.equal(first[name], second[name]) for name in first)
    wide = {name for name, value in half.items() if value.dtype != torch.bfloat16}
    assert wide == {"transformer.output.weight"}  # logits are float32
    drafter: Any = models[0].drafter
    assert drafter.head(torch.ones(1, 32)).shape == (1, 64)
    condition = models[0].condition(["a lamp"])
    assert torch.equal(condition.values, models[1].condition(["a lamp"]).values)
    assert not torch.equal(condition.values, models[0].condition(["another"]).values)


def test_generate_warns_that_the_weights_are_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    out = tmp_path / "picture.png"
    typed = ["generate", "--model", "llamagen-t2i-stage1", "--random-weights", "--out", str(out)]
    assert cli.main([*typed, "--tree", "small-7"]) == 0
    assert (
        "the weights of llamagen-t2i-stage1 are random (seed 0, float32)" in capsys.readouterr().err
    )
    assert out.is_file()
