"""The page that readers start with, `acceptance/reference.py`, decides as the batched form does."""

from __future__ import annotations

import doctest

import pytest
import torch

from lantern_bench.decoding.acceptance import reference
from lantern_bench.decoding.neighbours import nearest_codes
from tests.helpers.rules import accept, rule_named

VOCABULARY = 8
TABLE = nearest_codes(
    torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(2)), VOCABULARY - 1
)
NEAREST = TABLE[:, :3].tolist()
RULES = {
    "strict": (rule_named("strict"), reference.strict),
    "lantern": (
        rule_named("additive", neighbours=3, bound=0.2, table=TABLE),
        reference.neighbours(NEAREST, limit=lambda _p, _x: 0.2),
    ),
    "lantern++": (
        rule_named("multiplicative", neighbours=3, bound=3.0, table=TABLE),
        reference.neighbours(NEAREST, limit=lambda p, x: 2.0 * p[x]),
    ),
    "cool-sd": (
        rule_named("cool-sd", bound=1.5),
        reference.by_probability(
            lambda p, q: [min(1.0, 1.5 * a / b) if b else 0.0 for a, b in zip(p, q, strict=True)]
        ),
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
        rule = recorded(scalar, probabilities)
        _, left = reference.verify_node(
            p=p.tolist(),
            q=q.tolist() if sampled else None,
            drafts=tokens.tolist(),
            uniforms=[1.0] * len(tokens),  # rejects every draft
            rule=rule,
        )
        # What comes behind a draft that is certain to be accepted is never reached.
        certain = [probability >= 1 for probability in probabilities]
        reached = certain.index(True) + 1 if any(certain) else len(tokens)
        torch.testing.assert_close(acceptance.accept[0, :reached].tolist(), probabilities[:reached])
        if not any(certain):
            torch.testing.assert_close(residual.tolist(), left)


def recorded(rule: reference.Rule, probabilities: list[float]) -> reference.Rule:
    """Return the rule, which also lists the probabilities with which it accepts."""

    def decide(p: list[float], q: list[float], x: int) -> tuple[float, list[float]]:
        probability, residual = rule(p, q, x)
        probabilities.append(probability)
        return probability, residual

    return decide
