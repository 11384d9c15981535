"""Static trees of the search: growing by reach against exhaustive search."""

from __future__ import annotations

import itertools
import math

import pytest

from lantern_bench.methods.static_trees import STATIC_TREES, Path, Topology, check_topology
from lantern_bench.profile.tree_search import longest_trees, probe_tree

RATES = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.1], [0.4, 0.1, 0.1]]


def independent_reach() -> dict[Path, float]:
    """The reach of each node of three levels and ranks, where rank and depth decide."""
    reach = {}
    for depth in (1, 2, 3):
        for path in itertools.product(range(3), repeat=depth):
            rates = [RATES[level][rank] for level, rank in enumerate(path)]
            reach[path] = math.prod(rates)
    return reach


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
def test_the_longest_tree_is_found(nodes: int) -> None:
    longest = max(expected_length(check_topology(tree)) for tree in all_trees(nodes))
    lengths = longest_trees(independent_reach(), nodes)
    best = max(lengths, key=lambda tree: lengths[tree])
    assert len(best) == nodes
    assert lengths[best] == pytest.approx(longest)
    assert lengths[best] == pytest.approx(expected_length(best))


def test_one_rank_gives_chains() -> None:
    chain = {path: value for path, value in independent_reach().items() if not any(path)}
    assert list(longest_trees(chain, 8)) == [
        tuple((0,) * depth for depth in range(1, levels + 1)) for levels in (1, 2, 3)
    ]


def test_a_node_waits_for_its_earlier_siblings() -> None:
    """A later sibling may be committed more often than an earlier one."""
    reach = {(0,): 0.2, (1,): 0.5, (2,): 0.1}
    assert longest_trees(reach, 2) == {
        ((0,),): pytest.approx(1.2),
        ((0,), (1,)): pytest.approx(1.7),
    }


def test_static_trees_are_searched_in_a_tree_with_all_named_small_trees() -> None:
    probe = set(probe_tree())
    for name in ("chain-7", "small-7", "eagle1-25", "balanced-25", "extended-57"):
        assert probe.issuperset(STATIC_TREES[name])
