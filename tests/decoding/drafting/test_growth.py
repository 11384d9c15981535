"""Dynamic trees: the vectorised growth equals a plain reading of docs/algorithms.md, section 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.decoding.tree import DraftTree
from tests.helpers.rules import parents_of

Prefix = tuple[int, ...]
Distribution = Callable[[Prefix], Tensor]


def plain_tree(
    q: Distribution, nodes: int, rounds: int, beam: int
) -> tuple[list[Prefix], list[float]]:
    """The kept prefixes in generation order, with their cumulative log q."""

    def children(prefix: Prefix, reach: Tensor) -> list[tuple[Tensor, Prefix]]:
        distribution = q(prefix)
        best = sorted(
            range(len(distribution)), key=lambda token: (-float(distribution[token]), token)
        )[:beam]
        return [
            (reach + distribution[token].log(), (*prefix, token))
            for token in best
            if distribution[token] > 0
        ]

    generation = children((), torch.zeros(()))
    every = list(generation)
    for _ in range(rounds - 1):
        frontier = sorted(generation, key=lambda item: -float(item[0]))[:beam]
        generation = []
        for reach, prefix in frontier:
            generation += children(prefix, reach)
        every += generation
    ranked = sorted(
        range(len(every)), key=lambda place: (-float(every[place][0]), len(every[place][1]), place)
    )
    selected = [every[place] for place in sorted(ranked[:nodes])]
    return [prefix for _, prefix in selected], [float(reach) for reach, _ in selected]


def grow(distributions: list[Distribution], rounds: int, beam: int) -> Growth:
    growth = Growth(torch.stack([distribution(()) for distribution in distributions]), beam)
    frontier = growth.frontier
    prefixes = [[(token,) for token in row] for row in frontier.tokens.tolist()]
    expanded = [list(row) for row in prefixes]
    check_seen(frontier.seen, prefixes, expanded)
    for _ in range(rounds - 1):
        rows = [
            torch.stack([distribution(prefix) for prefix in row])
            for distribution, row in zip(distributions, prefixes, strict=True)
        ]
        frontier = growth.grow(torch.stack(rows))
        prefixes = [
            [(*row[slot], token) for slot, token in zip(origin, tokens, strict=True)]
            for row, origin, tokens in zip(
                prefixes, frontier.origin.tolist(), frontier.tokens.tolist(), strict=True
            )
        ]
        expanded = [done + row for done, row in zip(expanded, prefixes, strict=True)]
        check_seen(frontier.seen, prefixes, expanded)
    return growth


def check_seen(seen: Tensor, prefixes: list[list[Prefix]], expanded: list[list[Prefix]]) -> None:
    """A frontier node sees those of its ancestors that were expanded, and itself."""
    for image, row in enumerate(prefixes):
        for slot, prefix in enumerate(row):
            ancestors = [prefix[: depth + 1] for depth in range(len(prefix))]
            visible = [
                expanded[image][place] for place in seen[image, slot].nonzero().flatten().tolist()
            ]
            assert visible == ancestors


def prefixes_of(tree: DraftTree, image: int) -> list[Prefix]:
    """The tokens below the root that lead to each node."""
    return [
        tuple(tree.tokens[image, seen.nonzero().flatten()[1:]].tolist())
        for seen in tree.attention[image]
    ]


def random_distribution(seed: int, vocabulary: int, kind: str) -> Distribution:
    def distribution(prefix: Prefix) -> Tensor:
        number = seed * 7919 + sum((token + 1) * 31**place for place, token in enumerate(prefix))
        noise = torch.Generator().manual_seed(number)
        # powers of two: equal scores by different ways are frequent and exact enough to tie
        if kind == "ties":
            weights = 2.0 ** torch.randint(-2, 1, (vocabulary,), generator=noise).float()
        else:
            weights = torch.randn(vocabulary, generator=noise).mul(2).exp()
        if kind == "filtered":
            weights[weights < weights.topk(2).values[-1]] = 0
        return weights / (
            weights.sum() if kind != "ties" else 2.0 ** torch.ceil(weights.sum().log2())
        )

    return distribution


@pytest.mark.parametrize("kind", ["random", "ties", "filtered"])
@pytest.mark.parametrize(
    ("nodes", "rounds", "beam"),
    [(5, 3, 2), (12, 4, 3), (3, 2, 4), (60, 3, 3), (7, 1, 5), (4, 5, 1)],
)
def test_growth_equals_a_plain_implementation(
    kind: str, nodes: int, rounds: int, beam: int
) -> None:
    distributions = [random_distribution(seed, 6, kind) for seed in range(4)]
    growth = grow(distributions, rounds, beam)
    root = torch.tensor([3, 1, 4, 0])
    selected, valid = growth.select(nodes)
    log_q = torch.cat(growth.log_q, dim=1)
    tree = growth.tree(root, nodes)
    assert tree.max_depth == rounds
    for image, distribution in enumerate(distributions):
        prefixes, reach = plain_tree(q=distribution, nodes=nodes, rounds=rounds, beam=beam)
        count = len(prefixes) + 1
        assert valid[image].tolist() == [place < count - 1 for place in range(valid.shape[1])]
        drafted = prefixes_of(tree, image)[:count]
        assert drafted == [(), *prefixes]
        torch.testing.assert_close(log_q[image, selected[image, : count - 1]], torch.tensor(reach))
        numbers = {prefix: place for place, prefix in enumerate(drafted)}
        assert parents_of(tree.attention)[image, 1:count].tolist() == [
            numbers[prefix[:-1]] for prefix in prefixes
        ]
        assert tree.depths[image, :count].tolist() == [len(prefix) for prefix in drafted]
        for place, prefix in enumerate(drafted):
            below = [numbers[other] for other in prefixes if other[:-1] == prefix]
            assert tree.children[image, place].tolist() == below + [-1] * (beam - len(below))
            leaves = [
                numbers[p]
                for p in drafted
                if p[: len(prefix)] == prefix and not any(o[:-1] == p for o in prefixes)
            ]
            assert tree.path_order[image, place] == min(leaves)
        assert int(tree.tokens[image, 0]) == int(root[image])
        assert not tree.children[image, count:].ge(0).any()
        assert tree.tokens[image, count:].eq(0).all()


def test_a_depth_limit_selects_what_fewer_rounds_would() -> None:
    distributions = [random_distribution(seed, 6, "random") for seed in range(5)]
    growth = grow(distributions, 4, 3)
    limits = [4, 2, 1, 0, -1]
    tree = growth.tree(torch.zeros(5, dtype=torch.int64), 9, torch.tensor(limits))
    for image, limit in enumerate(limits):
        expected = (
            plain_tree(q=distributions[image], nodes=9, rounds=limit, beam=3)[0]
            if limit > 0
            else []
        )
        assert prefixes_of(tree, image)[1 : len(expected) + 1] == expected
        assert int((tree.children[image] >= 0).sum()) == len(expected)


@pytest.mark.parametrize("certain", [1.0, 1.0000002])
def test_a_child_as_probable_as_its_parent_does_not_displace_it(certain: float) -> None:
    """Finding B1: a child with log q = 0 has exactly its parent's score."""

    def distribution(prefix: Prefix) -> Tensor:
        # A probability that rounding lifted above 1 may not lift the child above its parent either.
        return torch.tensor([0.0, certain, 0.0]) if prefix else torch.tensor([0.5, 0.3, 0.2])

    growth = grow([distribution], 3, 2)
    for nodes, expected in ((1, [(0,)]), (2, [(0,), (0, 1)]), (4, [(0,), (1,), (0, 1), (0, 1, 1)])):
        tree = growth.tree(torch.zeros(1, dtype=torch.int64), nodes)
        assert prefixes_of(tree, 0)[1:] == expected
