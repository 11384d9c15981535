"""The longest static trees of every size, given how often drafts are accepted.

Acceptance is assumed to depend on depth and child rank alone. The best tree of n nodes and D levels then follows from a
dynamic programme over depth and nodes (Sequoia, arXiv 2402.12374, section 3.1).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.methods.trees import Path, Topology, check_topology

Rates = Sequence[Sequence[float]]
"""Of depth 0, 1, ...: the probability that the child of rank 0, 1, ... is accepted."""

LEVELS, RANKS = 8, 5
CHAIN: Topology = tuple((0,) * depth for depth in range(1, LEVELS + 1))
PROBE: Topology = check_topology(
    [*CHAIN, *((r,) for r in range(1, RANKS)), *((*[0] * d, r) for d in range(1, LEVELS) for r in (1, 2))]
)
"""A tree that is wide enough to show which ranks are accepted at every depth."""
_LEAST_WALKS = 30


def acceptance_by_rank(traces: Sequence[ImageTrace], ranks: int) -> list[list[float]]:
    """Return the share of walks that accept the child of each rank, at each depth.

    Depths that fewer than 30 walks reached are left out. Ranks that were not offered count as never accepted.
    """
    counts: list[list[int]] = []
    for step in (step for trace in traces for step in trace.child_rank):
        for depth, rank in enumerate(step):
            if depth == len(counts):
                counts.append([0] * (ranks + 1))
            counts[depth][min(rank, ranks - 1) if rank >= 0 else ranks] += 1
    reached = itertools.takewhile(lambda walks: sum(walks) >= _LEAST_WALKS, counts)
    return [[count / sum(walks) for count in walks[:ranks]] for walks in reached]


def expected_length(topology: Topology, rates: Rates) -> float:
    """Return the expected tokens of a step: the bonus token, plus the probability of each node to be accepted."""
    chance: dict[Path, float] = {(): 1.0}
    for path in topology:
        chance[path] = chance[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(chance.values())


def longest_trees(rates: Rates, most_nodes: int) -> dict[Topology, float]:
    """Return the longest trees for each number of levels and nodes, with their expected length."""
    lengths = {}
    for levels in range(1, len(rates) + 1):
        best = _best_below(rates[:levels])
        for nodes in range(levels, most_nodes + 1):
            topology = check_topology(best(nodes)[1])
            lengths[topology] = expected_length(topology, rates)
    return lengths


def _best_below(rates: Rates) -> Callable[[int], tuple[float, tuple[Path, ...]]]:
    """Return the dynamic programme: number of nodes -> the best forest below one node, and its expected length."""
    ranks = len(rates[0])

    @functools.cache
    def best(depth: int, rank: int, nodes: int) -> tuple[float, tuple[Path, ...]]:
        """The best forest of `nodes` whose roots are children of one node at `depth`, from `rank` on."""
        if nodes == 0 or depth == len(rates) or rank == ranks:
            return 0.0, ()
        top: tuple[float, tuple[Path, ...]] = (0.0, ())
        for below in range(nodes):
            length_below, paths_below = best(depth + 1, 0, below)
            length_beside, paths_beside = best(depth, rank + 1, nodes - 1 - below)
            length = rates[depth][rank] * (1.0 + length_below) + length_beside
            if length > top[0] or not top[1]:
                top = length, ((rank,), *((rank, *path) for path in paths_below), *paths_beside)
        return top

    return lambda nodes: best(0, 0, nodes)
