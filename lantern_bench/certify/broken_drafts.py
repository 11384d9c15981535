"""Jacobi drafting with the mistakes that are easily made between two steps (docs/algorithms.md, section 8.2).

Each function returns how a decoding is broken (`accept` and `make` as in `decode`), or None where its coupling cannot
have the mistake. `BROKEN_DRAFTS` has them by drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.tree_acceptance import Accept, Acceptance, accept_children
from lantern_bench.decoding.drafting.hybrid import HybridDrafting
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.drafting.static import draft_probabilities
from lantern_bench.decoding.protocol import Drafted, LastStep, Target
from lantern_bench.methods.code import Code

Mistake: TypeAlias = tuple[Accept | None, Code]


def old_q(decoding: Decoding) -> Mistake | None:
    """A draft that stays the same is verified with the q of the step before."""
    return None if decoding.value("coupling") == "none" else (None, _OldQ)


def kept_draft(decoding: Decoding) -> Mistake | None:
    """The last drafts are kept, and verified with the new q as if they had been drawn from it."""
    return (None, _KeptDraft) if decoding.value("coupling") == "none" else None


def slot_noise(decoding: Decoding) -> Mistake | None:
    """The noise of Gumbel coupling belongs to a place of the window, not to a position of the image."""
    return (None, _SlotNoise) if decoding.value("coupling") == "gumbel" else None


def hybrid_old_q(decoding: Decoding) -> Mistake | None:
    """As `old_q`, of a hybrid window."""
    return None if decoding.value("coupling") == "none" else (None, _HybridOldQ)


def hybrid_drafter_q(decoding: Decoding) -> Mistake | None:
    """Drafts of a mixture are verified as if the drafter alone had made them."""
    return None if decoding.value("share") == 1 else (None, _DrafterQ)


def uniform_reused(decoding: Decoding) -> Mistake | None:
    """The uniform number that decides whether a draft is kept also decides whether the walk accepts it."""
    if decoding.value("coupling") != "maximal":
        return None
    made: dict[int, _UniformReused] = {}

    def make(decoding: Decoding, target: Target, batch: int) -> _UniformReused:
        made[batch] = _UniformReused(decoding, target, batch)
        return made[batch]

    def accept(
        p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, relaxation: Any, table: Tensor | None,
        active: Any = None, images: int = 1, *others: Any,
    ) -> Acceptance:  # fmt: skip
        decided = accept_children(p, q, tokens, offered, relaxation, table, active, images, *others)
        hit = made[images].uniforms.T.reshape(-1, 1) < decided.accept
        return Acceptance(hit.to(p.dtype), decided.mass, decided.rest, decided.exhausted)

    return accept, make


class _Remembers(JacobiDrafting):
    """Knows the last draft of each place and its q, where there is one."""

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        batch, window, _ = self._q.shape
        self.last, self.last_q = torch.zeros(batch, window, dtype=torch.int64), torch.zeros_like(self._q)
        self.known = torch.zeros(batch, window, dtype=torch.bool)

    def after_step(self, step: LastStep) -> None:
        images, at = self._behind(step.accepted + 1, self.depth)
        self.known = at < self.depth
        at = at.clamp_max(self.depth - 1)
        self.last, self.last_q = step.tree.tokens[:, 1:][images, at], self._q[images, at]
        super().after_step(step)


class _OldQ(_Remembers):
    def draft(self, *given: Any) -> Drafted:
        drafted = super().draft(*given)
        same = self.known & (drafted[0][:, 1:] == self.last)
        self._q.copy_(torch.where(same[:, :, None], self.last_q, self._q))
        return drafted


class _HybridOldQ(_OldQ, HybridDrafting):
    pass


class _DrafterQ(HybridDrafting):
    def draft(self, session: Any, drafts: Any, *given: Any) -> Drafted:
        asked = [drafts]

        class Watched:
            def extend(self, *given: Any) -> Any:
                asked.append(session.extend(*given))
                return asked[-1]

        watched: Any = Watched()
        drafted = super().draft(watched, drafts, *given)
        for place, answer in enumerate(asked):
            self._q[:, place] = draft_probabilities(answer, self._decoding)[:, 0]
        return drafted


class _KeptDraft(_Remembers):
    def draft(self, *given: Any) -> Drafted:
        tokens = super().draft(*given)[0]
        return (torch.cat([tokens[:, :1], torch.where(self.known, self.last, tokens[:, 1:])], dim=1),)


class _SlotNoise(JacobiDrafting):
    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        self.begun = False

    def _noise(self, noise: Tensor) -> Tensor:
        if not self.begun:
            self._clocks.copy_(noise)
        self.begun = True
        return self._clocks


class _UniformReused(_Remembers):
    """Draws the uniform numbers after the fact: given that a draft stays, its number was below the chance to stay."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._generator = torch.Generator().manual_seed(0)

    def draft(self, *given: Any) -> Drafted:
        drafted = super().draft(*given)
        stays = torch.where(self.known, self._law.gather(2, self.last[:, :, None]).squeeze(2), 1.0)
        free = torch.rand(stays.shape, generator=self._generator)
        same = ~self.known | (drafted[0][:, 1:] == self.last)
        self.uniforms = torch.where(same, free * stays, stays + free * (1.0 - stays))
        return drafted


BROKEN_DRAFTS: dict[str, dict[str, Callable[[Decoding], Mistake | None]]] = {
    "jacobi": {
        "old q kept with a draft": old_q,
        "draft kept, with the new q": kept_draft,
        "uniform number used again": uniform_reused,
        "noise kept by place in the window": slot_noise,
    },
    "hybrid": {"old q kept with a draft": hybrid_old_q, "verified with the drafter's q": hybrid_drafter_q},
}
"""The mistakes that the audit plants in a drafting, by what is wrong."""
