"""What a step does on average: every draft and every end of the walk, enumerated.

The truth takes each step through `verify`, forced to stop at each node in turn.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.expectation import ScoredDrafts
from lantern_bench.decoding.acceptance.verify import accept_drafts, verify
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.catalog import RULES
from tests.helpers.rules import rule_named
from tests.helpers.tabular import Setting, Tabular, force_stops

VOCABULARY = 4
FEATURES = 3
EXAMPLES = {
    "additive": 0.2,
    "multiplicative": 3.0,
    "entropy": 0.4,
    "cool-sd": 1.6,
    "gsd": 3,
    "typical": 0.2,
    "csd": 0.65,
    "addition": 0.3,
}
TREES = ("chain", "wide", "small", "dynamic")
# with the depth drafted to
SETTINGS = [(Setting(), 3), (Setting(top_k=3), 2)]


def configured(name: str, residual: str) -> ConfiguredRule:
    codebook = torch.randn(VOCABULARY, 2, generator=torch.Generator().manual_seed(1)).double()
    return rule_named(
        name,
        neighbours=3,
        bound=EXAMPLES.get(name),
        residual=residual,
        table=nearest_codes(codebook, VOCABULARY - 1),
        codebook=codebook,
    )


def cases() -> list[tuple[str, str, str]]:
    found = []
    for name, row in RULES.items():
        official = row.kind == "by neighbours" or row.official_removal is not None
        for residual in ("exact", "official") if official else ("exact",):
            for shape in TREES:
                if row.accept_tree and (shape == "dynamic" or (row.chains and shape != "chain")):
                    continue
                found.append((name, residual, shape))
    return found


class Average(NamedTuple):
    """Means over a step."""

    length: float
    shift: Tensor  # [F], summed over the tokens
    emitted_tv: float


def feature_of(prefix: tuple[int, ...]) -> Tensor:
    """Features [F, V] of the tokens behind a prefix, which differ from prefix to prefix."""
    seed = 1 + sum((token + 1) * 7**place for place, token in enumerate(prefix))
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(FEATURES, VOCABULARY, generator=noise, dtype=torch.float64)


def features_at(tree: DraftTree, p: Tensor) -> Tensor:
    """Centred features [B, M, F, V] at every node."""
    images, nodes = tree.tokens.shape
    every = torch.zeros(images, nodes, FEATURES, VOCABULARY, dtype=torch.float64)
    for image in range(images):
        for node in range(nodes):
            above = tree.attention[image, node].nonzero()[1:, 0]
            raw = feature_of(tuple(tree.tokens[image, above].tolist()))
            every[image, node] = raw - (raw @ p[image, node])[:, None]
    return every


def by_enumeration(
    weights: Tensor,
    tree: DraftTree,
    p: Tensor,
    *,
    rule: ConfiguredRule,
    limit: Tensor,
    features: Tensor,
) -> Average:
    """The means over every draft, every end of the walk and every bonus token."""
    _, acceptance = accept_drafts(tree=tree, target_probs=p, rule=rule, depth_limit=limit)
    stops, forced = force_stops(tree, tree.by_node(acceptance.accept))
    length = 0.0
    emitted_tv = 0.0
    shift = torch.zeros(FEATURES, dtype=torch.float64)
    for uniforms, stop in zip(forced, stops, strict=True):
        chance = weights * stop
        verdict = verify(
            tree=tree,
            target_probs=p,
            rule=rule,
            uniforms=uniforms,
            noise=torch.ones(len(p), VOCABULARY, dtype=torch.float64),
            depth_limit=limit,
        )
        length += float((chance * (verdict.accepted + 1)).sum())
        emitted_tv += float((chance * verdict.emitted_tv).sum())
        for image in chance.nonzero()[:, 0].tolist():
            path = verdict.path[image, : int(verdict.accepted[image]) + 1]
            emitted = features[image, path[-1]] @ verdict.next_probs[image]
            for node, child in pairwise(path.tolist()):
                emitted = emitted + features[image, node, :, tree.tokens[image, child]]
            shift += chance[image] * emitted
    return Average(length, shift, emitted_tv)


@pytest.mark.parametrize(("setting", "depth"), SETTINGS)
@pytest.mark.parametrize(("name", "residual", "shape"), cases())
def test_expected_length_and_shift_are_exact(
    name: str, residual: str, shape: str, setting: Setting, depth: int
) -> None:
    model = Tabular(VOCABULARY, setting, seed=3)
    weights, tree = model.drafts(shape)
    p = model.target_at(tree)
    rule = configured(name, residual)
    limit = torch.full((len(p),), depth)
    features = features_at(tree, p)
    truth = by_enumeration(weights, tree, p, rule=rule, limit=limit, features=features)
    step = ScoredDrafts(tree, p.clone(), features, depth_limit=limit).expected(rule)
    reach = weights[:, None] * step.reach
    assert float(reach.sum()) == pytest.approx(truth.length, abs=1e-6)
    shift = (reach[..., None] * step.shift).sum(dim=(0, 1))
    assert_close(shift, truth.shift, atol=1e-6, rtol=0)
    if RULES[name].lossless:
        assert_close(shift, torch.zeros_like(shift), atol=1e-6, rtol=0)
    elif shape == "small" and not setting.top_k:
        assert float(shift.abs().max()) > 1e-3
    if step.emitted_tv is not None:
        of_step = float((reach * step.emitted_tv).sum())
        assert of_step == pytest.approx(truth.emitted_tv, abs=1e-5)


def test_a_limit_of_0_commits_one_token_of_p() -> None:
    model = Tabular(VOCABULARY, Setting(), seed=3)
    _, tree = model.drafts("small")
    p = model.target_at(tree)
    limit = torch.zeros(len(p), dtype=torch.int64)
    drafts = ScoredDrafts(tree, p, features_at(tree, p), depth_limit=limit)
    step = drafts.expected(configured("strict", "exact"))
    assert not step.tries.any()
    assert_close(step.reach.sum(dim=1), torch.ones(len(p), dtype=torch.float64))
    assert_close(step.shift, torch.zeros_like(step.shift), atol=1e-9, rtol=0)


def test_a_rule_reads_the_position_of_a_draft() -> None:
    """A relaxed rule from position 5 on, which is strict before it."""
    additive = configured("additive", "exact")
    row = replace(
        additive.row,
        function=lambda draft, values: torch.where(draft.position < 5, 0.0, draft.number(0.9)),
    )
    rule = ConfiguredRule(row, additive.values, additive.codebook)
    model = Tabular(VOCABULARY, Setting(), seed=3)
    _, tree = model.drafts("chain")
    p = model.target_at(tree)

    def reach(rule: ConfiguredRule, position: int) -> Tensor:
        positions = torch.full((len(p),), position)
        drafts = ScoredDrafts(tree, p, features_at(tree, p), position=positions)
        return drafts.expected(rule).reach

    strict = reach(configured("strict", "exact"), 0)
    assert_close(reach(rule, 0), strict)
    assert (reach(rule, 5).sum(dim=1) >= strict.sum(dim=1)).all()
    assert reach(rule, 5).sum() > strict.sum() + 1
    # At position 4, the first draft is before position 5 and the others are not.
    assert_close(reach(rule, 4)[:, :2], strict[:, :2])
    assert reach(rule, 4).sum() > strict.sum() + 0.1
