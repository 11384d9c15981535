"""Jacobi drafting as its authors coded it where that is not lossless: `form: published`, for comparison and audit.

SCD: arXiv 2510.24211 and github.com/junhyukso/SCD, its code for Lumina and Janus. SJD-PAC: arXiv 2603.18599 and
github.com/KangJialiang/SJD-PAC at 4fbc099. The lossless forms are in `jacobi.py` and `pac.py`; docs/algorithms.md,
sections 8.2 and 8.3, have the smallest examples that show the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.relaxation import STRICT, Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Accept
from lantern_bench.decoding.acceptance.walk import (
    Verdict,
    accept_tree,
    along_path,
    committed_tokens,
    longest_path,
    offered_children,
)
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting, couple
from lantern_bench.decoding.drafting.pac import PacDrafting
from lantern_bench.decoding.protocol import Drafted, DrafterLogits, DrafterSession, LastStep, Target
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import DraftTree


def make_scd(decoding: Decoding, target: Target, batch: int) -> PublishedScd:
    """Make the published form of the row `jacobi`."""
    return PublishedScd(decoding, target, batch)


def make_sjd_pac(decoding: Decoding, target: Target, batch: int) -> PublishedSjdPac:
    """Make the published form of the row `pac`."""
    return PublishedSjdPac(decoding, target, batch)


class PublishedScd(JacobiDrafting):
    """Maximal coupling in which a kept draft keeps its old q; a fresh draft has q = 1.

    State besides: old_q [B, W, V] and old int64 [B, W], the rows and the drafts of the last step.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._old_q, self._old = torch.zeros_like(self._q), torch.zeros_like(self._q[:, :, 0], dtype=torch.int64)

    def after_step(self, step: LastStep) -> None:
        """Also move the old rows and drafts to their new places."""
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
        """Draft with the right probabilities, and verify with the old rows where a draft comes out as before."""
        (tokens,) = super().draft(session, drafts, root, noise, depth_limit)
        drawn, behind = tokens[:, 1:, None], (self._ahead[:-1] + self._moved[:, None])[:, :, None]
        kept = (behind < self.depth) & (drawn == self._old[:, :, None])
        q = torch.where(behind > self.depth, (self._codes == drawn).float(), self._q)
        self._q.copy_(torch.where(kept, self._old_q, q))
        return (tokens,)


class PublishedSjdPac(PacDrafting):
    """Each candidate is accepted by itself, and the longest accepted path wins; behind a whole window, a uniform token.

    Also: a rejected first candidate that has siblings is redrawn from what all of them leave and not from what it
    leaves; siblings come from norm(max(r - q, 0)), and are verified as draws from r; the p behind the last draft is not
    reused. One thing differs from the authors' code: a sibling never equals the first candidate.
    State besides: aside [B, branching, V], what siblings of kept drafts come from; old int64 [B, W], the last drafts.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._aside = torch.zeros_like(self._q[:, : self._branching])
        self._old = torch.zeros_like(self._q[:, :, 0], dtype=torch.int64)

    def after_step(self, step: LastStep) -> None:
        """Also keep what the first candidates and their siblings will be drawn from."""
        (images, at), branching = self._behind(step.accepted + 1, self.depth - 1), self._branching
        nodes, x = self._reused(step), step.tree.tokens[:, self._onward[0, 1:]]
        p = step.p[images, nodes[:, :-1]]
        _, found = accept_tree(step.tree, step.p, STRICT, None)
        rows = step.tree.layout.slots[nodes[:, :branching]] * len(x) + images
        by_all = found.final(rows.flatten(), p[:, :branching].flatten(0, 1)).view_as(self._aside)
        alone = (p - self._q).clamp_min(0.0)
        law = couple(p, self._q, x, torch.cat([by_all, alone[:, branching:]], dim=1))
        super().after_step(step)
        self._law.copy_(law[images, at])
        self._aside.copy_(alone[images, at[:, :branching]])
        self._old.copy_(x[images, at])
        self._moved.add_(1)  # one row less is reused

    def _beside(self, first: Tensor) -> Tensor:
        branching = self._branching
        fresh = self._ahead[:branching] + self._moved[:, None] > self.depth
        old = self._old[:, :branching]
        rejected = self._law[:, :branching].scatter(2, old[:, :, None], 0.0)
        reused = torch.where((first == old)[:, :, None], self._aside, rejected)
        return torch.where(fresh[:, :, None], self._uniform, reused)

    def verify(
        self,
        tree: DraftTree,
        target_probs: Tensor,
        relaxation: Relaxation,
        table: Tensor | None,
        uniforms: Tensor,
        noise: Tensor,
        depth_limit: Tensor | None = None,
        accept: Accept | None = None,
        position: Tensor | None = None,
    ) -> Verdict:
        """Accept each candidate by itself; arguments as of `verify` in acceptance/walk.py."""
        _, found = accept_tree(tree, target_probs, relaxation, table, depth_limit, accept, position)
        batch, offered, layout = len(tree.tokens), offered_children(tree, depth_limit), tree.layout
        hit = (tree.rows(uniforms) < found.accept).view(len(layout.nodes), batch, -1).transpose(0, 1)
        agreed = torch.zeros_like(offered, dtype=torch.bool)
        agreed[:, layout.nodes] = hit
        winner, on_path, path = longest_path(tree, offered, agreed)
        images = torch.arange(batch, device=winner.device)
        own, rejected = target_probs[images, winner], (offered[images, winner] >= 0).any(dim=1)
        rest = found.final(layout.slots[winner].clamp_min(0) * batch + images, own)
        next_probs = torch.where(rejected[:, None], rest, own)
        whole = path[:, -1:] >= 0
        next_probs = torch.where(whole, self._uniform, next_probs)
        accepted, tokens = committed_tokens(tree, path, sample(next_probs, noise))
        none = torch.zeros_like(offered, dtype=noise.dtype)
        child_rank, mass = along_path(tree, offered, none, on_path, path)
        return Verdict(path, accepted, tokens, child_rank, mass, mass, next_probs)
