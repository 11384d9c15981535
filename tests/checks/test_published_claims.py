"""The example of docs/audit.md for SCD: by hand in fractions, and with its authors' own form."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.checks.tabular_model import TabularModel
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep, drafting_of
from tests.helpers.rules import STRICT

IMAGES = 60_000
Q = torch.tensor([0.5, 0.5])
R = torch.tensor([0.75, 0.25])
P = torch.tensor([0.5, 0.5])


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize(("drafting", "verified_with"), [("jacobi", "r"), ("scd-published", "q")])
def test_an_old_q_kept_with_a_draft(drafting: str, verified_with: str) -> None:
    # Three cases: draft 0 is kept, draft 1 is kept, draft 1 is redrawn as 0. Each has a probability
    # and a q of token 0 that verifies it.
    chances = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    redrawn = Fraction(3, 4)
    old = redrawn if verified_with == "r" else Fraction(1, 2)
    accepts = [Fraction(1, 2) / old, Fraction(0), Fraction(1, 2) / redrawn]
    first = sum(chance * accept for chance, accept in zip(chances, accepts, strict=True))
    assert first == (Fraction(1, 2) if verified_with == "r" else Fraction(2, 3))
    share = float((second_draft(drafting) == 0).double().mean())
    assert share == pytest.approx(float(first), abs=5 * (0.25 / IMAGES) ** 0.5)


def second_draft(drafting: str) -> Tensor:
    """The first tokens [IMAGES] if drafts of q are drawn again from r and verified with p."""
    target = TabularModel(2, 4, seed=0)
    noise = torch.Generator().manual_seed(1)
    method: Any = drafting_of(Decoding("scd", window=2, drafting=drafting), target, IMAGES)

    def exponential(*shape: int) -> Tensor:
        return torch.empty(IMAGES, *shape).exponential_(generator=noise)

    def rows(distribution: Tensor) -> Tensor:
        return distribution.expand(IMAGES, method.tree.tokens.shape[1], -1).contiguous()

    root = torch.zeros(IMAGES, dtype=torch.int64)
    limit = torch.full((IMAGES,), 2)
    method.start_images(rows(Q)[:, 0])
    method.draft(DraftInputs(root, exponential(method.noises, 2), limit))
    # One draft of q at each place: the published form starts with q = 1 instead.
    method._q.copy_(rows(Q)[:, :2])
    method.tree.tokens.copy_(
        torch.multinomial(rows(Q)[:, 0], 1, generator=noise).expand(-1, method.tree.tokens.shape[1])
    )
    path = torch.tensor([[0, -1, -1]]).expand(IMAGES, -1)
    method.after_step(
        LastStep(
            p=rows(R),
            path=path,
            accepted=root,
            tokens=path,
            position=root + 2,
        )
    )
    method.draft(DraftInputs(root, exponential(method.noises, 2), limit))
    uniforms = torch.rand(IMAGES, *method.tree.children.shape[1:], generator=noise)
    verdict = method.verify(
        method.tree,
        rows(P),
        STRICT,
        uniforms=uniforms,
        noise=exponential(2),
        depth_limit=limit,
    )
    return verdict.tokens[:, 0]
