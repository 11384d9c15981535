"""Drafts from the target's own last answers: speculative Jacobi decoding (SJD), and with coupled drafts (SCD).

What a step scored at a position is what the next step drafts there. SJD: arXiv 2410.01699, SCD: arXiv 2510.24211;
docs/algorithms.md, sections 8.1, 8.2 and 8.7, which also say why this is lossless.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import DraftTree, StaticTree
from lantern_bench.utils.errors import RefusedError


def couple(p: Tensor, q: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return what to draw the next drafts from, [..., V], so that they stay as often as possible and come out as `p`.

    Maximal coupling: x stays with probability min(1, p(x) / q(x)), else a draw from the residual takes its place.

    Args:
        p: The distribution [..., V] of the next drafts.
        q: The distribution [..., V] of the last drafts.
        x: The last drafts, int64 [...].
        residual: Replaces max(p - q, 0) [..., V], of any scale; the drafts then no longer come out as `p`.
    """
    x = x[..., None]
    if residual is None:
        residual = (p - q).clamp_min(0.0)
    residual_sum = residual.sum(dim=-1, keepdim=True)
    # Where rounding leaves nothing to change to, nothing changes.
    stays = torch.where(residual_sum > 0, (p.gather(-1, x) / q.gather(-1, x)).clamp_max(1.0), 1.0)
    changes = residual * torch.where(residual_sum > 0, (1.0 - stays) / residual_sum, 0.0)
    return torch.where(torch.arange(p.shape[-1], device=p.device) == x, stays, changes)


class JacobiDraft(NamedTuple):
    """A window of drafts."""

    tokens: Tensor  # int64 [B, W + 1], the root first


class JacobiDrafting(DraftMethod):
    """A chain of W = `window` drafts below the root; draft i belongs to the position `position` + i of the image."""

    learns = True
    # with maximal coupling: whether the drafts of the last step and their rows are needed
    reads_last_drafts = False

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        window = decoding.value("window")
        vocabulary = target.vocab_size
        device = target.device
        self._initial = decoding.value("initial")
        self._coupling = decoding.value("coupling")
        self._greedy = decoding.greedy
        self.nodes = window + 1
        self.depth = window
        # Gumbel coupling needs noise only where positions enter the window, but how many do only the device knows.
        self.noises = 0 if decoding.greedy else window
        self._chain = StaticTree.of([(0,) * depth for depth in range(1, window + 1)], device)
        self._line_length = target.line_length
        if self._initial == "above" and not self._line_length:
            raise RefusedError(
                "initial above: this model does not say how long a row of its grid is", "Use left."
            )
        self._forced = target.forced  # the forced tokens at positions int64 [...], -1 where none is
        self._copies = self._initial in ("left", "above")
        self._has_certain = self._copies or target.n_codes < vocabulary
        self._codes = torch.arange(vocabulary, device=device)
        self._ahead = torch.arange(window + 1, device=device)
        self._uniform = (self._codes < target.n_codes) / target.n_codes
        # [B, W, V], what each draft was drawn from; between two steps what the next one has to come out as.
        self._q = torch.zeros(batch, window, vocabulary, device=device)
        self._moved = torch.zeros(
            batch, dtype=torch.int64, device=device
        )  # tokens that the last step committed
        self._position = torch.zeros_like(self._moved)  # tokens committed so far
        if self._coupling == "maximal":
            self._coupled_q = torch.zeros_like(
                self._q
            )  # what the next drafts are drawn from, given the last ones
        if self._coupling == "maximal" and self.reads_last_drafts:
            self._old = torch.zeros_like(
                self._q[:, :, 0], dtype=torch.int64
            )  # [B, W], the drafts of the last step
            self._old_q = torch.zeros_like(self._q)  # their rows
        if self._coupling == "gumbel":
            self._clocks = torch.ones_like(self._q)  # the noise of each position
        if self._copies:
            # [B, N + W + 1], the image's tokens, committed and drafted, that copies are read from.
            columns = target.image_tokens + window + 1
            self._line = torch.zeros(batch, columns, dtype=torch.int64, device=device)

    def start_images(self, p: Tensor) -> None:
        """All drafts are fresh, as if a step had moved past the whole window."""
        self._position.fill_(1)
        self._moved.fill_(self.depth + 1)
        self._q.copy_(p[:, None].expand_as(self._q))
        if self._coupling == "maximal":
            self._coupled_q.copy_(self._q)

    def after_step(self, step: LastStep) -> None:
        """Shift p by the committed tokens; drafts behind the last row get that row too (`initial: row`)."""
        moved = step.accepted + 1
        ahead = self._further(moved, self.depth)
        if self._coupling == "maximal":
            coupled = couple(step.p[:, :-1], self._q, step.tree.tokens[:, 1:])
            self._coupled_q.copy_(torch.cat([coupled, step.p[:, -1:]], dim=1)[ahead])
            if self.reads_last_drafts:
                moved_old = self._further(moved, self.depth - 1)
                self._old_q.copy_(self._q[moved_old])
                self._old.copy_(step.tree.tokens[:, 1:][moved_old])
        self._q.copy_(step.p[ahead])
        self._moved.copy_(moved)
        self._position.copy_(step.position)

    def draft(self, inputs: DraftInputs) -> JacobiDraft:
        """Draw every draft from its row, fresh ones as `initial` says, and keep the rows for verification."""
        window = self._ahead[:-1]
        fresh = window + self._moved[:, None] > self.depth
        position = self._position[:, None] + window
        last = (
            self._position[:, None] + self.depth - self._moved[:, None]
        )  # the position in front of the fresh ones
        # A repeated row can be that of a forced token, which is impossible elsewhere.
        renewed = fresh if self._initial != "row" else fresh & (self._forced(last) >= 0)
        drawn_from = q = torch.where(renewed[:, :, None], self._uniform, self._q)
        if self._coupling == "maximal":
            drawn_from = torch.where(renewed[:, :, None], self._uniform, self._coupled_q)
        tokens = (
            drawn_from.argmax(dim=-1)
            if self._greedy
            else sample(drawn_from, self._noise(inputs.noise))
        )
        certain = self._forced(position)
        if self._copies:
            certain = torch.where(
                certain >= 0,
                certain,
                self._copied(root=inputs.root, tokens=tokens, position=position, last=last),
            )
        certain = torch.where(fresh, certain, -1)
        if self._has_certain:
            tokens = torch.where(certain >= 0, certain, tokens)
            q = torch.where(
                (certain >= 0)[:, :, None], (self._codes == certain[:, :, None]).float(), q
            )
        self._q.copy_(q)
        drafted = torch.cat([inputs.root[:, None], tokens], dim=1)
        self._remember(drafted)
        return JacobiDraft(drafted)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The chain of the drafts, with the rows that they were drawn from."""
        (tokens,) = drafted
        return self._chain.draft(tokens, None if self._greedy else self._q)

    def _further(self, moved: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the index [B, W] of what is `moved` [B] further along the second dimension, at most at `last`."""
        images = torch.arange(len(moved), device=moved.device)[:, None]
        return images, (self._ahead[:-1] + moved[:, None]).clamp_max(last)

    def _noise(self, noise: Tensor) -> Tensor:
        """Return Exp(1) noise [B, W, V]; with Gumbel coupling a position keeps its own."""
        if self._coupling != "gumbel":
            return noise
        stays = self._ahead[:-1] + self._moved[:, None] < self.depth
        moved = self._clocks[self._further(self._moved, self.depth - 1)]
        self._clocks.copy_(torch.where(stays[:, :, None], moved, noise))
        return self._clocks

    def _remember(self, tokens: Tensor) -> None:
        """Write the root and the drafts [B, W + 1] to the line that copies are read from."""
        if self._copies:
            self._line.scatter_(1, self._position[:, None] - 1 + self._ahead, tokens)

    def _copied(self, root: Tensor, tokens: Tensor, position: Tensor, last: Tensor) -> Tensor:
        """Return the tokens [B, W] of the nearest position to the left, or above, that is not fresh; -1 for none."""
        self._remember(torch.cat([root[:, None], tokens], dim=1))
        if self._initial == "left":
            source = (last - (self._forced(last) >= 0).long()).expand_as(position)
        else:
            source = position + (last - position) // self._line_length * self._line_length
        return torch.where(source >= 0, self._line.gather(1, source.clamp_min(0)), -1)


class HybridDrafting(JacobiDrafting):
    """A Jacobi window whose first `drafted` drafts are drawn from a mixture with the drafter.

    The mixture is w q + (1 - w) r with w = `drafter_weight`. q is the drafter's distribution and r
    the target's last answer at the position. Fresh drafts come from q alone. At the first position
    r was computed below a token that has since been rejected.
    """

    reads_last_drafts = True

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._drafter_weight = decoding.value("drafter_weight")
        self.forwards = min(decoding.value("drafted"), self.depth)

    def draft(self, inputs: DraftInputs) -> JacobiDraft:
        """Draft a Jacobi window, then its first drafts anew, one forward of the drafter for each."""
        root = inputs.root
        proposer = inputs.proposer
        assert proposer is not None
        (tokens,) = super().draft(inputs)
        noise = self._clocks if self._coupling == "gumbel" else inputs.noise
        head = [root]
        last = self._moved + self._ahead[:, None]
        drafter_q = proposer.root_q
        for depth in range(self.forwards):
            if depth:
                seen = torch.ones(len(root), 1, depth, dtype=torch.bool, device=root.device)
                drafter_q = proposer.extend(
                    head[-1][:, None], torch.zeros_like(root)[:, None], seen
                )
            q = drafter_q[:, 0]
            fresh = last[depth] > self.depth
            has_old = last[depth] < self.depth
            weight = self._drafter_weight
            mixture = weight * q + (1.0 - weight) * self._q[:, depth]
            q = torch.where(fresh[:, None], q, mixture)
            drawn_from = q
            if self._coupling == "maximal":
                coupled = couple(q, self._old_q[:, depth], self._old[:, depth])
                drawn_from = torch.where(has_old[:, None], coupled, q)
            self._q[:, depth] = q
            head.append(q.argmax(dim=-1) if self._greedy else sample(drawn_from, noise[:, depth]))
        tokens = torch.cat([torch.stack(head, dim=1), tokens[:, self.forwards + 1 :]], dim=1)
        self._remember(tokens)
        return JacobiDraft(tokens)
