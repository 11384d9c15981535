"""Drafts from the target's own last answers: speculative Jacobi decoding (SJD), also coupled (SCD).

What a step scored at a position is what the next step drafts there. SJD: arXiv 2410.01699, SCD:
arXiv 2510.24211; docs/algorithms.md, sections 8.1, 8.2 and 8.7.

Why this is lossless:

1. The row that each draft was drawn from is kept, and is the tree's q. So the ordinary verification
   decides, whatever the row is.
2. A row depends on tokens before its position alone, never on the draft itself.
3. Coupling draws a draft given the last one, such that its marginal distribution stays the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.drafting.draft_method import DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import chain, index_along
from lantern_bench.utils.errors import RefusedError


def couple(p: Tensor, q: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return what to draw the next drafts from so that most stay and they are distributed as `p`.

    Maximal coupling: x stays with probability min(1, p(x) / q(x)); otherwise a draw from the
    residual takes its place. `reference.py` has the paper form.

    Args:
        p: The distribution [..., V] of the next drafts.
        q: The distribution [..., V] of the last drafts.
        x: The last drafts, int64 [...].
        residual: Replaces max(p - q, 0) [..., V], of any scale; the next drafts are then no longer
            distributed as `p`.
    """
    x = x[..., None]
    if residual is None:
        residual = (p - q).clamp_min(0.0)
    residual_sum = residual.sum(dim=-1, keepdim=True)
    # If rounding leaves nothing to change to, nothing changes.
    stays = torch.where(residual_sum > 0, (p.gather(-1, x) / q.gather(-1, x)).clamp_max(1.0), 1.0)
    changes = residual * torch.where(residual_sum > 0, (1.0 - stays) / residual_sum, 0.0)
    return torch.where(index_along(p, -1) == x, stays, changes)


class JacobiDrafting(DraftMethod):
    """A chain of W = `window` drafts below the root.

    Draft i belongs to the position `position` + i of the image. Fresh drafts belong to positions
    that the window has just reached, for which the target has not answered yet.
    """

    reads_last_step = True
    # with maximal coupling: whether the drafts of the last step and their rows are needed
    reads_last_drafts = False

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        window = decoding.value("window")
        vocabulary = target.vocab_size
        device = target.device
        self._initial = decoding.value("initial")
        self._coupling = decoding.value("coupling")
        self._greedy = decoding.greedy
        self._line_length = target.line_length
        if self._initial == "above" and not self._line_length:
            raise RefusedError(
                "initial above: this model does not say how long a row of its grid is", "Use left."
            )
        self.depth = window
        # Gumbel coupling needs noise only for fresh drafts, but only the device knows which are.
        self.noises = 0 if decoding.greedy else window
        # the forced tokens at positions int64 [...], -1 where none is
        self._forced = target.forced_tokens
        self._copies = self._initial in ("left", "above")
        self._has_certain = self._copies or target.n_codes < vocabulary
        self._codes = torch.arange(vocabulary, device=device)
        self._ahead = torch.arange(window + 1, device=device)
        self._uniform = (self._codes < target.n_codes) / target.n_codes

        # The row that each draft was drawn from, [B, W, V]. Between steps: the marginal
        # distribution that the next draft of the position must have.
        self._q = torch.zeros(batch, window, vocabulary, device=device)
        self._chain = chain(window, device)
        self.tree = self._chain.allocate(batch, None if decoding.greedy else self._q)
        # how many tokens the last step committed, int64 [B]
        self._committed = torch.zeros(batch, dtype=torch.int64, device=device)
        # how many tokens are committed, int64 [B]
        self._position = torch.zeros_like(self._committed)
        if self._coupling == "maximal":
            # what the next drafts are drawn from, given the last ones
            self._coupled_q = torch.zeros_like(self._q)
        if self._coupling == "maximal" and self.reads_last_drafts:
            # the drafts of the last step, [B, W], and their rows
            self._old = self._committed.new_zeros(batch, window)
            self._old_q = torch.zeros_like(self._q)
        if self._coupling == "gumbel":
            # the noise of each position
            self._clocks = torch.ones_like(self._q)
        if self._copies:
            # the image's tokens, committed and drafted, that copies are read from, [B, N + W + 1]
            columns = target.image_tokens + window + 1
            self._line = self._committed.new_zeros(batch, columns)

    def start_images(self, p: Tensor) -> None:
        """Make all drafts fresh, as if a step had committed more than the whole window."""
        self._position.fill_(1)
        self._committed.fill_(self.depth + 1)
        self._q.copy_(p[:, None])
        if self._coupling == "maximal":
            self._coupled_q.copy_(self._q)

    def after_step(self, step: LastStep) -> None:
        """Shift p by the committed tokens; fresh drafts get the last row too (`initial: row`)."""
        committed = step.accepted + 1
        ahead = self._further(committed, self.depth)
        if self._coupling == "maximal":
            drafts = self._first_drafts()
            coupled = couple(step.p[:, :-1], self._q, drafts)
            self._coupled_q.copy_(torch.cat([coupled, step.p[:, -1:]], dim=1)[ahead])
            if self.reads_last_drafts:
                old = self._further(committed, self.depth - 1)
                self._old_q.copy_(self._q[old])
                self._old.copy_(drafts[old])
        self._q.copy_(step.p[ahead])
        self._committed.copy_(committed)
        self._position.copy_(step.position)

    def draft(self, inputs: DraftInputs) -> None:
        """Draw every draft from its row, and keep the rows for verification."""
        self._fill_chain(self._draw_window(inputs))

    def _draw_window(self, inputs: DraftInputs) -> Tensor:
        """Return the root and its W drafts [B, W + 1], fresh ones as `initial` says."""
        window = self._ahead[:-1]
        fresh = window + self._committed[:, None] > self.depth
        position = self._position[:, None] + window
        # the position in front of the fresh ones
        last = self._position[:, None] + self.depth - self._committed[:, None]

        # 1. Fresh drafts without a row of their own come from all codes alike.
        renewed = fresh
        if self._initial == "row":
            # A repeated row can belong to a forced token, which is impossible elsewhere.
            renewed = fresh & (self._forced(last) >= 0)
        q = torch.where(renewed.unsqueeze(2), self._uniform, self._q)
        drawn_from = q
        if self._coupling == "maximal":
            drawn_from = torch.where(renewed.unsqueeze(2), self._uniform, self._coupled_q)

        # 2. Draw.
        if self._greedy:
            tokens = drawn_from.argmax(dim=-1)
        else:
            tokens = sample(drawn_from, self._noise(inputs.noise))

        # 3. Forced tokens and copies are certain where drafts are fresh.
        if self._has_certain:
            certain = self._forced(position)
            if self._copies:
                copied = self._copied(root=inputs.root, tokens=tokens, position=position, last=last)
                certain = torch.where(certain >= 0, certain, copied)
            is_certain = fresh & (certain >= 0)
            tokens = torch.where(is_certain, certain, tokens)
            one_hot = (self._codes == certain.unsqueeze(2)).float()
            q = torch.where(is_certain.unsqueeze(2), one_hot, q)

        self._q.copy_(q)
        drafted = torch.cat([inputs.root[:, None], tokens], dim=1)
        self._remember(drafted)
        return drafted

    def _fill_chain(self, tokens: Tensor) -> None:
        """Write the root and its drafts [B, W + 1] to the tree."""
        self.tree.copy_(self._chain.draft(tokens, self.tree.q))

    def _first_drafts(self) -> Tensor:
        """Return the drafts [B, W] that were drawn from the rows."""
        return self.tree.tokens[:, 1:]

    def _further(self, steps: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the index [B, W] of places `steps` [B] further along, at most `last`."""
        images = index_along(steps)[:, None]
        return images, (self._ahead[:-1] + steps[:, None]).clamp_max(last)

    def _noise(self, noise: Tensor) -> Tensor:
        """Return Exp(1) noise [B, W, V]; with Gumbel coupling a position keeps its noise."""
        if self._coupling != "gumbel":
            return noise
        stays = self._ahead[:-1] + self._committed[:, None] < self.depth
        shifted = self._clocks[self._further(self._committed, self.depth - 1)]
        self._clocks.copy_(torch.where(stays.unsqueeze(2), shifted, noise))
        return self._clocks

    def _remember(self, tokens: Tensor) -> None:
        """Write the root and the drafts [B, W + 1] to the line that copies are read from."""
        if self._copies:
            self._line.scatter_(1, self._position[:, None] - 1 + self._ahead, tokens)

    def _copied(self, *, root: Tensor, tokens: Tensor, position: Tensor, last: Tensor) -> Tensor:
        """Return the tokens [B, W] of the nearest position to the left, or above; -1 for none.

        Fresh positions are skipped.
        """
        self._remember(torch.cat([root[:, None], tokens], dim=1))
        if self._initial == "left":
            is_forced = (self._forced(last) >= 0).long()
            source = (last - is_forced).expand_as(position)
        else:
            lines_up = (position - last + self._line_length - 1) // self._line_length
            source = position - lines_up * self._line_length
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

    def draft(self, inputs: DraftInputs) -> None:
        """Draft a Jacobi window, then its first drafts anew, one drafter forward for each."""
        root = inputs.root
        proposer = inputs.proposer
        assert proposer is not None
        tokens = self._draw_window(inputs)
        noise = self._clocks if self._coupling == "gumbel" else inputs.noise
        head = [root]
        last = self._committed + self._ahead[:, None]
        drafter_q = proposer.root_q
        for depth in range(self.forwards):
            if depth:
                seen = root.new_ones(len(root), 1, depth, dtype=torch.bool)
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
        self._fill_chain(tokens)
