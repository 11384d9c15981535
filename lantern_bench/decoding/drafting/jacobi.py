"""Drafts from the target's own last answers: speculative Jacobi decoding (SJD), and with coupled drafts (SCD).

What a step scored at a position is what the next step drafts there, so no drafter is asked. SJD: arXiv 2410.01699,
SCD: arXiv 2510.24211; docs/algorithms.md, sections 8.1 and 8.2, which also say why this is lossless.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.protocol import Drafted, DrafterLogits, DrafterSession, LastStep, Target, WithForcedTokens
from lantern_bench.decoding.sampling import sample
from lantern_bench.decoding.tree import DraftTree, StaticTree
from lantern_bench.errors import RefusedError


@runtime_checkable
class OnGrid(Protocol):
    """A target whose image tokens are rows of `line_length` tokens, forced ones included."""

    @property
    def line_length(self) -> int:
        """Tokens of one row."""


def make_jacobi(decoding: Decoding, target: Target, batch: int) -> JacobiDrafting:
    """Make the drafting of the row `jacobi`."""
    return JacobiDrafting(decoding, target, batch)


def couple(p: Tensor, q: Tensor, x: Tensor, rest: Tensor | None = None) -> Tensor:
    """Return what to draw the next drafts from, [..., V], given drafts `x` [...] of `q`, so that they come out as `p`.

    x stays with probability min(1, p(x) / q(x)), else a draw from norm(max(p - q, 0)) takes its place. No other way
    to turn a draw from q into one from p keeps it more often: maximal coupling (docs/algorithms.md, section 8.2).
    `rest` [..., V], of any scale, takes the place of max(p - q, 0), for forms that are not lossless.
    """
    own = x[..., None]
    rest = (p - q).clamp_min(0.0) if rest is None else rest
    left = rest.sum(dim=-1, keepdim=True)
    # Where rounding leaves nothing to change to, nothing changes.
    stays = torch.where(left > 0, (p.gather(-1, own) / q.gather(-1, own)).clamp_max(1.0), 1.0)
    changed = rest * torch.where(left > 0, (1.0 - stays) / left, 0.0)
    return torch.where(torch.arange(p.shape[-1], device=p.device) == own, stays, changed)


class JacobiDrafting:
    """A chain of W = `window` drafts below the root; draft i belongs to the position `position` + i of the image.

    State, for B images: q float32 [B, W, V], what each draft was drawn from, and between two steps what the next one
    has to be drawn from; moved int64 [B], the tokens of the last step; position int64 [B], the tokens so far. Maximal
    coupling: law [B, W, V], what the next drafts are drawn from given the last ones. Gumbel coupling: clocks [B, W, V],
    the noise of each position. Copies: line int64 [B, N + W + 1], the image's tokens, committed and drafted.
    """

    def __init__(self, decoding: Decoding, target: Target, batch: int) -> None:
        window, vocabulary, device = decoding.value("window"), target.vocab_size, target.device
        self._initial, self._coupling = decoding.value("initial"), decoding.value("coupling")
        self._greedy = decoding.greedy
        self.nodes, self.depth, self.forwards, self.fanout = window + 1, window, 0, 1
        # Gumbel coupling needs noise only where positions enter the window. But how many do is known on the device
        # alone, and an image gets the same random numbers whatever else is in its batch: so a step draws for all.
        self.noises = 0 if decoding.greedy else window
        self._chain = StaticTree.of([(0,) * depth for depth in range(1, window + 1)], device)
        self._line_length = target.line_length if isinstance(target, OnGrid) else 0
        if self._initial == "above" and not self._line_length:
            raise RefusedError("initial above: this model does not say how long a row of its grid is", "Use left.")
        forcing = target if isinstance(target, WithForcedTokens) and target.n_codes < vocabulary else None
        self._forcing, choices = forcing, vocabulary if forcing is None else forcing.n_codes
        self._codes, self._ahead = torch.arange(vocabulary, device=device), torch.arange(window + 1, device=device)
        self._uniform = (self._codes < choices) / choices
        self._q = torch.zeros(batch, window, vocabulary, device=device)
        self._moved, self._position = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
        if self._coupling == "maximal":
            self._law = torch.zeros_like(self._q)
        if self._coupling == "gumbel":
            self._clocks = torch.ones_like(self._q)
        if self._initial in ("left", "above"):
            places = target.image_tokens + window + 1
            self._line = torch.zeros(batch, places, dtype=torch.int64, device=device)

    def start_images(self, p: Tensor) -> None:
        """All drafts are fresh, as if a step had moved past the whole window."""
        self._position.fill_(1)
        self._moved.fill_(self.depth + 1)
        self._q.copy_(p[:, None].expand_as(self._q))
        if self._coupling == "maximal":
            self._law.copy_(self._q)

    def after_step(self, step: LastStep) -> None:
        """Move each p to the draft of its position; the drafts behind the last of them get it too (`initial: row`)."""
        moved = step.accepted + 1
        images, at = self._behind(moved, self.depth)
        if self._coupling == "maximal":
            coupled = couple(step.p[:, :-1], self._q, step.tree.tokens[:, 1:])
            self._law.copy_(torch.cat([coupled, step.p[:, -1:]], dim=1)[images, at])
        self._q.copy_(step.p[images, at])
        self._moved.copy_(moved)
        self._position.copy_(step.position)

    def draft(
        self,
        session: DrafterSession | None,
        drafts: DrafterLogits | None,
        root: Tensor,
        noise: Tensor,
        depth_limit: Tensor,
    ) -> Drafted:
        """Draw every draft from its row, fresh ones as `initial` says, and keep the rows for verification."""
        del session, drafts, depth_limit  # verification leaves out deeper nodes
        window = self._ahead[:-1]
        fresh = window + self._moved[:, None] > self.depth
        place = self._position[:, None] + window
        last = self._position[:, None] + self.depth - self._moved[:, None]  # the position in front of the fresh ones
        # A repeated row can be that of a forced token, which is impossible elsewhere.
        renewed = fresh if self._initial != "row" else fresh & (self._forced(last) >= 0)
        law = q = torch.where(renewed[:, :, None], self._uniform, self._q)
        if self._coupling == "maximal":
            law = torch.where(renewed[:, :, None], self._uniform, self._law)
        tokens = law.argmax(dim=-1) if self._greedy else sample(law, self._noise(noise))
        sure = self._forced(place)
        if self._initial in ("left", "above"):
            sure = torch.where(sure >= 0, sure, self._copied(root, tokens, place, last))
        sure = torch.where(fresh, sure, -1)
        if self._forcing is not None or self._initial in ("left", "above"):
            tokens = torch.where(sure >= 0, sure, tokens)
            q = torch.where((sure >= 0)[:, :, None], (self._codes == sure[:, :, None]).float(), q)
        self._q.copy_(q)
        drafted = torch.cat([root[:, None], tokens], dim=1)
        self._remember(drafted)
        return (drafted,)

    def to_score(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and attention are a chain's."""
        tokens, chain = drafted[0], self._chain
        return tokens, chain.depths.expand(len(tokens), -1), chain.attention.expand(len(tokens), -1, -1)

    def tree(self, drafted: Drafted) -> DraftTree:
        """The chain of the drafts, with the rows that they were drawn from."""
        return self._chain.draft(drafted[0], None if self._greedy else self._q)

    def _behind(self, moved: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return the index [B, W] of what is `moved` [B] further along the second dimension, at most at `last`."""
        images = torch.arange(len(moved), device=moved.device)[:, None]
        return images, (self._ahead[:-1] + moved[:, None]).clamp_max(last)

    def _noise(self, noise: Tensor) -> Tensor:
        """Return Exp(1) noise [B, W, V]; with Gumbel coupling a position keeps its own."""
        if self._coupling != "gumbel":
            return noise
        held = self._ahead[:-1] + self._moved[:, None] < self.depth
        self._clocks.copy_(
            torch.where(held[:, :, None], self._clocks[self._behind(self._moved, self.depth - 1)], noise)
        )
        return self._clocks

    def _forced(self, places: Tensor) -> Tensor:
        """Return the forced tokens at positions int64 [...], -1 where none is."""
        return torch.full_like(places, -1) if self._forcing is None else self._forcing.forced(places)

    def _remember(self, tokens: Tensor) -> None:
        """Write the root and the drafts [B, W + 1] to the line that copies are read from."""
        if self._initial in ("left", "above"):
            self._line.scatter_(1, self._position[:, None] - 1 + self._ahead, tokens)

    def _copied(self, root: Tensor, tokens: Tensor, place: Tensor, last: Tensor) -> Tensor:
        """Return the tokens [B, W] left of or above the fresh positions, -1 where there is none.

        What is copied from fresh positions is what these copy: of the positions to the left, or above, the nearest one
        that is not fresh.
        """
        self._remember(torch.cat([root[:, None], tokens], dim=1))
        if self._initial == "left":
            source = (last - (self._forced(last) >= 0).long()).expand_as(place)
        else:
            source = place + (last - place) // self._line_length * self._line_length
        return torch.where(source >= 0, self._line.gather(1, source.clamp_min(0)), -1)
