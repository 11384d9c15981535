"""`lantern-bench profile --search`: the fastest static trees by measured acceptance and costs, measured themselves.

The programme that finds them is `measure/tree_search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lantern_bench.console import Console
from lantern_bench.errors import UserError

if TYPE_CHECKING:
    from lantern_bench.measure.tree_search import Found
    from lantern_bench.models.loaded import LoadedModel

__all__ = ["search_trees"]

# Wide enough to see at which ranks drafts are accepted, at every depth.
_PROBE = tuple([(r,) for r in range(5)] + [(*[0] * d, r) for d in range(1, 8) for r in range(3)])
_RANKS, _MOST_NODES, _SHOWN = 5, 26, 5
_NODES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_FORWARDS = 100


def search_trees(
    model: LoadedModel,
    rule: Mapping[str, Any],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    console: Console,
) -> None:
    """Print trees to be written into an experiment, with what they were expected to do and what they did.

    `rule` is the acceptance rule with guidance, as settings of a `Decoding`; `rows` are those of the profile, among
    them the step of autoregressive decoding and of a static tree or more. Raises `UserError` without the latter.
    """
    import pandas as pd

    from lantern_bench.measure.steps import forward_ms, step_cost
    from lantern_bench.measure.tree_search import acceptance_by_rank, best_trees, interpolated
    from lantern_bench.spec.decoding import Decoding

    levels = _levels()
    static = [row for row in rows if row["what"] == "step" and row["name"] in levels]
    if not static:
        raise UserError("--search: needs the cost of a static tree", "Add one to --tree, such as chain-5.")
    traces = step_cost(model, Decoding(**rule, topology=_PROBE), prompts, seed + 1).traces
    rates = acceptance_by_rank(traces, _RANKS)
    condition = model.condition(prompts[:1])
    scale = float(rule["cfg_scale"])
    forward = interpolated({nodes: forward_ms(model, condition, nodes, scale, _FORWARDS) for nodes in _NODES})
    level_ms = sum(row["draft_ms"] for row in static) / sum(levels[row["name"]] for row in static)
    rest = sum(row["verify_ms"] + row["other_ms"] for row in static) / len(static)
    found = best_trees(
        rates, _MOST_NODES, lambda paths: forward(len(paths) + 1) + level_ms * len(paths[-1]) + rest, _SHOWN
    )
    console.say("accepted at depth 1, 2, ... by rank: " + "; ".join(" ".join(f"{r:.2f}" for r in d) for d in rates))
    measured = [_measured(model, rule, one, prompts, seed, console) for one in found]
    console.table(pd.DataFrame(measured).round(3), title=" ".join(f"{key}={value:g}" for key, value in _shown(rule)))


def _measured(
    model: LoadedModel, rule: Mapping[str, Any], one: Found, prompts: Sequence[str], seed: int, console: Console
) -> dict[str, Any]:
    """A tree found, decoded with, and autoregressive decoding right after it: machines change their pace."""
    from lantern_bench.measure.steps import step_cost
    from lantern_bench.spec.decoding import Decoding

    text = " ".join("".join(map(str, path)) for path in one.topology)
    console.say(f"measuring {text}")
    cost = step_cost(model, Decoding(**rule, topology=one.topology), prompts, seed)
    settings: dict[str, Any] = {"mode": "ar", "cfg_scale": rule["cfg_scale"]}
    plain = step_cost(model, Decoding(**settings), prompts, seed)
    row = {"tree": text, "nodes": len(one.topology), "levels": len(one.topology[-1])}
    row |= {"expected_length": one.length, "expected_ms": one.milliseconds}
    row |= {"mean_accepted_length": cost.mean_accepted_length, "milliseconds": cost.total, "ar_ms": plain.total}
    return row | {"speedup": cost.mean_accepted_length * plain.total / cost.total}


def _shown(rule: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What of a rule is a number."""
    return [(key, value) for key, value in rule.items() if isinstance(value, int | float)]


def _levels() -> dict[str, int]:
    """How many drafter forwards each named tree takes."""
    from lantern_bench.spec.topologies import STATIC_TREES

    return {name: len(paths[-1]) for name, paths in STATIC_TREES.items()}
