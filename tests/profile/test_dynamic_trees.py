"""Dynamic trees of the search: what a smaller tree keeps of a large one, and the lengths that follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.config.methods import most_nodes
from lantern_bench.config.trees import Path
from lantern_bench.decoding.drafting.dynamic import Growth
from lantern_bench.profile import dynamic_trees
from lantern_bench.profile.dynamic_trees import list_dynamic, nodes_needed, probe, reach_of
from lantern_bench.profile.steps import step_costs
from tests.tiny_family import PROMPTS, TinyFamily

CODES, DEPTH, BEAM = 12, 4, 4


def grown(table: Tensor, depth: int, beam: int) -> Growth:
    """The growth of one image whose q after a token is a row of `table`."""
    growth = Growth(table[:1], beam)
    for _ in range(depth - 1):
        growth.grow(table[growth.frontier.tokens])
    return growth


def kept_paths(growth: Growth, nodes: int) -> set[Path]:
    """The nodes that a dynamic tree keeps, by their paths of child ranks."""
    tree = growth.tree(torch.zeros(1, dtype=torch.int64), nodes)
    paths: dict[int, Path] = {0: ()}
    for node, parent in enumerate(tree.parents[0].tolist()):
        if node:
            paths[node] = (*paths[parent], tree.children[0, parent].tolist().index(node))
    return set(paths.values()) - {()}


@pytest.mark.parametrize("seed", range(3))
def test_smaller_trees_are_read_from_the_largest(seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    table = torch.randn(CODES, CODES, generator=noise).mul(1.5).softmax(-1)
    reach = reach_of(grown(table, DEPTH, BEAM))
    missed = 0
    for depth in range(1, DEPTH + 1):
        for beam in range(1, BEAM + 1):
            small = grown(table, depth, beam)
            for nodes in range(1, most_nodes(depth, beam) + 1):
                kept = kept_paths(small, nodes)
                found = {
                    path
                    for path in reach
                    if sum(n <= nodes for n in nodes_needed(reach, path, depth, beam)) == len(path)
                }
                assert found <= kept
                missed += len(kept - found)
                if (depth, beam) == (DEPTH, BEAM) or depth == 1:
                    assert found == kept
    # A narrow beam may expand a node that the wide one does not; its children are unknown.
    assert missed < 9


def test_a_walk_ends_where_it_leaves_the_tree() -> None:
    reach = {(0,): -0.5, (1,): -1.5, (0, 0): -1.0, (0, 1): -2.0, (1, 0): -1.6, (1, 1): -3.0}
    assert nodes_needed(reach, (0, 1), 2, 2) == [1, 5]
    assert nodes_needed(reach, (0, 1), 2, 1) == [1]
    assert nodes_needed(reach, (1, 0), 1, 2) == [2]
    assert nodes_needed(reach, (), 2, 2) == []


@pytest.mark.parametrize("rule", ["strict", "additive"])
def test_expected_length_is_that_of_a_decode(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_trees, "_DEPTH", 3)
    monkeypatch.setattr(dynamic_trees, "_BEAM", 3)
    model = TinyFamily().load("tiny", torch.device("cpu"), torch.float32)
    own = {"neighbours": 3, "delta": 0.2} if rule == "additive" else {}
    decoding = Decoding.model_validate(
        {"mode": "speculative", "drafting": "dynamic", "rule": rule, "nodes": 5, "depth": 2, "beam": 2} | own
    )
    prompts = PROMPTS * 40
    trees = {(tree.nodes, tree.levels, tree.width): tree for tree in list_dynamic(model, decoding, prompts, 1, print)}
    measured = step_costs(model, [decoding], prompts, 10_000)[0].mean_accepted_length
    assert trees[5, 2, 2].length == pytest.approx(measured, abs=0.1)
    assert trees[2, 1, 2].length < trees[5, 2, 2].length < trees[21, 3, 3].length
    largest = list(probe(model, decoding, PROMPTS, 1))
    assert all(reach.keys() >= {walk} or not walk for reach, walk in largest)
