"""Draft trees and tables of nearest codes: the recorded ones, and what all of them keep to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.decoding.tree import StaticTree, link_nodes
from lantern_bench.methods.static_trees import STATIC_TREES
from lantern_bench.utils.errors import UserError
from tests.helpers.golden_cases import golden_path
from tests.helpers.rules import parents_of

PUBLISHED_NAMES = {
    "chain-5": "chain",
    "eagle1-25": "mc_sim_7b_63",
    "balanced-25": "mc_sim_7b_63_balanced",
    "deep-25": "reverse_balanced_25",
    "extended-57": "naive_extend_57",
    "medusa-63": "medusa_2_7b_63",
}


def recorded_trees() -> dict[str, Any]:
    return json.loads(golden_path("trees", "trees.json").read_text())


def has_gap(paths: list[list[int]]) -> bool:
    given = {tuple(path) for path in paths}
    before: set[tuple[int, ...]] = set()
    for path in given:
        before.update((*path[:-1], rank) for rank in range(path[-1]))
    return not before <= set(given)


def leaf_paths(tree: StaticTree) -> list[list[int]]:
    """Root-to-leaf paths as node numbers, in lexicographic order, padded with -1."""
    leaves = (tree.children < 0).all(dim=1)
    paths = sorted(row.nonzero().flatten().tolist() for row in tree.attention[leaves])
    return [path + [-1] * (len(tree.levels) + 1 - len(path)) for path in paths]


def test_static_trees_equal_the_recorded_ones() -> None:
    raw = load_file(golden_path("trees", "trees_raw.safetensors"))
    built = []
    refused = []
    for name, recorded in recorded_trees().items():
        if has_gap(recorded["choices_as_given"]):
            with pytest.raises(UserError, match="gap"):
                StaticTree.of(recorded["choices_as_given"])
            refused.append(name)
            continue
        tree = StaticTree.of(recorded["choices_as_given"])
        assert tree.parents.tolist() == recorded["parent"], name
        assert tree.depths.tolist() == recorded["depth"], name
        assert leaf_paths(tree) == recorded["retrieve_indices"], name
        seen = [row.nonzero().flatten().tolist() for row in tree.attention]
        assert seen == [sorted(ancestors) for ancestors in recorded["ancestors_inclusive"]], name
        assert torch.equal(tree.attention, raw[f"{name}.tree_attn_mask"][0, 0] > 0), name
        assert torch.equal(tree.depths, raw[f"{name}.tree_position_ids"].flatten().long()), name
        built.append(name)
    print(f"golden trees: {len(built)} equal, {len(refused)} with gaps refused")
    assert set(PUBLISHED_NAMES.values()) <= set(built)


@pytest.mark.parametrize(("ours", "published"), PUBLISHED_NAMES.items())
def test_named_trees_are_the_published_ones(ours: str, published: str) -> None:
    assert [list(path) for path in STATIC_TREES[ours]] == recorded_trees()[published][
        "sorted_node_paths"
    ][1:]


@pytest.mark.parametrize("name", STATIC_TREES)
def test_levels_and_layout_name_every_child_once(name: str) -> None:
    tree = StaticTree.of(STATIC_TREES[name])
    drafted: list[int] = []
    for level in tree.levels:
        drafted += tree.children[level.nodes[level.slot], level.rank].tolist()
        assert (tree.children[level.nodes] >= 0).sum(dim=1).max() == level.fanout
    assert drafted == list(range(1, len(tree.depths)))
    counts = (tree.children >= 0).sum(dim=1)
    for rank, active in enumerate(tree.layout.nodes_per_rank):
        assert (counts[tree.layout.nodes[:active]] > rank).all()
        assert (counts[tree.layout.nodes[active:]] <= rank).all()
    assert (counts[tree.layout.slots < 0] == 0).all()


def test_linked_nodes_with_nodes_that_only_fill_up() -> None:
    """Nodes that fill up a tree have the root as parent, see only it, and are no children."""
    tree = link_nodes(
        tokens=torch.tensor([[9, 5, 6, 7], [9, 5, 8, 8]]),
        parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1]]),
        depths=torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]]),
        ranks=torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]]),
        valid=torch.tensor([[True, True, True, True], [True, True, False, False]]),
        fanout=2,
        max_depth=2,
    )
    assert tree.tokens.tolist() == [[9, 5, 6, 7], [9, 5, 0, 0]]
    assert parents_of(tree.attention).tolist() == [[-1, 0, 0, 1], [-1, 0, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 1, 2], [0, 1, 1, 1]]
    assert tree.children.tolist() == [
        [[1, 2], [3, -1], [-1, -1], [-1, -1]],
        [[1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ]
    assert tree.attention.int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]
    # Leaves 2 and 3 of the first image: the path over node 1 ends at the later leaf.
    assert tree.path_order[0].tolist() == [2, 3, 2, 3]
    assert tree.path_order[1, :2].tolist() == [1, 1]
    assert tree.q is None


def test_static_drafts_share_their_shape_and_omit_undrawn_nodes() -> None:
    shape = StaticTree.of([(0,), (1,), (0, 0)])
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 4]])
    valid = torch.tensor([[True, True, True, True], [True, True, False, True]])
    tree = shape.draft(tokens, None, valid)
    assert tree.children.tolist() == [
        [[1, 2], [3, -1], [-1, -1], [-1, -1]],
        [[1, -1], [3, -1], [-1, -1], [-1, -1]],
    ]
    assert tree.attention.data_ptr() == shape.attention.data_ptr()
    assert tree.depths.tolist() == [[0, 1, 1, 2]] * 2
    assert tree.rows(tokens).tolist() == [1, 1, 2, 2]


# ---- nearest codes

CODES = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))


def recorded_codebooks() -> dict[str, torch.Tensor]:
    latents = np.load(golden_path("nearest_table", "latents.npz"))
    model = torch.load(golden_path("llamagen_vq", "vq.pt"), weights_only=True)["model"]
    return {
        "a": torch.from_numpy(latents["a_latents"]),
        "b": torch.from_numpy(latents["b_latents"]),
        "vq_model": model["quantize.embedding.weight"],
    }


@pytest.mark.parametrize("name", ["a", "b", "vq_model"])
def test_nearest_tables_equal_the_recorded_ones(name: str) -> None:
    codes = recorded_codebooks()[name]
    total = len(codes)
    recorded = np.load(golden_path("nearest_table", f"{name}_top_{total - 1}_indices.npy")).astype(
        np.int64
    )
    table = nearest_codes(codes, total - 1).numpy()
    distance = torch.cdist(codes.double(), codes.double()).numpy()
    own = np.take_along_axis(distance, table, axis=1)
    theirs = np.take_along_axis(distance, recorded, axis=1)
    # The order may differ only where two distances are within 1e-5.
    assert np.abs(own - theirs)[table != recorded].max(initial=0.0) < 1e-5
    assert (table == recorded).mean() > 0.99
    assert (np.sort(table) == np.sort(recorded)).all()


def test_ties_go_to_the_smaller_index_and_duplicates_count() -> None:
    codes = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [-1.0, 0.0]])
    assert nearest_codes(codes, 4).tolist()[0] == [3, 1, 2, 4]
    assert nearest_codes(codes, 2).tolist() == [[3, 1], [0, 3], [0, 3], [0, 1], [0, 3]]
    assert nearest_codes(codes, 0).shape == (5, 0)
    with pytest.raises(ValueError, match="from 0 to 4"):
        nearest_codes(codes, 5)


@pytest.mark.parametrize("metric", ["l2", "cosine", "random"])
def test_a_table_holds_every_other_code_once_however_it_is_computed(
    metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = nearest_codes(CODES, 39, metric=metric)
    assert all(sorted([*row.tolist(), code]) == list(range(40)) for code, row in enumerate(whole))
    monkeypatch.setattr("lantern_bench.decoding.neighbours._DISTANCES_AT_ONCE", 9 * 40)
    assert torch.equal(nearest_codes(CODES, 7, metric=metric), whole[:, :7])


def test_cosine_orders_by_the_angle_alone() -> None:
    stretched = CODES * torch.linspace(0.1, 10, 40)[:, None]
    table = nearest_codes(stretched, 39, metric="cosine")
    unit = torch.nn.functional.normalize(CODES.double(), dim=1)
    cosines = (unit @ unit.T).gather(1, table.long())
    assert (cosines.diff(dim=1) <= 1e-6).all()
    assert not torch.equal(table, nearest_codes(stretched, 39))
    normalised = torch.nn.functional.normalize(CODES, dim=1)
    assert torch.equal(
        nearest_codes(normalised, 39)[:, :3], nearest_codes(normalised, 39, metric="cosine")[:, :3]
    )


def test_random_neighbours_ignore_geometry_and_repeat() -> None:
    first = nearest_codes(CODES, 10, metric="random")
    assert torch.equal(first, nearest_codes(CODES.flip(0), 10, metric="random"))
    expected = 10 * 10 / 39
    near = nearest_codes(CODES, 10)
    shared = [len(set(a) & set(b)) for a, b in zip(first.tolist(), near.tolist(), strict=True)]
    assert abs(sum(shared) / len(shared) - expected) < 1
