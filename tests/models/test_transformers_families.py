"""Models that transformers hosts: our logits, greedy images and pixels against its own, from checkpoints it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.registry import load_model
from tests.models import tiny_hosted as tiny

CPU, FLOAT, SCALE = torch.device("cpu"), torch.float32, 3.0
SHAPES = {
    "plain": tiny.Shape(),
    "grouped-query": tiny.Shape(kv_heads=2, ffn=40),
    "one key head, tied": tiny.Shape(heads=4, kv_heads=1, tied=True, codes=33),
    "odd grid, three resolutions": tiny.Shape(dim=24, heads=6, kv_heads=3, ffn=37, side=5, mult=(1, 2, 2), blocks=2),
    "deep, tied, long rotation": tiny.Shape(dim=48, heads=3, kv_heads=3, layers=4, tied=True, theta=500.0, side=3),
    "two frames, no attention": tiny.Shape(dim=40, heads=5, kv_heads=5, ffn=56, codes=100, code_dim=12, mult=(2, 1)),
}
SHAPES["two frames, no attention"] = SHAPES["two frames, no attention"]._replace(frames=2, attends=False)
WRITERS: dict[str, tuple[Callable[..., Any], Callable[..., tiny.Expected]]] = {
    "janus": (tiny.write_janus, tiny.expect_janus),
    "emu3": (tiny.write_emu3, tiny.expect_emu3),
}


def written(folder: Path, family: str, shape: tiny.Shape) -> tuple[Any, Any]:
    """Transformers' model and ours, from the same files."""
    theirs = WRITERS[family][0](folder / "weights", shape)
    # Janus states its grid; Emu3's pictures may have any.
    grid = f"grid: [{shape.side}, {shape.side + 1}]\n" if family == "emu3" else ""
    (folder / "model.yaml").write_text(f"family: {family}\n{grid}target: {{checkpoint: weights}}\n")
    return theirs, load_model(str(folder / "model.yaml"), CPU, FLOAT)


@pytest.mark.parametrize("family", WRITERS)
@torch.no_grad()
def test_agreement_with_transformers(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table that this test prints is the bar: at least five shapes a family."""
    rows = []
    for name, shape in SHAPES.items():
        theirs, model = written(tmp_path / name, family, shape)
        condition = model.condition(["a red lantern over the lake"])
        prompts = [values[valid] for values, valid in zip(condition.values[0], condition.valid[0], strict=True)]
        wanted = WRITERS[family][1](theirs, *prompts, model.grid, SCALE)
        forced = teacher_forced(model.target, condition, wanted.tokens[None], guided=True)
        chosen = model.target.forced(torch.arange(len(wanted.tokens))) < 0
        error = max(
            float((ours[0, chosen, : model.target.choices] - theirs[chosen, : model.target.choices]).abs().max())
            for ours, theirs in zip((forced.scores.cond, forced.scores.uncond), wanted.logits, strict=True)
        )
        greedy = Decoding(mode="ar", temperature=0, cfg_scale=SCALE)
        made = decode(model, condition, greedy, [torch.Generator()])[0].tokens
        pixels = model.pixels.pixels(wanted.tokens[None])[0]
        levels = int((pixels.int() - wanted.pixels.int()).abs().max())
        rows.append(f"{family} | {name} | {error:.1e} | {bool(made.equal(wanted.tokens))} | {levels}")
        assert error < 1e-4, rows
        assert made.tolist() == wanted.tokens.tolist(), rows
        assert pixels.shape == wanted.pixels.shape and levels <= 1, rows
        # Weights with which these checks could fail: tokens differ, and pixels are not all black or white.
        assert len(set(made.tolist())) > 2 and float(((pixels > 0) & (pixels < 255)).float().mean()) > 0.2
    with capsys.disabled():
        print("", "family | shape | logits error | tokens equal | pixels differ by (grey levels)", *rows, sep="\n")
