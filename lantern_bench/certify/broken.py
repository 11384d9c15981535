"""Rules and draftings that are broken on purpose: the mistakes that a certificate and an audit must reject.

A rule of another package gets the mistakes that any rule can have. docs/algorithms.md, sections 3 and 8.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.relaxed_rules import multiplicative_limit
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, rule_of
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.drafting.hybrid import HybridDrafting
from lantern_bench.decoding.drafting.jacobi import JacobiDrafting
from lantern_bench.decoding.protocol import Target
from lantern_bench.models.loaded_model import LoadedModel

TOO_OFTEN, LAMBDA = 0.02, 2.0
"""What a draft's acceptance probability is raised by, and the bound of the relaxed rule among the broken ones."""


Accept: TypeAlias = Callable[[Children, AcceptanceRule], Acceptance]


class Mistake(NamedTuple):
    """What is wrong, and the rule, the drafting, or both, that are wrong so."""

    name: str
    accept: Accept | None = None
    make: Callable[[Decoding, Target, int], DraftMethod] | None = None

    def arguments(self, decoding: Decoding, target: Target, batch: int) -> dict[str, Any]:
        """Return the arguments of `decode` that make this mistake with `batch` images."""
        arguments: dict[str, Any] = {}
        if self.make is not None:
            arguments["drafting"] = self.make(decoding, target, batch)
        if self.accept is not None:
            arguments["rule"] = AcceptanceRule(self.name, accept=self.accept)
        return arguments


def rule_mistakes(decoding: Decoding, model: LoadedModel) -> list[Mistake]:
    """Return the mistakes of a decoding's rule that show without siblings; none where nothing is drafted."""
    if not decoding.drafts:
        return []
    rule = rule_of(decoding, model).accept or accept_children
    mistakes = [
        Mistake("residual left out", strict_without_residual if rule is accept_children else without_residual(rule)),
        Mistake("a draft accepted once too often in 50", accepted_too_often(rule)),
    ]
    if rule is accept_traversal:
        stale = partial(accept_traversal, update=lambda share, _sum: share)
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


def strict_without_residual(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Each draft is accepted with the right probability and only the distribution of the tokens is wrong, which makes it
    the mistake that a weak test misses.
    """
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        q_x = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))


def without_residual(rule: Accept) -> Accept:
    """Return `rule` with the bonus token drawn from the node's own p also after a rejection."""

    def broken(children: Children, parameters: AcceptanceRule) -> Acceptance:
        p = children.p.clone()
        return replace(rule(children, parameters), residual=p, exhausted=torch.zeros_like(children.offered[:, 0]))

    return broken


def accepted_too_often(rule: Accept) -> Accept:
    """Return `rule` with acceptance probabilities raised by `TOO_OFTEN`, to at most 1, of drafts that it can accept."""

    def broken(children: Children, parameters: AcceptanceRule) -> Acceptance:
        acceptance = rule(children, parameters)
        raised = (acceptance.accept + TOO_OFTEN).clamp(max=1.0)
        possible = children.offered & (acceptance.accept > 0)
        return replace(acceptance, accept=torch.where(possible, raised, 0.0))

    return broken


def relaxed(neighbours: int, table: Tensor) -> Accept:
    """Return the multiplicative rule in place of the strict one, with the bound `LAMBDA`."""
    rule = AcceptanceRule(
        "relaxed", {"lambda": LAMBDA}, limit=multiplicative_limit, neighbours=neighbours, nearest_codes=table
    )
    return lambda children, _rule: accept_children(children, rule)


def siblings_not_renormalised(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not renormalise."""
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        p_x = p.gather(1, x)
        q_x = torch.ones_like(p_x) if q is None else q.gather(1, x)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p_x / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is None:
            p.scatter_(1, x, torch.where(tried, 0.0, p_x))
        else:
            residual = (p - q).clamp_min(0.0)
            residual_sum = residual.sum(dim=1, keepdim=True)
            p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
            q.scatter_(1, x, torch.where(tried, 0.0, q_x))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))


# ---- Jacobi draftings


class _Remembering(JacobiDrafting):
    """A Jacobi drafting that remembers the last draft of each position and its q; `remembers` says where."""

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        batch, window, _ = self._q.shape
        self.last, self.last_q = torch.zeros(batch, window, dtype=torch.int64), torch.zeros_like(self._q)
        self.remembers = torch.zeros(batch, window, dtype=torch.bool)

    def after_step(self, step: LastStep) -> None:
        images, places = self._further(step.accepted + 1, self.depth)
        self.remembers = places < self.depth
        places = places.clamp_max(self.depth - 1)
        self.last, self.last_q = step.tree.tokens[:, 1:][images, places], self._q[images, places]
        super().after_step(step)


class _OldQ(_Remembering):
    """A draft that stays the same is verified with the q of the step before."""

    def draft(self, inputs: DraftInputs) -> Drafted:
        drafted = super().draft(inputs)
        stays = self.remembers & (drafted[0][:, 1:] == self.last)
        self._q.copy_(torch.where(stays[:, :, None], self.last_q, self._q))
        return drafted


class _HybridOldQ(_OldQ, HybridDrafting):
    """The same mistake in a hybrid window."""


class _DrafterQ(HybridDrafting):
    """Drafts of a mixture are verified as if the drafter alone had drawn them."""

    def draft(self, inputs: DraftInputs) -> Drafted:
        proposer: Any = inputs.proposer
        answers = [proposer.root_q]

        class Listener:
            root_q = proposer.root_q

            def extend(self, *nodes: Any) -> Any:
                answers.append(proposer.extend(*nodes))
                return answers[-1]

        listener: Any = Listener()
        drafted = super().draft(inputs._replace(proposer=listener))
        for depth, q in enumerate(answers):
            self._q[:, depth] = q[:, 0]
        return drafted


class _KeptDraft(_Remembering):
    """The last drafts are kept, and verified with the new q as if they had been drawn from it."""

    def draft(self, inputs: DraftInputs) -> Drafted:
        tokens = super().draft(inputs)[0]
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

    def draft(self, inputs: DraftInputs) -> Drafted:
        drafted = super().draft(inputs)
        chance = torch.where(self.remembers, self._coupled_q.gather(2, self.last[:, :, None]).squeeze(2), 1.0)
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

    def accept(children: Children, rule: AcceptanceRule) -> Acceptance:
        acceptance = accept_children(children, rule)
        assert children.layout is not None
        images = len(children.tokens) // len(children.layout.nodes)
        accepted = draftings[images].uniforms.T.reshape(-1, 1) < acceptance.accept
        return replace(acceptance, accept=accepted.to(acceptance.accept.dtype))

    return Mistake("uniform number used again", accept, make)
