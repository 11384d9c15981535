"""Jacobi drafts whose first places also ask a drafter: the drafting `hybrid`.

The target's last answer for the first place of a window was computed below a token that has just been rejected, and a
drafter knows the right one; further on the target's answers are better. So the first places draft from a mixture of
both, the others as in `jacobi.py`. Each draft is verified with what it was drawn from: docs/algorithms.md, section 8.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, couple
from lantern_bench.decoding.drafting.static import draft_probabilities
from lantern_bench.decoding.protocol import Drafted, DrafterLogits, DrafterSession, LastStep, Target
from lantern_bench.decoding.sampling import sample


def make_hybrid(decoding: Decoding, target: Target, batch: int) -> HybridDrafting:
    """Make the drafting of the row `hybrid`."""
    return HybridDrafting(decoding, target, batch)


class HybridDrafting(JacobiDrafting):
    """A Jacobi window whose first `drafted` places are drawn from `share` q + (1 - `share`) r.

    q is the drafter's distribution below the drafts before it, r the row of the position; fresh places have q alone.
    State besides, with maximal coupling: old_q [B, W, V] and old int64 [B, W], the last drafts and their rows.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._decoding, self._share = decoding, decoding.value("share")
        self.forwards = min(decoding.value("drafted"), self.depth)
        if self._coupling == "maximal":
            self._old_q, self._old = torch.zeros_like(self._q), torch.zeros_like(self._q[:, :, 0], dtype=torch.int64)

    def after_step(self, step: LastStep) -> None:
        """Also move the old rows and drafts to their new places."""
        if self._coupling == "maximal":
            images, at = self._behind(step.accepted + 1, self.depth - 1)
            self._old_q.copy_(self._q[images, at])
            self._old.copy_(step.tree.tokens[:, 1:][images, at])
        super().after_step(step)

    def draft(
        self,
        session: DrafterSession | None,
        drafts: DrafterLogits | None,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,
    ) -> Drafted:
        """Draft a Jacobi window, then its first places anew, one forward of the drafter for each."""
        assert session is not None and drafts is not None
        (tokens,) = super().draft(session, drafts, root, noise, depth_limit)
        noise = self._clocks if self._coupling == "gumbel" else noise
        head, last = [root], self._moved + self._ahead[:, None]
        for place in range(self.forwards):
            if place:
                seen = torch.ones(len(root), 1, place, dtype=torch.bool, device=root.device)
                drafts = session.extend(head[-1][:, None], torch.zeros_like(root)[:, None], seen)
            q, row = draft_probabilities(drafts, self._decoding)[:, 0], self._q[:, place]
            fresh, held = last[place] > self.depth, last[place] < self.depth
            q = torch.where(fresh[:, None], q, self._share * q + (1.0 - self._share) * row)
            law = q
            if self._coupling == "maximal":
                law = torch.where(held[:, None], couple(q, self._old_q[:, place], self._old[:, place]), q)
            self._q[:, place] = q
            head.append(q.argmax(dim=-1) if self._greedy else sample(law, noise[:, place]))
        tokens = torch.cat([torch.stack(head, dim=1), tokens[:, self.forwards + 1 :]], dim=1)
        self._remember(tokens)
        return (tokens,)
