"""Which static tree is the fastest, given how often drafts are accepted and what a step costs.

Acceptance is taken to depend on depth and rank alone: how often the walk, standing on a node at some depth, moves on to
the child of some rank. Then the best tree of n nodes and D levels is a dynamic programme over depth and nodes
(as Sequoia, arXiv 2402.12374, section 3.1); its step is priced by what was measured. No torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lantern_bench.config.trees import Path, Topology, check_topology
from lantern_bench.decoding.trace import ImageTrace

Rates = Sequence[Sequence[float]]
"""Of depth 0, 1, ...: the probability that the child of rank 0, 1, ... is taken."""


class Found(NamedTuple):
    """A tree with the tokens a step is expected to commit and the milliseconds it is expected to take."""

    topology: Topology
    length: float
    milliseconds: float

    @property
    def tokens_per_ms(self) -> float:
        """What the search maximises."""
        return self.length / self.milliseconds


def acceptance_by_rank(traces: Sequence[ImageTrace], ranks: int) -> list[list[float]]:
    """How often the child of each rank was taken, at each depth of the trees that were decoded; unit: share.

    Depths that were reached less than 30 times are left out. Ranks beyond those offered count as never taken.
    """
    counts: list[list[int]] = []
    for trace in traces:
        for step in trace.child_rank:
            for depth, rank in enumerate(step):
                while len(counts) <= depth:
                    counts.append([0] * (ranks + 1))
                counts[depth][min(rank, ranks - 1) if rank >= 0 else ranks] += 1
    rates = []
    for taken in counts:
        if sum(taken) < _LEAST:
            break
        rates.append([count / sum(taken) for count in taken[:ranks]])
    return rates


_LEAST = 30


def expected_length(topology: Topology, rates: Rates) -> float:
    """Tokens a step commits: the bonus token and the chance of each node to be accepted."""
    chance: dict[Path, float] = {(): 1.0}
    for path in topology:
        chance[path] = chance[path[:-1]] * rates[len(path) - 1][path[-1]]
    return sum(chance.values())


def best_trees(rates: Rates, most_nodes: int, step_ms: Callable[[Topology], float], keep: int = 5) -> list[Found]:
    """The `keep` fastest of the best trees of each number of nodes and of levels, fastest first."""
    found = []
    for levels in range(1, len(rates) + 1):
        best = _best_below(rates[:levels])
        for nodes in range(levels, most_nodes + 1):
            topology = check_topology(best(nodes)[1])
            found.append(Found(topology, expected_length(topology, rates), step_ms(topology)))
    unlike = {one.topology: one for one in found}
    return sorted(unlike.values(), key=lambda one: -one.tokens_per_ms)[:keep]


def _best_below(rates: Rates) -> Callable[[int], tuple[float, tuple[Path, ...]]]:
    """The programme: the best forest of n nodes whose roots are children of one node at `depth`, from `rank` on."""
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


def interpolated(points: Mapping[int, float]) -> Callable[[float], float]:
    """A straight line between measured points, the last slope going on behind them."""
    known = sorted(points.items())

    def value(at: float) -> float:
        pairs = list(itertools.pairwise(known))
        if not pairs:
            return known[0][1]
        (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
        return y0 + (y1 - y0) * (at - x0) / (x1 - x0)

    return value
