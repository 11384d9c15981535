"""Decisions and residuals of the LANTERN authors' code (`residual: official`).

Their code differs from their paper in four ways (docs/algorithms.md, section 9.A):

- a draft of probability 0 can take neighbour mass;
- a rejection treats one neighbour more than the rule looks at, and all alike once one is taken;
- a rejection takes the neighbours out of q in place of p;
- where nothing is left of p, a uniform distribution follows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Children, Residual
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Decision, DraftView, Lenders


class OfficialRule(ConfiguredRule):
    """A relaxed rule as the LANTERN authors' code treats it."""

    def decide(self, draft: DraftView) -> Decision:
        """Decide on the drafts of n nodes."""
        if self.takes_neighbours:
            return self._decide_officially(draft)
        decision = super().decide(draft)
        if self.rule.official_removal is None:
            return decision
        return replace(decision, removal=self.rule.official_removal)

    def _decide_officially(self, draft: DraftView) -> Decision:
        cumulative_mass, taken = self.neighbour_masses(draft)
        mass = torch.where(taken, cumulative_mass, 0.0).amax(dim=1)
        tokens = self.codes.nearest_to(draft.token, extra=1)
        return Decision(
            probability=draft.accept_probability(mass),
            neighbour_mass=mass,
            lenders=Lenders(tokens=tokens, taken=taken[:, :1].expand_as(tokens)),
        )

    def residual(self, children: Children) -> Residual:
        """Return p and q of nodes before the first rejection."""
        return OfficialResidual(children, self.codes)


class OfficialResidual(Residual):
    """The residual of the LANTERN authors' code."""

    def _kept_p(self, near: Lenders, p: Tensor) -> Tensor | float:
        """Leave the neighbours' p as it was: their code takes them out of q."""
        return p.gather(1, near.tokens)

    def _handle_empty(self, empty: Tensor) -> None:
        """Go on with a uniform distribution."""
        n = len(empty)
        count = self._codes.count or self.p.shape[1]
        self.p[:n, :count].masked_fill_(empty, 1.0 / count)
        self._p_sum[:n].masked_fill_(empty, 1.0)
