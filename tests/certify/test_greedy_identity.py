"""Greedy identity: equal tokens, or a difference at a near-tie of the logits of greedy decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.certify.greedy_identity import NEAR_TIE, greedy_agreements
from lantern_bench.config.decoding import Decoding
from lantern_bench.config.plan import Prompt
from lantern_bench.decoding.protocol import Logits
from lantern_bench.models.loaded_model import LoadedModel
from tests.tiny_model import PROMPTS, TinyModel, TinySession, TinyTarget

ALL = [Prompt(text) for text in PROMPTS]
GREEDY = [
    Decoding(mode="speculative", tree="small-7", temperature=0),
    Decoding(mode="speculative", drafting="dynamic", nodes=6, depth=2, beam=3, temperature=0),
]


@pytest.fixture
def model() -> LoadedModel:
    return TinyModel().load(torch.device("cpu"), torch.float32)


def test_greedy_speculation_equals_greedy_decoding(model: LoadedModel) -> None:
    found = list(greedy_agreements(model, ALL, GREEDY, batch=2))
    assert [decoding for decoding, _ in found] == GREEDY * 2
    assert [one.prompt for decoding, part in found for one in part if decoding == GREEDY[0]] == ALL
    assert all(one.difference is None and not one.near_tie for _, part in found for one in part)


class _Rounding(TinySession):
    """Scores of a tree differ slightly from those of one node, as rounding causes."""

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        scores = super().score(tokens, depths, attention)
        if tokens.shape[1] == 1:
            return scores
        top = scores.cond.topk(2, dim=-1).indices
        turned = scores.cond.scatter_add(-1, top[..., 1:], torch.full_like(scores.cond[..., :1], self.table.turn))  # type: ignore[attr-defined]
        return scores._replace(cond=turned)


class _Turned(TinyTarget):
    def session(self, batch: int, guided: bool, nodes: int) -> Any:
        return _Rounding(self, batch, guided)


@pytest.mark.parametrize(("gap", "near"), [(NEAR_TIE["float32"] / 2, True), (0.01, False)])
def test_difference_is_near_tie_only_below_the_margin(model: LoadedModel, gap: float, near: bool) -> None:
    target = _Turned(1.0, 1)
    # Every token has two most probable successors, `gap` apart; the scores of a tree swap them.
    first = target.cond.argmax(dim=-1, keepdim=True)
    second = (first + 1) % target.cond.shape[-1]
    top = target.cond.max(dim=-1, keepdim=True).values
    target.cond = target.cond.scatter(-1, second, top - gap)
    target.turn = 2 * gap  # type: ignore[attr-defined]
    found = [one for _, part in greedy_agreements(replace(model, target=target), ALL, GREEDY[:1]) for one in part]
    assert all(one.difference is not None for one in found)
    assert [one.difference[1] for one in found] == [pytest.approx(gap, abs=1e-6)] * len(found)  # type: ignore[index]
    assert all(one.near_tie is near for one in found)
