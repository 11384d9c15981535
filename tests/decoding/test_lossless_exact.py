"""The strict rule is lossless, by enumeration of every draft and every accept/reject outcome of one step.

Checked for the first token and for the joint distribution of the committed sequence, against autoregressive decoding,
for each drafting, filter and guidance; and rules that are broken on purpose are seen to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.decoding.tabular import (
    Outcomes,
    Setting,
    Step,
    Tabular,
    distribution_of_step,
    error_of,
    first_tokens,
    force_stops,
    verify_step,
    without_q,
)

SETTINGS = {
    "plain": Setting(),
    "guided": Setting(cfg_scale=2.5),
    "top-k": Setting(temperature=0.8, top_k=3),
    "top-p": Setting(top_p=0.8, cfg_scale=1.5),
    "both": Setting(temperature=1.4, top_k=4, top_p=0.9, filter_order="top_p_first", cfg_scale=3.0),
}
SHAPES = {
    "chain": [(0,), (0, 0), (0, 0, 0)],
    "wide": [(0,), (1,), (2,)],
    "small": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
}
LENGTH = 4


def static_error(setting: Setting, shape: str, step: Step, vocabulary: int = 4, seed: int = 1) -> tuple[float, float]:
    """Return the largest errors (first token, joint) of a step with sampled drafts."""
    model = Tabular(vocabulary, setting, seed)
    weights, tree = model.static_drafts(StaticTree.of(SHAPES[shape]))
    return errors(model, weights, tree, step)


def dynamic_error(setting: Setting, tree: DraftTree, model: Tabular, step: Step) -> tuple[float, float]:
    return errors(model, torch.ones(1, dtype=torch.float64), tree, step)


def errors(model: Tabular, weights: Tensor, tree: DraftTree, step: Step) -> tuple[float, float]:
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-9)
    distribution = distribution_of_step(model, weights, tree, step, LENGTH)
    truth = model.distribution_after((), LENGTH)
    return error_of(first_tokens(distribution), first_tokens(truth)), error_of(distribution, truth)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_static_drafting_is_lossless(setting: str, shape: str) -> None:
    first, joint = static_error(SETTINGS[setting], shape, verify_step)
    print(f"static {shape} {setting}: first {first:.1e}, joint {joint:.1e}")
    assert max(first, joint) < 1e-5


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("nodes", "rounds", "beam"), [(6, 3, 2), (5, 2, 3), (3, 3, 1), (6, 1, 6)])
def test_dynamic_drafting_is_lossless(setting: str, nodes: int, rounds: int, beam: int) -> None:
    model = Tabular(6, SETTINGS[setting], seed=2)
    tree = model.dynamic_draft(nodes, rounds, beam)
    first, joint = dynamic_error(SETTINGS[setting], tree, model, verify_step)
    assert max(first, joint) < 1e-5


@pytest.mark.parametrize("limit", [-1, 0, 1, 2])
@pytest.mark.parametrize("drafting", ["static", "dynamic"])
def test_a_depth_limit_is_lossless(limit: int, drafting: str) -> None:
    step = partial(verify_step, depth_limit=limit)
    if drafting == "static":
        error = static_error(SETTINGS["guided"], "small", step)
    else:
        model = Tabular(5, SETTINGS["guided"], seed=3)
        error = dynamic_error(SETTINGS["guided"], model.dynamic_draft(6, 3, 2), model, step)
    assert max(error) < 1e-5


@pytest.mark.parametrize("setting", SETTINGS)
def test_float32_stays_within_the_tolerance(setting: str) -> None:
    def in_float32(tree: DraftTree, p: Tensor) -> Outcomes:
        half = DraftTree(**{**vars(tree), "q": None if tree.q is None else tree.q.float()})
        weights, tokens, lengths, last = verify_step(half, p.float())
        return weights.double(), tokens, lengths, last.double()

    assert max(static_error(SETTINGS[setting], "small", in_float32)) < 1e-5


# Rules broken on purpose: accept_one(p, q, tokens) -> accept probability of each child, and the final distribution.
Accept = Callable[[Tensor, Tensor | None, list[int]], tuple[list[float], Tensor]]


def accept_one(
    p: Tensor, q: Tensor | None, tokens: list[int], residual: bool = True, renormalise: bool = True
) -> tuple[list[float], Tensor]:
    accepts = []
    for x in tokens:
        share = 1.0 if q is None else float(q[x])
        accepts.append(min(1.0, float(p[x]) / share) if share > 0 else 0.0)
        if share <= 0:
            continue
        if residual:
            left = (p - q).clamp_min(0) if q is not None else p.clone()
            left[x] = left[x] if q is not None else 0.0
            p = left / left.sum() if left.sum() > 0 else p
        if q is not None:
            q = q.clone()
            q[x] = 0.0
            q = q / q.sum() if renormalise and q.sum() > 0 else q
    return accepts, p


def step_with(rule: Accept) -> Step:
    """A step that walks with a rule for one node."""

    def step(tree: DraftTree, p: Tensor) -> Outcomes:
        batch, nodes, vocabulary = p.shape
        accept = torch.zeros(batch, nodes, tree.children.shape[2], dtype=p.dtype)
        last = torch.zeros(nodes, batch, vocabulary, dtype=p.dtype)
        drafts = torch.zeros(nodes, batch, tree.max_depth, dtype=torch.int64)
        lengths = tree.depths.T.contiguous()
        for image in range(batch):
            for node in range(nodes):
                kids = [child for child in tree.children[image, node].tolist() if child >= 0]
                q = None if tree.q is None else tree.q[image, node]
                accepts, last[node, image] = rule(p[image, node], q, tree.tokens[image, kids].tolist())
                accept[image, node, : len(kids)] = torch.tensor(accepts, dtype=p.dtype)
                ancestors = tree.attention[image, node].nonzero().flatten()[1:]
                drafts[node, image, : len(ancestors)] = tree.tokens[image, ancestors]
        return force_stops(tree, accept)[0], drafts, lengths, last

    return step


def test_enumeration_accepts_the_correct_rule() -> None:
    assert max(static_error(Setting(), "small", step_with(accept_one))) < 1e-9


@pytest.mark.parametrize(
    ("name", "rule"),
    {
        "residual left out": partial(accept_one, residual=False),
        "q not renormalised after earlier draws": partial(accept_one, renormalise=False),
    }.items(),
)
def test_broken_rules_are_seen(name: str, rule: Accept) -> None:
    # Seed 6: an unnormalised q shows only where the residual of the first child rests on two tokens or more.
    first, joint = static_error(Setting(), "wide", step_with(rule), vocabulary=5, seed=6)
    print(f"broken: {name}: first {first:.3f}, joint {joint:.4f}")
    assert first > 1e-2
    assert joint > 1e-3


def test_a_deterministic_draft_taken_for_a_sampled_one_is_seen() -> None:
    """The children are the top of q, yet are accepted as if they had been drawn from it."""
    model = Tabular(5, Setting(), seed=3)
    shape = StaticTree.of(SHAPES["small"])
    fixed = model.dynamic_shape(shape)
    q = torch.stack([model.q(prefix) for prefix in prefixes_of(fixed)])[None]
    error = errors(model, torch.ones(1, dtype=torch.float64), shape.draft(fixed.tokens, q), verify_step)
    print(f"broken: deterministic draft taken for a sampled one: first {error[0]:.3f}, joint {error[1]:.4f}")
    assert error[0] > 1e-2
    assert error[1] > 1e-3
    assert max(errors(model, torch.ones(1, dtype=torch.float64), fixed, verify_step)) < 1e-5


def prefixes_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens below the root that lead to each node of the first image."""
    return [tuple(tree.tokens[0, seen.nonzero().flatten()[1:]].tolist()) for seen in tree.attention[0]]


def test_sampled_drafts_with_q_1_are_lossless_but_accepted_less() -> None:
    """q = 1 is right for any draft that does not depend on what the target then draws; it only wastes drafts.

    Given the children, accepting x with p(x) and else drawing from p without x emits p, whatever chose x. So this
    reading of section 3 cannot be told from the right one by the distribution of the tokens; acceptance tells it.
    """
    model = Tabular(4, Setting(), seed=1)
    weights, tree = model.static_drafts(StaticTree.of(SHAPES["small"]))
    assert max(errors(model, weights, without_q(tree), verify_step)) < 1e-9
    target = model.target_at(tree)
    lengths = {}
    for name, drafted in (("q", tree), ("q = 1", without_q(tree))):
        stops, _, accepted, _ = verify_step(drafted, target)
        lengths[name] = float((stops * weights * accepted).sum())
    print(f"accepted drafts a step: {lengths}")
    assert lengths["q"] > 1.3 * lengths["q = 1"]


def test_a_dynamic_draft_without_residual_is_seen() -> None:
    model = Tabular(5, Setting(), seed=2)
    first, joint = dynamic_error(
        Setting(), model.dynamic_draft(6, 3, 2), model, step_with(partial(accept_one, residual=False))
    )
    assert first > 1e-2
    assert joint > 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_drafts_from_the_target_are_always_accepted(setting: str) -> None:
    model = Tabular(4, SETTINGS[setting], seed=4, alike=True)
    weights, tree = model.static_drafts(StaticTree.of(SHAPES["small"]))
    stops, _, lengths, _ = verify_step(tree, model.target_at(tree))
    first_path = (stops * weights * (lengths == 3)).sum()
    assert float(first_path) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_from_the_target_are_accepted_with_their_mass(setting: str) -> None:
    model = Tabular(6, SETTINGS[setting], seed=4, alike=True)
    tree = model.dynamic_draft(nodes=3, rounds=1, beam=3)
    stops, _, _, _ = verify_step(tree, model.target_at(tree))
    offered = [int(tree.tokens[0, child]) for child in tree.children[0, 0].tolist() if child >= 0]
    assert len(offered) == min(3, int((model.p(()) > 0).sum()))
    assert 1.0 - float(stops[0, 0]) == pytest.approx(float(model.p(())[offered].sum()), abs=1e-6)
