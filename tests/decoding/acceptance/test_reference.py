"""The page that readers start with, `acceptance/reference.py`, decides as the batched form does."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.acceptance import reference
from lantern_bench.decoding.drafting.jacobi import couple
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.methods.static_trees import STATIC_TREES
from tests.helpers.rules import accept, rule_named
from tests.helpers.tabular import verify_step

VOCABULARY = 8
TABLE = nearest_codes(
    torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(2)), VOCABULARY - 1
)
NEAREST = TABLE[:, :3].tolist()
RULES = {
    "strict": (rule_named("strict"), reference.strict),
    "lantern": (
        rule_named("additive", neighbours=3, bound=0.2, table=TABLE),
        reference.by_neighbours(NEAREST, limit=lambda _p, _x: 0.2),
    ),
    "lantern++": (
        rule_named("multiplicative", neighbours=3, bound=3.0, table=TABLE),
        reference.by_neighbours(NEAREST, limit=lambda p, x: 2.0 * p[x]),
    ),
    "cool-sd": (
        rule_named("cool-sd", bound=1.5),
        reference.by_probability(lambda p, q: torch.where(q > 0, 1.5 * p / q, 0.0).clamp(max=1.0)),
    ),
}


def test_its_examples_are_true() -> None:
    assert doctest.testmod(reference).failed == 0


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_the_batched_form_accepts_and_leaves_the_same(name: str, sampled: bool) -> None:
    batched, scalar = RULES[name]
    noise = torch.Generator().manual_seed(1)
    for _ in range(50):
        p, q = torch.softmax(
            1.5 * torch.randn(2, VOCABULARY, generator=noise, dtype=torch.float64), dim=-1
        )
        tokens = torch.randperm(VOCABULARY, generator=noise)[:3]
        acceptance = accept(
            p=p[None], q=q[None] if sampled else None, tokens=tokens[None], rule=batched
        )
        residual = acceptance.bonus_distribution(torch.tensor([0]), p[None])[0]

        probabilities: list[float] = []
        decide = recorded(scalar, probabilities)
        _, left = reference.verify_node(
            p=p,
            q=q if sampled else None,
            drafts=tokens.tolist(),
            uniforms=[1.0] * len(tokens),  # rejects every draft
            decide=decide,
        )
        # What comes behind a draft that is certain to be accepted is never reached.
        certain = [probability >= 1 for probability in probabilities]
        reached = certain.index(True) + 1 if any(certain) else len(tokens)
        torch.testing.assert_close(acceptance.accept[0, :reached].tolist(), probabilities[:reached])
        if not any(certain):
            torch.testing.assert_close(residual, left)


def recorded(rule: reference.Decide, probabilities: list[float]) -> reference.Decide:
    """Return the rule, which also lists the probabilities with which it accepts."""

    def decide(p: Tensor, q: Tensor, x: int) -> tuple[float, Tensor]:
        probability, residual = rule(p, q, x)
        probabilities.append(float(probability))
        return probability, residual

    return decide


# ---- traversal and coupling


@pytest.mark.parametrize("name", ["small-7", "chain-3"])
def test_traversal_of_one_tree_ends_as_the_batched_form(name: str) -> None:
    noise = torch.Generator().manual_seed(3)
    paths = [(), *STATIC_TREES[name]]
    shape = StaticTree.of(STATIC_TREES[name])
    for _ in range(20):
        size = (len(paths), VOCABULARY)
        logits = 1.5 * torch.randn(2, *size, generator=noise, dtype=torch.float64)
        p, q = torch.softmax(logits, dim=-1)
        tokens = [0] * len(paths)
        for node, children in enumerate(shape.children.tolist()):
            drawn = q[node].multinomial(len(children), generator=noise).tolist()
            for child, token in zip(children, drawn, strict=True):
                if child >= 0:
                    tokens[child] = token
        tree = shape.draft(torch.tensor([tokens]), q[None])
        weights, drafts, lengths, last = verify_step(tree, p[None], rule=rule_named("traversal"))

        ends = every_end(root_of(shape, tokens, p=p, q=q))
        assert sum(weight for weight, _ in ends.values()) == pytest.approx(1.0)
        possible = [way for way, (weight, _) in ends.items() if weight > 1e-12]
        assert len(possible) == int((weights > 1e-12).sum())
        for node in (weights[:, 0] > 1e-12).nonzero().flatten().tolist():
            way = tuple(drafts[node, 0, : lengths[node, 0]].tolist())
            weight, after = ends[way]
            assert float(weights[node, 0]) == pytest.approx(weight, abs=1e-12)
            assert last[node, 0].tolist() == pytest.approx(after.tolist(), abs=1e-12)


def root_of(shape: StaticTree, tokens: list[int], p: Tensor, q: Tensor) -> reference.Node:
    """The tree of nodes, made from the leaves up."""
    nodes: dict[int, reference.Node] = {}
    for node in reversed(range(len(tokens))):
        children = [child for child in shape.children[node].tolist() if child >= 0]
        drafts = [(tokens[child], nodes[child]) for child in children]
        nodes[node] = reference.Node(p=p[node], q=q[node], drafts=drafts)
    return nodes[0]


def every_end(root: reference.Node) -> dict[tuple[int, ...], tuple[float, Tensor]]:
    """How a traversal can end: by accepted drafts, the probability and the next distribution."""
    ends: dict[tuple[int, ...], tuple[float, Tensor]] = {}
    pending: list[list[bool]] = [[]]
    while pending:
        answers = pending.pop()
        weight = 1.0
        asked = 0

        def happens(probability: float, answers: list[bool] = answers) -> bool:
            nonlocal weight, asked
            answer = answers[asked] if asked < len(answers) else False
            weight *= probability if answer else 1.0 - probability
            asked += 1
            return answer

        end = reference.traverse(root, happens)
        for place in range(len(answers), asked):
            pending.append([*answers, *[False] * (place - len(answers)), True])
        if end is not None and weight > 0:
            drafts, after = end
            before, _ = ends.get(tuple(drafts), (0.0, after))
            ends[tuple(drafts)] = (before + weight, after)
    return ends


def test_the_batched_coupling_is_the_coupling_of_the_papers() -> None:
    noise = torch.Generator().manual_seed(4)
    for _ in range(50):
        logits = 1.5 * torch.randn(2, VOCABULARY, generator=noise, dtype=torch.float64)
        p, q = torch.softmax(logits, dim=-1)
        for x in range(VOCABULARY):
            batched = couple(p, q, torch.tensor(x))
            assert batched.tolist() == pytest.approx(reference.couple(p, q, x).tolist())
        assert torch.equal(couple(p, p, torch.tensor(2)), reference.couple(p, p, 2))
