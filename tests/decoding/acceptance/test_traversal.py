"""Trees accepted from leaf to root: lossless, as the text visits them, and rarely worse than child
by child.

On chains the rule is `block`, which is compared with its published procedure (arXiv 2403.10444).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor
from torch.testing import assert_close

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.traversal import _ends_in_chain, _visits_of_chain
from lantern_bench.decoding.acceptance.verify import accept_drafts, verify
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.decoding.acceptance.test_lossless_exact import SETTINGS
from tests.helpers.random_trees import FILTERS, random_probs, random_static, random_topology
from tests.helpers.rules import STRICT, rule_named
from tests.helpers.tabular import (
    SHAPES,
    Outcomes,
    Setting,
    Step,
    Tabular,
    accepted,
    force_stops,
    step_errors,
    verify_step,
)

TRAVERSAL = rule_named("traversal")
BLOCK = rule_named("block")
Vector = NDArray[np.float64]
# (drafts, image, p [M, V], mistake) -> (the chance to end at each node [M], the next token's
# distributions [M, V])
Procedure = Callable[[DraftTree, int, Vector, str], tuple[Vector, Vector]]


def chain(levels: int) -> list[tuple[int, ...]]:
    return [(0,) * level for level in range(1, levels + 1)]


def test_long_chains_are_decided_as_one_draft_after_the_other() -> None:
    """A window of 64 drafts in float32, with ratios from 0 to infinity."""
    noise = torch.Generator().manual_seed(0)
    ratio = torch.exp(3.0 * torch.randn(64, 500, generator=noise))
    ratio[torch.rand(64, 500, generator=noise) < 0.005] = 0.0
    ratio[torch.rand(64, 500, generator=noise) < 0.001] = torch.inf
    visits = torch.ones(65, 500, dtype=torch.float64)
    for draft in range(64):
        finite = ratio[draft].clamp(max=torch.finfo(torch.float32).max)
        visits[draft + 1] = (visits[draft] * finite).clamp(max=1.0)
    assert_close(_visits_of_chain(ratio), visits[1:].float(), rtol=1e-4, atol=1e-12)
    assert 0.1 < float((visits == 0.0).float().mean()) < 0.9

    ends_here = torch.rand(65, 500, generator=noise) ** 20
    ends = ends_here.double()
    for level in reversed(range(64)):
        ends[level] = ends[level + 1] + (1.0 - ends[level + 1]) * ends[level]
    assert_close(_ends_in_chain(ends_here), ends.float(), rtol=1e-5, atol=1e-30)


def test_random_trees_are_lossless() -> None:
    rng = np.random.default_rng(0)
    deepest = 0
    for seed in range(60):
        paths = random_topology(rng=rng, nodes=int(rng.integers(1, 6)), fanout=3, depth=3)
        deepest += max(map(len, paths)) == 3
        model = Tabular(3, Setting(), seed, spread=float(rng.choice([0.5, 1.5, 3.0])))
        assert (
            max(
                step_errors(model, model.static_drafts(paths), partial(verify_step, rule=TRAVERSAL))
            )
            < 1e-7
        )
    assert deepest > 5


# ---- how many drafts are accepted


def test_more_drafts_are_accepted_than_child_by_child() -> None:
    rng = np.random.default_rng(1)
    gains = []
    for seed in range(40):
        model = Tabular(3, Setting(), seed)
        weights, tree = model.static_drafts(random_topology(rng=rng, nodes=5, fanout=3, depth=3))
        lengths = [
            accepted((weights, tree), model.target_at(tree), rule) for rule in (TRAVERSAL, STRICT)
        ]
        gains.append(lengths[0] / lengths[1] - 1.0)
    worse = np.mean(np.array(gains) < 0)
    print(
        f"accepted drafts: {np.mean(gains):+.1%}, {min(gains):+.1%} to {max(gains):+.1%}, "
        f"fewer in {worse:.0%} of trees"
    )
    # Without replacement it may be worse (docs/algorithms.md, section 8.5).
    assert worse < 0.1
    assert np.mean(gains) > 0.02


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_block_accepts_at_least_as_much_as_its_drafts_alone(setting: str) -> None:
    gains = []
    for seed in range(8):
        model = Tabular(4, SETTINGS[setting], seed)
        weights, tree = model.drafts("chain")
        lengths = [
            accepted((weights, tree), model.target_at(tree), rule) for rule in (BLOCK, STRICT)
        ]
        gains.append(lengths[0] - lengths[1])
    print(f"{setting}: {sum(gains) / len(gains):.3f} more accepted drafts a step")
    assert min(gains) > -1e-9
    assert max(gains) > 0.05


def test_the_example_in_which_fewer_drafts_are_accepted() -> None:
    """The example of docs/algorithms.md, section 8.5."""
    shape = StaticTree.of([(0,), (0, 0), (0, 1)])
    q = torch.tensor([[1.0, 0, 0, 0], [0.75, 0.125, 0.125, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).double()
    p = torch.tensor([[0.75, 0.25, 0, 0], [0, 0.125, 0.5, 0.375], [0.25] * 4, [0.25] * 4]).double()
    pairs = torch.tensor(list(permutations(range(3), 2)))
    weights = q[1, pairs[:, 0]] * q[1, pairs[:, 1]] / (1.0 - q[1, pairs[:, 0]])
    tree = shape.draft(torch.nn.functional.pad(pairs, (2, 0)), q.expand(len(pairs), 4, 4))
    lengths = [
        accepted((weights, tree), p.expand(len(pairs), 4, 4), rule) for rule in (TRAVERSAL, STRICT)
    ]
    assert lengths == pytest.approx([1.2132, 1.2188], abs=1e-4)


def test_the_papers_example() -> None:
    """Two tokens whatever came before, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 or 11/9 are
    accepted.
    """
    p = torch.tensor([1.0, 2.0]).double() / 3
    q = torch.tensor([2.0, 1.0]).double() / 3
    tokens = torch.tensor([[0, *pair] for pair in product((0, 1), repeat=2)])
    drafts = (
        q[tokens[:, 1]] * q[tokens[:, 2]],
        StaticTree.of(chain(2)).draft(tokens, q.expand(4, 3, 2)),
    )
    lengths = [accepted(drafts, p.expand(4, 3, 2), rule) for rule in (STRICT, BLOCK)]
    assert lengths == pytest.approx([10 / 9, 11 / 9])


# ---- against the text and the published procedure, end by end, and mistakes that are easily made


def visited(tree: DraftTree, image: int, p: Vector, mistake: str = "") -> tuple[Vector, Vector]:
    """Section 8.5 as it is written: the probability to end at each node [M], and the next token's
    distributions.
    """
    assert tree.q is not None
    tokens = tree.tokens[image].tolist()
    children = tree.children[image].tolist()
    after = p.copy()

    def visit(node: int, share: float) -> Vector:
        own = p[node]
        law = tree.q[image, node].numpy().astype(p.dtype)
        entered = share
        ends = np.zeros(len(p))
        missed = 1.0
        for child in children[node]:
            if child < 0 or law[tokens[child]] <= 0:
                continue
            inside = visit(child, min(1.0, share * own[tokens[child]] / law[tokens[child]]))
            ends = ends + missed * inside
            missed = missed * (1.0 - inside.sum())
            rest = np.maximum(share * own - law, 0.0)
            if rest.sum() > 0:
                own = rest / rest.sum()
            if mistake != "share not updated":
                spare = rest.sum() + 1.0 - share
                share = rest.sum() / spare if spare > 0 else 1.0
            law = np.where(np.arange(len(law)) == tokens[child], 0.0, law)
            law = law if mistake == "q not renormalised" or law.sum() <= 0 else law / law.sum()
        ends[node] += missed * (
            entered if mistake == "ends with the share it was entered with" else share
        )
        after[node] = own
        return ends

    return visit(0, 1.0), after


def published(tree: DraftTree, image: int, p: Vector, mistake: str = "") -> tuple[Vector, Vector]:
    """Algorithm 2 as it is written; the step ends at the last level that is hit."""
    assert tree.q is not None
    q = tree.q[image].numpy()
    drafts = tree.tokens[image, 1:].tolist()
    share = [1.0]
    for level, x in enumerate(drafts):
        ratio = p[level, x] / q[level, x]
        share.append(min(1.0, ratio if mistake == "drafts alone" else share[-1] * ratio))
    chances = []
    after = []
    for level in range(len(drafts)):
        weight = 1.0 if mistake == "plain residual" else share[level]
        left = np.maximum(weight * p[level] - q[level], 0.0)
        spare = left.sum() + 1.0 - share[level]
        chance = left.sum() / spare if spare > 0 else 1.0
        if mistake == "share as chance":
            chance = share[level]
        chances.append(chance)
        after.append(left / left.sum() if left.sum() > 0 else p[level])
    hits = np.array([1.0, *chances[1:], share[-1]])
    none_behind = np.append(np.cumprod(1.0 - hits[:0:-1])[::-1], 1.0)
    return hits * none_behind, np.stack([*after, p[-1]])


def step_of(procedure: Procedure, mistake: str) -> Step:
    def step(tree: DraftTree, p: Tensor) -> Outcomes:
        batch, nodes, _ = p.shape
        weights = torch.zeros(nodes, batch, dtype=p.dtype)
        last = torch.zeros_like(p).transpose(0, 1).contiguous()
        drafts = torch.zeros(nodes, batch, tree.max_depth, dtype=torch.int64)
        for image in range(batch):
            ends, after = procedure(tree, image, p[image].numpy(), mistake)
            weights[:, image] = torch.from_numpy(ends)
            last[:, image] = torch.from_numpy(after)
            for node in range(nodes):
                ancestors = tree.attention[image, node].nonzero().flatten()[1:]
                drafts[node, image, : len(ancestors)] = tree.tokens[image, ancestors]
        return weights, drafts, tree.depths.T.contiguous(), last

    return step


WIDE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]
MISTAKES: list[tuple[Procedure, list[tuple[int, ...]], str]] = [
    (visited, WIDE, "share not updated"),
    (visited, WIDE, "q not renormalised"),
    (visited, WIDE, "ends with the share it was entered with"),
    (published, SHAPES["chain"], "drafts alone"),
    (published, SHAPES["chain"], "plain residual"),
    (published, SHAPES["chain"], "share as chance"),
]


@pytest.mark.parametrize(
    ("procedure", "paths", "mistake"), MISTAKES, ids=[row[2] for row in MISTAKES]
)
def test_a_broken_procedure_is_seen(
    procedure: Procedure, paths: list[tuple[int, ...]], mistake: str
) -> None:
    model = Tabular(4, Setting(), seed=3)
    drafts = model.static_drafts(paths)
    assert step_errors(model, drafts, step_of(procedure, ""))[1] < 1e-9
    _, error = step_errors(model, drafts, step_of(procedure, mistake))
    print(f"broken, {mistake}: joint {error:.4f}")
    assert error > 1e-3


@pytest.mark.parametrize(
    ("rule", "procedure"), [(TRAVERSAL, visited), (BLOCK, published)], ids=["traversal", "block"]
)
def test_random_drafts_are_accepted_as_written(rule: ConfiguredRule, procedure: Procedure) -> None:
    compared = 0
    for seed in range(160):
        rng = np.random.default_rng(seed)
        noise = torch.Generator().manual_seed(seed)
        batch = int(rng.integers(1, 4))
        vocabulary = int(rng.integers(3, 20))
        filters = FILTERS[rng.integers(len(FILTERS))]
        paths = random_topology(
            rng=rng, nodes=int(rng.integers(1, 14)), fanout=int(rng.integers(1, 5)), depth=5
        )
        shape = StaticTree.of(chain(int(rng.integers(1, 6))) if rule is BLOCK else paths)
        nodes = len(shape.depths)
        q, p = (
            random_probs(rng, noise, filters, shape=(batch, nodes, vocabulary))[1].double()
            for _ in range(2)
        )
        q, p = (rows / rows.sum(dim=-1, keepdim=True) for rows in (q, p))
        tree = random_static(rng=rng, noise=noise, q=q, shape=shape)
        accept = tree.by_node(accept_drafts(tree, p, rule)[1].accept)
        assert accept.isfinite().all()
        ends, forced = force_stops(tree, accept)
        for image in range(batch):
            wanted, after = procedure(tree, image, p[image].numpy(), "")
            assert_allclose(ends[:, image].numpy(), wanted, atol=1e-12)
            for end in np.flatnonzero(wanted > 1e-9):
                ended = verify(
                    tree=tree,
                    target_probs=p,
                    rule=rule,
                    uniforms=forced[end],
                    noise=torch.ones(batch, vocabulary),
                )
                assert int(ended.path[image].max()) == end
                assert_allclose(ended.next_probs[image].numpy(), after[end], atol=1e-9)
                compared += 1
    print(f"{compared} ends of random drafts: all as written")
    assert compared > 500


# ---- which drafts they decide on


def test_drafts_that_are_not_sampled_are_refused() -> None:
    model = Tabular(4, Setting(), seed=1)
    _, tree = model.dynamic_drafts(nodes=5, rounds=2, beam=2)
    for rule in (TRAVERSAL, BLOCK):
        with pytest.raises(ValueError, match="fixed trees of sampled drafts"):
            accept_drafts(tree, model.target_at(tree), rule)
    with pytest.raises(ValueError, match="the rule traversal needs sampled drafts"):
        Decoding(mode="speculative", rule="traversal", drafting="dynamic")


def test_greedy_traversal_is_strict() -> None:
    values: dict[str, Any] = {"mode": "speculative", "temperature": 0}
    assert Decoding(**{**values, "rule": "traversal"}) == Decoding(**values)
