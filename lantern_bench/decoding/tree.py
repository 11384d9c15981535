"""Draft trees as tensors, for the target's mask, verification and the drafter.

`StaticTree` is a fixed topology. `DraftTree` is the draft of one step, in preallocated tensors: a
drafting fills it, scoring and verification read it. docs/algorithms.md, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from lantern_bench.methods.static_trees import check_topology

_Lists: TypeAlias = Sequence[Sequence[int]]
# the fields of `DraftTree` that each step's draft is copied into
_WRITTEN = ("tokens", "depths", "children", "attention", "path_order")


@dataclass(frozen=True)
class RankGroup:
    """The n parents whose paths have the same sum of child ranks, most children first.

    A walk reaches each of them after the same number of rejections.
    """

    # their numbers, int64 [n]
    nodes: Tensor
    # their index in `TreeLayout.nodes`, int64 [n]
    slots: Tensor
    # int64 [n, C], -1 padded
    children: Tensor
    # at how many depths the nodes are
    levels: int
    # for each child rank the number of leading nodes that can have it
    nodes_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class TreeLayout:
    """The nodes that can have children, in order.

    Counts are on the host, so that no shape depends on the device.
    """

    # the I nodes that can have children, those with most children first, int64 [I]
    nodes: Tensor
    # the index of each node in `nodes`, -1 for leaves, int64 [M]
    slots: Tensor
    # for each child rank the number of leading nodes that can have it
    nodes_per_rank: tuple[int, ...]

    # Only of static trees: the children of `nodes`, int64 [I, C], -1 padded
    children: Tensor | None = None
    # at how many depths the nodes are
    levels: int = 0
    # the nodes by sum of child ranks
    groups: tuple[RankGroup, ...] = ()


@dataclass(frozen=True)
class DraftTree:
    """The drafts of one step for B images, M nodes each.

    Node 0 is the root, the last committed token.
    """

    # the tokens of the nodes, int64 [B, M]
    tokens: Tensor
    # 0 for the root, int64 [B, M]
    depths: Tensor
    # node numbers in the order of trial, -1 where there is none, int64 [B, M, C]
    children: Tensor
    # node (row) sees node (column): its ancestors and itself, bool [B, M, M]
    attention: Tensor
    # Ranks paths: of two nodes of equal depth, the one with the smaller number comes first when
    # paths are sorted by child rank. int64 [B, M]
    path_order: Tensor
    layout: TreeLayout
    # D, the largest depth of a node in trees of this shape
    max_depth: int
    # For each node the distribution that its children were drawn from, in order and without
    # replacement, float32 [B, M, V]. Rows of leaves are not read, so the last rows may be missing.
    # None: deterministic drafts, whose q is 1 (always so in greedy decoding).
    q: Tensor | None = None

    def clone(self) -> DraftTree:
        """Return a tree for `copy_` to fill. It has its own tensors but shares q with this one."""
        own = {
            name: getattr(self, name).clone(memory_format=torch.contiguous_format)
            for name in _WRITTEN
        }
        return replace(self, **own)

    def of_images(self, images: Tensor) -> DraftTree:
        """Return the drafts of some of the images."""
        own = {name: getattr(self, name)[images] for name in _WRITTEN}
        return replace(self, q=None if self.q is None else self.q[images], **own)

    def copy_(self, draft: DraftTree) -> None:
        """Overwrite this draft with another draft of the same shape."""
        for name in _WRITTEN:
            getattr(self, name).copy_(getattr(draft, name))
        if self.q is not None and draft.q is not None and self.q is not draft.q:
            self.q.copy_(draft.q)

    def rows(self, values: Tensor) -> Tensor:
        """Return a copy [I * B, ...] of the `values` [B, M, ...] of nodes that can have children.

        Indexed at once, and not by views: compiled programs then change the copy in place.
        """
        nodes = self.layout.nodes
        batch = len(values)
        images = index_along(values)
        return values[images.repeat(len(nodes)), nodes.repeat_interleave(batch)]

    def by_node(self, rows: Tensor) -> Tensor:
        """Return the inverse of `rows`: [B, M, ...] of `rows` [I * B, ...], 0 at other nodes."""
        nodes = self.layout.nodes
        images, count = self.tokens.shape
        of_nodes = rows.new_zeros(images, count, *rows.shape[1:])
        by_image = rows.view(len(nodes), images, *rows.shape[1:]).transpose(0, 1)
        of_nodes[:, nodes] = by_image
        return of_nodes


@dataclass(frozen=True)
class Level:
    """One drafting round of a static tree: the nodes of one depth that have children."""

    # int64 [n], the nodes that are expanded
    nodes: Tensor
    # for each node one deeper the index of its parent in `nodes`, int64 [m]
    slot: Tensor
    # for each node one deeper, which draw of its parent it is, int64 [m]
    rank: Tensor
    # the most children that any of the nodes has
    fanout: int
    # the slot of the nodes' parents in the level above, int64 [n]
    origin: Tensor
    # which of the nodes expanded so far, without the root, each node sees, bool [n, e]
    seen: Tensor


@dataclass(frozen=True)
class StaticTree:
    """A fixed topology as index tensors: M nodes with the root, ordered by (depth, path)."""

    # -1 for the root, int64 [M]
    parents: Tensor
    # 0 for the root, int64 [M]
    depths: Tensor
    # node numbers, -1 padded, int64 [M, C]
    children: Tensor
    # node (row) sees node (column), bool [M, M]
    attention: Tensor
    layout: TreeLayout
    # one for each depth from 0 to D - 1, where D is the depth of the deepest node
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> StaticTree:
        """Build the tree of root-to-node paths of child ranks.

        Raises `UserError` where `check_topology` refuses the paths.
        """
        nodes = [(), *check_topology(paths)]
        number = {path: node for node, path in enumerate(nodes)}
        parents = [-1, *(number[path[:-1]] for path in nodes[1:])]
        children: list[list[int]] = [[] for _ in nodes]
        for node, parent in enumerate(parents[1:], 1):
            children[parent].append(node)
        internal = [node for node, below in enumerate(children) if below]
        internal.sort(key=lambda node: -len(children[node]))

        with torch.device(device):
            attention = torch.tensor([_ancestors(path, nodes) for path in nodes])
            slots = torch.full((len(nodes),), -1)
            slots[torch.tensor(internal)] = torch.arange(len(internal))
            layout = TreeLayout(
                nodes=torch.tensor(internal),
                slots=slots,
                nodes_per_rank=_nodes_per_rank(children),
                children=_padded([children[node] for node in internal]),
                levels=len(nodes[-1]),
                groups=tuple(_rank_groups(nodes, internal, children)),
            )
            levels = _levels(nodes=nodes, parents=parents, children=children, attention=attention)
            return cls(
                parents=torch.tensor(parents),
                depths=torch.tensor([len(path) for path in nodes]),
                children=_padded(children),
                attention=attention,
                layout=layout,
                levels=tuple(levels),
            )

    def allocate(self, batch: int, q: Tensor | None) -> DraftTree:
        """Return a tree of this shape for drafts of B images to be copied into."""
        return self.draft(self.depths.new_zeros(batch, len(self.depths)), q).clone()

    def draft(self, tokens: Tensor, q: Tensor | None, valid: Tensor | None = None) -> DraftTree:
        """Return the draft of `tokens` in this shape, without copying the shape.

        Args:
            tokens: The tokens of the nodes, int64 [B, M].
            q: As in `DraftTree`.
            valid: bool [B, M], False for nodes that could not be drawn (q = 0) and so are no
                children. None: all are.
        """
        batch = len(tokens)
        children = self.children.expand(batch, -1, -1)
        if valid is not None:
            drawn = valid.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
            children = children.masked_fill(~drawn, -1)
        # Nodes are sorted by (depth, path), so at equal depth the node number ranks the paths.
        path_order = index_along(tokens, 1).expand(batch, -1)
        return DraftTree(
            tokens=tokens,
            depths=self.depths.expand(batch, -1),
            children=children,
            attention=self.attention.expand(batch, -1, -1),
            path_order=path_order,
            layout=self.layout,
            max_depth=len(self.levels),
            q=q,
        )


def chain(length: int, device: torch.device | str = "cpu") -> StaticTree:
    """Return the tree in which every node but the last has one child."""
    return StaticTree.of([(0,) * depth for depth in range(1, length + 1)], device)


def _ancestors(path: Sequence[int], nodes: _Lists) -> list[bool]:
    """Return for each node whether it lies on `path`, the last node included."""
    return [path[: len(above)] == above for above in nodes]


def _padded(children: _Lists) -> Tensor:
    width = max(map(len, children))
    return torch.tensor([[*below, *[-1] * (width - len(below))] for below in children])


def _nodes_per_rank(children: _Lists) -> tuple[int, ...]:
    """Return for each rank how many nodes have a child of this rank."""
    counts = [len(below) for below in children]
    return tuple(sum(count > rank for count in counts) for rank in range(max(counts)))


def _rank_groups(nodes: _Lists, internal: Sequence[int], children: _Lists) -> Iterator[RankGroup]:
    def rank_sum(node: int) -> int:
        return sum(nodes[node])

    for _, group in groupby(sorted(internal, key=rank_sum), key=rank_sum):
        parents = list(group)
        below = [children[node] for node in parents]
        depths = {len(nodes[node]) for node in parents}
        yield RankGroup(
            nodes=torch.tensor(parents),
            slots=torch.tensor([internal.index(node) for node in parents]),
            children=_padded(below),
            levels=len(depths),
            nodes_per_rank=_nodes_per_rank(below),
        )


def _levels(
    nodes: _Lists, parents: Sequence[int], children: _Lists, attention: Tensor
) -> Iterator[Level]:
    level_above = [-1]
    expanded: list[int] = []
    for depth in range(len(nodes[-1])):
        level = [node for node, path in enumerate(nodes) if len(path) == depth and children[node]]
        below = [child for child, parent in enumerate(parents) if parent in level]
        expanded += level
        yield Level(
            nodes=torch.tensor(level),
            slot=torch.tensor([level.index(parents[child]) for child in below]),
            rank=torch.tensor([nodes[child][-1] for child in below]),
            fanout=max(len(children[node]) for node in level),
            origin=torch.tensor([level_above.index(parents[node]) for node in level]),
            seen=attention[level][:, expanded[1:]],
        )
        level_above = level


def link_nodes(
    *,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ranks: Tensor,
    valid: Tensor,
    fanout: int,
    max_depth: int,
) -> DraftTree:
    """Return the deterministic draft of B images whose trees differ in shape.

    Args:
        tokens: int64 [B, M]; node 0 is the root.
        parents: int64 [B, M], -1 for the root; never above the node's own number.
        depths: int64 [B, M].
        ranks: The index of each node among its siblings, below `fanout`, int64 [B, M].
        valid: bool [B, M], True for the root and False for filler. A filler node gets depth 1, sees
            only itself and the root, and is nobody's child.
        fanout: The most children of a node.
        max_depth: The depth of the deepest node.
    """
    batch, nodes = tokens.shape
    number = index_along(tokens, 1).expand(batch, -1)
    parents = torch.where(valid, parents, 0)

    # Node n is written to entry `parent * fanout + rank` of the flat children, filler to the last.
    column = torch.where(valid, parents * fanout + ranks, nodes * fanout)[:, 1:]
    children = tokens.new_full((batch, nodes * fanout + 1), -1)
    children.scatter_(1, column, number[:, 1:])
    children = children[:, :-1].view(batch, nodes, fanout)

    attention = torch.eye(nodes, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
    above = parents
    for _ in range(max_depth):
        # The parent of the root is -1, which is clamped to the root: every node's ancestor.
        at_least_root = above.clamp_min(0)
        attention.scatter_(2, at_least_root.unsqueeze(2), value=True)
        above = torch.where(above < 0, above, parents.gather(1, at_least_root))

    # Paths are ranked by the first leaf below each node.
    is_leaf = valid & (children < 0).all(dim=-1)
    leaves_below = torch.where(is_leaf.unsqueeze(2) & attention, number.unsqueeze(2), nodes)
    return DraftTree(
        tokens=torch.where(valid, tokens, 0),
        depths=torch.where(valid, depths, 1),
        children=children,
        attention=attention,
        path_order=leaves_below.amin(dim=1),
        # any node can have children
        layout=TreeLayout(nodes=number[0], slots=number[0], nodes_per_rank=(nodes,) * fanout),
        max_depth=max_depth,
    )


def index_along(values: Tensor, dim: int = 0) -> Tensor:
    """Return 0, 1, ... for each place along a dimension, int64 [n]."""
    return torch.arange(values.shape[dim], device=values.device)


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Return the rows [B, n, V] of `values` [B, M, V] at `nodes` int64 [B, n]."""
    return values.gather(1, nodes.unsqueeze(2).expand(-1, -1, values.shape[2]))


def first_true(hit: Tensor) -> Tensor:
    """Return the place of the first True in the last dimension of bool [..., C]; C - 1 if nowhere.

    Not `argmax` of the bits: compiled for a CPU (inductor of torch 2.15), `argmax` returns wrong
    indices for 8-bit numbers.
    """
    return torch.where(hit, index_along(hit, -1), hit.shape[-1] - 1).amin(dim=-1)
