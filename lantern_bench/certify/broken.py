"""Rules and draftings that are broken on purpose: the mistakes that a certificate and an audit must reject.

A rule of another package gets the mistakes that any rule can have. docs/algorithms.md, sections 3 and 8.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.relaxation import ROOTS, Relaxation
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.decoding.acceptance.tree_acceptance import Accept, Acceptance, Nodes, accept_children, decide_each
from lantern_bench.decoding.drafting.hybrid import HybridDrafting
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.drafting.static import draft_probabilities
from lantern_bench.decoding.loop import relaxation_of
from lantern_bench.decoding.protocol import Drafted, LastStep, Target
from lantern_bench.methods.code import Code
from lantern_bench.models.loaded_model import LoadedModel

TOO_OFTEN, LAMBDA = 0.02, 2.0
"""What a draft's acceptance probability is raised by, and the bound of the relaxed rule among the broken ones."""


class Mistake(NamedTuple):
    """What is wrong, and the rule, the drafting, or both, that are wrong so: `accept` and `make` of `decode`."""

    name: str
    accept: Accept | None = None
    make: Code | None = None


def rule_mistakes(decoding: Decoding, model: LoadedModel) -> list[Mistake]:
    """Return the mistakes of a decoding's rule that show without siblings; none where nothing is drafted."""
    if not decoding.drafts:
        return []
    rule = relaxation_of(decoding, model).accept or accept_children
    mistakes = [
        Mistake("residual left out", strict_without_residual if rule is accept_children else without_residual(rule)),
        Mistake("a draft accepted once too often in 50", accepted_too_often(rule)),
    ]
    if rule is accept_traversal:
        stale = partial(accept_traversal, update=lambda share, _left: share)
        mistakes.append(Mistake("share not updated after a rejection", stale))
    if rule is accept_children and model.codebook is not None:
        k = min(100, len(model.codebook) // 4)
        mistakes.append(Mistake(f"relaxed: lambda {LAMBDA:g}, k {k}", relaxed(k, model.table(k))))
    return mistakes


def sibling_mistakes(decoding: Decoding) -> list[Mistake]:
    """Return the mistakes of the strict rule with siblings, which are small unless few tokens are possible."""
    has_siblings = decoding.branches or not decoding.drafting_row.sampled
    if decoding.rule != "strict" or not has_siblings:
        return []
    return [Mistake("not renormalised after a rejected sibling", siblings_not_renormalised)]


def drafting_mistakes(decoding: Decoding) -> list[Mistake]:
    """Return the mistakes of a Jacobi or hybrid drafting between two steps, those that its coupling can have."""
    if decoding.drafting not in ("jacobi", "hybrid"):
        return []
    coupling, mistakes = decoding.value("coupling"), []
    is_hybrid = decoding.drafting == "hybrid"
    if coupling != "none":
        mistakes.append(Mistake("old q kept with a draft", make=_HybridOldQ if is_hybrid else _OldQ))
    if is_hybrid and decoding.value("share") != 1:
        mistakes.append(Mistake("verified with the drafter's q", make=_DrafterQ))
    if not is_hybrid and coupling == "none":
        mistakes.append(Mistake("draft kept, with the new q", make=_KeptDraft))
    if not is_hybrid and coupling == "maximal":
        mistakes.append(_uniform_number_used_again())
    if not is_hybrid and coupling == "gumbel":
        mistakes.append(Mistake("noise kept by place in the window", make=_SlotNoise))
    return mistakes


# ---- rules


def strict_without_residual(
    p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *_unused: object
) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Arguments as of `accept_children`. Each draft is accepted with the right probability and only the distribution of
    the tokens is wrong, which makes it the mistake that a weak test misses.
    """
    accept = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for rank in range(tokens.shape[1]):
        x = tokens[:, rank, None]
        q_x = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros(len(p), dtype=torch.bool, device=p.device))


def without_residual(rule: Accept) -> Accept:
    """Return `rule` with the bonus token drawn from the node's own p also after a rejection."""

    def broken(p: Tensor, q: Tensor | None, *others: object) -> Acceptance:
        decided = rule(p.clone(), q, *others)  # type: ignore[arg-type]
        return Acceptance(decided.accept, decided.mass, p, torch.zeros_like(decided.exhausted))

    return broken


def accepted_too_often(rule: Accept) -> Accept:
    """Return `rule` with acceptance probabilities raised by `TOO_OFTEN`, to at most 1, of drafts that it can accept."""

    def broken(p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *others: object) -> Acceptance:
        decided = rule(p, q, tokens, offered, *others)  # type: ignore[arg-type]
        accept = torch.where(offered & (decided.accept > 0), (decided.accept + TOO_OFTEN).clamp(max=1.0), 0.0)
        return Acceptance(accept, decided.mass, decided.rest, decided.exhausted)

    return broken


def relaxed(neighbours: int, table: Tensor) -> Accept:
    """Return the multiplicative rule in place of the strict one, with the bound `LAMBDA`."""
    rule = Relaxation("multiplicative", neighbours, LAMBDA)

    def broken(p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *_unused: object) -> Acceptance:
        return accept_children(p, q, tokens, offered, rule, table)

    return broken


class _NotRenormalised(Nodes):
    """The nodes' p (deterministic drafts) and q (sampled ones) keep the scale they had before a rejection."""

    def decide(self, x: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
        decided = super().decide(x, offered)
        self.p_mass.fill_(1.0)
        self.q_mass.fill_(1.0)
        return decided


def siblings_not_renormalised(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    active: Sequence[int] | None = None,
    *_unused: object,
) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not renormalise."""
    return decide_each(_NotRenormalised(p, q, relaxation, table, ROOTS), tokens, offered, active)


# ---- Jacobi draftings


class _Remembering(JacobiDrafting):
    """A Jacobi drafting that remembers the last draft of each position and its q; `remembers` says where."""

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        batch, window, _ = self._q.shape
        self.last, self.last_q = torch.zeros(batch, window, dtype=torch.int64), torch.zeros_like(self._q)
        self.remembers = torch.zeros(batch, window, dtype=torch.bool)

    def after_step(self, step: LastStep) -> None:
        images, places = self._behind(step.accepted + 1, self.depth)
        self.remembers = places < self.depth
        places = places.clamp_max(self.depth - 1)
        self.last, self.last_q = step.tree.tokens[:, 1:][images, places], self._q[images, places]
        super().after_step(step)


class _OldQ(_Remembering):
    """A draft that stays the same is verified with the q of the step before."""

    def draft(self, *arguments: Any) -> Drafted:
        drafted = super().draft(*arguments)
        stays = self.remembers & (drafted[0][:, 1:] == self.last)
        self._q.copy_(torch.where(stays[:, :, None], self.last_q, self._q))
        return drafted


class _HybridOldQ(_OldQ, HybridDrafting):
    """The same mistake in a hybrid window."""


class _DrafterQ(HybridDrafting):
    """Drafts of a mixture are verified as if the drafter alone had drawn them."""

    def draft(self, session: Any, drafts: Any, *others: Any) -> Drafted:
        answers = [drafts]

        class Listener:
            def extend(self, *arguments: Any) -> Any:
                answers.append(session.extend(*arguments))
                return answers[-1]

        listener: Any = Listener()
        drafted = super().draft(listener, drafts, *others)
        for place, answer in enumerate(answers):
            self._q[:, place] = draft_probabilities(answer, self._decoding)[:, 0]
        return drafted


class _KeptDraft(_Remembering):
    """The last drafts are kept, and verified with the new q as if they had been drawn from it."""

    def draft(self, *arguments: Any) -> Drafted:
        tokens = super().draft(*arguments)[0]
        return (torch.cat([tokens[:, :1], torch.where(self.remembers, self.last, tokens[:, 1:])], dim=1),)


class _SlotNoise(JacobiDrafting):
    """The noise of Gumbel coupling belongs to a place of the window, not to a position of the image."""

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        self.has_noise = False

    def _noise(self, noise: Tensor) -> Tensor:
        if not self.has_noise:
            self._clocks.copy_(noise)
        self.has_noise = True
        return self._clocks


class _UniformNumbers(_Remembering):
    """Draws the uniform number of each draft after the fact: if the draft stays, it was below the chance to stay."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._generator = torch.Generator().manual_seed(0)

    def draft(self, *arguments: Any) -> Drafted:
        drafted = super().draft(*arguments)
        chance = torch.where(self.remembers, self._law.gather(2, self.last[:, :, None]).squeeze(2), 1.0)
        uniform = torch.rand(chance.shape, generator=self._generator)
        stays = ~self.remembers | (drafted[0][:, 1:] == self.last)
        self.uniforms = torch.where(stays, uniform * chance, chance + uniform * (1.0 - chance))
        return drafted


def _uniform_number_used_again() -> Mistake:
    """The uniform number that decides whether a draft is kept also decides whether it is accepted."""
    draftings: dict[int, _UniformNumbers] = {}  # by the size of their batch

    def make(decoding: Decoding, target: Target, batch: int) -> _UniformNumbers:
        draftings[batch] = _UniformNumbers(decoding, target, batch)
        return draftings[batch]

    def accept(
        p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, relaxation: Any, table: Tensor | None,
        active: Any = None, images: int = 1, *others: Any,
    ) -> Acceptance:  # fmt: skip
        decided = accept_children(p, q, tokens, offered, relaxation, table, active, images, *others)
        accepted = draftings[images].uniforms.T.reshape(-1, 1) < decided.accept
        return Acceptance(accepted.to(p.dtype), decided.mass, decided.rest, decided.exhausted)

    return Mistake("uniform number used again", accept, make)
