"""The corners of one node's acceptance: nothing left, children that are not there, random numbers
of exactly 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lantern_bench.decoding.acceptance.children import Acceptance
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import verify
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import StaticTree, link_nodes
from tests.helpers import rules
from tests.helpers.random_trees import random_rule
from tests.helpers.rules import STRICT, rule_named

OFFICIAL = rule_named("strict", residual="official")


def accept(
    p: list[float], q: list[float] | None, tokens: list[int], rule: ConfiguredRule
) -> Acceptance:
    return rules.accept(
        p=torch.tensor([p]),
        q=None if q is None else torch.tensor([q]),
        tokens=torch.tensor([tokens]),
        rule=rule,
    )


def final(acceptance: Acceptance, p: list[float]) -> list[float]:
    return acceptance.bonus_distribution(torch.tensor([0]), torch.tensor([p]))[0].tolist()


def test_with_nothing_left_a_deterministic_draft_falls_back() -> None:
    p = [0.0, 1.0, 0.0, 0.0]
    exact = accept(p=p, q=None, tokens=[1, 2], rule=STRICT)
    assert exact.accept.tolist() == [[1.0, 0.0]]
    assert exact.exhausted.tolist() == [True]
    assert final(exact, p) == p
    official = accept(p=p, q=None, tokens=[1, 2], rule=OFFICIAL)
    assert official.accept.tolist() == [[1.0, 0.25]]
    torch.testing.assert_close(final(official, p), [1 / 3, 1 / 3, 0.0, 1 / 3])


def test_with_nothing_left_a_sampled_draft_falls_back() -> None:
    """Rounding can leave a p below q everywhere: the first child may be rejected, and then nothing
    is left.
    """
    p = [0.4999999, 0.5]
    q = [0.5, 0.5]
    exact = accept(p=p, q=q, tokens=[0, 1], rule=STRICT)
    assert 0.99 < float(exact.accept[0, 0]) < 1.0
    assert exact.accept[0, 1] == 0.0
    torch.testing.assert_close(final(exact, p), p)
    official = accept(p=p, q=q, tokens=[0, 1], rule=OFFICIAL)
    # Uniform, and the second child, whose q is now 1, is still tried.
    assert official.accept[0, 1] == 0.5
    assert final(official, p) == [1.0, 0.0]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("residual", ["exact", "official"])
def test_children_that_are_not_offered_change_nothing(sampled: bool, residual: str) -> None:
    rng = np.random.default_rng(3)
    noise = torch.Generator().manual_seed(3)
    for _ in range(50):
        p, q = torch.softmax(2 * torch.randn(2, 1, 9, generator=noise), dim=-1)
        table = nearest_codes(torch.randn(9, 3, generator=noise), 8)
        rule = random_rule(rng=rng, vocabulary=9, table=table, residual=residual)
        tokens = torch.randperm(9, generator=noise)[None, :5]
        offered = torch.tensor([[True, False, True, True, False]])

        def accepted(
            shown: list[int], p=p, q=q, rule=rule, tokens=tokens, offered=offered
        ) -> Acceptance:
            return rules.accept(
                p=p,
                q=q if sampled else None,
                tokens=tokens[:, shown],
                rule=rule,
                offered=offered[:, shown],
            )

        every = accepted([0, 1, 2, 3, 4])
        without = accepted([0, 2, 3])
        assert torch.equal(every.accept[:, [0, 2, 3]], without.accept)
        assert torch.equal(every.neighbour_mass[:, [0, 2, 3]], without.neighbour_mass)
        assert not every.accept[:, [1, 4]].any()
        assert torch.equal(every.residual, without.residual)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_uniform_of_zero_does_not_accept_the_impossible(sampled: bool) -> None:
    p = torch.tensor([0.0, 0.6, 0.4]).expand(1, 3, 3)
    shape = StaticTree.of([(0,), (1,)])
    tokens = torch.tensor([[0, 0, 1]])
    if sampled:
        tree = shape.draft(
            tokens,
            torch.tensor([0.5, 0.5, 0.0]).expand(1, 3, 3),
            torch.tensor([[True, True, False]]),
        )
        assert tree.children[0, 0].tolist() == [1, -1]
    else:
        tree = link_nodes(
            tokens=tokens,
            parents=torch.tensor([[-1, 0, 0]]),
            depths=torch.tensor([[0, 1, 1]]),
            ranks=torch.tensor([[0, 0, 1]]),
            valid=torch.tensor([[True, True, False]]),
            fanout=2,
            max_depth=1,
        )
    verdict = verify(
        tree=tree,
        target_probs=p,
        rule=STRICT,
        uniforms=torch.zeros(1, 3, 2),
        noise=torch.ones(1, 3),
    )
    assert verdict.accepted.tolist() == [0]
    assert verdict.child_rank.tolist() == [[-1]]
    # The residual is p - q = [., .1, .4], or p without token 0.
    assert verdict.tokens.tolist() == [[2 if sampled else 1, 0]]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_official_fallback_excludes_forced_tokens(sampled: bool) -> None:
    """Tokens from `n_codes` on are forced: when nothing is left, what takes its place is uniform
    over the others.
    """
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]) if sampled else None
    table = torch.tensor([[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]])
    rule = rule_named(name="additive", neighbours=1, bound=0.5, residual="official", table=table)
    rule = replace(rule, codebook=replace(rule.codebook, n_codes=4))
    acceptance = rules.accept(p=p, q=q, tokens=torch.tensor([[0]]), rule=rule)
    assert acceptance.bonus_distribution(torch.tensor([0]), torch.zeros(1, 5)).tolist() == [
        [0.25, 0.25, 0.25, 0.25, 0.0]
    ]
