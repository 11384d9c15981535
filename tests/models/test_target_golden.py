"""The target against recordings of the official LlamaGen: logits, guidance, padding, cached greedy decoding.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), section 1 of its README.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.decode.sampling import guide
from lantern_bench.models.conditioning import CaptionFeatures, ClassLabel, Condition
from lantern_bench.models.llamagen import from_official
from lantern_bench.models.target import TransformerTarget
from lantern_bench.models.transformer import TransformerConfig

GOLDEN = Path(os.environ.get("LANTERN_BENCH_GOLDEN", Path(__file__).parents[1] / "golden")) / "llamagen_gpt"
SHAPES = {
    "c2i": {"dim": 64, "heads": 4, "ffn_dim": 256, "prefix": 1},
    "t2i": {"dim": 48, "heads": 3, "ffn_dim": 128, "prefix": 120},
}


def load(kind: str) -> tuple[TransformerTarget, dict[str, Tensor], Condition]:
    config = TransformerConfig(vocab_size=128, layers=3, grid=(4, 4), **SHAPES[kind])
    condition = ClassLabel(10, 64) if kind == "c2i" else CaptionFeatures(120, 32, 48)
    target = TransformerTarget(config, condition).eval()
    official = torch.load(GOLDEN / f"{kind}.pt", weights_only=True)["model"]
    target.load_state_dict(from_official(official))
    expected = load_file(GOLDEN / f"{kind}_expected.safetensors")
    if kind == "c2i":
        classes = expected["class_ids"]
        return target, expected, Condition(classes, torch.ones(len(classes), 1, dtype=torch.bool))
    return target, expected, Condition(expected["caption_embs"], expected["emb_masks"].bool())


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_logits_equal_the_official_ones(kind: str) -> None:
    target, expected, condition = load(kind)
    tokens = expected["tokens"].long()
    batch, n = tokens.shape
    session = target.session(batch, guided=True, nodes=n)
    start = session.prefill(condition)
    attention = torch.ones(n - 1, n - 1, dtype=torch.bool).tril().expand(batch, -1, -1)
    rest = session.score(tokens[:, :-1], torch.arange(n - 1).expand(batch, -1), attention)
    got = torch.cat([start.cond, rest.cond], dim=1)
    null = torch.cat([start.uncond, rest.uncond], dim=1)
    at = expected["logits_positions"].long() - (target.config.prefix - 1)
    assert (got[:, at] - expected["logits_cond"]).abs().max() < 2e-4
    assert (null[:, at] - expected["logits_uncond"]).abs().max() < 2e-4


@pytest.mark.parametrize(("kind", "scale"), [("c2i", 4.0), ("c2i", 1.0), ("t2i", 7.5), ("t2i", 1.0)])
@torch.no_grad()
def test_greedy_decoding_equals_the_official_one(kind: str, scale: float) -> None:
    target, expected, condition = load(kind)
    wanted = expected[f"greedy_cfg{scale}"].long()
    batch, n = wanted.shape
    session = target.session(batch, guided=scale != 1, nodes=1)
    scores = session.prefill(condition)
    tokens: list[Tensor] = []
    itself = torch.ones(batch, 1, 1, dtype=torch.bool)
    for _ in range(n):
        tokens.append(guide(scores.cond, scores.uncond, scale)[:, -1].argmax(-1))
        scores = session.score(tokens[-1][:, None], torch.zeros(batch, 1, dtype=torch.int64), itself)
        session.commit(torch.zeros(batch, 1, dtype=torch.int64), torch.ones(batch, dtype=torch.int64))
    assert torch.stack(tokens, dim=1).equal(wanted)
