"""The search for trees: its programme against all trees there are, its prices and its rates."""

from __future__ import annotations

import itertools

import pytest

from lantern_bench.config.trees import Topology, check_topology
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.profile.tree_search import acceptance_by_rank, best_trees, expected_length, interpolated

RATES = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.1], [0.4, 0.1, 0.1]]


def all_trees(nodes: int) -> set[Topology]:
    """Every topology of three levels and three ranks with so many nodes."""
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    found: set[Topology] = {()}
    for _ in range(nodes):
        found = {
            tuple(sorted({*tree, path})) for tree in found for path in paths if path not in tree and fits(tree, path)
        }
    return found


def fits(tree: Topology, path: tuple[int, ...]) -> bool:
    parent, rank = path[:-1], path[-1]
    return (not parent or parent in tree) and (rank == 0 or (*parent, rank - 1) in tree)


@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_the_programme_finds_the_longest_of_all_trees(nodes: int) -> None:
    longest = max(expected_length(check_topology(tree), RATES) for tree in all_trees(nodes))
    found = best_trees(RATES, nodes, lambda paths: 1.0 if len(paths) == nodes else 1e9, keep=1)[0]
    assert len(found.topology) == nodes
    assert found.length == pytest.approx(longest) == expected_length(found.topology, RATES)


def test_dear_nodes_make_small_trees() -> None:
    cheap, dear = (best_trees(RATES, 12, lambda paths, c=cost: 1 + c * len(paths), keep=1)[0] for cost in (0.0, 0.4))
    assert len(cheap.topology) == 12 > len(dear.topology)
    assert cheap.tokens_per_ms > dear.tokens_per_ms


def test_rates_are_counted_by_depth_and_rank() -> None:
    steps = [[0, 1], [0, -1], [-1], [1, 0]] * 10
    trace = ImageTrace([], [], [], [], [], steps, 1, 1, 1)
    assert acceptance_by_rank([trace], 2) == [[0.5, 0.25], [pytest.approx(1 / 3), pytest.approx(1 / 3)]]
    assert len(acceptance_by_rank([ImageTrace([], [], [], [], [], steps[:8], 1, 1, 1)], 2)) == 0


def test_prices_lie_on_lines_between_measured_points() -> None:
    price = interpolated({1: 2.0, 8: 9.0, 16: 10.0})
    assert [price(1), price(4.5), price(12), price(24)] == [2.0, 5.5, 9.5, 11.0]
