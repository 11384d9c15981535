"""Search for the fastest draft of a drafting and a rule.

Candidates get their expected length and a price, and the fastest few are measured.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from lantern_bench.config.decoding import Decoding, ParameterError
from lantern_bench.decoding.drafting.draft_method import drafting_of
from lantern_bench.methods.catalog import MODES, PARAMETERS, RULES, lossless_pairs
from lantern_bench.methods.static_trees import STATIC_TREES, Path, Topology, check_topology
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile.cost_model import dynamic_sizes
from lantern_bench.profile.shadow_walk import WalkSums, strict_of, walk_images
from lantern_bench.profile.step_costs import StepCost, forward_ms, step_costs
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import Emit, Note

SEARCHED = ("static", "jacobi", "pac", "hybrid", "dynamic")

_LEVELS = 8
_RANKS = 5  # of the children in static trees
_CHAIN: Topology = tuple((0,) * depth for depth in range(1, _LEVELS + 1))
_FORWARDS = (1, 2, 4, 8, 16, 32)  # nodes of the measured forwards
_FORWARD_REPEATS = 100
_MOST_NODES = 26  # of a static tree
_MEASURED = 5  # candidates that are measured because their price is low
_WINDOWS = [{"window": window} for window in (4, 8, 12, 16, 24, 32, 48)]
# From the smallest tree that was fastest on any model to the default of the drafting.
_DYNAMIC = ("2n1d2b", "3n1d3b", "6n2d3b", "10n3d3b", "16n4d4b", "24n4d6b", "32n6d5b", "58n5d10b")


def probe_tree() -> Topology:
    """Return the tree that static trees are cut out of: the named ones, and a chain."""
    named = itertools.chain.from_iterable(STATIC_TREES.values())
    return check_topology({*_CHAIN, *(path for path in named if max(path) < _RANKS)})


def longest_trees(reach: Mapping[Path, float], most_nodes: int) -> dict[Topology, float]:
    """Return the longest trees of each number of levels and nodes.

    A tree grows by the node with the largest reach among the nodes whose parent and whose earlier
    siblings it has.

    Args:
        reach: How often a step commits each node of a tree.
        most_nodes: The most nodes of a tree, without the root.

    Returns:
        The expected tokens of a step, with the bonus token, by tree.
    """
    lengths = {}
    for levels in range(1, 1 + max(map(len, reach))):
        left = {path for path in reach if len(path) <= levels}
        tree: set[Path] = {()}
        length = 1.0
        while left and len(tree) <= most_nodes:
            possible = [path for path in left if _fits(path, tree)]
            best = max(possible, key=lambda path: (reach[path], path))
            left.remove(best)
            tree.add(best)
            length += reach[best]
            lengths[check_topology(tree - {()})] = length
    return lengths


def _fits(path: Path, tree: Collection[Path]) -> bool:
    *parent, rank = path
    return tuple(parent) in tree and (rank == 0 or (*parent, rank - 1) in tree)


def _static_lengths(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], *, seed: int, emit: Emit
) -> dict[Decoding, float]:
    """Return the expected length of many static trees.

    A rule on chains walks along each chain, other rules along one tree that contains all others.

    Args:
        model: The model.
        decoding: The rule and the sampling.
        prompts: Prompts of the walk, decoded one after the other.
        seed: The seed of the first image.
        emit: Receives progress.
    """
    if decoding.rule_row.chains:
        # The rule decides on each chain as a whole.
        settings = [decoding.changed(tree=_CHAIN[:levels]) for levels in range(1, _LEVELS + 1)]
    else:
        settings = [decoding.changed(tree=probe_tree())]
    emit(Note(f"walking along {len(prompts)} images"))
    reach = []
    for setting in settings:
        parts = []
        for number, prompt in enumerate(prompts):
            sums = walk_images(
                model=model,
                walk=strict_of(setting),
                settings=[setting],
                prompts=[prompt],
                seeds=[seed + number],
            )
            parts.append(sums)
        walk = WalkSums.joined(parts)
        reach.append(walk.reach[0].sum(axis=0) / walk.steps.sum())
    if decoding.rule_row.chains:
        return dict(zip(settings, map(sum, reach), strict=True))
    of_nodes = dict(zip(settings[0].paths, reach[0][1:].tolist(), strict=True))
    return {
        decoding.changed(tree=tree): length
        for tree, length in longest_trees(of_nodes, _MOST_NODES).items()
    }


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft that the search may choose."""

    decoding: Decoding
    nodes: int  # without the root
    levels: int  # of the tree: forwards of a drafter
    width: int  # the most children of a node
    length: float  # expected tokens of a step: accepted drafts and the bonus token


def _find_candidates(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], *, seed: int, emit: Emit
) -> list[Candidate]:
    """Drafts of many sizes with their length: expected for static trees, otherwise measured."""
    lengths: dict[Decoding, float] = {}
    if decoding.drafting == "static":
        lengths = _static_lengths(model, decoding, prompts, seed=seed, emit=emit)
    else:
        dynamic = map(dynamic_sizes, _DYNAMIC)
        for size in dynamic if decoding.drafting == "dynamic" else _WINDOWS:
            sized = decoding.changed(**size)
            emit(Note(f"measuring the length of {describe(sized)}"))
            (cost,) = step_costs(model, [sized], prompts, seed=seed)
            lengths[sized] = cost.mean_accepted_length
    candidates = []
    for sized, length in lengths.items():
        drafts = drafting_of(sized, model.target)
        candidates.append(
            Candidate(
                decoding=sized,
                nodes=drafts.tree.tokens.shape[1] - 1,
                levels=drafts.depth,
                width=drafts.tree.children.shape[2],
                length=length,
            )
        )
    return candidates


def searched_lossless() -> list[tuple[str, str, str]]:
    """Return (mode, drafting, rule) of every lossless method whose drafts are searched."""
    methods = []
    for drafting in SEARCHED:
        rules = [rule.name for rule, row in lossless_pairs() if row.name == drafting]
        modes = [
            mode.name
            for mode in MODES.values()
            if mode.drafting == drafting and RULES[mode.rule].lossless
        ]
        for mode, rule in itertools.product(modes or ["speculative"], rules):
            with contextlib.suppress(ParameterError):  # the rule cannot decide on these drafts
                Decoding(mode, drafting=drafting, rule=rule)
                methods.append((mode, drafting, rule))
    return methods


def search_trees(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], *, seed: int, emit: Emit
) -> list[tuple[Decoding, dict[str, Any]]]:
    """Search for the fastest drafts of a decoding.

    Args:
        model: Decodes the images.
        decoding: Its drafting and rule are kept; its draft is replaced.
        prompts: One prompt for each image.
        seed: Seed of the first image.
        emit: Receives notes.

    Returns:
        The measured decodings, each with its row of costs, fastest first.

    Raises:
        UserError: The drafting is not searched, or not at this temperature.
    """
    if decoding.drafting not in SEARCHED:
        raise UserError(
            f"--search: the drafts of {decoding.cell_id} are not searched",
            f"Drafts of {', '.join(SEARCHED[:-1])} and {SEARCHED[-1]} are.",
        )
    if decoding.greedy and decoding.drafting == "static":
        raise UserError(
            "--temperature 0: trees are searched by probabilities of acceptance, and at "
            "temperature 0 there are none",
            "Search at temperature 1, or measure trees with --tree.",
        )
    candidates = _find_candidates(model, decoding, prompts, seed=seed + 1, emit=emit)
    condition = model.condition(prompts[:1])
    forwards = [
        forward_ms(model, condition, nodes, cfg_scale=decoding.cfg_scale, repeats=_FORWARD_REPEATS)
        for nodes in _FORWARDS
    ]

    @functools.cache
    def measured(candidate: Candidate) -> list[StepCost]:
        emit(Note(f"measuring {describe(candidate.decoding)}"))
        # `ar` is measured again for each candidate, because the speed of a machine drifts.
        return step_costs(
            model, [candidate.decoding, decoding.autoregressive()], prompts, seed=seed
        )

    corners = corners_of(candidates)
    expected_ms = fit_price(corners, [measured(corner)[0] for corner in corners], forwards)
    found = []
    for candidate in dict.fromkeys([*corners, *fastest(candidates, expected_ms, _MEASURED)]):
        cost, ar_cost = measured(candidate)
        expected = expected_ms(candidate)
        row = {
            "tree": describe(candidate.decoding),
            "nodes": candidate.nodes,
            "levels": candidate.levels,
            "expected_length": candidate.length,
            "mean_accepted_length": cost.mean_accepted_length,
            "expected_ms": expected,
            "milliseconds": cost.total,
            "ar_ms": ar_cost.total,
            "expected_speedup": candidate.length * ar_cost.total / expected,
            "speedup": cost.mean_accepted_length * ar_cost.total / cost.total,
        }
        found.append((candidate.decoding, row))
    return sorted(found, key=lambda decoding_row: -decoding_row[1]["speedup"])


def describe(decoding: Decoding) -> str:
    """Return the label of the drafts, or the paths of a static tree without a name."""
    tree = decoding.settings().get("tree")
    if isinstance(tree, list):
        return " ".join("".join(str(rank) for rank in path) for path in tree)
    return str(decoding.tree_label)


def corners_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return up to four candidates to fit a price to: smallest, deepest, widest and largest."""
    smallest = min(candidates, key=lambda tree: (tree.nodes, tree.levels, tree.width))
    deepest = min(candidates, key=lambda tree: (-tree.levels, tree.nodes))
    widest = min(candidates, key=lambda tree: (-tree.width, tree.levels, tree.nodes))
    largest = min(candidates, key=lambda tree: (-tree.nodes * tree.width, -tree.levels))
    return list(dict.fromkeys([smallest, deepest, widest, largest]))


def fit_price(
    measured: Sequence[Candidate], costs: Sequence[StepCost], forwards: Sequence[float]
) -> Callable[[Candidate], float]:
    """Fit the milliseconds of a step to a few measured candidates.

    The cost of the draft is linear in the levels and in levels * width. The cost of verification
    and the rest is linear in nodes * width.

    Args:
        measured: The measured candidates.
        costs: Their costs.
        forwards: Milliseconds of target forwards over `_FORWARDS` nodes.

    Returns:
        A function from a candidate to the expected milliseconds of its step.
    """

    def terms(tree: Candidate) -> list[float]:
        """Three terms of the draft, then two of the rest."""
        return [1.0, tree.levels, tree.levels * tree.width, 1.0, tree.nodes * tree.width]

    every = np.array([terms(tree) for tree in measured])
    draft_ms = [cost.parts["draft_ms"] for cost in costs]
    other_ms = [cost.parts["verify_ms"] + cost.parts["other_ms"] for cost in costs]
    prices = [*_fit_relative(every[:, :3], draft_ms), *_fit_relative(every[:, 3:], other_ms)]

    def expected_ms(tree: Candidate) -> float:
        forward = np.interp(tree.nodes + 1, _FORWARDS, forwards)
        return float(forward + np.dot(prices, terms(tree)))

    return expected_ms


def _fit_relative(terms: Any, milliseconds: Sequence[float]) -> Any:
    """Non-negative prices of terms by least squares of relative errors.

    With relative errors a small tree counts as much as a large one.
    """
    from scipy.optimize import nnls

    scale = 1.0 / np.maximum(milliseconds, 1e-9)
    prices, _ = nnls(terms * scale[:, None], np.ones(len(scale)))
    return prices


def fastest(
    candidates: Sequence[Candidate], expected_ms: Callable[[Candidate], float], count: int
) -> list[Candidate]:
    """Return the fastest candidates, at most one for each number of levels and width.

    Args:
        candidates: The candidates.
        expected_ms: A function of `fit_price`.
        count: Number of candidates that are returned.
    """
    best: dict[tuple[int, int], Candidate] = {}
    for candidate in sorted(candidates, key=lambda tree: -tree.length / expected_ms(tree)):
        best.setdefault((candidate.levels, candidate.width), candidate)
    return list(best.values())[:count]


def experiment_line(decoding: Decoding) -> str:
    """Return the configuration as an entry of `cells`, without values that are the default."""
    mode = MODES[decoding.mode]
    usual = {"drafting": mode.drafting, "rule": mode.rule, "cfg_scale": decoding.cfg_default}
    settings = decoding.settings()
    shown = {"mode": settings.pop("mode")}
    shown |= {
        key: value
        for key, value in settings.items()
        if value != usual.get(key, PARAMETERS[key].default)
    }
    text = yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=10_000)
    return f"- {text.strip()}"
