"""Accept or reject the draft children of tree nodes, for all nodes of a batch at once.

This is the loop of `reference.py`. For the children x of a node, in order:

    accept x with probability    min(1, p(x) / q(x))          strictly
                                 min(1, (p(x) + m(x)) / q(x))  by neighbours
                                 f(x)                          by probability
    after a rejection            p <- normalize(max(p - removal * q, 0)), lenders set to 0
                                 q <- normalize(q without x)

A residual depends on no random number. So nothing is drawn here: each child is decided as if its
earlier siblings had been rejected, and `verify.py` draws. Nodes with most children come first, so
the children of one rank belong to the first n nodes. docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_bench.decoding.tree import TreeLayout

if TYPE_CHECKING:
    from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule


@dataclass(frozen=True)
class Children:
    """Draft children of N nodes, up to C each, in the order in which they are tried."""

    # [N, V] target distributions; overwritten
    p: Tensor
    # [N, V] what the children were drawn from; None: deterministic drafts; overwritten
    q: Tensor | None
    # the draft tokens, int64 [N, C]
    tokens: Tensor
    # bool [N, C], which children exist
    offered: Tensor
    # how many leading nodes have a child of each rank
    nodes_per_rank: Sequence[int]
    # int64 [N], of the children in the tree
    depth: Tensor
    # int64 [N], of the children in the image
    position: Tensor
    # of the trees of B images: row `slot * B + image` is the node `layout.nodes[slot]`
    layout: TreeLayout | None = None


@dataclass(frozen=True)
class Acceptance:
    """The decision on N nodes with up to C children."""

    # [N, C] probability to accept each child, given that its earlier siblings were rejected
    accept: Tensor
    # [N, C] m(x) of each child that is tried
    neighbour_mass: Tensor
    # [N, V] p after all children were rejected, of any scale
    residual: Tensor
    # bool [N], rounding left no residual: the node's own p takes its place
    exhausted: Tensor

    def bonus_distribution(self, rows: Tensor, p: Tensor) -> Tensor:
        """Return what the bonus token is drawn from [n, V].

        Args:
            rows: The nodes at which the walk ended, int64 [n].
            p: Their distributions [n, V].
        """
        residual = torch.where(self.exhausted[rows, None], p, self.residual[rows])
        return residual / residual.sum(dim=-1, keepdim=True)


def accept_children(children: Children, rule: ConfiguredRule) -> Acceptance:
    """Decide on every child of every node, each as if its earlier siblings had been rejected.

    Args:
        children: The drafts. `p` and `q` are overwritten.
        rule: How to decide on a draft.
    """
    accept = torch.zeros_like(children.tokens, dtype=children.p.dtype)
    neighbour_mass = torch.zeros_like(accept)
    residual = rule.residual(children)
    for rank, n in enumerate(children.nodes_per_rank):
        draft = residual.drafts(children.tokens[:n, rank])
        decision = rule.decide(draft)

        tried = children.offered[:n, rank] & ~residual.exhausted[:n]
        if draft.q_x is not None:
            tried = tried & (draft.q_x > 0)
        accept[:n, rank] = torch.where(tried, decision.probability, 0.0)
        neighbour_mass[:n, rank] = torch.where(tried, decision.neighbour_mass, 0.0)

        residual.reject(draft.token, decision, tried)
    return Acceptance(
        accept=accept,
        neighbour_mass=neighbour_mass,
        residual=residual.p,
        exhausted=residual.exhausted,
    )
