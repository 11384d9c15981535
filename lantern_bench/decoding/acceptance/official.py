"""Decisions and residuals of the LANTERN authors' code (`residual: official`).

Their code differs from their paper in four ways (docs/algorithms.md, section 9.A):

- a draft of probability 0 can take neighbour mass;
- a rejection handles one more neighbour than acceptance does, and it handles all of them as taken
  once the first is taken;
- a rejection takes the neighbours out of q in place of p;
- an empty residual is replaced by a uniform distribution.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Residual
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Decision, DraftView, Neighbours


class OfficialResidual(Residual):
    """The residual of the LANTERN authors' code."""

    keeps_neighbours = True  # their code takes the neighbours out of q instead

    def _handle_empty(self, empty: Tensor) -> None:
        """Continue with a uniform distribution over the codes."""
        n = len(empty)
        n_codes = self._codebook.n_codes or self.p.shape[1]
        self.p[:n, :n_codes].masked_fill_(empty, 1.0 / n_codes)
        self._p_sum[:n].masked_fill_(empty, 1.0)


class OfficialRule(ConfiguredRule):
    """A relaxed rule as the LANTERN authors' code applies it."""

    residual_class = OfficialResidual

    def decide(self, draft: DraftView) -> Decision:
        """Decide on the drafts of n nodes."""
        if self.takes_neighbours:
            return self._decide_officially(draft)
        decision = super().decide(draft)
        if self.row.official_removal is None:
            return decision
        return replace(decision, removal=self.row.official_removal)

    def _decide_officially(self, draft: DraftView) -> Decision:
        cumulative_mass, taken = self.neighbour_masses(draft)
        mass = torch.where(taken, cumulative_mass, 0.0).amax(dim=1)
        tokens = self.codebook.nearest_to(draft.token, extra=1)
        return Decision(
            probability=draft.accept_probability(mass),
            neighbour_mass=mass,
            neighbours=Neighbours(tokens=tokens, taken=taken[:, :1].expand_as(tokens)),
        )
