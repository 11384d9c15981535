"""Accept or reject the draft children of tree nodes: the loop of `reference.py`, for all nodes of a batch at once.

A residual depends on no random number, so nothing is drawn here: each child is decided as if its earlier siblings had
been rejected, and `verify.py` draws. Nodes with most children come first, so that the children of one rank are those of
the first n nodes. docs/algorithms.md, sections 3, 4 and 8.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.draft_view import DraftView, Weights
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, Decision, Neighbours
from lantern_bench.decoding.tree import Layout

_EMPTY = 1e-12  # a residual with less than this of a mass of 1 is rounding


@dataclass(frozen=True)
class Children:
    """Draft children of N nodes, up to C each, in the order in which they are tried."""

    p: Tensor  # [N, V] target distributions; overwritten
    q: (
        Tensor | None
    )  # [N, V] what the children were drawn from; None: deterministic drafts; overwritten
    tokens: Tensor  # int64 [N, C]
    offered: Tensor  # bool [N, C], which children exist
    nodes_per_rank: Sequence[int]  # how many leading nodes have a child of each rank
    depth: Tensor  # int64 [N], of the children in the tree
    position: Tensor  # int64 [N], of the children in the image
    layout: Layout | None = (
        None  # of the trees of B images: row `slot * B + image` is the node `layout.nodes[slot]`
    )


@dataclass(frozen=True)
class Acceptance:
    """What is decided for N nodes with up to C children."""

    # [N, C] probability to accept each child, given that its earlier siblings were rejected
    accept: Tensor
    neighbour_mass: Tensor  # [N, C] m(x) of each child that is tried
    residual: Tensor  # [N, V] p after all children were rejected, of any scale
    exhausted: Tensor  # bool [N], rounding left no residual: the node's own p takes its place

    def bonus_distribution(self, rows: Tensor, p: Tensor) -> Tensor:
        """Return what the bonus token is drawn from [n, V], at the nodes `rows` [n] with the distributions `p`."""
        residual = torch.where(self.exhausted[rows, None], p, self.residual[rows])
        return residual / residual.sum(dim=-1, keepdim=True)


def accept_children(children: Children, rule: AcceptanceRule) -> Acceptance:
    """Decide on every child of every node, each as if its earlier siblings had been rejected."""
    accept = torch.zeros_like(children.tokens, dtype=children.p.dtype)
    neighbour_mass = torch.zeros_like(accept)
    residual = OfficialResidual(children, rule) if rule.official else Residual(children, rule)
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


class Residual:
    """p and q of N nodes after the rejections so far.

    A rejection of a deterministic draft only changes single entries of p. So p stays unnormalised there, and its sum is
    kept in float64: no child needs a sum over the vocabulary.
    """

    def __init__(self, children: Children, rule: AcceptanceRule) -> None:
        self.p = children.p  # [N, V]
        self.q = children.q  # [N, V]; None: deterministic drafts
        self.exhausted = torch.zeros_like(children.depth, dtype=torch.bool)  # [N]
        self._rule = rule
        self._depth = children.depth
        self._position = children.position
        self._q_sum = torch.ones_like(self.p[:, :1])  # [N, 1]
        self._p_sum = torch.ones_like(self._q_sum, dtype=torch.float64)  # [N, 1]
        if self.q is None:
            self._p_sum = self.p.sum(dim=1, keepdim=True, dtype=torch.float64)

    def drafts(self, tokens: Tensor) -> DraftView:
        """Return the drafts `tokens` [n] of the first n nodes as the rule sees them."""
        n = len(tokens)
        target = Weights(values=self.p[:n], total=self._p_sum[:n].to(self.p.dtype))
        proposal = None if self.q is None else Weights(values=self.q[:n], total=self._q_sum[:n])
        return DraftView(
            rule=self._rule,
            token=tokens,
            p_x=target.at(tokens[:, None]).squeeze(1),
            q_x=None if proposal is None else proposal.at(tokens[:, None]).squeeze(1),
            target=target,
            proposal=proposal,
            depth=self._depth[:n],
            position=self._position[:n],
        )

    def reject(self, tokens: Tensor, decision: Decision, tried: Tensor) -> None:
        """Reject the drafts `tokens` [n] of the first n nodes, where they are `tried` [n]."""
        reject = self._reject_deterministic if self.q is None else self._reject_sampled
        reject(tokens[:, None], decision, tried[:, None])

    def _reject_sampled(self, x: Tensor, decision: Decision, tried: Tensor) -> None:
        """Replace p by max(p - q, 0), renormalised, and take x out of q; columns are [n, 1].

        At x the residual is 0 without more ado: a rejected x has p(x) <= p(x) + m(x) < q(x).
        """
        assert self.q is not None
        n = len(x)
        p = self.p[:n]
        q = self.q[:n]
        removed = q / self._q_sum[:n]
        if decision.removal is not None:
            removed = removed * decision.removal
        residual = (p - removed).clamp_min_(0.0)
        if decision.neighbours is not None:
            near = decision.neighbours
            left = torch.where(near.taken, self._left_at(near, p), residual.gather(1, near.tokens))
            _write(residual, near.tokens, left)
        residual_sum = residual.sum(dim=1, keepdim=True)
        p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
        self._handle_empty(tried & (residual_sum <= 0))
        _write(q, x, torch.where(tried, 0.0, q.gather(1, x)))
        self._q_sum[:n] = q.sum(dim=1, keepdim=True)

    def _reject_deterministic(self, x: Tensor, decision: Decision, tried: Tensor) -> None:
        """Take x, or what acceptance used up of it, and the neighbours taken out of p; columns are [n, 1]."""
        n = len(x)
        p = self.p[:n]
        p_sum = self._p_sum[:n]
        if decision.neighbours is not None:
            near = decision.neighbours
            before = p.gather(1, near.tokens)
            p_sum = p_sum - torch.where(near.taken, before, 0.0).sum(
                dim=1, keepdim=True, dtype=torch.float64
            )
            _write(p, near.tokens, torch.where(near.taken & tried, 0.0, before))
        p_x = p.gather(1, x)
        left = torch.zeros_like(p_x)
        if decision.removal is not None:
            left = (p_x - decision.removal.gather(1, x) * p_sum.to(p_x.dtype)).clamp_min(0.0)
        p_sum = p_sum - (p_x - left)
        _write(p, x, torch.where(tried, left, p_x))
        self._p_sum[:n] = torch.where(tried, p_sum, self._p_sum[:n])
        self._handle_empty(tried & (p_sum <= _EMPTY))

    def _left_at(self, near: Neighbours, p: Tensor) -> Tensor | float:
        """Return what a rejection leaves of neighbours whose mass the draft took."""
        del near, p
        return 0.0

    def _handle_empty(self, empty: Tensor) -> None:
        """Mark nodes whose residual is `empty` [n, 1] as exhausted."""
        self.exhausted[: len(empty)] |= empty.squeeze(1)


class OfficialResidual(Residual):
    """The residual of the LANTERN authors' code (`residual: official`; docs/algorithms.md, section 9.A)."""

    def _left_at(self, near: Neighbours, p: Tensor) -> Tensor | float:
        """It takes the neighbours out of q, and so leaves their p as it was."""
        return p.gather(1, near.tokens)

    def _handle_empty(self, empty: Tensor) -> None:
        """It goes on with a uniform distribution."""
        n = len(empty)
        codes = self._rule.n_codes or self.p.shape[1]
        self.p[:n, :codes].masked_fill_(empty, 1.0 / codes)
        self._p_sum[:n].masked_fill_(empty, 1.0)


def _write(values: Tensor, columns: Tensor, entries: Tensor) -> None:
    """`scatter_` along the rows of `values`, in the form that compiled programs run in place, without a copy."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    values.index_put_((rows, columns), entries)
