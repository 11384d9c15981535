"""Nothing inside a step waits for the device: every piece runs on tensors that have shapes but no
values.
"""

from __future__ import annotations

import pytest
import torch

from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import verify, verify_greedy
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.sampling import draw_without_replacement, probabilities
from lantern_bench.decoding.tree import DraftTree, StaticTree
from lantern_bench.methods.static_trees import STATIC_TREES
from tests.helpers.rules import STRICT, rule_named

BATCH = 3
VOCABULARY = 64
TABLE = torch.empty(VOCABULARY, 11, dtype=torch.int32, device="meta")
RULES = [
    STRICT,
    rule_named(name="additive", neighbours=10, bound=0.1, residual="exact", table=TABLE),
    rule_named(name="multiplicative", neighbours=10, bound=2.0, residual="official", table=TABLE),
    rule_named("cool-sd", 0, 1.1),
    rule_named(
        name="gsd",
        neighbours=0,
        bound=14,
        residual="official",
        codebook=torch.empty(VOCABULARY, 8, device="meta"),
    ),
    rule_named("entropy", 10, 0.1, table=TABLE),
    rule_named("typical", 0, 0.09),
    rule_named("csd", 0, 0.65),
    rule_named("addition", 0, 0.1),
]


def numbers(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def static_draft() -> DraftTree:
    shape = StaticTree.of(STATIC_TREES["eagle1-25"], device="meta")
    nodes = len(shape.depths)
    tokens, _ = draw_without_replacement(
        numbers(BATCH, VOCABULARY), nodes, numbers(BATCH, VOCABULARY)
    )
    valid = torch.ones(BATCH, nodes, dtype=torch.bool, device="meta")
    return shape.draft(tokens, numbers(BATCH, nodes, VOCABULARY), valid)


def dynamic_draft() -> DraftTree:
    growth = Growth(numbers(BATCH, VOCABULARY), 4)
    growth.grow(numbers(BATCH, 4, VOCABULARY))
    limit = torch.ones(BATCH, dtype=torch.int64, device="meta")
    return growth.tree(torch.zeros(BATCH, dtype=torch.int64, device="meta"), 9, limit)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("draft", [static_draft, dynamic_draft])
def test_a_step_reads_no_value_on_the_host(draft, rule: ConfiguredRule) -> None:
    tree = draft()
    nodes = tree.tokens.shape[1]
    logits = numbers(BATCH, nodes, VOCABULARY)
    p = probabilities(logits, temperature=0.9, top_k=20, top_p=0.9)
    limit = torch.zeros(BATCH, dtype=torch.int64, device="meta")
    verdict = verify(
        tree=tree,
        target_probs=p,
        rule=rule,
        uniforms=numbers(*tree.children.shape),
        noise=numbers(BATCH, VOCABULARY),
        depth_limit=limit,
    )
    assert verdict.tokens.shape == verdict.path.shape == (BATCH, tree.max_depth + 1)
    assert verdict.child_rank.shape == (BATCH, tree.max_depth)
    assert verdict.next_probs.shape == (BATCH, VOCABULARY)
    greedy = verify_greedy(tree=tree, guided_logits=logits, rule=rule, depth_limit=limit)
    assert verdict.visit_probability is None is greedy.visit_probability
    tensors = {name: value for name, value in vars(verdict).items() if value is not None}
    for name, value in tensors.items():
        assert getattr(greedy, name).shape == value.shape, name
        assert getattr(greedy, name).dtype == value.dtype, name
