"""The tree search: prices of steps, which trees are measured, and the line of an experiment."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.experiment import load_experiment
from lantern_bench.config.settings import Overrides
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile import step_costs
from lantern_bench.profile.step_costs import StepCost
from lantern_bench.profile.tree_search import (
    Candidate,
    corners_of,
    experiment_line,
    fastest,
    fit_price,
)
from lantern_bench.utils.progress import ProgressEvent
from tests.helpers.tiny_model import PROMPTS, TinyModel

FORWARDS = (1.0, 1.2, 1.6, 2.4, 4.0, 7.2)  # 0.8 + 0.2 a node


def candidate(nodes: int, levels: int, width: int, length: float = 1.0) -> Candidate:
    return Candidate(
        decoding=Decoding("ar"), nodes=nodes, levels=levels, width=width, length=length
    )


def true_cost(tree: Candidate) -> StepCost:
    draft = 0.3 + 0.2 * tree.levels + 0.05 * tree.levels * tree.width
    parts = {
        "draft_ms": draft,
        "target_ms": 0.0,
        "verify_ms": 0.1 + 0.01 * tree.nodes * tree.width,
        "other_ms": 0.2,
    }
    return StepCost(total=0.0, parts=parts, mean_accepted_length=1.0, traces=[])


def test_price_is_recovered_from_the_corners() -> None:
    trees = [
        candidate(nodes, levels, width)
        for nodes, levels, width in product((4, 9, 20), (1, 2, 4), (1, 2, 5))
    ]
    corners = corners_of(trees)
    expected_ms = fit_price(corners, [true_cost(tree) for tree in corners], FORWARDS)
    for tree in trees:
        assert expected_ms(tree) == pytest.approx(
            0.8 + 0.2 * (tree.nodes + 1) + sum(true_cost(tree).parts.values())
        )


def test_corners_of_chains_are_the_shortest_and_the_longest() -> None:
    chains = [candidate(nodes, nodes, 1) for nodes in range(1, 8)]
    assert corners_of(chains) == [chains[0], chains[-1]]


def test_fastest_has_a_candidate_of_each_size() -> None:
    trees = [
        candidate(nodes=nodes, levels=levels, width=2, length=nodes + levels / 10)
        for nodes, levels in product((2, 3, 4), (1, 2))
    ]
    assert fastest(trees, lambda tree: tree.nodes**2, 5) == [trees[1], trees[0]]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mode": "speculative", "tree": "chain-3"}, "- {mode: speculative, tree: chain-3}"),
        (
            {"mode": "speculative", "rule": "block", "tree": "chain-7", "temperature": 0.9},
            "- {mode: speculative, rule: block, tree: chain-7, temperature: 0.9}",
        ),
        (
            {
                "mode": "lantern",
                "drafting": "static",
                "tree": [(0,), (1,)],
                "neighbours": 9,
                "delta": 0.1,
            },
            "- {mode: lantern, drafting: static, tree: [[0], [1]], neighbours: 9, delta: 0.1}",
        ),
        (
            {
                "mode": "lantern",
                "nodes": 3,
                "depth": 1,
                "beam": 3,
                "neighbours": 9,
                "delta": 0.1,
                "cfg_scale": 2.0,
            },
            "- {mode: lantern, nodes: 3, depth: 1, beam: 3, neighbours: 9, delta: 0.1}",
        ),
    ],
)
def test_line_of_an_experiment_gives_the_cell_again(
    values: dict[str, object], line: str, tmp_path: Path
) -> None:
    decoding = Decoding(**values | {"cfg_scale": 2.0, "cfg_default": 2.0})
    assert experiment_line(decoding) == line
    path = tmp_path / "line.yaml"
    path.write_text(f"model: lanterns\nbaseline: false\ncells:\n  {line}\n")
    (cell,) = load_experiment(
        path, {"lanterns": {"cfg_scale": 2.0, "tree": "chain-4"}}, Overrides()
    ).cells
    assert cell.decoding == decoding


def test_decodings_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel().load(torch.device("cpu"), torch.float32)
    plain = Decoding(mode="ar")
    drafted = Decoding(mode="speculative", tree="chain-3")
    order = list[bool]()
    events = list[ProgressEvent]()
    real = step_costs.decode

    def watched(
        model: LoadedModel, condition: Any, decoding: Decoding, *given: Any, **named: Any
    ) -> Any:
        order.append(decoding.drafts)
        return real(model, condition, decoding, *given, **named)

    monkeypatch.setattr(step_costs, "decode", watched)
    costs = step_costs.step_costs(model, [plain, drafted], PROMPTS[:3], emit=events.append)
    assert order == [False, True] + [False, True] * 3  # a warm-up of each, then in turns
    assert events[-1].done == 1.0
    assert [len(cost.traces) for cost in costs] == [3, 3]
    for cost in costs:
        seconds = sum(trace.seconds - trace.phases["prefill"] for trace in cost.traces)
        assert cost.total == pytest.approx(
            1e3 * seconds / sum(len(trace.committed) for trace in cost.traces)
        )
