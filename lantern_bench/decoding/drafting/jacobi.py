"""Drafts from the target's own last answers: speculative Jacobi decoding (SJD), also coupled (SCD).

The distribution that the target computed for a position in one step is the q of the next step's
draft there. Such a distribution [V] is called a row. SJD: arXiv 2410.01699, SCD: arXiv 2510.24211,
SJD++: arXiv 2512.07503; docs/algorithms.md, sections 8.1, 8.2 and 8.7 to 8.9.

Why this is lossless:

1. The row that each draft was drawn from is kept and becomes the q of the tree. So the ordinary
   verification is right for any row.
2. A row depends only on tokens before its position, never on the draft itself.
3. Coupling draws a draft given the last one, such that its marginal distribution is still the row.
   After a rule that reads deeper drafts, the last one is no longer distributed as its row, and
   coupling starts from the distribution that it then has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.traversal import distribution_behind
from lantern_bench.decoding.drafting.draft_method import DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.protocol import Target
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import chain, index_along
from lantern_bench.utils.errors import RefusedError


def couple(p: Tensor, q: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return what to draw the next drafts from, given the last drafts (maximal coupling).

    The next drafts are distributed as `p` and equal the last ones as often as possible: x stays
    with probability min(1, p(x) / q(x)), and otherwise a draw from the residual replaces it.
    `reference.py` has the paper form.

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
    # If rounding leaves no residual, every draft stays.
    stays = torch.where(residual_sum > 0, (p.gather(-1, x) / q.gather(-1, x)).clamp_max(1.0), 1.0)
    changes = residual * torch.where(residual_sum > 0, (1.0 - stays) / residual_sum, 0.0)
    return torch.where(index_along(p, -1) == x, stays, changes)


class Redraft(NamedTuple):
    """How the next drafts are drawn, given the last ones."""

    coupled: Tensor  # what each is drawn from, given the last draft, [..., V]
    q: Tensor  # its distribution if the last draft is not known, which verification uses, [..., V]


def redraft_below(p: Tensor, q: Tensor, x: Tensor, tau: float) -> Redraft:
    """Keep the last drafts where p(x) > tau q(x), and draw the others from `p` (SJD++).

    The next drafts are not distributed as `p`: mass that stays is mass of q.

    Args:
        p: The new rows, [..., V].
        q: The distribution [..., V] of the last drafts.
        x: The last drafts, int64 [...].
        tau: The threshold.
    """
    stays = p > tau * q
    x_stays = stays.gather(-1, x[..., None])
    coupled = torch.where(x_stays, (index_along(p, -1) == x[..., None]).to(p.dtype), p)
    redrawn = torch.where(stays, 0.0, q).sum(dim=-1, keepdim=True)
    return Redraft(coupled, torch.where(stays, q, 0.0) + redrawn * p)


class JacobiDrafting(DraftMethod):
    """A chain of W = `window` drafts below the root.

    Draft i belongs to the position `position` + i of the image. A draft is fresh if the window has
    just reached its position, so that the target has no row for it yet.
    """

    reads_last_step = True
    # whether a subclass reads the drafts of the last step and their rows (with `_redraws` only)
    reads_last_drafts = False

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        window = decoding.value("window")
        vocabulary = target.vocab_size
        device = target.device
        self._initial = decoding.value("initial")
        self._coupling = decoding.value("coupling")
        self._tau = decoding.value("tau")
        # whether the next drafts are drawn given the last ones
        self._redraws = self._coupling in ("maximal", "threshold")
        self._greedy = decoding.greedy
        self._line_length = target.line_length
        if self._initial == "above" and not self._line_length:
            raise RefusedError(
                "initial above: this model does not say how long a row of its grid is", "Use left."
            )
        if self._initial == "copy" and not target.coarse_tokens:
            raise RefusedError("initial copy: this model decodes no coarse grid first", "Use row.")
        self.depth = window
        # Gumbel coupling needs noise only for fresh drafts, which the host does not know.
        self.noises = 0 if decoding.greedy else window
        # the forced tokens at positions int64 [...], -1 where none is
        self._forced = target.forced_tokens
        self._sources = target.sources
        self._copies = self._initial in ("left", "above", "copy")
        self._has_certain = self._copies or target.n_codes < vocabulary
        self._codes = torch.arange(vocabulary, device=device)
        # 0 to W: positions relative to the root's
        self._offsets = torch.arange(window + 1, device=device)
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
        if self._redraws:
            # the distributions of the next drafts given the last ones, [B, W, V]
            self._coupled_q = torch.zeros_like(self._q)
        if self._redraws and self.reads_last_drafts:
            # the drafts of the last step, [B, W], and their distributions after it
            self._last_drafts = self._committed.new_zeros(batch, window)
            self._last_q = torch.zeros_like(self._q)
        if self._coupling == "gumbel":
            # the Exp(1) noise of each position in the window, [B, W, V]
            self._position_noise = torch.ones_like(self._q)
        if self._copies:
            # the image's committed and drafted tokens, which drafts are copied from, [B, N + W + 1]
            columns = target.image_tokens + window + 1
            self._history = self._committed.new_zeros(batch, columns)

    def start_images(self, p: Tensor) -> None:
        """Make all drafts fresh, as if a step had committed more than the whole window."""
        self._position.fill_(1)
        self._committed.fill_(self.depth + 1)
        self._q.copy_(p[:, None])
        if self._redraws:
            self._coupled_q.copy_(self._q)

    def after_step(self, step: LastStep) -> None:
        """Shift the rows by the committed tokens; the last row also fills the fresh places."""
        committed = step.accepted + 1
        reused = self._shifted(committed, self.depth)
        q = step.p
        if self._redraws:
            drafts = self._main_drafts()
            p = step.p[:, :-1]
            last_q = self._q
            if step.visit_probability is not None:
                # The rule has read the drafts behind the last accepted one.
                last_q = distribution_behind(p, self._q, step.visit_probability[:, :-1])
            redraft = self.redraft(p, last_q, drafts)
            fresh = step.p[:, -1:]
            q = torch.cat([redraft.q, fresh], dim=1)
            self._coupled_q.copy_(torch.cat([redraft.coupled, fresh], dim=1)[reused])
            if self.reads_last_drafts:
                shifted = self._shifted(committed, self.depth - 1)
                self._last_q.copy_(last_q[shifted])
                self._last_drafts.copy_(drafts[shifted])
        self._q.copy_(q[reused])
        self._committed.copy_(committed)
        self._position.copy_(step.position)

    def redraft(self, p: Tensor, q: Tensor, x: Tensor) -> Redraft:
        """Couple the next drafts with the last ones.

        Args:
            p: The new rows, [..., V].
            q: The distribution [..., V] of the last drafts.
            x: The last drafts, int64 [...].
        """
        if self._coupling == "threshold":
            return redraft_below(p, q, x, tau=self._tau)
        return Redraft(couple(p, q, x), p)

    def draft(self, inputs: DraftInputs) -> None:
        """Draw every draft from its row. The rows stay in `_q` for verification."""
        self._fill_chain(self._draw_window(inputs))

    def _draw_window(self, inputs: DraftInputs) -> Tensor:
        """Return the root and its W drafts [B, W + 1]; `initial` decides how to draw fresh ones."""
        window = self._offsets[:-1]
        fresh = window + self._committed[:, None] > self.depth
        position = self._position[:, None] + window
        # the last position that is not fresh, [B, 1]
        last = self._position[:, None] + self.depth - self._committed[:, None]

        # 1. Choose the rows: fresh drafts have none, and are drawn uniformly from the codes. With
        # `initial: row` they repeat the last row, unless it belongs to a forced token, because
        # that token is impossible at other positions. So do those that `copy` has no source for.
        is_uniform = fresh
        if self._initial in ("row", "copy"):
            is_uniform = fresh & (self._forced(last) >= 0)
        q = torch.where(is_uniform.unsqueeze(2), self._uniform, self._q)
        drawn_from = q
        if self._redraws:
            drawn_from = torch.where(is_uniform.unsqueeze(2), self._uniform, self._coupled_q)

        # 2. Draw.
        if self._greedy:
            tokens = drawn_from.argmax(dim=-1)
        else:
            tokens = sample(drawn_from, self._noise(inputs.noise))

        # 3. Replace fresh drafts by forced tokens and copies, which are deterministic.
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
        self._write_history(drafted)
        return drafted

    def _fill_chain(self, tokens: Tensor) -> None:
        """Write the root and its drafts [B, W + 1] to the tree."""
        self.tree.copy_(self._chain.draft(tokens, self.tree.q))

    def _main_drafts(self) -> Tensor:
        """Return the drafts [B, W] that were drawn from the rows."""
        return self.tree.tokens[:, 1:]

    def _shifted(self, steps: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the index (image, place) [B, W] of places 0 to W - 1 shifted by `steps` [B].

        Places are clamped to `last`.
        """
        images = index_along(steps)[:, None]
        return images, (self._offsets[:-1] + steps[:, None]).clamp_max(last)

    def _noise(self, noise: Tensor) -> Tensor:
        """Return Exp(1) noise [B, W, V]; with Gumbel coupling a position keeps its noise."""
        if self._coupling != "gumbel":
            return noise
        stays = self._offsets[:-1] + self._committed[:, None] < self.depth
        shifted = self._position_noise[self._shifted(self._committed, self.depth - 1)]
        self._position_noise.copy_(torch.where(stays.unsqueeze(2), shifted, noise))
        return self._position_noise

    def _write_history(self, tokens: Tensor) -> None:
        """Write the root and the drafts [B, W + 1] to the history that copies are read from."""
        if self._copies:
            self._history.scatter_(1, self._position[:, None] - 1 + self._offsets, tokens)

    def _copied(self, *, root: Tensor, tokens: Tensor, position: Tensor, last: Tensor) -> Tensor:
        """Return the tokens [B, W] that fresh drafts copy.

        They are of the nearest position to the left or above that is not fresh, or of the coarse
        grid. They are -1 where there is no such position.
        """
        self._write_history(torch.cat([root[:, None], tokens], dim=1))
        if self._initial == "left":
            is_forced = (self._forced(last) >= 0).long()
            source = (last - is_forced).expand_as(position)
        elif self._initial == "copy":
            source = self._sources(position)
        else:
            rows_up = (position - last + self._line_length - 1) // self._line_length
            source = position - rows_up * self._line_length
        return torch.where(source >= 0, self._history.gather(1, source.clamp_min(0)), -1)


class HybridDrafting(JacobiDrafting):
    """A Jacobi window whose first `drafted` drafts are drawn from a mixture with the drafter.

    The mixture is w q + (1 - w) r with w = `drafter_weight`. q is the drafter's distribution, and r
    the row of the position from the last step. Fresh drafts come from q alone. At the first
    position, r was computed after a token that has since been rejected.
    """

    reads_last_drafts = True

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        super().__init__(decoding, target, batch)
        self._drafter_weight = decoding.value("drafter_weight")
        self.forwards = min(decoding.value("drafted"), self.depth)

    def draft(self, inputs: DraftInputs) -> None:
        """Draft a Jacobi window, then redraw its first drafts with one drafter forward for each."""
        root = inputs.root
        proposer = inputs.proposer
        assert proposer is not None
        tokens = self._draw_window(inputs)
        noise = self._position_noise if self._coupling == "gumbel" else inputs.noise
        head = [root]
        # the place of each draft in the window of the last step, [W + 1, B]
        place_before = self._committed + self._offsets[:, None]
        drafter_q = proposer.root_q
        for depth in range(self.forwards):
            if depth:
                seen = root.new_ones(len(root), 1, depth, dtype=torch.bool)
                drafter_q = proposer.extend(
                    head[-1][:, None], torch.zeros_like(root)[:, None], seen
                )
            q = drafter_q[:, 0]
            fresh = place_before[depth] > self.depth
            was_drafted = place_before[depth] < self.depth
            weight = self._drafter_weight
            mixture = weight * q + (1.0 - weight) * self._q[:, depth]
            q = torch.where(fresh[:, None], q, mixture)
            drawn_from = q
            if self._redraws:
                redraft = self.redraft(q, self._last_q[:, depth], self._last_drafts[:, depth])
                drawn_from = torch.where(was_drafted[:, None], redraft.coupled, q)
                q = torch.where(was_drafted[:, None], redraft.q, q)
            self._q[:, depth] = q
            head.append(q.argmax(dim=-1) if self._greedy else sample(drawn_from, noise[:, depth]))
        tokens = torch.cat([torch.stack(head, dim=1), tokens[:, self.forwards + 1 :]], dim=1)
        self._write_history(tokens)
        self._fill_chain(tokens)
