"""One node and its children: with what probability each child is accepted, and the residual when none is.

The residual after rejecting the first j children does not depend on the random numbers, so many nodes are computed
together, one child rank at a time (docs/algorithms.md, sections 3 and 4). Only this file computes acceptance
probabilities and residuals of children; `walk.py` walks with them and `emitted_tv.py` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.relaxation import (
    ROOTS,
    Place,
    Relaxation,
    chances,
    every_token,
    merged_mass,
    neighbour_columns,
)

_NOTHING = 1e-12  # of a mass of 1, what subtracting may leave where nothing is left


@dataclass(frozen=True)
class Acceptance:
    """What `accept_children` found for N nodes with up to C children.

    accept: [N, C], the probability that child j is accepted after the earlier ones were rejected; 0 if not tried.
    mass: [N, C], the merged mass m(x) of each tried child, else 0; of a rule of `chance` max(q(x) f(x) - p(x), 0).
    rest: [N, V], the current p after all children were rejected, of any scale.
    exhausted: [N], rounding left no mass (`exact` only): the node's own p takes the place of `rest`.
    """

    accept: Tensor
    mass: Tensor
    rest: Tensor
    exhausted: Tensor

    def final(self, rows: Tensor, own: Tensor) -> Tensor:
        """Return the distributions [n, V] of the bonus token at the nodes `rows` [n], whose p is `own` [n, V]."""
        chosen = torch.where(self.exhausted[rows, None], own, self.rest[rows])
        return chosen / chosen.sum(dim=-1, keepdim=True)


Accept: TypeAlias = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Relaxation, Tensor | None, Sequence[int] | None, int, Place], Acceptance
]
"""The signature of `accept_children`; a test of a broken rule passes another function of it."""


def accept_children(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    active: Sequence[int] | None = None,
    images: int = 1,  # noqa: ARG001  # rows of all images are alike
    place: Place = ROOTS,
) -> Acceptance:
    """Return the acceptance of the children of N nodes, of each as if those before it had been rejected.

    `p` [N, V] are the nodes' target distributions and `q` [N, V] the distributions their children were drawn from
    without replacement, or None for a deterministic draft (q = 1). Both are overwritten. `tokens` int64 [N, C] are
    the children in the order of trial, `offered` bool [N, C] says which exist. `active[j]`, when given, is the number
    of leading rows that have a child of rank j. `place` says where the rows stand. docs/algorithms.md, sections 3, 4
    and 8.4.
    """
    return decide_each(Nodes(p, q, relaxation, table, place), tokens, offered, active)


def decide_each(nodes: Nodes, tokens: Tensor, offered: Tensor, active: Sequence[int] | None) -> Acceptance:
    """Return the acceptance of the children of `nodes`, rank by rank; the others as in `accept_children`."""
    count, ranks = tokens.shape
    accept, mass = nodes.p.new_zeros(count, ranks), nodes.p.new_zeros(count, ranks)
    for rank, rows in enumerate([count] * ranks if active is None else active):
        accept[:rows, rank], mass[:rows, rank] = nodes.decide(tokens[:rows, rank, None], offered[:rows, rank, None])
    return Acceptance(accept, mass, nodes.p, nodes.exhausted.squeeze(1))


class Nodes:
    """The current p and q of all nodes, changed by each rejection. Columns [N, 1] hold one number per node."""

    def __init__(self, p: Tensor, q: Tensor | None, relaxation: Relaxation, table: Tensor | None, place: Place) -> None:
        self.p, self.q, self.relaxation, self.table, self.place = p, q, relaxation, table, place
        self.official = relaxation.residual == "official"
        # A deterministic draft only sets entries of p to 0: p stays unnormalised, and its mass is kept in float64, so
        # that no child needs a sum over the vocabulary.
        self.p_mass = p.new_ones(len(p), 1) if q is not None else p.sum(dim=1, keepdim=True, dtype=torch.float64)
        self.q_mass = p.new_ones(len(p), 1)
        self.exhausted = torch.zeros(len(p), 1, dtype=torch.bool, device=p.device)

    def decide(self, x: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
        """Return accept probability and merged mass [n] of the children `x` [n, 1], then reject them all."""
        rows = len(x)
        p, p_mass = self.p[:rows], self.p_mass[:rows].to(self.p.dtype)
        p_x = p.gather(1, x) / p_mass
        q_x = torch.ones_like(p_x) if self.q is None else self.q[:rows].gather(1, x) / self.q_mass[:rows]
        tried = offered & ~self.exhausted[:rows] & (q_x > 0)
        near, touched, mass, taken = None, None, torch.zeros_like(p_x), None
        if self.relaxation.merges:
            near = neighbour_columns(self.table, x.squeeze(1), self.relaxation)
            of_x = None if self.q is None else q_x.squeeze(1)
            merged, merges = merged_mass(p, x.squeeze(1), self.table, self.relaxation, self.place, p_mass, of_x)
            mass = merged[:, None]
            # A rejection touches the merged codes; under `official` all k + 1 as soon as one merged.
            touched = merges[:, :1].expand_as(near) if self.official else merges
        if self.relaxation.chance is not None:
            q = None if self.q is None else self.q[:rows] / self.q_mass[:rows]
            f = chances(every_token(p, p_mass, q, self.relaxation, self.table, self.place))
            accept = torch.where(tried, f.gather(1, x), 0.0)
            mass = (q_x * accept - p_x).clamp_min(0.0)
            # The share of q that a rejection takes out of p (docs/algorithms.md, section 8.4).
            published = self.relaxation.published
            taken = f if published == "exact" else torch.full_like(f, float(published == "plain"))
        else:
            accept = torch.where(tried, ((p_x + mass) / q_x).clamp(max=1.0), 0.0)
        if self.q is None:
            self._reject_deterministic(x, tried, near, touched, taken)
        else:
            self._reject_sampled(x, tried, near, touched, taken)
        return accept.squeeze(1), torch.where(tried, mass, 0.0).squeeze(1)

    def _reject_deterministic(
        self, x: Tensor, tried: Tensor, near: Tensor | None, touched: Tensor | None, taken: Tensor | None
    ) -> None:
        """Take x and the touched codes out of p; of a rule of `chance` the share `taken` [n, V] of q = 1 at x."""
        p, left = self.p[: len(x)], self.p_mass[: len(x)]
        if near is not None and touched is not None:
            lent = p.gather(1, near)
            left = left - torch.where(touched, lent, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
            _put(p, near, torch.where(touched & tried, 0.0, lent))
        own = p.gather(1, x)
        kept = torch.zeros_like(own)
        if taken is not None:
            kept = (own - taken.gather(1, x) * left.to(own.dtype)).clamp_min(0.0)
        left = left - (own - kept)
        _put(p, x, torch.where(tried, kept, own))
        empty = tried & (left <= _NOTHING)
        self._settle_empty(empty)
        if self.official:
            left = torch.where(empty, 1.0, left)
        self.p_mass[: len(x)] = torch.where(tried, left, self.p_mass[: len(x)])

    def _reject_sampled(
        self, x: Tensor, tried: Tensor, near: Tensor | None, touched: Tensor | None, taken: Tensor | None
    ) -> None:
        """Set p to max(p~ - q, 0) renormalised (p and the reduced q under `official`), and take x out of q.

        At x itself that is 0, as p - q is: a rejected x has p~(x) < q(x). A rule of `chance`: max(p - q taken, 0).
        """
        assert self.q is not None
        p, q = self.p[: len(x)], self.q[: len(x)]
        drawn = q / self.q_mass[: len(x)]
        rest = (p - (drawn if taken is None else drawn * taken)).clamp_min_(0.0)
        if near is not None and touched is not None:
            instead = p.gather(1, near) if self.official else 0.0
            _put(rest, near, torch.where(touched, instead, rest.gather(1, near)))
        left = rest.sum(dim=1, keepdim=True)
        p.copy_(torch.where(tried & (left > 0), rest / left, p))
        self._settle_empty(tried & (left <= 0))
        _put(q, x, torch.where(tried, 0.0, q.gather(1, x)))
        self.q_mass[: len(x)] = q.sum(dim=1, keepdim=True)

    def _settle_empty(self, empty: Tensor) -> None:
        """Where p is empty: uniform without forced tokens under `official`, else the node offers no more children."""
        if self.official:
            choices = self.relaxation.choices or self.p.shape[1]
            self.p[: len(empty), :choices].masked_fill_(empty, 1.0 / choices)
        else:
            self.exhausted[: len(empty)] |= empty


def _put(values: Tensor, columns: Tensor, chosen: Tensor) -> None:
    """`scatter_` along the rows of `values`, in a form that compiled programs run in place, without a copy."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    values.index_put_((rows, columns), chosen)
