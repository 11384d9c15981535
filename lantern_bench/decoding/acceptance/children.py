"""Accept or reject the draft children of tree nodes, and compute the residual when all are rejected.

A node has a target distribution p and children x, tried in order. Child x is accepted with probability

    min(1, (p(x) + m(x)) / q(x))

where q is the distribution it was drawn from and m(x) its neighbour mass (0 under the strict rule). When x is rejected,
p becomes the residual max(p - q, 0), renormalised, without the neighbours whose mass x took; and q loses x, because
siblings are drawn without replacement. A deterministic draft is the case q(x) = 1. When no child is left, the bonus
token is drawn from the residual. A rule of `chance` gives the probability f of acceptance itself; its residual is
max(p - q f, 0).

A residual depends on no random number, so all nodes are computed together, one child rank at a time.
docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.rule import AcceptanceRule, DraftView, acceptance_chance, neighbour_mass
from lantern_bench.decoding.tree import Layout

_EMPTY = 1e-12  # a residual with less than this of a mass of 1 is rounding
_Merged: TypeAlias = tuple[Tensor, Tensor]  # the neighbours [n, k] of drafts, and which of them mass is taken from


@dataclass(frozen=True)
class Children:
    """Draft children of N nodes, up to C each, in the order in which they are tried."""

    p: Tensor  # [N, V] target distributions; overwritten
    q: Tensor | None  # [N, V] what the children were drawn from; None: deterministic drafts; overwritten
    tokens: Tensor  # int64 [N, C]
    offered: Tensor  # bool [N, C], which children exist
    nodes_per_rank: Sequence[int]  # how many leading nodes have a child of each rank
    depth: Tensor  # int64 [N], of the children in the tree
    position: Tensor  # int64 [N], of the children in the image
    layout: Layout | None = None  # of the trees of B images: row `slot * B + image` is the node `layout.nodes[slot]`


@dataclass(frozen=True)
class Acceptance:
    """What is decided for N nodes with up to C children."""

    accept: Tensor  # [N, C] probability to accept each child, given that its earlier siblings were rejected
    mass: Tensor  # [N, C] neighbour mass m(x) of each child that is tried
    residual: Tensor  # [N, V] p after all children were rejected, of any scale
    exhausted: Tensor  # bool [N], rounding left no residual: the node's own p takes its place

    def bonus_distribution(self, rows: Tensor, p: Tensor) -> Tensor:
        """Return what the bonus token is drawn from [n, V], at the nodes `rows` [n] with the distributions `p`."""
        residual = torch.where(self.exhausted[rows, None], p, self.residual[rows])
        return residual / residual.sum(dim=-1, keepdim=True)


def accept_children(children: Children, rule: AcceptanceRule) -> Acceptance:
    """Decide on every child of every node, each as if its earlier siblings had been rejected."""
    remaining = _Remaining(children, rule)
    accept = torch.zeros_like(children.tokens, dtype=children.p.dtype)
    mass = torch.zeros_like(accept)
    for rank, n in enumerate(children.nodes_per_rank):
        x = children.tokens[:n, rank, None]
        p_x, q_x = remaining.probabilities(x)
        tried = children.offered[:n, rank, None] & ~remaining.exhausted[:n] & (q_x > 0)
        m, merged, share = torch.zeros_like(p_x), None, None
        if rule.chance is not None:
            f = acceptance_chance(remaining.every_token(n))
            probability = f.gather(1, x)
            m = (q_x * probability - p_x).clamp_min(0.0)  # what x takes from other tokens
            # A token is rejected with probability 1 - f, so q f is what acceptance used up.
            share = f if rule.official_share is None else torch.full_like(p_x, rule.official_share).expand_as(f)
        else:
            if rule.uses_neighbours:
                summed, taken = neighbour_mass(remaining.drafts(x, p_x, q_x))
                m = summed[:, None]
                neighbours = rule.nearest(x.squeeze(1), extra=int(rule.official_residual))
                if rule.official_residual:  # the authors' code treats all k + 1 alike as soon as one is taken
                    taken = taken[:, :1].expand_as(neighbours)
                merged = neighbours, taken
            probability = ((p_x + m) / q_x).clamp(max=1.0)
        accept[:n, rank] = torch.where(tried, probability, 0.0).squeeze(1)
        mass[:n, rank] = torch.where(tried, m, 0.0).squeeze(1)
        if children.q is None:
            remaining.reject_deterministic(x, tried, merged, share)
        else:
            remaining.reject_sampled(x, tried, merged, share)
    return Acceptance(accept, mass, remaining.p, remaining.exhausted.squeeze(1))


class _Remaining:
    """p and q of all nodes after the rejections so far; columns [N, 1] hold one number per node.

    A rejection of a deterministic draft only changes single entries of p: p stays unnormalised and its sum is kept in
    float64, so that no child needs a sum over the vocabulary.
    """

    def __init__(self, children: Children, rule: AcceptanceRule) -> None:
        self.p, self.q, self.rule, self._children = children.p, children.q, rule, children
        ones = torch.ones(len(self.p), 1, dtype=torch.float64, device=self.p.device)
        self._p_sum = ones if self.q is not None else self.p.sum(dim=1, keepdim=True, dtype=torch.float64)
        self._q_sum = torch.ones_like(self.p[:, :1])
        self.exhausted = torch.zeros_like(ones, dtype=torch.bool)

    def probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return p(x) and q(x) [n, 1] of the children x [n, 1]."""
        n = len(x)
        p_x = self.p[:n].gather(1, x) / self._sum_of_p(n)
        return p_x, torch.ones_like(p_x) if self.q is None else self.q[:n].gather(1, x) / self._q_sum[:n]

    def drafts(self, x: Tensor, p_x: Tensor, q_x: Tensor) -> DraftView:
        """Return the view of the children x [n, 1]."""
        return self._view(x.squeeze(1), p_x.squeeze(1), None if self.q is None else q_x.squeeze(1), slice(len(x)))

    def every_token(self, n: int) -> DraftView:
        """Return the view of every token that the next children of n nodes could have been."""
        p, q = self.p[:n] / self._sum_of_p(n), None if self.q is None else self.q[:n] / self._q_sum[:n]
        return self._view(torch.arange(p.shape[1], device=p.device), p, q, (slice(n), None))

    def _view(self, token: Tensor, p_x: Tensor, q_x: Tensor | None, nodes: slice | tuple[slice, None]) -> DraftView:
        children, p_sum = self._children, self._sum_of_p(len(self.p))[nodes]
        return DraftView(
            self.rule, token, p_x, q_x, self.p[nodes], p_sum, children.depth[nodes], children.position[nodes]
        )

    def reject_sampled(self, x: Tensor, tried: Tensor, merged: _Merged | None, share: Tensor | None) -> None:
        """Replace p by its residual max(p - q, 0) where x is tried, and take x out of q; `share` [n, V] of q counts.

        Without `share` the residual is 0 at x: a rejected x has p(x) <= p(x) + m(x) < q(x).
        """
        assert self.q is not None
        p, q = self.p[: len(x)], self.q[: len(x)]
        removed = q / self._q_sum[: len(x)]
        if share is not None:
            removed = removed * share
        residual = (p - removed).clamp_min_(0.0)
        if merged is not None:
            neighbours, taken = merged
            remainder = p.gather(1, neighbours) if self.rule.official_residual else 0.0
            _write(residual, neighbours, torch.where(taken, remainder, residual.gather(1, neighbours)))
        residual_sum = residual.sum(dim=1, keepdim=True)
        p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
        self._handle_empty(tried & (residual_sum <= 0))
        _write(q, x, torch.where(tried, 0.0, q.gather(1, x)))
        self._q_sum[: len(x)] = q.sum(dim=1, keepdim=True)

    def reject_deterministic(self, x: Tensor, tried: Tensor, merged: _Merged | None, share: Tensor | None) -> None:
        """Take x and the neighbours whose mass it took out of p; of x only its `share` [n, V]."""
        p, p_sum = self.p[: len(x)], self._p_sum[: len(x)]
        if merged is not None:
            neighbours, taken = merged
            lent = p.gather(1, neighbours)
            p_sum = p_sum - torch.where(taken, lent, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
            _write(p, neighbours, torch.where(taken & tried, 0.0, lent))
        p_x = p.gather(1, x)
        remainder = torch.zeros_like(p_x)
        if share is not None:
            remainder = (p_x - share.gather(1, x) * p_sum.to(p_x.dtype)).clamp_min(0.0)
        p_sum = p_sum - (p_x - remainder)
        _write(p, x, torch.where(tried, remainder, p_x))
        empty = tried & (p_sum <= _EMPTY)
        self._handle_empty(empty)
        if self.rule.official_residual:
            p_sum = torch.where(empty, 1.0, p_sum)
        self._p_sum[: len(x)] = torch.where(tried, p_sum, self._p_sum[: len(x)])

    def _sum_of_p(self, n: int) -> Tensor:
        return self._p_sum[:n].to(self.p.dtype)

    def _handle_empty(self, empty: Tensor) -> None:
        """Mark nodes whose residual is empty as exhausted; the authors' code replaces p by a uniform distribution."""
        if self.rule.official_residual:
            n_codes = self.rule.n_codes or self.p.shape[1]
            self.p[: len(empty), :n_codes].masked_fill_(empty, 1.0 / n_codes)
        else:
            self.exhausted[: len(empty)] |= empty


def _write(values: Tensor, columns: Tensor, entries: Tensor) -> None:
    """`scatter_` along the rows of `values`, in the form that compiled programs run in place, without a copy."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    values.index_put_((rows, columns), entries)
