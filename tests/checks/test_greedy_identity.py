"""Greedy identity: equal tokens, or a difference at a near-tie of the logits of greedy decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.checks.certification import identity_row
from lantern_bench.checks.image_tests import NEAR_TIE, greedy_differences
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Logits
from lantern_bench.models.families.lanterns.description import HELD_OUT
from lantern_bench.models.families.lanterns.family import Lanterns
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.prompts.prompt import Prompt
from tests.helpers.mistakes import step_mistakes
from tests.helpers.tiny_model import PROMPTS, TinyModel, TinySession, TinyTarget

ALL = [Prompt(text) for text in PROMPTS]
GREEDY = {
    "static": Decoding(mode="speculative", tree="small-7", temperature=0),
    "dynamic": Decoding(
        mode="speculative", drafting="dynamic", nodes=6, depth=2, beam=3, temperature=0
    ),
}


@pytest.fixture
def model() -> LoadedModel:
    return TinyModel().load(torch.device("cpu"), torch.float32)


def test_greedy_speculation_equals_greedy_decoding(model: LoadedModel) -> None:
    assert greedy_differences(model, ALL, GREEDY) == dict.fromkeys(GREEDY, [None] * len(ALL))


def test_a_wrong_cache_slot_after_a_switch_of_branches_is_rejected() -> None:
    """The tables have no cache, and images need some hundred to show it."""
    lanterns = Lanterns().load(torch.device("cpu"), torch.float32)
    mistakes = step_mistakes(GREEDY["static"])
    (mistake,) = [
        mistake
        for mistake in mistakes
        if mistake.name == "cache of the first branch after a switch"
    ]
    prompts = [Prompt(item.caption()) for item in HELD_OUT[:2]]
    with mistake.patched():
        differences = greedy_differences(
            lanterns, prompts, {"static": GREEDY["static"].changed(cfg_scale=2.0)}
        )
    assert (
        identity_row(
            model="lanterns",
            setting="static",
            differences=differences["static"],
            tolerance=NEAR_TIE["float32"],
        )["passed"]
        == "NO"
    )


class _Rounding(TinySession):
    """A tree gets slightly different scores than a single node, as from rounding."""

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Logits:
        scores = super().score(tokens, depths, attention)
        if tokens.shape[1] == 1:
            return scores
        top = scores.cond.topk(2, dim=-1).indices
        turned = scores.cond.scatter_add(
            -1, top[..., 1:], torch.full_like(scores.cond[..., :1], self.table.turn)
        )  # type: ignore[attr-defined]
        return scores._replace(cond=turned)


class _Turned(TinyTarget):
    def session(self, batch: int, *, guided: bool, nodes: int) -> Any:
        return _Rounding(self, batch, guided=guided)


@pytest.mark.parametrize(("gap", "passed"), [(NEAR_TIE["float32"] / 2, "yes"), (0.01, "NO")])
def test_difference_is_near_tie_only_below_the_margin(
    model: LoadedModel, gap: float, passed: str
) -> None:
    target = _Turned(1.0, 1)
    # Every token has two most probable successors, `gap` apart; the scores of a tree swap them.
    first = target.cond.argmax(dim=-1, keepdim=True)
    second = (first + 1) % target.cond.shape[-1]
    top = target.cond.max(dim=-1, keepdim=True).values
    target.cond = target.cond.scatter(-1, second, top - gap)
    target.turn = 2 * gap  # type: ignore[attr-defined]
    differences = greedy_differences(replace(model, target=target), ALL, GREEDY)["static"]
    assert [margin for _, margin in filter(None, differences)] == [
        pytest.approx(gap, abs=1e-6)
    ] * len(ALL)
    assert (
        identity_row(
            model="m", setting="static", differences=differences, tolerance=NEAR_TIE["float32"]
        )["passed"]
        == passed
    )
