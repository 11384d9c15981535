"""The named trees are the published ones, and only trees that can be drafted pass.

The published shapes are read from the recordings in tests/golden (or LANTERN_BENCH_GOLDEN).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lantern_bench.methods.static_trees import STATIC_TREES, check_topology, topology_name
from lantern_bench.utils.errors import UserError

GOLDEN = Path(os.environ.get("LANTERN_BENCH_GOLDEN", Path(__file__).parents[1] / "golden"))
PUBLISHED = {
    "chain-5": "chain",
    "eagle1-25": "mc_sim_7b_63",
    "balanced-25": "mc_sim_7b_63_balanced",
    "deep-25": "reverse_balanced_25",
    "extended-57": "naive_extend_57",
    "medusa-63": "medusa_2_7b_63",
}


@pytest.mark.parametrize("ours", PUBLISHED)
def test_named_trees_are_the_published_ones(ours: str) -> None:
    published = json.loads((GOLDEN / "trees" / "trees.json").read_text())[PUBLISHED[ours]]
    assert STATIC_TREES[ours] == check_topology(published["choices_as_given"])
    assert [list(path) for path in STATIC_TREES[ours]] == published["sorted_node_paths"][1:]


def test_chains_are_as_deep_as_their_names() -> None:
    assert {
        name: topology[-1] for name, topology in STATIC_TREES.items() if name.startswith("chain")
    } == {f"chain-{depth}": (0,) * depth for depth in (3, 4, 5, 6, 7)}


def test_small_tree_is_the_design() -> None:
    assert STATIC_TREES["small-7"] == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("name", STATIC_TREES)
def test_named_trees_pass_their_own_check_and_count_their_nodes(name: str) -> None:
    assert check_topology(STATIC_TREES[name]) == STATIC_TREES[name]
    assert len(STATIC_TREES[name]) == int(name.rsplit("-", 1)[1])
    assert topology_name(STATIC_TREES[name]) == name


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], "empty"),
        ([[]], "empty path"),
        ([[0], [2]], "its sibling [1] is missing"),
        ([[1]], "its sibling [0] is missing"),
        ([[0], [0, 1]], "its sibling [0, 0] is missing"),
        ([[0], [1, 0]], "has no parent"),
        ([[0], [0]], "written twice"),
        ([[0], [-1]], "whole number"),
        ([[0], [0, True]], "whole number"),
        ([[0], [0, 0.0]], "whole number"),
        ([["0"]], "whole number"),
        ([[{}]], "whole number"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused(paths: list[list[int]], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_topology(paths)
    assert expected in caught.value.message


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Random trees without gaps, grown child by child, in random order."""
    paths: list[tuple[int, ...]] = [(0,)]
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([(), *paths]))
        rank = sum(1 for path in paths if path[:-1] == parent)
        paths.append((*parent, rank))
    return draw(st.permutations(paths))


@given(trees())
def test_grown_trees_pass_in_any_order(paths: list[tuple[int, ...]]) -> None:
    checked = check_topology(paths)
    assert set(checked) == set(paths)
    assert [len(path) for path in checked] == sorted(len(path) for path in paths)
    for path in checked:
        assert path[:-1] == () or checked.index(path[:-1]) < checked.index(path)


@given(trees(), st.data())
def test_a_tree_without_an_inner_node_is_refused(
    paths: list[tuple[int, ...]], data: st.DataObject
) -> None:
    needed = [
        p
        for p in paths
        if any((o[: len(p)] == p and o != p) or o == (*p[:-1], p[-1] + 1) for o in paths)
    ]
    if needed:
        gone = data.draw(st.sampled_from(needed))
        with pytest.raises(UserError):
            check_topology([path for path in paths if path != gone])
