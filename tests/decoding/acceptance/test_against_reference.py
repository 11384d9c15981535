"""The vectorised verification equals the oracle, child by child, on random trees.

`LANTERN_BENCH_RANDOM_TREES` sets how many (each for 1 to 3 images); the default keeps the test
short.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from numpy.testing import assert_allclose

from lantern_bench.decoding.acceptance.verify import verify, verify_greedy
from lantern_bench.decoding.sampling import greedy_probabilities
from tests.helpers.random_trees import Draft, random_draft
from tests.helpers.reference_walk import merge, walk, walk_greedy
from tests.helpers.rules import parents_of

TREES = int(os.environ.get("LANTERN_BENCH_RANDOM_TREES", "400"))


def check_sampled(draft: Draft, seed: int) -> int:
    """Compare the walks of all images; return the number of children looked at."""
    tree = draft.tree
    verdict = verify(
        tree=tree,
        target_probs=draft.probs,
        rule=draft.rule,
        uniforms=draft.uniforms,
        noise=draft.noise,
        depth_limit=draft.depth_limit,
    )
    eps = torch.finfo(draft.probs.dtype).eps
    looks = 0
    for image in range(len(tree.tokens)):
        tokens = tree.tokens[image].tolist()
        q = None if tree.q is None else list(tree.q[image].numpy())
        done = walk(
            children=tree.children[image].tolist(),
            tokens=tokens,
            p_of=list(draft.probs[image].numpy()),
            q_of=q,
            rules=draft.rules,
            uniform=lambda node, rank, image=image: float(draft.uniforms[image, node, rank]),
            depth_limit=draft.limit(image),
        )
        length = len(done.path) - 1
        last = len(done.path)
        message = f"seed {seed}, image {image}, {draft.rule}"
        assert verdict.path[image].tolist() == done.path + [-1] * (tree.max_depth - length), message
        assert int(verdict.accepted[image]) == length, message
        assert verdict.tokens[image, :length].tolist() == [
            tokens[node] for node in done.path[1:]
        ], message
        ranks = (done.child_rank + [-2] * tree.max_depth)[: tree.max_depth]
        assert verdict.child_rank[image].tolist() == ranks, message
        # Rounding grows by the inverse of the mass that a rejection leaves.
        near = 40 * eps / done.smallest_rest
        assert_allclose(verdict.next_probs[image], done.next_probs, atol=near, err_msg=message)
        assert_allclose(
            verdict.neighbour_mass[image], done.neighbour_mass, atol=near, err_msg=message
        )
        assert_allclose(
            verdict.neighbour_mass_tried[image],
            done.neighbour_mass_tried,
            atol=near,
            err_msg=message,
        )
        assert_allclose(verdict.emitted_tv[image], done.emitted_tv, atol=near, err_msg=message)
        final = int((verdict.next_probs[image] / draft.noise[image]).argmax())
        assert verdict.tokens[image, length:].tolist() == [final] + [0] * (
            tree.max_depth + 1 - last
        ), message
        looks += len(done.looks)
    return looks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sampled_walks_equal_the_oracle(dtype: torch.dtype) -> None:
    looks = sum(check_sampled(random_draft(seed, dtype), seed) for seed in range(TREES))
    print(f"{TREES} random drafts, {looks} children looked at: all walks equal")
    assert looks > TREES


def paths_in_order(draft: Draft, image: int) -> list[list[int]]:
    """All root-to-leaf paths of what is offered, in the order that section 3 gives."""
    children = draft.tree.children[image].tolist()

    def below(node: int, depth: int) -> list[list[int]]:
        offered = [child for child in children[node] if child >= 0 and depth < draft.limit(image)]
        if not offered:
            return [[node]]
        paths = []
        for child in offered:
            paths += [[node, *rest] for rest in below(child, depth + 1)]
        return paths

    paths = below(0, 0)
    if isinstance(draft.tree.q, torch.Tensor):
        return sorted(paths)
    return sorted(paths, key=lambda path: path[-1])


def test_greedy_walks_equal_the_oracle() -> None:
    accepted = 0
    for seed in range(TREES):
        draft = random_draft(seed)
        tree = draft.tree
        # A dynamic tree is selected under the limit, so a limit in verification alone is left to
        # static trees.
        limit = draft.depth_limit if tree.q is not None else None
        draft.depth_limit = limit
        # Targets that like the drafts make long paths, of equal length too.
        logits = draft.logits.clone()
        wanted = torch.zeros_like(logits)
        for image, node, rank in (tree.children >= 0).nonzero().tolist():
            wanted[image, node, tree.tokens[image, tree.children[image, node, rank]]] += 3.0 / (
                1 + rank
            )
        logits += wanted
        verdict = verify_greedy(tree=tree, guided_logits=logits, rule=draft.rule, depth_limit=limit)
        for image in range(len(tree.tokens)):
            probs = list(greedy_probabilities(logits[image]).numpy())
            tokens = tree.tokens[image].tolist()
            path, token = walk_greedy(
                parents=parents_of(tree.attention)[image].tolist(),
                paths=paths_in_order(draft, image),
                tokens=tokens,
                p_of=probs,
                rules=draft.rules,
            )
            length = len(path) - 1
            message = f"seed {seed}, image {image}, {draft.rule}"
            assert verdict.path[image].tolist() == path + [-1] * (tree.max_depth - length), message
            assert verdict.tokens[image, : length + 1].tolist() == [
                *(tokens[node] for node in path[1:]),
                token,
            ], message
            ranks = [tree.children[image, a].tolist().index(b) for a, b in pairwise(path)]
            offers = bool((tree.children[image, path[-1]] >= 0).any()) and length < draft.limit(
                image
            )
            ends = ([-1] if offers else []) + [-2] * tree.max_depth
            assert verdict.child_rank[image].tolist() == (ranks + ends)[: tree.max_depth], message
            assert_allclose(verdict.next_probs[image], probs[path[-1]], atol=1e-6)
            lent = [
                merge(probs[parent], tokens[child], draft.rules)[0]
                for parent, child in pairwise(path)
            ]
            assert_allclose(verdict.neighbour_mass[image], sum(lent), atol=1e-6, err_msg=message)
            decided = []
            for node in path[: draft.limit(image)]:
                for child in tree.children[image, node].tolist():
                    if child >= 0:
                        decided.append(merge(probs[node], tokens[child], draft.rules)[0])
            assert_allclose(
                verdict.neighbour_mass_tried[image], sum(decided), atol=3e-6, err_msg=message
            )
            accepted += length
    print(f"{TREES} random drafts, {accepted} accepted greedily: all walks equal")
    assert accepted > TREES


def test_batches_change_no_image_and_inputs_are_not_written() -> None:
    compared = 0
    for seed in range(30):
        draft = random_draft(seed)
        tree = draft.tree
        probs = draft.probs.clone()
        q = None if tree.q is None else tree.q.clone()
        whole = verify(
            tree=tree,
            target_probs=probs,
            rule=draft.rule,
            uniforms=draft.uniforms,
            noise=draft.noise,
            depth_limit=draft.depth_limit,
        )
        assert torch.equal(probs, draft.probs)
        assert q is None or torch.equal(q, tree.q)
        for image in range(len(tree.tokens)):
            alone = {
                name: value[image : image + 1]
                for name, value in vars(tree).items()
                if isinstance(value, torch.Tensor)
            }
            row = slice(image, image + 1)
            limit = None if draft.depth_limit is None else draft.depth_limit[row]
            verdict = verify(
                tree=replace(tree, **alone),
                target_probs=probs[row],
                rule=draft.rule,
                uniforms=draft.uniforms[row],
                noise=draft.noise[row],
                depth_limit=limit,
            )
            tensors = {name: value for name, value in vars(verdict).items() if value is not None}
            for name, value in tensors.items():
                assert torch.equal(value, getattr(whole, name)[row]), (seed, name)
            compared += 1
    assert compared > 30
