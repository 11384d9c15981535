"""Static trees of the search: dynamic programming against exhaustive search, acceptance rates."""

from __future__ import annotations

import itertools

import pytest

from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.methods.static_trees import Topology, check_topology
from lantern_bench.profile.tree_search import acceptance_by_rank, longest_trees

RATES = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.1], [0.4, 0.1, 0.1]]


def all_trees(nodes: int) -> set[Topology]:
    """Every topology with this many nodes, at most three levels and three ranks."""
    paths: list[tuple[int, ...]] = []
    for depth in (1, 2, 3):
        paths += itertools.product(range(3), repeat=depth)
    trees: set[Topology] = {()}
    for _ in range(nodes):
        larger = set[Topology]()
        for tree in trees:
            added = [path for path in paths if path not in tree and fits(tree, path)]
            larger |= {tuple(sorted({*tree, path})) for path in added}
        trees = larger
    return trees


def fits(tree: Topology, path: tuple[int, ...]) -> bool:
    parent = path[:-1]
    rank = path[-1]
    return (not parent or parent in tree) and (rank == 0 or (*parent, rank - 1) in tree)


def expected_length(topology: Topology) -> float:
    """1 for the bonus token, plus the acceptance probability of each node."""
    chance: dict[tuple[int, ...], float] = {(): 1.0}
    for path in topology:
        chance[path] = chance[path[:-1]] * RATES[len(path) - 1][path[-1]]
    return sum(chance.values())


@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_programme_finds_the_longest_tree(nodes: int) -> None:
    longest = max(expected_length(check_topology(tree)) for tree in all_trees(nodes))
    lengths = longest_trees(RATES, nodes)
    best = max(lengths, key=lambda tree: lengths[tree])
    assert len(best) == nodes
    assert lengths[best] == pytest.approx(longest)
    assert lengths[best] == pytest.approx(expected_length(best))


def test_one_rank_gives_chains() -> None:
    lengths = longest_trees([rates[:1] for rates in RATES], 8)
    assert list(lengths) == [
        tuple((0,) * depth for depth in range(1, levels + 1)) for levels in (1, 2, 3)
    ]


def test_acceptance_is_counted_by_depth_and_rank() -> None:
    steps = [[0, 1], [0, -1], [-1], [1, 0]] * 10
    trace = ImageTrace(
        start=[],
        committed=[],
        uncut=[],
        accepted=[],
        offered_depth=[],
        child_rank=steps,
        target_forwards=1,
        drafter_forwards=1,
        tokens=1,
    )
    assert acceptance_by_rank([trace], 2) == [
        [0.5, 0.25],
        [pytest.approx(1 / 3), pytest.approx(1 / 3)],
    ]
    assert (
        len(
            acceptance_by_rank(
                [
                    ImageTrace(
                        start=[],
                        committed=[],
                        uncut=[],
                        accepted=[],
                        offered_depth=[],
                        child_rank=steps[:8],
                        target_forwards=1,
                        drafter_forwards=1,
                        tokens=1,
                    )
                ],
                2,
            )
        )
        == 0
    )
