"""The longest static trees of every size, given how often drafts are accepted.

Acceptance is assumed to depend on depth and child rank alone. The best tree of n nodes and D levels then follows from a
dynamic programme over depth and nodes (Sequoia, arXiv 2402.12374, section 3.1).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.trees import Path, Topology, check_topology
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.steps import step_costs
from lantern_bench.profile.tree_search import Tree, with_tree

Rates = Sequence[Sequence[float]]
"""Of depth 0, 1, ...: the probability that the child of rank 0, 1, ... is accepted."""

_DEPTH, _RANKS, _MOST_NODES, _LEAST = 8, 5, 26, 30
_CHAIN = [(0,) * depth for depth in range(1, _DEPTH + 1)]
# Wide enough to see which ranks are accepted at every depth.
_BESIDE = [(r,) for r in range(1, _RANKS)] + [(*[0] * d, r) for d in range(1, _DEPTH) for r in range(1, 3)]


def list_static(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, say: Callable[[str], None]
) -> list[Tree]:
    """Return the longest tree for each number of levels and nodes; of a rule for chains only chains."""
    ranks = 1 if decoding.rule_row.chains else _RANKS
    probe = with_tree(decoding, {"topology": _CHAIN if ranks == 1 else [*_CHAIN, *_BESIDE]})
    rates = acceptance_by_rank(step_costs(model, [probe], prompts, seed)[0].traces, ranks)
    say("accepted at depth 1, 2, ... by rank: " + "; ".join(" ".join(f"{r:.2f}" for r in d) for d in rates))
    return [
        Tree({"topology": paths}, len(paths), len(paths[-1]), 1 + max(path[-1] for path in paths), length)
        for paths, length in longest_trees(rates, _MOST_NODES).items()
    ]


def acceptance_by_rank(traces: Sequence[ImageTrace], ranks: int) -> list[list[float]]:
    """Return the share of walks that accept the child of each rank, at each depth.

    Depths that were reached fewer than 30 times are left out. Ranks that were not offered count as never accepted.
    """
    counts: list[list[int]] = []
    for step in (step for trace in traces for step in trace.child_rank):
        for depth, rank in enumerate(step):
            if depth == len(counts):
                counts.append([0] * (ranks + 1))
            counts[depth][min(rank, ranks - 1) if rank >= 0 else ranks] += 1
    reached = itertools.takewhile(lambda taken: sum(taken) >= _LEAST, counts)
    return [[count / sum(taken) for count in taken[:ranks]] for taken in reached]


def expected_length(topology: Topology, rates: Rates) -> float:
    """Expected tokens of a step: the bonus token, plus the probability of each node to be accepted."""
    chance: dict[Path, float] = {(): 1.0}
    for path in topology:
        chance[path] = chance[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(chance.values())


def longest_trees(rates: Rates, most_nodes: int) -> dict[Topology, float]:
    """Return the longest trees for each number of levels and nodes, with their expected length."""
    found = {}
    for levels in range(1, len(rates) + 1):
        best = _best_below(rates[:levels])
        for nodes in range(levels, most_nodes + 1):
            topology = check_topology(best(nodes)[1])
            found[topology] = expected_length(topology, rates)
    return found


def _best_below(rates: Rates) -> Callable[[int], tuple[float, tuple[Path, ...]]]:
    """Dynamic programme: the best forest of n nodes whose roots are children of one node, from a rank on."""
    ranks = len(rates[0])

    @functools.cache
    def best(depth: int, rank: int, nodes: int) -> tuple[float, tuple[Path, ...]]:
        if nodes == 0 or depth == len(rates) or rank == ranks:
            return 0.0, ()
        top: tuple[float, tuple[Path, ...]] = (0.0, ())
        for below in range(nodes):
            inside, under = best(depth + 1, 0, below)
            beside, others = best(depth, rank + 1, nodes - 1 - below)
            value = rates[depth][rank] * (1.0 + inside) + beside
            if value > top[0] or not top[1]:
                top = value, ((rank,), *((rank, *path) for path in under), *others)
        return top

    return lambda nodes: best(0, 0, nodes)
