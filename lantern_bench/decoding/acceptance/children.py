"""Accept or reject the draft children of tree nodes, for all nodes of a batch at once.

This is the loop of `reference.py`. For the children x of a node, in order:

    accept x with probability    min(1, p(x) / q(x))          strictly
                                 min(1, (p(x) + m(x)) / q(x))  by neighbours
                                 f(x)                          by probability
    after a rejection            p <- normalize(max(p - removal * q, 0)), 0 at neighbours taken
                                 q <- normalize(q without x)

A residual depends on no random number. So each child is decided here as if its earlier siblings had
been rejected, and `verify.py` draws the random numbers. Nodes with most children come first, so
the children of one rank belong to the first n nodes. docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.draft_view import (
    Codebook,
    Decision,
    DraftView,
    ScaledDistributions,
)
from lantern_bench.decoding.tree import TreeLayout, index_along

if TYPE_CHECKING:
    from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule

_EMPTY = 1e-12  # a smaller sum of a residual is a rounding error


@dataclass(frozen=True)
class Children:
    """Draft children of N nodes, up to C each, in the order in which they are tried."""

    # [N, V] target distributions; overwritten
    p: Tensor
    # [N, V] distributions that the children were drawn from; None: deterministic; overwritten
    q: Tensor | None
    # the draft tokens, int64 [N, C]
    tokens: Tensor
    # bool [N, C], which children exist
    offered: Tensor
    # how many leading nodes have a child of each rank
    nodes_per_rank: Sequence[int]
    # depth of the children in the tree, int64 [N]
    depth: Tensor
    # position of the children in the image, int64 [N]
    position: Tensor
    # layout of the trees of B images: row `slot * B + image` is the node `layout.nodes[slot]`
    layout: TreeLayout | None = None


@dataclass(frozen=True)
class Acceptance:
    """The decision on the up to C children of N nodes."""

    # [N, C] probability to accept each child, given that its earlier siblings were rejected
    accept: Tensor
    # [N, C] m(x) of each child that is tried
    neighbour_mass: Tensor
    # [N, V] p after all children were rejected, not normalised
    residual: Tensor
    # bool [N], nodes whose residual is lost to rounding: their own p replaces it
    exhausted: Tensor
    # [N] w of each node, of rules whose decision on a node depends on the drafts below it
    visit_probability: Tensor | None = None
    # [2, N, C] emitted TV of each child, if it is rejected and if it is accepted; None: not known
    emitted_tv: Tensor | None = None

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
    emitted_tv = accept.new_zeros(2, *accept.shape)
    residual = rule.residual_class(children, rule.codebook)
    for rank, n in enumerate(children.nodes_per_rank):
        draft = residual.drafts(children.tokens[:n, rank])
        decision = rule.decide(draft)

        tried = children.offered[:n, rank] & ~residual.exhausted[:n]
        if draft.q_x is not None:
            tried = tried & (draft.q_x > 0)
        accept[:n, rank] = torch.where(tried, decision.probability, 0.0)
        neighbour_mass[:n, rank] = torch.where(tried, decision.neighbour_mass, 0.0)

        tv = residual.reject(draft, decision, tried)
        # Where tv is TV(p, q), a rejection takes 1 off (docs/algorithms.md, section 6.3).
        if_rejected = tv if decision.is_by_probability else tv - 1.0
        emitted_tv[0, :n, rank] = torch.where(tried, if_rejected, 0.0)
        emitted_tv[1, :n, rank] = torch.where(tried, tv, 0.0)
    return Acceptance(
        accept=accept,
        neighbour_mass=neighbour_mass,
        residual=residual.p,
        exhausted=residual.exhausted,
        emitted_tv=emitted_tv,
    )


class Residual:
    """p and q of N nodes after the rejections so far.

    A rejection of a deterministic draft changes single entries of p. So p stays unnormalised there,
    and its sum is kept in float64, which saves a sum over the vocabulary for each child.
    """

    # whether a rejected draw from q leaves the p of its neighbours as it was
    keeps_neighbours = False

    def __init__(self, children: Children, codebook: Codebook) -> None:
        self.p = children.p  # [N, V]
        self.q = children.q  # [N, V]; None: deterministic drafts
        # [N], nodes for which rounding left no residual
        self.exhausted = torch.zeros_like(children.depth, dtype=torch.bool)
        self._codebook = codebook
        self._children = children
        self._q_sum = torch.ones_like(self.p[:, :1])  # [N, 1]
        self._p_sum = torch.ones_like(self._q_sum, dtype=torch.float64)  # [N, 1]
        if self.q is None:
            self._p_sum = self.p.sum(dim=1, keepdim=True, dtype=torch.float64)

    def drafts(self, tokens: Tensor) -> DraftView:
        """Return the drafts `tokens` [n] of the first n nodes as a rule sees them."""
        n = len(tokens)
        proposal = None
        if self.q is not None:
            proposal = ScaledDistributions(values=self.q[:n], total=self._q_sum[:n])
        return DraftView(
            token=tokens,
            depth=self._children.depth[:n],
            position=self._children.position[:n],
            target=ScaledDistributions(values=self.p[:n], total=self._p_sum[:n].to(self.p.dtype)),
            proposal=proposal,
            codebook=self._codebook,
        )

    def reject(self, draft: DraftView, decision: Decision, tried: Tensor) -> Tensor:
        """Reject the drafts of the first n nodes.

        Args:
            draft: The drafts, of `drafts`.
            decision: How the rule decides on them.
            tried: Which of them are tried, bool [n]; at other nodes nothing changes.

        Returns:
            Of each draft [n], before the rejection: sum (q f - p)+ if the rule decides by
            probability, otherwise TV(p, q).
        """
        x = draft.token[:, None]
        if self.q is not None:
            return self._reject_sampled(x, decision, tried[:, None])
        tv = decision.neighbour_mass if decision.is_by_probability else 1.0 - draft.p_x
        self._reject_deterministic(x, decision, tried[:, None])
        return tv

    def _reject_sampled(self, x: Tensor, decision: Decision, tried: Tensor) -> Tensor:
        """Reject draws from q; columns are [n, 1].

        p <- normalize(max(p - removal * q, 0)), with 0 at the neighbours taken; then x is removed
        from q. At x the residual is 0 already: a rejected x has p(x) <= p(x) + m(x) < q(x).
        """
        assert self.q is not None
        n = len(x)
        p = self.p[:n]
        q = self.q[:n]
        removed = q / self._q_sum[:n] * decision.removal
        residual = (p - removed).clamp_min_(0.0)
        over = (removed - p).clamp_min(0.0) if decision.is_by_probability else residual
        tv = over.sum(dim=1)
        near = decision.neighbours
        if near is not None:
            kept = p.gather(1, near.tokens) if self.keeps_neighbours else 0.0
            left = torch.where(near.taken, kept, residual.gather(1, near.tokens))
            _write(residual, near.tokens, left)
        residual_sum = residual.sum(dim=1, keepdim=True)
        p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
        self._handle_empty(tried & (residual_sum <= 0))
        _write(q, x, torch.where(tried, 0.0, q.gather(1, x)))
        self._q_sum[:n] = q.sum(dim=1, keepdim=True)
        return tv

    def _reject_deterministic(self, x: Tensor, decision: Decision, tried: Tensor) -> None:
        """Reject drafts of probability 1; columns are [n, 1].

        Take x, or the part of x that acceptance used up, and the neighbours taken out of p.
        """
        n = len(x)
        p = self.p[:n]
        p_sum = self._p_sum[:n]
        near = decision.neighbours
        if near is not None:
            before = p.gather(1, near.tokens)
            taken = torch.where(near.taken, before, 0.0)
            p_sum = p_sum - taken.sum(dim=1, keepdim=True, dtype=torch.float64)
            _write(p, near.tokens, torch.where(near.taken & tried, 0.0, before))
        removal = decision.removal
        if isinstance(removal, Tensor):
            removal = removal.gather(1, x)
        p_x = p.gather(1, x)
        left = (p_x - removal * p_sum.to(p_x.dtype)).clamp_min(0.0)
        p_sum = p_sum - (p_x - left)
        _write(p, x, torch.where(tried, left, p_x))
        self._p_sum[:n] = torch.where(tried, p_sum, self._p_sum[:n])
        self._handle_empty(tried & (p_sum <= _EMPTY))

    def _handle_empty(self, empty: Tensor) -> None:
        """Mark nodes whose residual is `empty` [n, 1] as exhausted."""
        self.exhausted[: len(empty)] |= empty.squeeze(1)


def _write(values: Tensor, columns: Tensor, entries: Tensor) -> None:
    """Scatter along the rows of `values`, in a form that compiled programs run in place."""
    rows = index_along(values)[:, None]
    values.index_put_((rows, columns), entries)
