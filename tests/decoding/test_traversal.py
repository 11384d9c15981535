"""Trees accepted from leaf to root: lossless, as the text visits them, and rarely worse than child by child.

On chains the rule is `block`, which is compared with its published procedure (arXiv 2403.10444).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.acceptance.walk import accept_tree, verify
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.decoding.random_trees import FILTERS, random_probs, random_static, random_topology
from tests.decoding.rules import STRICT, rule_named
from tests.decoding.tabular import (
    Outcomes,
    Setting,
    Step,
    Tabular,
    distribution_of_step,
    error_of,
    force_stops,
    verify_step,
)
from tests.decoding.test_lossless_exact import SETTINGS, SHAPES

TRAVERSAL, BLOCK = rule_named("traversal"), rule_named("block")
CASES = [(TRAVERSAL, shape) for shape in SHAPES] + [(BLOCK, "chain")]
Vector = NDArray[np.float64]


def joint_error(model: Tabular, paths: list[tuple[int, ...]], step: Step) -> float:
    """The largest error of the joint distribution of the tokens that a step can make, and one more."""
    shape = StaticTree.of(paths)
    weights, tree = model.static_drafts(shape)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-9)
    length = shape.max_depth + 1
    return error_of(distribution_of_step(model, weights, tree, step, length), model.distribution_after((), length))


@pytest.mark.parametrize(("rule", "shape"), CASES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_rules_are_lossless(setting: str, rule: AcceptanceRule, shape: str) -> None:
    error = joint_error(Tabular(4, SETTINGS[setting], seed=1), SHAPES[shape], partial(verify_step, rule=rule))
    assert error < 1e-7


@pytest.mark.parametrize(("rule", "shape"), [(TRAVERSAL, "small"), (BLOCK, "chain")], ids=["traversal", "block"])
@pytest.mark.parametrize("limit", [-1, 0, 1, 2])
def test_a_depth_limit_is_lossless(limit: int, rule: AcceptanceRule, shape: str) -> None:
    step = partial(verify_step, rule=rule, depth_limit=limit)
    assert joint_error(Tabular(4, SETTINGS["guided"], seed=3), SHAPES[shape], step) < 1e-7


def test_random_trees_are_lossless() -> None:
    rng, deepest = np.random.default_rng(0), 0
    for seed in range(60):
        paths = random_topology(rng, int(rng.integers(1, 6)), 3, 3)
        deepest += max(map(len, paths)) == 3
        model = Tabular(3, Setting(), seed, spread=float(rng.choice([0.5, 1.5, 3.0])))
        assert joint_error(model, paths, partial(verify_step, rule=TRAVERSAL)) < 1e-7
    assert deepest > 5


def test_float32_stays_within_the_tolerance() -> None:
    def in_float32(tree: DraftTree, p: Tensor) -> Outcomes:
        assert tree.q is not None
        half = DraftTree(**{**vars(tree), "q": tree.q.float()})
        weights, tokens, lengths, last = verify_step(half, p.float(), rule=TRAVERSAL)
        return weights.double(), tokens, lengths, last.double()

    for setting in SETTINGS.values():
        assert joint_error(Tabular(4, setting, seed=3), SHAPES["small"], in_float32) < 1e-5


# ---- how many drafts are accepted


def accepted(weights: Tensor, tree: DraftTree, p: Tensor, rule: AcceptanceRule) -> float:
    stops, _, lengths, _ = verify_step(tree, p, rule=rule)
    return float((stops * weights * lengths).sum())


def test_more_drafts_are_accepted_than_child_by_child() -> None:
    rng, gains = np.random.default_rng(1), []
    for seed in range(40):
        model = Tabular(3, Setting(), seed)
        weights, tree = model.static_drafts(StaticTree.of(random_topology(rng, 5, 3, 3)))
        p = model.target_at(tree)
        gains.append(accepted(weights, tree, p, TRAVERSAL) / accepted(weights, tree, p, STRICT) - 1.0)
    worse = np.mean(np.array(gains) < 0)
    print(
        f"accepted drafts: {np.mean(gains):+.1%}, {min(gains):+.1%} to {max(gains):+.1%}, fewer in {worse:.0%} of trees"
    )
    # Without replacement it may be worse (docs/algorithms.md, section 8.5).
    assert worse < 0.1
    assert np.mean(gains) > 0.02


def test_the_example_in_which_fewer_drafts_are_accepted() -> None:
    """The example of docs/algorithms.md, section 8.5."""
    shape = StaticTree.of([(0,), (0, 0), (0, 1)])
    q = torch.tensor([[1.0, 0, 0, 0], [0.75, 0.125, 0.125, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).double()
    p = torch.tensor([[0.75, 0.25, 0, 0], [0, 0.125, 0.5, 0.375], [0.25] * 4, [0.25] * 4]).double()
    pairs = torch.tensor([(first, second) for first in range(3) for second in range(3) if first != second])
    weights = q[1, pairs[:, 0]] * q[1, pairs[:, 1]] / (1.0 - q[1, pairs[:, 0]])
    tree = shape.draft(torch.nn.functional.pad(pairs, (2, 0)), q.expand(len(pairs), 4, 4))
    lengths = [accepted(weights, tree, p.expand(len(pairs), 4, 4), rule) for rule in (TRAVERSAL, STRICT)]
    assert lengths == pytest.approx([1.2132, 1.2188], abs=1e-4)


def test_with_the_target_as_drafter_the_first_path_is_accepted() -> None:
    model = Tabular(4, Setting(), seed=4, alike=True)
    weights, tree = model.static_drafts(StaticTree.of(SHAPES["small"]))
    stops, _, lengths, _ = verify_step(tree, model.target_at(tree), rule=TRAVERSAL)
    assert float((stops * weights * (lengths == 3)).sum()) == pytest.approx(1.0, abs=1e-6)


# ---- against the text, node by node, and mistakes that are easily made


def visited(tree: DraftTree, image: int, p: Vector, mistake: str = "") -> tuple[Vector, Vector]:
    """Section 8.5 as it is written: the probability to end at each node [M], and the next token's distributions."""
    assert tree.q is not None
    tokens, children = tree.tokens[image].tolist(), tree.children[image].tolist()
    after = p.copy()

    def visit(node: int, share: float) -> Vector:
        own, law, entered = p[node], tree.q[image, node].numpy().astype(p.dtype), share
        ends, missed = np.zeros(len(p)), 1.0
        for child in children[node]:
            if child < 0 or law[tokens[child]] <= 0:
                continue
            inside = visit(child, min(1.0, share * own[tokens[child]] / law[tokens[child]]))
            ends, missed = ends + missed * inside, missed * (1.0 - inside.sum())
            rest = np.maximum(share * own - law, 0.0)
            if rest.sum() > 0:
                own = rest / rest.sum()
            if mistake != "share not updated":
                spare = rest.sum() + 1.0 - share
                share = rest.sum() / spare if spare > 0 else 1.0
            law = np.where(np.arange(len(law)) == tokens[child], 0.0, law)
            law = law if mistake == "q not renormalised" or law.sum() <= 0 else law / law.sum()
        ends[node] += missed * (entered if mistake == "ends with the share it was entered with" else share)
        after[node] = own
        return ends

    return visit(0, 1.0), after


def visiting_step(mistake: str) -> Step:
    def step(tree: DraftTree, p: Tensor) -> Outcomes:
        batch, nodes, _ = p.shape
        weights, last = torch.zeros(nodes, batch, dtype=p.dtype), torch.zeros_like(p).transpose(0, 1).contiguous()
        drafts = torch.zeros(nodes, batch, tree.max_depth, dtype=torch.int64)
        for image in range(batch):
            ends, after = visited(tree, image, p[image].numpy(), mistake)
            weights[:, image], last[:, image] = torch.from_numpy(ends), torch.from_numpy(after)
            for node in range(nodes):
                ancestors = tree.attention[image, node].nonzero().flatten()[1:]
                drafts[node, image, : len(ancestors)] = tree.tokens[image, ancestors]
        return weights, drafts, tree.depths.T.contiguous(), last

    return step


@pytest.mark.parametrize(
    "mistake", ["share not updated", "q not renormalised", "ends with the share it was entered with"]
)
def test_a_broken_traversal_is_seen(mistake: str) -> None:
    model = Tabular(4, Setting(), seed=3)
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
    assert joint_error(model, paths, visiting_step("")) < 1e-9
    error = joint_error(model, paths, visiting_step(mistake))
    print(f"broken, {mistake}: joint {error:.4f}")
    assert error > 1e-3


def test_random_trees_are_accepted_as_they_are_visited() -> None:
    compared = 0
    for seed in range(150):
        rng, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        batch, vocabulary = int(rng.integers(1, 4)), int(rng.integers(3, 20))
        filters = FILTERS[rng.integers(len(FILTERS))]
        shape = StaticTree.of(random_topology(rng, int(rng.integers(1, 14)), int(rng.integers(1, 5)), 5))
        nodes = len(shape.depths)
        q, p = (random_probs(rng, noise, filters, batch, nodes, vocabulary)[1].double() for _ in range(2))
        q, p = (rows / rows.sum(dim=-1, keepdim=True) for rows in (q, p))
        tree = random_static(rng, noise, q, shape)
        _, acceptance = accept_tree(tree, p, TRAVERSAL)
        accept = torch.zeros(batch, nodes, tree.children.shape[2], dtype=p.dtype)
        accept[:, tree.layout.nodes] = acceptance.accept.view(-1, batch, accept.shape[2]).transpose(0, 1)
        assert accept.isfinite().all()
        ends, forced = force_stops(tree, accept)
        for image in range(batch):
            wanted, after = visited(tree, image, p[image].numpy())
            assert_allclose(ends[:, image].numpy(), wanted, atol=1e-12)
            for end in np.flatnonzero(wanted > 1e-9):
                ended = verify(tree, p, TRAVERSAL, forced[end], torch.ones(batch, vocabulary))
                assert int(ended.path[image].max()) == end
                assert_allclose(ended.next_probs[image].numpy(), after[end], atol=1e-9)
                compared += 1
    print(f"{compared} ends of random trees: all as visited")
    assert compared > 500


# ---- chains, against the published procedure


def chain(levels: int) -> StaticTree:
    return StaticTree.of([(0,) * level for level in range(1, levels + 1)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_block_accepts_at_least_as_much_as_its_drafts_alone(setting: str) -> None:
    gains = []
    for seed in range(8):
        model = Tabular(4, SETTINGS[setting], seed)
        weights, tree = model.static_drafts(chain(3))
        accepted_drafts = []
        for rule in (STRICT, BLOCK):
            stops, _, lengths, _ = verify_step(tree, model.target_at(tree), rule=rule)
            accepted_drafts.append(float((stops * weights * lengths).sum()))
        gains.append(accepted_drafts[1] - accepted_drafts[0])
    print(f"{setting}: {sum(gains) / len(gains):.3f} more accepted drafts a step")
    assert min(gains) > -1e-9
    assert max(gains) > 0.05


def test_the_papers_example() -> None:
    """Two tokens whatever came before, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 or 11/9 are accepted."""
    p, q = torch.tensor([1.0, 2.0]).double() / 3, torch.tensor([2.0, 1.0]).double() / 3
    tokens = torch.tensor([[0, first, second] for first in (0, 1) for second in (0, 1)])
    weights = q[tokens[:, 1]] * q[tokens[:, 2]]
    tree = chain(2).draft(tokens, q.expand(4, 3, 2))
    for rule, wanted in ((STRICT, 10 / 9), (BLOCK, 11 / 9)):
        stops, _, lengths, _ = verify_step(tree, p.expand(4, 3, 2), rule=rule)
        assert float((stops * weights * lengths).sum()) == pytest.approx(wanted)


def published(p: Vector, q: Vector, drafts: list[int], mistake: str = "") -> tuple[Vector, list[Vector]]:
    """Algorithm 2 as it is written: chances h(1..n) of the levels, and distributions of the token after ends 0..n.

    `p` [n + 1, V], `q` [n, V].
    """
    n, share = len(drafts), [1.0]
    for level, x in enumerate(drafts):
        ratio = p[level, x] / q[level, x]
        share.append(min(1.0, ratio if mistake == "drafts alone" else share[-1] * ratio))
    chances, after = [], []
    for level in range(n + 1):
        if level == n:
            chances.append(share[n])
            after.append(p[n])
            continue
        weight = 1.0 if mistake == "plain residual" else share[level]
        left = np.maximum(weight * p[level] - q[level], 0.0)
        spare = left.sum() + 1.0 - share[level]
        chances.append(share[level] if mistake == "share as chance" else left.sum() / spare if spare > 0 else 1.0)
        after.append(left / left.sum() if left.sum() > 0 else p[level])
    return np.array(chances[1:]), after


def distribution_of_ends(chances: Vector) -> Vector:
    """The step ends at the last level that is hit: the chance of each end 0..n."""
    none_behind = np.append(np.cumprod((1.0 - chances)[::-1])[::-1], 1.0)
    return np.append(1.0, chances) * none_behind


def published_step(mistake: str) -> Step:
    def step(tree: DraftTree, p: Tensor) -> Outcomes:
        assert tree.q is not None
        nodes, batch = p.shape[1], len(p)
        weights = torch.zeros(nodes, batch, dtype=torch.float64)
        last = torch.zeros(nodes, batch, p.shape[2], dtype=torch.float64)
        for image in range(batch):
            drafts = tree.tokens[image, 1:].tolist()
            chances, after = published(p[image].numpy(), tree.q[image, :-1].numpy(), drafts, mistake)
            weights[:, image] = torch.from_numpy(distribution_of_ends(chances))
            last[:, image] = torch.from_numpy(np.stack(after))
        return weights, tree.tokens[:, 1:].expand(nodes, -1, -1), tree.depths.T.contiguous(), last

    return step


@pytest.mark.parametrize("mistake", ["drafts alone", "plain residual", "share as chance"])
def test_a_broken_block_rule_is_seen(mistake: str) -> None:
    model = Tabular(4, Setting(), seed=3)
    assert joint_error(model, SHAPES["chain"], published_step("")) < 1e-9
    error = joint_error(model, SHAPES["chain"], published_step(mistake))
    print(f"broken, {mistake}: joint {error:.4f}")
    assert error > 1e-3


def test_random_blocks_are_accepted_as_published() -> None:
    compared = 0
    for seed in range(150):
        rng, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        batch, levels, vocabulary = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(3, 20))
        filters, shape = FILTERS[rng.integers(len(FILTERS))], chain(levels)
        q, p = (random_probs(rng, noise, filters, batch, levels + 1, vocabulary)[1].double() for _ in range(2))
        q, p = (rows / rows.sum(dim=-1, keepdim=True) for rows in (q, p))
        tree = random_static(rng, noise, q, shape)
        _, acceptance = accept_tree(tree, p, BLOCK)
        accept = acceptance.accept.view(levels, batch, 1).transpose(0, 1)
        assert accept.isfinite().all()
        filled = torch.nn.functional.pad(accept, (0, 0, 0, 1))
        ends, forced = force_stops(tree, filled)
        for image in range(batch):
            chances, after = published(p[image].numpy(), q[image, :-1].numpy(), tree.tokens[image, 1:].tolist())
            wanted = distribution_of_ends(chances)
            assert_allclose(ends[:, image].numpy(), wanted, atol=1e-12)
            for end in np.flatnonzero(wanted > 1e-9):
                ended = verify(tree, p, BLOCK, forced[end], torch.ones(batch, vocabulary))
                assert int(ended.accepted[image]) == end
                assert_allclose(ended.next_probs[image].numpy(), after[end], atol=1e-9)
                assert ended.child_rank[image].tolist() == ([0] * end + [-1] + [-2] * levels)[:levels]
                compared += 1
    print(f"{compared} ends of random blocks: all as published")
    assert compared > 500


# ---- which drafts they decide on


def test_drafts_that_are_not_sampled_are_refused() -> None:
    model = Tabular(4, Setting(), seed=1)
    tree = model.dynamic_draft(nodes=5, rounds=2, beam=2)
    for rule in (TRAVERSAL, BLOCK):
        with pytest.raises(ValueError, match="fixed trees of sampled drafts"):
            accept_tree(tree, model.target_at(tree), rule)
    with pytest.raises(ValueError, match="the rule traversal needs sampled drafts"):
        Decoding(mode="speculative", rule="traversal", drafting="dynamic")


def test_greedy_traversal_is_strict() -> None:
    values: dict[str, Any] = {"mode": "speculative", "temperature": 0}
    assert Decoding(**{**values, "rule": "traversal"}) == Decoding(**values)
