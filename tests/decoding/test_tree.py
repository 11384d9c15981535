"""Draft trees whose shape differs from image to image, and static ones with tokens that could not be drawn."""

from __future__ import annotations

import torch

from lantern_bench.decoding.tree import StaticTree, link_nodes
from tests.decoding.rules import parents_of


def test_linked_nodes_with_nodes_that_only_fill_up() -> None:
    """Whatever the filling nodes hold, they hang on the root, see nothing else and are nobody's children."""
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
