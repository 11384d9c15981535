"""Jacobi drafts whose first positions also ask a drafter: the drafting `hybrid`.

The target's last answer for the first position of a window was computed below a token that has just been rejected, and
a drafter knows the right one; further on the target's answers are better. So the first positions draft from a mixture
of both, the others as in `jacobi.py`. Each draft is verified with what it was drawn from: docs/algorithms.md, section
8.7.
"""

from __future__ import annotations

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, couple
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import sample


class HybridDrafting(JacobiDrafting):
    """A Jacobi window whose first `drafted` drafts are drawn from `share` q + (1 - `share`) r.

    q is the drafter's distribution below the drafts before it, r the row of the position; fresh positions have q alone.
    """

    reads_last_drafts = True

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._share = decoding.value("share")
        self.forwards = min(decoding.value("drafted"), self.depth)

    def draft(self, inputs: DraftInputs) -> Drafted:
        """Draft a Jacobi window, then its first drafts anew, one forward of the drafter for each."""
        proposer, root = inputs.proposer, inputs.root
        assert proposer is not None
        (tokens,) = super().draft(inputs)
        noise = self._clocks if self._coupling == "gumbel" else inputs.noise
        head, last, drafter_q = [root], self._moved + self._ahead[:, None], proposer.root_q
        for depth in range(self.forwards):
            if depth:
                seen = torch.ones(len(root), 1, depth, dtype=torch.bool, device=root.device)
                drafter_q = proposer.extend(head[-1][:, None], torch.zeros_like(root)[:, None], seen)
            q, row = drafter_q[:, 0], self._q[:, depth]
            fresh, has_old = last[depth] > self.depth, last[depth] < self.depth
            q = torch.where(fresh[:, None], q, self._share * q + (1.0 - self._share) * row)
            drawn_from = q
            if self._coupling == "maximal":
                coupled = couple(q, self._old_q[:, depth], self._old[:, depth])
                drawn_from = torch.where(has_old[:, None], coupled, q)
            self._q[:, depth] = q
            head.append(q.argmax(dim=-1) if self._greedy else sample(drawn_from, noise[:, depth]))
        tokens = torch.cat([torch.stack(head, dim=1), tokens[:, self.forwards + 1 :]], dim=1)
        self._remember(tokens)
        return (tokens,)
