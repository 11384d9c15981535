"""The target against recordings of the official LlamaGen: logits, guidance, padding, cached greedy decoding.

Reads the folder named by LANTERN_BENCH_GOLDEN (default tests/golden), section 1 of its README, through a model file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lantern_bench.decoding.sampling import guide
from lantern_bench.models.target import Condition
from tests.models import golden_models
from tests.models.golden_models import GOLDEN


def load(kind: str, folder: Path) -> tuple[Any, dict[str, Tensor], Condition]:
    target = golden_models.load(golden_models.recorded_target(folder, kind)).target
    expected = load_file(GOLDEN / "llamagen_gpt" / f"{kind}_expected.safetensors")
    if kind == "c2i":
        classes = expected["class_ids"]
        return target, expected, Condition(classes, torch.ones(len(classes), 1, dtype=torch.bool))
    return target, expected, Condition(expected["caption_embs"], expected["emb_masks"].bool())


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@torch.no_grad()
def test_logits_equal_the_official_ones(kind: str, tmp_path: Path) -> None:
    target, expected, condition = load(kind, tmp_path)
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


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@torch.no_grad()
def test_greedy_decoding_equals_the_official_one(kind: str, tmp_path: Path) -> None:
    target, expected, condition = load(kind, tmp_path)
    recorded = [name for name in expected if name.startswith("greedy_cfg")]
    assert recorded
    for name in recorded:
        scale, wanted = float(name.removeprefix("greedy_cfg")), expected[name].long()
        batch, n = wanted.shape
        session = target.session(batch, guided=scale != 1, nodes=1)
        scores = session.prefill(condition)
        tokens: list[Tensor] = []
        itself = torch.ones(batch, 1, 1, dtype=torch.bool)
        for _ in range(n):
            tokens.append(guide(scores.cond, scores.uncond, scale)[:, -1].argmax(-1))
            scores = session.score(tokens[-1][:, None], torch.zeros(batch, 1, dtype=torch.int64), itself)
            session.commit(torch.zeros(batch, 1, dtype=torch.int64), torch.ones(batch, dtype=torch.int64))
        assert torch.stack(tokens, dim=1).equal(wanted), name
