"""Lumina-mGPT 2.0 against its arithmetic written out (`tiny_lumina2`): logits, greedy pictures,
pixels; its card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lantern_bench.checks.check_model import TOLERANCE, check_model
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.teacher_forcing import teacher_forced
from lantern_bench.models.random_weights import meta_model
from lantern_bench.models.registry import model_of
from lantern_bench.utils.errors import UserError
from tests.helpers import tiny_lumina2 as tiny

CPU = torch.device("cpu")
SCALE = 4.0
SHAPES = {
    "plain": tiny.Shape(),
    "grouped-query": tiny.Shape(kv_heads=2, ffn=40, grid=(4, 8)),
    "head norms in two parts": tiny.Shape(parts=2, kv_heads=2, mult=(1, 2), grid=(8, 4)),
    "head norms of each head": tiny.Shape(parts=4, layers=3, attends=False),
    "odd sizes": tiny.Shape(
        dim=36, heads=6, kv_heads=3, ffn=37, codes=33, mult=(1, 2, 2), blocks=2
    ),
    "norms after, other rotation": tiny.Shape(
        swin=True, theta=500.0, code_dim=6, channels=64, mult=(1,)
    ),
}
# Every test run compares one shape; the others belong to the long tests.
DEFAULT = "head norms in two parts"
SHAPES_BY_COST = [
    name if name == DEFAULT else pytest.param(name, marks=pytest.mark.long) for name in SHAPES
]
CAPTION = ["red", "lantern", "over", "the", "image"]


@pytest.mark.parametrize("name", SHAPES_BY_COST)
@torch.no_grad()
def test_agreement_with_the_arithmetic_written_out(name: str, tmp_path: Path) -> None:
    """Prompts, logits, the greedy picture and its pixels are those of the authors' arithmetic."""
    shape = SHAPES[name]
    path = tiny.write(tmp_path / "model", shape)
    state = load_file(path.parent / "model.safetensors")
    vq = torch.load(path.parent / "movqgan_270M.ckpt", weights_only=True)
    model: Any = model_of(str(path)).load(CPU, torch.float32)
    condition = model.condition([" ".join(CAPTION)])
    for ours, theirs, valid in zip(
        condition.values[0], tiny.prompts(CAPTION, shape), condition.valid[0], strict=True
    ):
        assert ours[valid].tolist() == theirs
    tokens, *their_logits = tiny.greedy(state=state, shape=shape, caption=CAPTION, scale=SCALE)
    forced = teacher_forced(model.target, condition, tokens[None], guided=True).logits
    free = tokens < shape.codes
    for ours, theirs in zip((forced.cond, forced.uncond), their_logits, strict=True):
        assert (ours[0, free, : shape.codes] - theirs[free]).abs().max() < 1e-4
    for mode in ("ar", "scd"):
        (image,) = decode(
            model=model,
            condition=condition,
            decoding=Decoding(mode, temperature=0, cfg_scale=SCALE),
            generators=[torch.Generator()],
        )
        assert image.tokens.tolist() == tokens.tolist()
    picture = model.draw(tokens[None])[0]
    drawn = tiny.pixels(vq, shape, tokens[free]).permute(1, 2, 0)
    assert picture.shape == drawn.shape
    assert (picture - ((drawn.clamp(-1, 1) + 1) * 127.5)).abs().max() <= 1
    # Weights with which these checks could fail: tokens differ, and pixels are not all black or
    # white.
    assert len(set(tokens[free].tolist())) > 2
    assert float(((picture > 0) & (picture < 255)).float().mean()) > 0.2


def test_check_model_passes_and_neighbours_are_of_its_own_codebook(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "model", SHAPES["head norms in two parts"])
    model = model_of(str(path)).load(CPU, torch.float32)
    draws = torch.Generator().manual_seed(0)
    captions = ["red lantern", "image over the lantern"]
    checks = check_model(model, captions, tolerance=TOLERANCE["float32"], generator=draws)
    assert {check.check: check.result for check in checks if check.result != "pass"} == {
        "logits": "none"
    }
    rows = torch.load(path.parent / "movqgan_270M.ckpt", weights_only=True)[
        "quantize.embedding.weight"
    ]
    assert model.codebook is not None
    assert torch.equal(model.codebook, rows)
    distance = torch.cdist(rows, rows).fill_diagonal_(torch.inf)
    assert model.table(1)[: len(rows), 0].tolist() == distance.argmin(-1).tolist()


def test_pictures_become_tokens_with_row_ends(tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    model: Any = model_of(str(tiny.write(tmp_path / "model", shape))).load(CPU, torch.float32)
    pictures = torch.randint(
        256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    tokens = model.pixels.tokens(pictures)
    assert tokens.shape == (2, 20)
    assert (tokens[:, 4::5] == shape.codes).all()
    assert (tokens[:, :4] < shape.codes).all()


def test_card_and_full_shape_are_the_published_ones() -> None:
    """Bytes of the published shards: 4.96 + 4.98 + 4.42 + 1.40 GB in bfloat16; MoVQGAN 270M: 1.08
    GB in float32.
    """
    card = model_of("lumina-mgpt2")
    assert (card.name, card.tokens, card.codes, card.mode) == (
        "lumina-mgpt2-7b",
        96 * 97,
        16384,
        "scd",
    )
    assert card.defaults["cfg_scale"] == 4.0
    assert card.defaults["top_k"] == 4096
    assert card.licence == "Apache-2.0"
    assert "768x768 px" in card.description
    assert card.parameters is not None
    assert 2 * card.parameters == pytest.approx(15.76e9, abs=0.02e9)
    model: Any = meta_model("lumina-mgpt2-7b")
    assert model.drafter is None
    target: Any = model.target
    assert (target.image_tokens, target.n_codes, target.config.text_vocab_size) == (
        9312,
        16384,
        171385,
    )
    counted = sum(parameter.numel() for parameter in model.pixels.model.parameters())
    assert 4 * counted == pytest.approx(1.08e9, abs=0.01e9)


def test_prompt_is_the_authors(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "model", tiny.Shape(grid=(8, 4)))
    wording = model_of(str(path)).wording()
    text = wording.template.format(caption="a cat")
    assert text == "Generate an image of 32x64 according to the following prompt:\na cat"
    assert wording.before == ("<|im_end|>",)
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}))
    assert model_of(str(path)).wording().before == ("<|endoftext|>",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("grid: [4, 4]", "grid: [4, 6]", "this model's pictures have a multiple of 4 of each"),
        (
            "first_code: 70",
            "first_code: -1",
            "target.config.first_code: -1: must be a whole number",
        ),
        ("codes: 40", "codes: many", "target.config.codes: many: must be a whole number"),
    ],
)
def test_model_files_that_cannot_be_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "model", SHAPES["plain"])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError) as caught:
        model_of(str(path)).load(CPU, torch.float32).condition(["red lantern"])
    assert message in caught.value.message
    assert "\n" not in caught.value.message
