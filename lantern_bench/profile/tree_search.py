"""Search for the fastest static tree, given how often drafts are accepted and what a step costs.

Acceptance is assumed to depend on depth and child rank alone. The best tree of n nodes and D levels then follows from a
dynamic programme over depth and nodes (Sequoia, arXiv 2402.12374, section 3.1). Its step is priced by measured times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.trees import STATIC_TREES, Path, Topology, check_topology
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.errors import UserError
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.steps import forward_ms, step_cost

Rates = Sequence[Sequence[float]]
"""Of depth 0, 1, ...: the probability that the child of rank 0, 1, ... is accepted."""

# Wide enough to see which ranks are accepted at every depth.
_PROBE = tuple([(r,) for r in range(5)] + [(*[0] * d, r) for d in range(1, 8) for r in range(3)])
_RANKS, _MOST_NODES, _LEAST = 5, 26, 30
_SEARCHED_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32)


def search_trees(
    model: LoadedModel,
    rule: Mapping[str, Any],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return one row per tree found: its expected and its measured cost and speedup.

    `rule` holds the settings of the acceptance rule and guidance. `rows` are those of the profile; raises `UserError`
    if they have no step of a static tree. `say` receives a line of text for each stage.
    """
    from scipy.interpolate import make_interp_spline

    levels = {name: len(paths[-1]) for name, paths in STATIC_TREES.items()}
    static = [row for row in rows if row["what"] == "step" and row["name"] in levels]
    if not static:
        raise UserError("--search: needs the cost of a static tree", "Add one to --tree, such as chain-5.")
    traces = step_cost(model, Decoding(**rule, topology=_PROBE), prompts, seed + 1).traces
    rates = acceptance_by_rank(traces, _RANKS)
    say("accepted at depth 1, 2, ... by rank: " + "; ".join(" ".join(f"{r:.2f}" for r in d) for d in rates))
    condition, scale = model.condition(prompts[:1]), float(rule["cfg_scale"])
    forward_times = [forward_ms(model, condition, nodes, scale, 100) for nodes in _SEARCHED_NODES]
    forward = make_interp_spline(_SEARCHED_NODES, forward_times, k=1)
    level_ms = sum(row["draft_ms"] for row in static) / sum(levels[row["name"]] for row in static)
    rest_ms = sum(row["verify_ms"] + row["other_ms"] for row in static) / len(static)

    def step_ms(paths: Topology) -> float:
        return float(forward(len(paths) + 1)) + level_ms * len(paths[-1]) + rest_ms

    def measured(one: Found) -> dict[str, Any]:
        text = " ".join("".join(map(str, path)) for path in one.topology)
        say(f"measuring {text}")
        cost = step_cost(model, Decoding(**rule, topology=one.topology), prompts, seed)
        # Autoregressive decoding again for each tree, because the speed of a machine drifts.
        plain = step_cost(model, Decoding.model_validate({"mode": "ar", "cfg_scale": scale}), prompts, seed)
        row = {"tree": text, "nodes": len(one.topology), "levels": len(one.topology[-1])}
        row |= {"expected_length": one.length, "expected_ms": one.milliseconds}
        row |= {"mean_accepted_length": cost.mean_accepted_length, "milliseconds": cost.total, "ar_ms": plain.total}
        return row | {"speedup": cost.mean_accepted_length * plain.total / cost.total}

    return [measured(one) for one in best_trees(rates, _MOST_NODES, step_ms)]


class Found(NamedTuple):
    """A tree with the expected tokens and the expected milliseconds of a step."""

    topology: Topology
    length: float
    milliseconds: float

    @property
    def tokens_per_ms(self) -> float:
        """The objective of the search."""
        return self.length / self.milliseconds


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


def best_trees(rates: Rates, most_nodes: int, step_ms: Callable[[Topology], float], keep: int = 5) -> list[Found]:
    """Return the `keep` fastest of the longest trees for each number of nodes and levels, fastest first."""
    found = []
    for levels in range(1, len(rates) + 1):
        best = _best_below(rates[:levels])
        for nodes in range(levels, most_nodes + 1):
            topology = check_topology(best(nodes)[1])
            found.append(Found(topology, expected_length(topology, rates), step_ms(topology)))
    unique = {one.topology: one for one in found}
    return sorted(unique.values(), key=lambda one: -one.tokens_per_ms)[:keep]


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
