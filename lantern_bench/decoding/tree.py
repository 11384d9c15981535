"""Draft trees as tensors, for the target's mask, the walk and the drafter (docs/algorithms.md, section 2).

`StaticTree` is a fixed topology; `DraftTree` is one step's draft, the only form that verification sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lantern_bench.methods.static_trees import check_topology

_Lists: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class RankGroup:
    """The n parents whose paths have the same sum of child ranks, so as many rejections before them, widest first."""

    nodes: Tensor  # int64 [n]
    slots: Tensor  # int64 [n], their index in `Layout.nodes`
    children: Tensor  # int64 [n, C], -1 padded
    levels: int  # at how many depths the nodes are
    # for each child rank the number of leading nodes that can have it
    nodes_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Which nodes can have children, in which order; counts are on the host, so that no shape waits for the device."""

    nodes: Tensor  # int64 [I], the nodes that can have children, those with most children first
    slots: Tensor  # int64 [M], the index of each node in `nodes`, -1 for leaves
    # for each child rank the number of leading nodes that can have it
    nodes_per_rank: tuple[int, ...]
    # Only of static trees:
    children: Tensor | None = None  # int64 [I, C] of `nodes`, -1 padded
    levels: int = 0  # at how many depths the nodes are
    groups: tuple[RankGroup, ...] = ()  # the nodes by sum of child ranks


@dataclass(frozen=True)
class DraftTree:
    """The drafts of one step for B images, M nodes each, node 0 the root (the last committed token)."""

    tokens: Tensor  # int64 [B, M]
    depths: Tensor  # int64 [B, M], 0 for the root
    children: Tensor  # int64 [B, M, C], node numbers in the order of trial, -1 where there is none
    attention: Tensor  # bool [B, M, M], node (row) sees node (column): its ancestors and itself
    # int64 [B, M], of two equally deep nodes the smaller number lies on the earlier path
    path_order: Tensor
    layout: Layout
    max_depth: int  # D, the depth of the deepest node a tree of this shape can have
    # float32 [B, M, V], for each node the distribution its children were drawn from, in order, without replacement.
    # Rows of leaves are not read, those at the end may be missing. None for a deterministic draft, whose q is 1 (also
    # in any greedy decoding).
    q: Tensor | None = None

    def rows(self, values: Tensor) -> Tensor:
        """Return a copy [I * B, ...] of the `values` [B, M, ...] of the nodes that can have children, node by node.

        Indexed at once, and not by views: compiled programs then change the copy in place.
        """
        nodes = self.layout.nodes
        images = torch.arange(len(values), device=values.device)
        return values[images.repeat(len(nodes)), nodes.repeat_interleave(len(values))]

    def by_node(self, rows: Tensor) -> Tensor:
        """Return [B, M, ...] of `rows` [I * B, ...] that belong to the nodes that can have children; else 0."""
        nodes = self.layout.nodes
        images, count = self.tokens.shape
        of_nodes = rows.new_zeros(images, count, *rows.shape[1:])
        of_nodes[:, nodes] = rows.view(len(nodes), images, *rows.shape[1:]).transpose(0, 1)
        return of_nodes


@dataclass(frozen=True)
class Level:
    """One drafting round of a static tree: which nodes of one depth are expanded, and into which nodes."""

    nodes: Tensor  # int64 [n], the nodes of this depth that have children
    slot: Tensor  # int64 [m], for each node one deeper the index of its parent in `nodes`
    rank: Tensor  # int64 [m], which draw of its parent it is
    fanout: int  # the most children any of the nodes has
    origin: Tensor  # int64 [n], the slot of their parents in the level above
    seen: Tensor  # bool [n, e], who sees whom of the nodes expanded so far, the root left out


@dataclass(frozen=True)
class StaticTree:
    """A fixed topology as index tensors: M nodes with the root, ordered by (depth, path)."""

    parents: Tensor  # int64 [M]
    depths: Tensor  # int64 [M]
    children: Tensor  # int64 [M, C], -1 padded
    attention: Tensor  # bool [M, M]
    layout: Layout
    levels: tuple[Level, ...]  # one for each depth from 0 to D - 1
    max_depth: int  # D

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> StaticTree:
        """Build the tree of root-to-node child-rank paths; UserError where `check_topology` refuses them."""
        nodes = [(), *check_topology(paths)]
        number = {path: node for node, path in enumerate(nodes)}
        parents = [-1, *(number[path[:-1]] for path in nodes[1:])]
        kids: list[list[int]] = [[] for _ in nodes]
        for node, parent in enumerate(parents[1:], 1):
            kids[parent].append(node)
        internal = sorted(
            (node for node, below in enumerate(kids) if below), key=lambda node: -len(kids[node])
        )
        with torch.device(device):
            attention = torch.tensor(
                [[path[: len(above)] == above for above in nodes] for path in nodes]
            )
            layout = Layout(
                nodes=torch.tensor(internal),
                nodes_per_rank=_nodes_per_rank(kids),
                children=_padded([kids[node] for node in internal]),
                slots=torch.tensor(
                    [internal.index(node) if below else -1 for node, below in enumerate(kids)]
                ),
                levels=len(nodes[-1]),
                groups=tuple(_rank_groups(nodes, internal, kids)),
            )
            return cls(
                parents=torch.tensor(parents),
                depths=torch.tensor([len(path) for path in nodes]),
                children=_padded(kids),
                attention=attention,
                layout=layout,
                levels=tuple(_levels(nodes=nodes, parents=parents, kids=kids, attention=attention)),
                max_depth=len(nodes[-1]),
            )

    def draft(self, tokens: Tensor, q: Tensor | None, valid: Tensor | None = None) -> DraftTree:
        """Return the DraftTree of `tokens` int64 [B, M] in this shape, without copying the shape.

        `q` [B, M, V] as in DraftTree (None for deterministic drafts); `valid` bool [B, M] is False for nodes that
        could not be drawn (q = 0), which then are no children.
        """
        batch = len(tokens)
        children = self.children.expand(batch, -1, -1)
        if valid is not None:
            drawn = valid.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
            children = children.masked_fill(~drawn, -1)
        return DraftTree(
            tokens=tokens,
            depths=self.depths.expand(batch, -1),
            children=children,
            attention=self.attention.expand(batch, -1, -1),
            # Nodes are sorted by (depth, path): among equally deep ones, numbers are in the order of paths.
            path_order=torch.arange(tokens.shape[1], device=tokens.device).expand(batch, -1),
            layout=self.layout,
            max_depth=self.max_depth,
            q=q,
        )


def _padded(kids: _Lists) -> Tensor:
    width = max(map(len, kids))
    return torch.tensor([[*below, *[-1] * (width - len(below))] for below in kids])


def _nodes_per_rank(kids: _Lists) -> tuple[int, ...]:
    return tuple(sum(len(below) > rank for below in kids) for rank in range(max(map(len, kids))))


def _rank_groups(nodes: _Lists, internal: Sequence[int], kids: _Lists) -> Iterator[RankGroup]:
    for ranks in sorted({sum(nodes[node]) for node in internal}):
        parents = [node for node in internal if sum(nodes[node]) == ranks]
        below = [kids[node] for node in parents]
        slots = torch.tensor([internal.index(node) for node in parents])
        levels = len({len(nodes[node]) for node in parents})
        yield RankGroup(
            nodes=torch.tensor(parents),
            slots=slots,
            children=_padded(below),
            levels=levels,
            nodes_per_rank=_nodes_per_rank(below),
        )


def _levels(
    nodes: _Lists, parents: Sequence[int], kids: _Lists, attention: Tensor
) -> Iterator[Level]:
    above = [-1]
    expanded = list[int]()
    for depth in range(len(nodes[-1])):
        expanding = [node for node, path in enumerate(nodes) if len(path) == depth and kids[node]]
        children = [child for node in expanding for child in kids[node]]
        expanded += expanding
        yield Level(
            nodes=torch.tensor(expanding),
            slot=torch.tensor([expanding.index(parents[child]) for child in children]),
            rank=torch.tensor([nodes[child][-1] for child in children]),
            fanout=max(len(kids[node]) for node in expanding),
            origin=torch.tensor([above.index(parents[node]) for node in expanding]),
            seen=attention[expanding][:, expanded[1:]],
        )
        above = expanding


def link_nodes(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ranks: Tensor,
    valid: Tensor,
    fanout: int,
    max_depth: int,
) -> DraftTree:
    """Return the deterministic DraftTree of B images whose trees differ in shape.

    All int64 [B, M]: `tokens`, `parents` (-1 for the root, which is node 0, and never above the node's own number),
    `depths`, `ranks` (index among the siblings, < `fanout`). Nodes with `valid` bool [B, M] False fill up: they hang
    on the root at depth 1, see only it and themselves, and are no children.
    """
    batch, nodes = tokens.shape
    number = torch.arange(nodes, device=tokens.device).expand(batch, -1)
    is_root = number == 0
    is_child = valid & ~is_root
    exists = valid | is_root
    parents = torch.where(exists, parents, 0)
    column = torch.where(is_child, parents * fanout + ranks, nodes * fanout)
    children = torch.full((batch, nodes * fanout + 1), -1, dtype=torch.int64, device=tokens.device)
    children = children.scatter_(1, column, number)[:, :-1].view(batch, nodes, fanout)
    attention = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    above = parents
    for _ in range(max_depth):
        # Above the root there is -1, clamped to the root: everybody's ancestor.
        attention.scatter_(2, above.clamp_min(0)[:, :, None], True)
        above = torch.where(above < 0, above, parents.gather(1, above.clamp_min(0)))
    leaf = exists & (children < 0).all(dim=-1)
    below = torch.where(leaf[:, :, None] & attention, number[:, :, None], nodes)
    return DraftTree(
        tokens=torch.where(exists, tokens, 0),
        depths=torch.where(exists, depths, 1),
        children=children,
        attention=attention,
        path_order=below.amin(dim=1),
        layout=full_layout(nodes, fanout, tokens.device),
        max_depth=max_depth,
    )


def full_layout(nodes: int, fanout: int, device: torch.device) -> Layout:
    """The layout of a tree of which any node can have `fanout` children."""
    every = torch.arange(nodes, device=device)
    return Layout(nodes=every, slots=every, nodes_per_rank=(nodes,) * fanout)


def first_true(hit: Tensor) -> Tensor:
    """Return int64 [...]: where the first True stands along the last dimension of bool [..., C]; C - 1 if nowhere.

    Not `argmax` of the bits: compiled for a CPU (inductor of torch 2.15) that gives wrong indices for 8-bit numbers.
    """
    last = hit.shape[-1] - 1
    return torch.where(hit, torch.arange(last + 1, device=hit.device), last).amin(dim=-1)
