"""Rules that give the probability f of acceptance: what they emit, against docs/algorithms.md,
section 8.4.

Each rule is written a second time here, token by token in numpy; emitted distributions are
enumerated over all drafts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import verify
from lantern_bench.decoding.loop import decode
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import StaticTree
from lantern_bench.methods import catalog
from lantern_bench.methods.draftings import Mode
from lantern_bench.methods.rules import Rule
from tests.decoding.acceptance.test_emitted_tv import dirichlet, mean_distribution, of_drafts
from tests.decoding.test_loop import DRAFTED, CodedModel, g_test
from tests.helpers.rules import (
    accept,
    emitted,
    neighbour_mass,
    rule_named,
    total_variation,
    view_of,
)
from tests.helpers.tabular import (
    Setting,
    Tabular,
    distribution_of_step,
    error_of,
    first_tokens,
    verify_step,
)

Vector = NDArray[np.float64]
CODES = torch.randn(40, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
OTHERS: dict[str, dict[str, float]] = {
    "cool-sd": {"decay": 0.7},
    "gsd": {"probability_gap": 0.1, "code_gap": 2.0},
}
OTHERS["typical"] = {"alpha": 0.3}
OTHERS["csd"] = {"entropy_weight": 0.2}
OTHERS["addition"] = {}
BOUNDS = {"cool-sd": (0.6, 1.0, 1.7), "gsd": (2, 5, 14), "typical": (0.02, 0.4)}
BOUNDS |= {"csd": (0.3, 0.65), "addition": (0.4,)}
# what p loses after a rejection, as a share of q, where a rule has `residual: official`
OFFICIAL_REMOVAL = {"gsd": 1.0, "typical": 0.0}
CASES: list[tuple[str, float]] = []
for _rule, _bounds in BOUNDS.items():
    CASES += product((_rule,), _bounds)


def rule_of(
    name: str, bound: float, residual: str = "exact", vocabulary: int = 12
) -> ConfiguredRule:
    return rule_named(
        name=name,
        neighbours=0,
        bound=bound,
        residual=residual,
        codebook=CODES[:vocabulary],
        **OTHERS[name],
    )


def entropy(p: Vector) -> float:
    return -sum(mass * math.log(mass) for mass in p if mass > 0)


def chance(name: str, bound: float, p: Vector, q: Vector | None, depth: int = 1) -> Vector:
    """f of every token with q > 0, written from section 8.4; 0 elsewhere."""
    others = OTHERS[name]
    accept = np.zeros_like(p)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    for x in range(len(p)):
        if q is not None and q[x] == 0:
            continue
        if name == "cool-sd":
            accept[x] = (
                bound * math.exp(-others["decay"] * (depth - 1)) * p[x] / (1 if q is None else q[x])
            )
        elif name in ("csd", "addition"):
            drawn = np.eye(len(p))[x] if q is None else q
            added = bound
            if name == "csd":
                is_close = 0.5 * np.abs(p - drawn).sum() < bound
                added = others["entropy_weight"] * entropy(p) if is_close else 0.0
            accept[x] = min(1.0, p[x] / drawn[x]) + added
        elif name == "typical":
            accept[x] = float(p[x] > min(bound, others["alpha"] * math.exp(-entropy(p))))
        else:
            at = order.index(x)
            near = order[max(0, at - (int(bound) - 1) // 2) : at + int(bound) // 2 + 1]
            near = [code for code in near if abs(p[code] - p[x]) < others["probability_gap"]]
            near = [
                code
                for code in near
                if float((CODES[code] - CODES[x]).square().sum()) < others["code_gap"]
            ]
            accept[x] = sum(p[code] for code in near) / (
                1 if q is None else sum(q[code] for code in near)
            )
    return np.minimum(accept, 1.0)


def expected(
    p: Vector, q: Vector | None, children: tuple[int, ...], name: str, bound: float, residual: str
) -> tuple[Vector, float]:
    """Distribution of the first token given the drafts `children`, and the chance of no draft; one
    after the other.
    """
    emitted_so_far = np.zeros_like(p)
    left = 1.0
    for x in children:
        f = chance(name=name, bound=bound, p=p, q=q)
        emitted_so_far[x] += left * f[x]
        left *= 1 - f[x]
        drawn = q if q is not None else np.eye(len(p))[x]
        share = f
        if residual == "official" and name in OFFICIAL_REMOVAL:
            share = np.full_like(f, OFFICIAL_REMOVAL[name])
        rest = np.maximum(p - drawn * share, 0)
        if rest.sum() > 0:
            p = rest / rest.sum()
        if q is not None:
            q = np.where(np.arange(len(q)) == x, 0, q)
            q = q / max(q.sum(), 1e-300)
    return emitted_so_far + left * p, left


def pairs(seed: int, count: int, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(seed)
    p, q = dirichlet(noise, 2, count, vocabulary)
    p[0, :3] = 0  # tokens that a filter took out
    q[1, 2:5] = 0
    return list(zip(p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), strict=True))


@pytest.mark.parametrize(("name", "bound"), CASES)
def test_the_exact_residual_reaches_the_smallest_tv_of_one_draft(name: str, bound: float) -> None:
    worst = 0.0
    larger = 0.0
    for p, q in pairs(1, 30, 12):
        every = torch.arange(12)[:, None]
        f = torch.tensor(chance(name=name, bound=bound, p=p.numpy(), q=q.numpy()))
        least = float((q * f - p).clamp_min(0).sum())
        tv = total_variation(p, mean_distribution(p, q, rule_of(name, bound)))
        worst = max(worst, abs(float(tv) - least))
        if name == "cool-sd":
            formula = torch.minimum((q - p).clamp_min(0), max(bound - 1, 0) * p).sum()
            assert least == pytest.approx(float(formula), abs=1e-12)
        official = float(
            total_variation(p, mean_distribution(p, q, rule_of(name, bound, "official")))
        )
        larger = max(larger, official - least)
        if name == "gsd" and float((q * f).sum()) >= float(torch.minimum(p, q).sum()):
            assert official == pytest.approx(least, abs=1e-12), (
                "accepting no less than strict, plain is enough"
            )
        # Deterministic drafts: q is 1 at x.
        alone = torch.tensor(
            [
                chance(name=name, bound=bound, p=p.numpy(), q=None)[x] - float(p[x])
                for x in range(12)
            ]
        ).clamp_min(0)
        torch.testing.assert_close(
            total_variation(p, of_drafts(p=p, q=None, drafts=every, rule=rule_of(name, bound))),
            alone,
        )
    print(
        f"{name} {bound}: emitted TV off the smallest by {worst:.1e}; "
        f"official above it by up to {larger:.3f}"
    )
    assert worst < 1e-12
    assert larger > 1e-3 if name == "typical" or bound == 2 else larger > -1e-12
    assert name in OFFICIAL_REMOVAL or larger < 1e-12, "the published residual is the exact one"


def test_the_plain_residual_of_a_strength_below_1_is_seen() -> None:
    """Section 8.4: with w < 1 max(p - q, 0) is the wrong residual.

    It is put in place of the rule's own.
    """
    cool_sd = rule_of("cool-sd", 0.6, "official")
    rule = replace(cool_sd, row=replace(cool_sd.row, official_removal=1.0))
    worst = []
    for p, q in pairs(2, 30, 12):
        worst.append(float(total_variation(p, mean_distribution(p, q, rule))))
        assert float(total_variation(p, mean_distribution(p, q, rule_of("cool-sd", 0.6)))) < 1e-12
    print(f"plain residual at w = .6: emitted TV {sum(worst) / len(worst):.3f} on average")
    assert sum(worst) / len(worst) > 0.05


@pytest.mark.parametrize("residual", ["exact", "official"])
@pytest.mark.parametrize(("name", "bound"), CASES)
def test_siblings_are_judged_by_the_residual(name: str, bound: float, residual: str) -> None:
    rule = rule_of(name, bound, residual, vocabulary=6)
    worst = 0.0
    for p, q in pairs(3, 6, 6):
        drafts = [
            tokens
            for tokens in itertools.permutations(range(6), 3)
            if all(q[x] > 0 for x in tokens)
        ]
        for drawn in (q, None):
            first_tokens_of_drafts = of_drafts(p=p, q=drawn, drafts=torch.tensor(drafts), rule=rule)
            for row, children in zip(first_tokens_of_drafts, drafts, strict=True):
                numbers = None if drawn is None else drawn.numpy()
                wanted, _ = expected(
                    p=p.numpy(),
                    q=numbers,
                    children=children,
                    name=name,
                    bound=bound,
                    residual=residual,
                )
                worst = max(worst, float((row - torch.tensor(wanted)).abs().max()))
    print(f"{name} {bound} {residual}: {worst:.1e}")
    assert worst < 1e-9


def test_the_strength_falls_with_depth() -> None:
    """With w = 1.5 at the first draft and 1 at the second, only the first token is off."""
    model = Tabular(4, Setting(), seed=1)
    for tree_of in ("chain", "small"):
        drafts = model.drafts(tree_of)
        for decay, holds in ((math.log(1.5), True), (0.0, False)):
            rule = rule_named("cool-sd", 0, 1.5, decay=decay)
            joint = distribution_of_step(
                model=model, drafts=drafts, step=partial(verify_step, rule=rule), length=2
            )
            first = first_tokens(joint)
            product = {(x, y): first[(x,)] * float(model.p((x,))[y]) for x, y in joint}
            assert error_of(first, first_tokens(model.distribution_after((), 2))) > 1e-2
            assert (error_of(joint, product) < 1e-9) == holds


@pytest.mark.parametrize("tree", ["chain", "small", "dynamic"])
@pytest.mark.parametrize(("name", "bound"), CASES)
def test_a_step_emits_what_emitted_tv_says(name: str, bound: float, tree: str) -> None:
    """The first token of the walk, over all drafts, is the one that `emitted` computes from the
    root's children.
    """
    model = Tabular(4, Setting(), seed=3)
    rule = rule_of(name, bound, vocabulary=4)
    weights, drafts = model.drafts(tree)
    walked = first_tokens(
        distribution_of_step(
            model=model, drafts=(weights, drafts), step=partial(verify_step, rule=rule), length=1
        )
    )
    children = drafts.children[:, 0]
    tokens = drafts.tokens.gather(1, children.clamp_min(0))
    p = model.p(()).expand(len(tokens), -1)
    q = None if drafts.q is None else drafts.q[:, 0]
    emitted_tokens = (
        weights @ emitted(p=p, q=q, tokens=tokens, valid=children >= 0, rule=rule).distribution
    )
    assert max(abs(walked.get((x,), 0.0) - float(emitted_tokens[x])) for x in range(4)) < 1e-9


def test_the_entropy_rule_takes_as_much_as_the_entropy_allows() -> None:
    noise = torch.Generator().manual_seed(7)
    p = dirichlet(noise, 30, 32)
    table = nearest_codes(CODES[:32], 31)
    x = torch.arange(30)
    limit = torch.tensor([0.5 * entropy(row.numpy()) / math.log(32) for row in p])
    rule = rule_named("entropy", 20, 0.5, table=table)
    mass, taken = neighbour_mass(view_of(p, x, rule), rule)
    assert (mass <= limit + 1e-12).all()
    assert 0 < float(taken.sum(1).double().mean()) < 20
    near = p.gather(1, table[x, :20].long()).cumsum(1)
    wanted = torch.where(near <= limit[:, None], near, 0.0).amax(1)
    torch.testing.assert_close(mass, wanted)
    certain = torch.zeros(1, 32, dtype=torch.float64)
    certain[0, 3] = 1
    assert float(neighbour_mass(view_of(certain, x[3:4], rule), rule)[0]) == 0


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConfiguredRule]:
    """Install a rule of `chance` made of a function, with two neighbours and the codebook."""

    def install(function: Callable[..., Any]) -> ConfiguredRule:
        row = Rule(
            "watching",
            kind="by probability",
            function=function,
            neighbours=2,
            codebook=True,
        )
        monkeypatch.setitem(catalog.RULES, row.name, row)
        return rule_named("watching", 2, 1.0, table=nearest_codes(CODES[:6], 5), codebook=CODES[:6])

    return install


SEEN = (
    "token",
    "p",
    "p_x",
    "q",
    "nearest_codes",
    "neighbour_tokens",
    "neighbour_p",
    "distances",
    "depth",
    "position",
)


def test_a_rule_sees_tokens_neighbours_distances_depth_and_place(
    watching: Callable[..., ConfiguredRule],
) -> None:
    views: list[Any] = []

    def look(draft: Any, values: Any) -> Tensor:
        # p and q are read when they are asked for, and change with every rejection.
        views.append(SimpleNamespace(**{name: getattr(draft, name).clone() for name in SEEN}))
        return torch.zeros_like(draft.p)

    model = Tabular(6, Setting(), seed=2)
    tree = StaticTree.of([(0,), (1,), (0, 0)])
    drawn = tree.draft(torch.tensor([[0, 2, 4, 1], [0, 3, 5, 2]]), model.q(()).expand(2, 4, 6))
    p = model.target_at(drawn)
    table = nearest_codes(CODES[:6], 5)
    shape = (2, 4, 2)
    position = torch.tensor([7, 9])
    verify(
        tree=drawn,
        target_probs=p,
        rule=watching(look),
        uniforms=torch.rand(shape),
        noise=torch.ones(2, 6),
        depth_limit=None,
        position=position,
    )
    seen = views[-1]  # the second child of the root, in both images
    root = p[:, 0]
    rest = root - 0.0 * root  # f = 0 leaves p as it is
    assert seen.token.tolist() == drawn.tokens[:, 2].tolist()
    torch.testing.assert_close(seen.p, rest)
    torch.testing.assert_close(seen.p_x, rest.gather(1, seen.token[:, None]).squeeze(1))
    assert torch.equal(seen.nearest_codes, table[:, :2].long())
    near = table[seen.token, :2].long()
    assert torch.equal(seen.neighbour_tokens, near)
    torch.testing.assert_close(seen.neighbour_p, rest.gather(1, near))
    distances = (CODES[near] - CODES[seen.token][:, None]).norm(dim=-1)
    torch.testing.assert_close(seen.distances, distances)
    lost = model.q(()).expand(2, 6).clone()
    lost[0, 2] = lost[1, 3] = 0
    torch.testing.assert_close(seen.q, lost / lost.sum(1, keepdim=True))
    assert seen.depth.tolist() == [1, 1]
    assert seen.position.tolist() == [7, 9]


def test_depth_and_place_are_those_of_the_draft_in_the_loop(
    watching: Callable[..., ConfiguredRule],
) -> None:
    """A rule that accepts by place and depth alone: which steps are made follows from them."""
    watching(
        lambda draft, values: ((draft.position % 4 != 0) & (draft.depth < 3)).double()[:, None]
    )
    catalog.MODES["watching"] = Mode(name="watching", drafting="static", rule="watching")
    try:
        values = {"mode": "watching", "bound": 1.0, "neighbours": 2, "tree": "chain-5"}
        model = CodedModel(3, 9, seed=1)
        image = decode(
            model=model,
            condition=None,
            decoding=Decoding(**values),
            generators=[torch.Generator().manual_seed(0)],
        )[0]
    finally:
        del catalog.MODES["watching"]
    # Steps start at 1; a draft at a multiple of 4, and the third of a step, are rejected.
    assert image.trace.start == [1, 4, 5, 8]
    assert image.trace.accepted[:3] == [2, 0, 2]


def test_a_broken_number_of_a_token_that_cannot_be_drawn_is_ignored(
    watching: Callable[..., ConfiguredRule],
) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]])
    q = torch.tensor([[0.0, 1.0, 0.0]])
    rule = watching(lambda draft, values: draft.ratio)
    acceptance = accept(p=p, q=q, tokens=torch.tensor([[1]]), rule=rule)
    assert acceptance.accept.tolist() == [[0.5]]
    assert acceptance.residual.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("drafted", DRAFTED)
def test_a_strength_of_at_most_1_is_lossless_in_the_loop(drafted: str) -> None:
    values = DRAFTED[drafted] | {"mode": "cool-sd"}
    lossless = g_test(Decoding(**values, strength=0.8, decay=0.3), 5_000)
    loose = g_test(Decoding(**values, strength=2.0, decay=0.0), 5_000)
    print(f"cool-sd, {drafted}: p = {lossless:.3f}; with a strength of 2 {loose:.1e}")
    assert lossless > 1e-3
    assert loose < 1e-6
