"""The compiled verification gives the same verdicts as the eager one, on thousands of random trees.

Compilers make mistakes of their own (torch 2.15 finds the largest of 8-bit numbers at wrong places
when there are ten of them), and a wrong walk still paints pictures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.verify import Verdict, verify, verify_greedy
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.helpers.random_trees import dynamic_trees, random_static, random_topology
from tests.helpers.rules import rule_named

NODES = 59
FANOUT = 10
DEPTH = 5
VOCABULARY = 50
ROUNDS = 50
BATCH = 50
CODES = torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"name": "additive", "neighbours": 12, "bound": 0.4, "residual": "official"},
    "dynamic, wide": {"name": "additive", "neighbours": 12, "bound": 0.4, "residual": "official"},
    "static": {"name": "multiplicative", "neighbours": 12, "bound": 2.0},
    "static, strict": {"name": "strict"},
    "block": {"name": "block"},
    "traversal": {"name": "traversal"},
    "greedy": {"name": "additive", "neighbours": 12, "bound": 0.3},
    "static, cool-sd": {"name": "cool-sd", "bound": 1.3},
    "dynamic, cool-sd": {"name": "cool-sd", "bound": 8.0},
    "static, gsd": {"name": "gsd", "bound": 4, "residual": "official", "codebook": CODES},
    "static, entropy": {"name": "entropy", "neighbours": 12, "bound": 0.3},
    "dynamic, typical": {"name": "typical", "bound": 0.09},
    "dynamic, csd": {"name": "csd", "bound": 0.95},
    "static, addition": {"name": "addition", "bound": 0.2},
}
EVERY_TIME = ("dynamic", "greedy", "block")
"""The others compile for up to a minute each: `long`."""


def sharp(rng: torch.Generator, *shape: int) -> Tensor:
    return (3 * torch.randn(*shape, VOCABULARY, generator=rng)).softmax(-1)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind not in EVERY_TIME)) for kind in KINDS],
)
def test_compiled_walks_are_the_same(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = torch.Generator().manual_seed(0)
    table = nearest_codes(torch.randn(VOCABULARY, 3, generator=noise), VOCABULARY - 1)
    # A program has one part for each child rank, that of GSD another for each place of a cluster,
    # that of traversal for each sum of child ranks. The `long` ones have as many as the widest tree
    # in use.
    small = {
        "dynamic": (16, 3),
        "block": (DEPTH + 1, 1),
        "static, gsd": (14, 2),
        "traversal": (12, 2),
        "greedy": (16, 3),
    }
    nodes, fanout = small.get(kind, (NODES, FANOUT))
    shape = StaticTree.of(random_topology(rng=rng, nodes=nodes - 1, fanout=fanout, depth=DEPTH))

    rule = rule_named(**KINDS[kind], table=table)

    def decided(tree: DraftTree, p: Tensor, uniforms: Tensor, ends: Tensor) -> Verdict:
        return (
            verify_greedy(tree, p.log(), rule)
            if kind == "greedy"
            else verify(tree=tree, target_probs=p, rule=rule, uniforms=uniforms, noise=ends)
        )

    compiled = Engine(compile=True).program(kind, decided, torch.device("cpu"))
    accepted = 0
    at_fault = 0
    for _ in range(ROUNDS):
        p = sharp(noise, BATCH, nodes)
        if kind.startswith("dynamic"):
            tree = dynamic_trees(
                rng=rng, batch=BATCH, nodes=nodes, vocabulary=VOCABULARY, depth=DEPTH, fanout=fanout
            )
        else:
            # Near p, so that long paths are kept too.
            tree = random_static(
                rng=rng,
                noise=noise,
                q=(0.5 * p + 0.5 * sharp(noise, BATCH, nodes)),
                shape=shape,
                filled=False,
            )
        uniforms = torch.rand(tree.children.shape, generator=noise)
        ends = torch.empty(BATCH, VOCABULARY).exponential_(generator=noise)
        verdict = compiled(tree, p, uniforms, ends)
        wanted = decided(tree, p, uniforms, ends)
        # A rounding may turn a decision that stands within 1e-6 of its threshold: once in a million
        # of them.
        same = (verdict.path == wanted.path).all(1) & (verdict.tokens == wanted.tokens).all(1)
        same &= (verdict.child_rank == wanted.child_rank).all(1)
        at_fault += int((~same).sum())
        torch.testing.assert_close(
            verdict.next_probs[same], wanted.next_probs[same], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            verdict.neighbour_mass_tried[same], wanted.neighbour_mass_tried[same], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            verdict.emitted_tv[same], wanted.emitted_tv[same], atol=1e-4, rtol=0
        )
        accepted += int(wanted.accepted.sum())
    assert at_fault <= 1
    assert accepted > ROUNDS * BATCH / 4
    print(f"{kind}: {ROUNDS * BATCH} trees, {accepted} accepted, {at_fault} at a rounding")
