"""The examples of docs/audit.md for SCD and PathSpec: by hand in fractions, and with the form as
published.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_bench.checks.tabular_model import TabularModel, g_tests, table_images
from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.drafting.draft_method import DraftInputs, LastStep, drafting_of
from lantern_bench.decoding.engine import Engine
from tests.decoding.test_engine import Small, decoded, same
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


@pytest.mark.usefixtures("published_forms")
@pytest.mark.parametrize(
    ("drafting", "wanted"), [("jacobi", Fraction(2, 5)), ("pathspec-published", Fraction(11, 25))]
)
def test_the_longest_of_two_chains_is_no_draw_from_p(drafting: str, wanted: Fraction) -> None:
    """q (1/2, 1/2), p (3/5, 2/5), windows of one draft: P(1), enumerated.

    Draft 0 is always accepted and draft 1 with 4/5. So all uniform numbers below 4/5 are alike, and
    so are all above.
    """
    target = TabularModel(2, 4, seed=0)
    method: Any = drafting_of(
        Decoding("sjd", window=1, drafting=drafting, initial="uniform"), target
    )
    nodes = method.tree.tokens.shape[1]
    chains = [method] if drafting == "jacobi" else method._chains
    root = torch.zeros(1, dtype=torch.int64)
    probability = Fraction(0)
    for drafts in itertools.product((0, 1), repeat=len(chains)):
        for is_low in itertools.product((True, False), repeat=len(chains)):
            method.start_images(torch.tensor([[0.5, 0.5]]))
            inputs = DraftInputs(root, torch.ones(1, method.noises, 2), torch.tensor([1]))
            method.draft(inputs)
            uniforms = torch.zeros(method.tree.children.shape)
            weight = Fraction(1)
            for number, chain in enumerate(chains):
                assert chain._q.tolist() == [[[0.5, 0.5]]]
                method.tree.tokens[:, 1 + number] = drafts[number]
                chain.tree.tokens[:, 1] = drafts[number]
                uniforms[:, 0, number] = 0.4 if is_low[number] else 0.9
                weight *= Fraction(1, 2) * (Fraction(4, 5) if is_low[number] else Fraction(1, 5))
            verdict = method.verify(
                method.tree,
                torch.tensor([0.6, 0.4]).expand(1, nodes, -1).contiguous(),
                STRICT,
                uniforms=uniforms,
                noise=torch.ones(1, 2),
                depth_limit=torch.tensor([1]),
            )
            if int(verdict.accepted):
                emitted = Fraction(int(verdict.tokens[0, 0]))
            else:
                emitted = Fraction(float(verdict.next_probs[0, 1])).limit_denominator(1000)
            probability += weight * emitted
    assert probability == wanted


@pytest.mark.usefixtures("published_forms")
def test_images_of_two_chains_are_rejected() -> None:
    p_values = {}
    for drafting in ("jacobi", "pathspec-published"):
        decoding = Decoding("sjd", window=4, drafting=drafting, initial="uniform")
        tests, _ = g_tests(decoding, table_images(decoding, range(5000)))
        p_values[drafting] = tests["joint of the first tokens"]
    assert p_values["jacobi"] > 1e-3
    assert p_values["pathspec-published"] < 1e-12


@pytest.mark.usefixtures("published_forms")
def test_two_chains_decode_in_batches_compiled_and_greedily() -> None:
    model = Small()
    decoding = Decoding("pathspec-published", window=3, cfg_scale=1.5)
    together = decoded(model, decoding, 3)
    (alone,) = decoded(model, decoding, 1)
    assert alone.tokens.equal(together[0].tokens)
    engine = Engine(compile=True, backend="aot_eager")
    same(decoded(model=model, decoding=decoding, images=3, engine=engine), together)
    assert {ranks[0] for ranks in alone.trace.child_rank if ranks} == {-1, 0, 1}
    greedy = decoded(model, decoding.changed(temperature=0.0), 3)
    wanted = decoded(model, decoding.autoregressive().changed(temperature=0.0), 3)
    assert all(a.tokens.equal(b.tokens) for a, b in zip(greedy, wanted, strict=True))
    with pytest.raises(ParameterError, match="PathSpec draws every draft anew"):
        Decoding("pathspec-published", coupling="maximal")
