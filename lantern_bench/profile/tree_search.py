"""Search for the fastest tree of a drafting and a rule: expected by acceptance and cost, then measured.

The drafting's row names the function that lists trees with their expected length (`static_trees.py`,
`dynamic_trees.py`). This file prices their steps from a few that are measured, and measures the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.methods import DRAFTINGS, SAMPLING
from lantern_bench.errors import UserError
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.plugins import Values, load_code
from lantern_bench.profile.steps import StepCost, forward_ms, step_costs

_FORWARDS = (1, 2, 4, 8, 16, 32)
_KEPT = 5


class Tree(NamedTuple):
    """A tree that a drafting can make: its parameters, its size, and the expected tokens of a step.

    levels: drafter forwards. width: the most children of a node. length: accepted drafts and the bonus token.
    """

    values: Values
    nodes: int
    levels: int
    width: int
    length: float


def search_trees(
    model: LoadedModel, decoding: Decoding, prompts: Sequence[str], seed: int, say: Callable[[str], None]
) -> list[tuple[Decoding, dict[str, Any]]]:
    """Return the decodings that were measured, each with its row of expected and measured cost, fastest first.

    Of `decoding` all but its tree counts. Raises `UserError` for a drafting whose trees are not searched, and for
    too few prompts. `say` receives a line of text for each stage.
    """
    search = decoding.drafting_row.search
    if not search:
        *most, last = (name for name, row in DRAFTINGS.items() if row.search)
        known = f"{', '.join(most)} and {last}"
        raise UserError(f"--search: the drafts of {decoding.cell_id} are not searched", f"Those of {known} are.")
    trees: list[Tree] = load_code(search)(model, decoding, prompts, seed + 1, say)
    if not trees:
        text = f"--images {len(prompts)}: too few drafts to see how often they are accepted"
        raise UserError(text, "Give more images.")
    condition = model.condition(prompts[:1])
    forwards = [forward_ms(model, condition, nodes, decoding.cfg_scale, 100) for nodes in _FORWARDS]
    plain = autoregressive(decoding)
    costs: dict[int, tuple[StepCost, StepCost]] = {}

    def measure(tree: Tree) -> None:
        if id(tree) not in costs:
            chosen = with_tree(decoding, tree.values)
            say(f"measuring {describe(chosen)}")
            # Autoregressive decoding again for each tree, because the speed of a machine drifts.
            cost, ar = step_costs(model, [chosen, plain], prompts, seed)
            costs[id(tree)] = cost, ar

    corners = corner_trees(trees)
    for tree in corners:
        measure(tree)
    price = fit_price(corners, [costs[id(tree)][0] for tree in corners], forwards)
    for tree in fastest(trees, price, _KEPT):
        measure(tree)
    rows = []
    for tree in (one for one in trees if id(one) in costs):
        cost, ar = costs[id(tree)]
        chosen, expected = with_tree(decoding, tree.values), price(tree)
        row = {"tree": describe(chosen), "nodes": tree.nodes, "levels": tree.levels}
        row |= {"expected_length": tree.length, "mean_accepted_length": cost.mean_accepted_length}
        row |= {"expected_ms": expected, "milliseconds": cost.total, "ar_ms": ar.total}
        row |= {"expected_speedup": tree.length * ar.total / expected}
        rows.append((chosen, row | {"speedup": cost.mean_accepted_length * ar.total / cost.total}))
    return sorted(rows, key=lambda made: -made[1]["speedup"])


def with_tree(decoding: Decoding, values: Values) -> Decoding:
    """Return a configuration with other parameters of its drafting, or with another drafting."""
    own = {key for row in DRAFTINGS.values() for key in row.parameter_names}
    kept = {key: value for key, value in decoding.settings().items() if key not in own}
    return Decoding.model_validate(kept | {"cfg_default": decoding.cfg_default} | dict(values))


def autoregressive(decoding: Decoding) -> Decoding:
    """Return autoregressive decoding with the same sampling."""
    return Decoding.model_validate({"mode": "ar"} | {key: decoding.value(key) for key in SAMPLING})


def describe(decoding: Decoding) -> str:
    """Return the label of the drafts, and the paths of a static tree without a name."""
    tree = decoding.settings().get("tree")
    return " ".join("".join(map(str, path)) for path in tree) if isinstance(tree, list) else str(decoding.tree_label)


def corner_trees(trees: Sequence[Tree]) -> list[Tree]:
    """Return up to four trees that a price can be fitted to: the smallest, a deep, a wide and the largest one."""
    keys: tuple[Callable[[Tree], tuple[int, ...]], ...] = (
        lambda tree: (tree.nodes, tree.levels, tree.width),
        lambda tree: (-tree.levels, tree.nodes),
        lambda tree: (-tree.width, tree.levels, tree.nodes),
        lambda tree: (-tree.nodes * tree.width, -tree.levels),
    )
    found = [min(trees, key=key) for key in keys]
    return [tree for place, tree in enumerate(found) if all(tree is not other for other in found[:place])]


def fit_price(trees: Sequence[Tree], costs: Sequence[StepCost], forwards: Sequence[float]) -> Callable[[Tree], float]:
    """Return the expected milliseconds of a tree's step.

    `costs` are those of a few `trees`, `forwards` those of 1, 2, 4, ... nodes. The draft costs so much a level and so
    much a level and child; verification and the rest so much a node and child; the forward is interpolated.
    """
    from scipy.optimize import nnls

    def drafted(tree: Tree) -> list[float]:
        return [1.0, tree.levels, tree.levels * tree.width]

    def others(tree: Tree) -> list[float]:
        return [1.0, tree.nodes * tree.width]

    def fitted(terms: Callable[[Tree], list[float]], measured: Sequence[float]) -> Any:
        # Relative errors: a small tree counts as much as a large one.
        scale = 1.0 / np.maximum(measured, 1e-9)
        return nnls(np.array([terms(tree) for tree in trees]) * scale[:, None], np.ones(len(trees)))[0]

    draft = fitted(drafted, [cost.parts["draft_ms"] for cost in costs])
    rest = fitted(others, [cost.parts["verify_ms"] + cost.parts["other_ms"] for cost in costs])

    def price(tree: Tree) -> float:
        forward = np.interp(tree.nodes + 1, _FORWARDS, forwards)
        return float(forward + np.dot(draft, drafted(tree)) + np.dot(rest, others(tree)))

    return price


def fastest(trees: Sequence[Tree], price: Callable[[Tree], float], keep: int) -> list[Tree]:
    """Return the `keep` trees of most expected tokens per millisecond, one for each number of levels and width."""
    ranked = sorted(trees, key=lambda tree: -tree.length / price(tree))
    best: dict[tuple[int, int], Tree] = {}
    for tree in ranked:
        best.setdefault((tree.levels, tree.width), tree)
    return list(best.values())[:keep]


def experiment_line(decoding: Decoding) -> str:
    """Return the configuration as an entry of `cells`, without what is a default."""
    import yaml

    from lantern_bench.config.methods import MODES, PARAMETERS

    mode = MODES[decoding.mode]
    usual = {"drafting": mode.drafting, "rule": mode.rule, "cfg_scale": decoding.cfg_default}
    shown = {
        key: value
        for key, value in decoding.settings().items()
        if value != usual.get(key, None if key == "mode" else PARAMETERS[key].default)
    }
    return "- " + str(yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=10_000)).strip()
