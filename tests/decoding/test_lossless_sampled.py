"""The strict rule is lossless, seen through sampled steps: G-tests of first and joint tokens, with power.

Thousands of images with a tabular target decode one step through `verify` and are completed from the target. The right
rule passes; broken ones are rejected by the same test.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from torch import Tensor

from lantern_bench.certify.broken import strict_without_residual
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.acceptance.walk import verify
from lantern_bench.decoding.sampling import Draws, draw_without_replacement, sample, uniform
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.decoding.rules import STRICT
from tests.decoding.tabular import Prefix, Setting, Tabular

VOCABULARY, LENGTH, IMAGES = 4, 3, 20_000
SHAPE = StaticTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
SETTINGS = {"plain": Setting(), "filtered": Setting(temperature=0.9, top_k=3, top_p=0.95, cfg_scale=1.5)}


class Tables:
    """p or q [codes, V] of every prefix; the code of a prefix is its tokens + 1 in base V + 1."""

    def __init__(self, model: Tabular) -> None:
        self.p = torch.zeros((VOCABULARY + 1) ** LENGTH, VOCABULARY)
        self.q = torch.zeros_like(self.p)
        for code in range(len(self.p)):
            prefix = self.prefix(code)
            if prefix is not None:
                self.p[code], self.q[code] = model.p(prefix).float(), model.q(prefix).float()

    @staticmethod
    def prefix(code: int) -> Prefix | None:
        digits = np.base_repr(code, VOCABULARY + 1)
        tokens = tuple(int(digit) - 1 for digit in digits if code)
        return None if -1 in tokens else tokens

    @staticmethod
    def codes(tree: DraftTree) -> Tensor:
        """[B, M], from the root down; nodes are numbered parents first."""
        codes = torch.zeros_like(tree.tokens)
        for node in range(1, tree.tokens.shape[1]):
            above = codes.gather(1, tree.parents[:, node : node + 1].clamp_min(0)).squeeze(1)
            codes[:, node] = above * (VOCABULARY + 1) + tree.tokens[:, node] + 1
        return codes


def static_draft(tables: Tables, noise: torch.Generator) -> DraftTree:
    tokens = torch.zeros(IMAGES, len(SHAPE.parents), dtype=torch.int64)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    q = torch.zeros(*tokens.shape, VOCABULARY)
    for level in SHAPE.levels:
        q[:, level.nodes] = tables.q[Tables.codes(SHAPE.draft(tokens, None))[:, level.nodes]]
        clocks = torch.empty(IMAGES, len(level.nodes), VOCABULARY).exponential_(generator=noise)
        drawn, able = draw_without_replacement(q[:, level.nodes], level.fanout, clocks)
        tokens[:, level.children] = drawn[:, level.slot, level.rank]
        valid[:, level.children] = able[:, level.slot, level.rank]
    return SHAPE.draft(tokens, q, valid)


def dynamic_draft(model: Tabular) -> DraftTree:
    one = model.dynamic_draft(nodes=5, rounds=2, beam=2)
    batched = {
        name: value.expand(IMAGES, *value.shape[1:]) for name, value in vars(one).items() if torch.is_tensor(value)
    }
    return DraftTree(**{**vars(one), **batched})


def p_values(
    model: Tabular, tables: Tables, tree: DraftTree, noise: torch.Generator, rule: AcceptanceRule = STRICT
) -> tuple[float, float]:
    """Decode one step for all images, complete to LENGTH tokens, and G-test first and joint tokens."""
    draws = Draws([noise], "cpu")
    uniforms = uniform(draws.bits(*tree.children.shape))[0]
    last = draws.exponential(IMAGES, VOCABULARY)[0]
    verdict = verify(tree, tables.p[Tables.codes(tree)], rule, uniforms, last)
    code = torch.zeros(IMAGES, dtype=torch.int64)
    made = []
    for place in range(LENGTH):
        fresh = sample(tables.p[code], draws.exponential(IMAGES, VOCABULARY)[0])
        made.append(torch.where(place <= verdict.accepted, verdict.tokens[:, place], fresh))
        code = code * (VOCABULARY + 1) + made[-1] + 1
    return g_test(model, torch.stack(made, dim=1), 1), g_test(model, torch.stack(made, dim=1), LENGTH)


def g_test(model: Tabular, tokens: Tensor, length: int) -> float:
    distribution = model.distribution_after((), length)
    cells = {prefix: place for place, prefix in enumerate(distribution)}
    found, counts = np.unique(tokens[:, :length].numpy(), axis=0, return_counts=True)
    observed = np.zeros(len(distribution))
    for row, count in zip(found.tolist(), counts, strict=True):
        if tuple(row) not in cells:
            return 0.0
        observed[cells[tuple(row)]] = count
    expected = np.array(list(distribution.values()))
    return float(power_divergence(observed, expected / expected.sum() * len(tokens), lambda_="log-likelihood").pvalue)


def run(drafting: str, setting: str, rule: AcceptanceRule = STRICT) -> tuple[float, float]:
    noise = torch.Generator().manual_seed(11)
    model = Tabular(VOCABULARY, SETTINGS[setting], seed=6)
    tables = Tables(model)
    tree = static_draft(tables, noise) if drafting == "static" else dynamic_draft(model)
    return p_values(model, tables, tree, noise, rule)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafting", ["static", "dynamic"])
def test_sampled_steps_follow_the_target(drafting: str, setting: str) -> None:
    first, joint = run(drafting, setting)
    print(f"G-test {drafting} {setting}: first p = {first:.3f}, joint p = {joint:.3f}")
    assert min(first, joint) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafting", ["static", "dynamic"])
def test_200_000_images_follow_the_target(drafting: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "IMAGES", 200_000)
    first, joint = run(drafting, setting)
    print(f"G-test of 200,000 images, {drafting} {setting}: first p = {first:.3f}, joint p = {joint:.3f}")
    assert min(first, joint) > 1e-3


@pytest.mark.parametrize("drafting", ["static", "dynamic"])
def test_without_the_residual_the_test_rejects(drafting: str) -> None:
    first, joint = run(drafting, "plain", AcceptanceRule(accept=strict_without_residual))
    print(f"broken, residual left out, {drafting}: first p = {first:.1e}, joint p = {joint:.1e}")
    assert max(first, joint) < 1e-6


def test_a_deterministic_draft_taken_for_a_sampled_one_is_rejected() -> None:
    noise = torch.Generator().manual_seed(11)
    model = Tabular(VOCABULARY, Setting(), seed=6)
    tables = Tables(model)
    tree = dynamic_draft(model)
    pretended = DraftTree(**{**vars(tree), "q": tables.q[Tables.codes(tree)]})
    first, joint = p_values(model, tables, pretended, noise)
    print(f"broken, deterministic draft taken for a sampled one: first p = {first:.1e}, joint p = {joint:.1e}")
    assert max(first, joint) < 1e-6
