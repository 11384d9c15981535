"""A chain accepted as a block: lossless, equal to the published procedure, and never worse than draft by draft."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor

from lantern_bench.decoding.acceptance.walk import accept_tree, verify
from lantern_bench.decoding.tree import DraftTree, StaticTree
from tests.decoding.random_trees import FILTERS, random_probs, random_static
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
from tests.decoding.test_lossless_exact import SETTINGS

BLOCK = rule_named("block")
LENGTH = 4
Vector = NDArray[np.float64]


def chain(levels: int) -> StaticTree:
    return StaticTree.of([(0,) * level for level in range(1, levels + 1)])


def joint_error(model: Tabular, levels: int, step: Step) -> float:
    """The largest error of the joint distribution of LENGTH tokens of which a step makes the first."""
    weights, tree = model.static_drafts(chain(levels))
    return error_of(distribution_of_step(model, weights, tree, step, LENGTH), model.distribution_after((), LENGTH))


@pytest.mark.parametrize("limit", [None, -1, 0, 1, 2])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_block_is_lossless(setting: str, levels: int, limit: int | None) -> None:
    for seed in (1, 2):
        model = Tabular(4, SETTINGS[setting], seed)
        assert joint_error(model, levels, partial(verify_step, rule=BLOCK, depth_limit=limit)) < 1e-7


def test_float32_stays_within_the_tolerance() -> None:
    def in_float32(tree: DraftTree, p: Tensor) -> Outcomes:
        assert tree.q is not None
        half = DraftTree(**{**vars(tree), "q": tree.q.float()})
        weights, tokens, lengths, last = verify_step(half, p.float(), rule=BLOCK)
        return weights.double(), tokens, lengths, last.double()

    for setting in SETTINGS.values():
        assert joint_error(Tabular(4, setting, seed=3), 3, in_float32) < 1e-5


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_block_accepts_at_least_as_much_as_its_drafts_alone(setting: str) -> None:
    gains = []
    for seed in range(8):
        model = Tabular(4, SETTINGS[setting], seed)
        weights, tree = model.static_drafts(chain(3))
        kept = []
        for rule in (STRICT, BLOCK):
            stops, _, lengths, _ = verify_step(tree, model.target_at(tree), rule=rule)
            kept.append(float((stops * weights * lengths).sum()))
        gains.append(kept[1] - kept[0])
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


def test_with_the_target_as_drafter_everything_is_accepted() -> None:
    model = Tabular(4, Setting(), seed=4, alike=True)
    weights, tree = model.static_drafts(chain(3))
    stops, _, lengths, _ = verify_step(tree, model.target_at(tree), rule=BLOCK)
    assert float((stops * weights * (lengths == 3)).sum()) == pytest.approx(1.0, abs=1e-6)


# ---- mistakes that are easily made, each of which must show


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
    assert joint_error(model, 3, published_step("")) < 1e-9
    error = joint_error(model, 3, published_step(mistake))
    print(f"broken, {mistake}: joint {error:.4f}")
    assert error > 1e-3


# ---- against the published procedure


def test_random_blocks_are_accepted_as_published() -> None:
    compared = 0
    for seed in range(150):
        rng, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        batch, levels, vocabulary = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(3, 20))
        filters, shape = FILTERS[rng.integers(len(FILTERS))], chain(levels)
        q, p = (random_probs(rng, noise, filters, batch, levels + 1, vocabulary)[1].double() for _ in range(2))
        q, p = (one / one.sum(dim=-1, keepdim=True) for one in (q, p))
        tree = random_static(rng, noise, q, shape)
        _, acceptance = accept_tree(tree, p, BLOCK)
        accept = acceptance.accept.view(levels, batch, 1).transpose(0, 1)
        assert accept.isfinite().all()
        filled = torch.nn.functional.pad(accept, (0, 0, 0, 1))
        found, forced = force_stops(tree, filled)
        for image in range(batch):
            chances, after = published(p[image].numpy(), q[image, :-1].numpy(), tree.tokens[image, 1:].tolist())
            wanted = distribution_of_ends(chances)
            assert_allclose(found[:, image].numpy(), wanted, atol=1e-12)
            for end in np.flatnonzero(wanted > 1e-9):
                ended = verify(tree, p, BLOCK, forced[end], torch.ones(batch, vocabulary))
                assert int(ended.accepted[image]) == end
                assert_allclose(ended.next_probs[image].numpy(), after[end], atol=1e-9)
                assert ended.child_rank[image].tolist() == ([0] * end + [-1] + [-2] * levels)[:levels]
                compared += 1
    print(f"{compared} ends of random blocks: all as published")
    assert compared > 500


def test_drafts_that_are_not_sampled_are_refused() -> None:
    model = Tabular(4, Setting(), seed=1)
    tree = model.dynamic_draft(nodes=2, rounds=2, beam=1)
    with pytest.raises(ValueError, match="fixed trees of sampled drafts"):
        accept_tree(tree, model.target_at(tree), BLOCK)
