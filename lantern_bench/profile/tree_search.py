"""Search for the fastest draft of a drafting and a rule: candidates with their length, priced, then measured."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.decoding.trace import ImageTrace
from lantern_bench.methods.catalog import DRAFTINGS, MODES, PARAMETERS, RULES
from lantern_bench.methods.static_trees import Path, Topology, check_topology
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.step_costs import StepCost, forward_ms, step_costs, with_drafting
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import Emit, Note

Rates = Sequence[Sequence[float]]
"""Of depth 0, 1, ...: the probability that the child of rank 0, 1, ... is accepted."""

SEARCHED = ("static", "jacobi", "pac", "hybrid", "dynamic")

_LEVELS = 8
_RANKS = 5
_CHAIN: Topology = tuple((0,) * depth for depth in range(1, _LEVELS + 1))
# A tree that is wide enough to show which ranks are accepted at every depth.
_PROBE: Topology = check_topology(
    [
        *_CHAIN,
        *((r,) for r in range(1, _RANKS)),
        *((*[0] * d, r) for d in range(1, _LEVELS) for r in (1, 2)),
    ]
)
_LEAST_WALKS = 30
_FORWARDS = (1, 2, 4, 8, 16, 32)  # nodes of the forwards that are measured
_MOST_NODES = 26  # of a static tree
_MEASURED = 5  # candidates that are measured because their price is low
_WINDOWS = tuple({"window": window} for window in (4, 8, 12, 16, 24, 32, 48))
# From the smallest that have paid on any model to the default of the drafting.
_DYNAMIC = tuple(
    {"nodes": nodes, "depth": depth, "beam": beam}
    for nodes, depth, beam in (
        (2, 1, 2),
        (3, 1, 3),
        (6, 2, 3),
        (10, 3, 3),
        (16, 4, 4),
        (24, 4, 6),
        (32, 6, 5),
        (58, 5, 10),
    )
)


# ---- The longest static trees of every size, given how often drafts are accepted


def acceptance_by_rank(traces: Sequence[ImageTrace], ranks: int) -> list[list[float]]:
    """Return the share of walks that accept the child of each rank, at each depth that enough walks reached."""
    counts: list[list[int]] = []
    for step in (step for trace in traces for step in trace.child_rank):
        for depth, rank in enumerate(step):
            if depth == len(counts):
                counts.append([0] * (ranks + 1))
            counts[depth][min(rank, ranks - 1) if rank >= 0 else ranks] += 1
    reached = itertools.takewhile(lambda walks: sum(walks) >= _LEAST_WALKS, counts)
    return [[count / sum(walks) for count in walks[:ranks]] for walks in reached]


def longest_trees(rates: Rates, most_nodes: int) -> dict[Topology, float]:
    """Return the longest trees for each number of levels and nodes, with the expected tokens of a step."""
    lengths = {}
    for levels in range(1, len(rates) + 1):
        best = _best_forest(rates[:levels])
        for nodes in range(levels, most_nodes + 1):
            length, paths = best(0, 0, nodes)
            lengths[check_topology(paths)] = 1.0 + length  # with the bonus token
    return lengths


def _best_forest(rates: Rates) -> Callable[[int, int, int], tuple[float, tuple[Path, ...]]]:
    """Return (depth, rank, nodes) -> expected length and paths of the best children of one node, from `rank` on."""

    @functools.cache
    def best(depth: int, rank: int, nodes: int) -> tuple[float, tuple[Path, ...]]:
        if nodes == 0 or depth == len(rates) or rank == len(rates[0]):
            return 0.0, ()
        top: tuple[float, tuple[Path, ...]] = (0.0, ())
        for below in range(nodes):
            length_below, paths_below = best(depth + 1, 0, below)
            length_beside, paths_beside = best(depth, rank + 1, nodes - 1 - below)
            length = rates[depth][rank] * (1.0 + length_below) + length_beside
            if length > top[0] or not top[1]:
                top = length, ((rank,), *((rank, *path) for path in paths_below), *paths_beside)
        return top

    return best


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft that the search may choose."""

    decoding: Decoding
    nodes: int  # without the root
    levels: int  # of the tree: forwards of a drafter
    width: int  # the most children of a node
    length: float  # expected tokens of a step: accepted drafts and the bonus token


def _candidates(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, emit: Emit
) -> list[Candidate]:
    """Return drafts of several sizes with their length: static trees by acceptance, others measured."""
    if decoding.drafting == "static":
        ranks = 1 if decoding.rule_row.chains else _RANKS
        probe = with_drafting(decoding, {"tree": _CHAIN if ranks == 1 else _PROBE})
        rates = acceptance_by_rank(
            step_costs(model=model, decodings=[probe], prompts=prompts, seed=seed)[0].traces, ranks
        )
        by_depth = "; ".join(" ".join(f"{rate:.2f}" for rate in depth) for depth in rates)
        emit(Note(f"accepted at depth 1, 2, ... by rank: {by_depth}"))
        return [
            Candidate(
                with_drafting(decoding, {"tree": paths}),
                nodes=len(paths),
                levels=len(paths[-1]),
                width=1 + max(path[-1] for path in paths),
                length=length,
            )
            for paths, length in longest_trees(rates, _MOST_NODES).items()
        ]
    shared = {key: decoding.value(key) for key in decoding.drafting_row.parameter_names}
    candidates = []
    for size in _DYNAMIC if decoding.drafting == "dynamic" else _WINDOWS:
        sized = with_drafting(decoding, shared | size)
        emit(Note(f"measuring the length of {describe(sized)}"))
        length = step_costs(model=model, decodings=[sized], prompts=prompts, seed=seed)[
            0
        ].mean_accepted_length
        drafts = drafting_of(sized, model.target)
        candidates.append(
            Candidate(
                decoding=sized,
                nodes=drafts.nodes - 1,
                levels=drafts.depth,
                width=drafts.fanout,
                length=length,
            )
        )
    return candidates


def searched_lossless() -> list[tuple[str, str, str]]:
    """Return (mode, drafting, rule) of every lossless way to decode whose drafts are searched."""
    rules = [name for name, row in RULES.items() if row.lossless and name != "none"]
    # Rules of one function are the same rule on a chain: the first stands for them.
    first_of = {RULES[name].accept_tree: name for name in reversed(rules)}
    on_chains = [name for name in rules if name in first_of.values()]
    methods = []
    for drafting in SEARCHED:
        modes = [
            mode.name
            for mode in MODES.values()
            if mode.drafting == drafting and RULES[mode.rule].lossless
        ]
        for mode in modes or ["speculative"]:
            for rule in on_chains if DRAFTINGS[drafting].chain else rules:
                with contextlib.suppress(ParameterError):  # the rule cannot decide on such drafts
                    Decoding(mode, drafting=drafting, rule=rule)
                    methods.append((mode, drafting, rule))
    return methods


def search_trees(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, emit: Emit
) -> list[tuple[Decoding, dict[str, Any]]]:
    """Return the measured decodings, each with its row of costs, fastest first; raises `UserError` where none exist."""
    if decoding.drafting not in SEARCHED:
        searched = f"Those of {', '.join(SEARCHED[:-1])} and {SEARCHED[-1]} are."
        raise UserError(f"--search: the drafts of {decoding.cell_id} are not searched", searched)
    candidates = _candidates(
        model=model, decoding=decoding, prompts=prompts, seed=seed + 1, emit=emit
    )
    if not candidates:
        text = f"--images {len(prompts)}: too few drafts to see how often they are accepted"
        raise UserError(text, "Give more images.")
    condition = model.condition(prompts[:1])
    forwards = [
        forward_ms(
            model=model, condition=condition, nodes=nodes, cfg_scale=decoding.cfg_scale, repeats=100
        )
        for nodes in _FORWARDS
    ]

    @functools.cache
    def measured(candidate: Candidate) -> list[StepCost]:
        emit(Note(f"measuring {describe(candidate.decoding)}"))
        # `ar` again for each candidate: the speed of a machine drifts.
        return step_costs(
            model=model,
            decodings=[candidate.decoding, decoding.autoregressive()],
            prompts=prompts,
            seed=seed,
        )

    corners = corners_of(candidates)
    expected_ms = fit_price(corners, [measured(corner)[0] for corner in corners], forwards)
    rows = []
    for candidate in dict.fromkeys([*corners, *fastest(candidates, expected_ms, _MEASURED)]):
        cost, ar_cost = measured(candidate)
        expected = expected_ms(candidate)
        row = {
            "tree": describe(candidate.decoding),
            "nodes": candidate.nodes,
            "levels": candidate.levels,
        }
        row |= {
            "expected_length": candidate.length,
            "mean_accepted_length": cost.mean_accepted_length,
        }
        row |= {"expected_ms": expected, "milliseconds": cost.total, "ar_ms": ar_cost.total}
        row |= {"expected_speedup": candidate.length * ar_cost.total / expected}
        row |= {"speedup": cost.mean_accepted_length * ar_cost.total / cost.total}
        rows.append((candidate.decoding, row))
    return sorted(rows, key=lambda row: -row[1]["speedup"])


def describe(decoding: Decoding) -> str:
    """Return the label of the drafts, or the paths of a static tree without a name."""
    tree = decoding.settings().get("tree")
    return (
        " ".join("".join(map(str, path)) for path in tree)
        if isinstance(tree, list)
        else str(decoding.tree_label)
    )


def corners_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return up to four candidates to fit a price to: the smallest, a deep, a wide and the largest one."""
    corners = (
        min(candidates, key=lambda candidate: (candidate.nodes, candidate.levels, candidate.width)),
        min(candidates, key=lambda candidate: (-candidate.levels, candidate.nodes)),
        min(
            candidates, key=lambda candidate: (-candidate.width, candidate.levels, candidate.nodes)
        ),
        min(
            candidates,
            key=lambda candidate: (-candidate.nodes * candidate.width, -candidate.levels),
        ),
    )
    return list(dict.fromkeys(corners))


def fit_price(
    measured: Sequence[Candidate], costs: Sequence[StepCost], forwards: Sequence[float]
) -> Callable[[Candidate], float]:
    """Return a function: candidate -> expected milliseconds of its step; `forwards` are those of `_FORWARDS` nodes."""
    from scipy.optimize import nnls

    def terms_of(candidate: Candidate) -> tuple[list[float], list[float]]:
        """What the cost of the draft is linear in, and what that of verification and the rest is."""
        levels = candidate.levels
        width = candidate.width
        return [1.0, levels, levels * width], [1.0, candidate.nodes * width]

    draft_ms = [cost.parts["draft_ms"] for cost in costs]
    others_ms = [cost.parts["verify_ms"] + cost.parts["other_ms"] for cost in costs]
    prices = []
    for terms, milliseconds in zip(
        zip(*map(terms_of, measured), strict=True), (draft_ms, others_ms), strict=True
    ):
        # Relative errors: a small tree counts as much as a large one.
        scale = 1.0 / np.maximum(milliseconds, 1e-9)
        prices.append(nnls(np.array(terms) * scale[:, None], np.ones(len(terms)))[0])

    def expected_ms(candidate: Candidate) -> float:
        forward = np.interp(candidate.nodes + 1, _FORWARDS, forwards)
        return float(forward + sum(map(np.dot, prices, terms_of(candidate))))

    return expected_ms


def fastest(
    candidates: Sequence[Candidate], expected_ms: Callable[[Candidate], float], count: int
) -> list[Candidate]:
    """Return the `count` fastest candidates, one for each number of levels and width."""
    ranked = sorted(candidates, key=lambda candidate: -candidate.length / expected_ms(candidate))
    best: dict[tuple[int, int], Candidate] = {}
    for candidate in ranked:
        best.setdefault((candidate.levels, candidate.width), candidate)
    return list(best.values())[:count]


def experiment_line(decoding: Decoding) -> str:
    """Return the configuration as an entry of `cells`, without values that are the default."""
    mode = MODES[decoding.mode]
    usual = {"drafting": mode.drafting, "rule": mode.rule, "cfg_scale": decoding.cfg_default}
    shown = {
        key: value
        for key, value in decoding.settings().items()
        if value != usual.get(key, None if key == "mode" else PARAMETERS[key].default)
    }
    return (
        "- "
        + str(yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=10_000)).strip()
    )
