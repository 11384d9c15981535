"""Jacobi and hybrid drafting with the mistakes that are easily made between two steps, which tests must reject.

docs/algorithms.md, sections 8.2 and 8.7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod, LastStep
from lantern_bench.decoding.drafting.jacobi import HybridDrafting, JacobiDrafting
from lantern_bench.decoding.protocol import Target


class Mistake(NamedTuple):
    """What is wrong, and the rule, the drafting, or both, that are wrong so."""

    name: str
    accept: Callable[[Children, AcceptanceRule], Acceptance] | None = None
    make: Callable[[Decoding, Target, int], DraftMethod] | None = None

    def arguments(self, decoding: Decoding, target: Any, batch: int) -> dict[str, Any]:
        """Return the arguments of `decode` that make this mistake with `batch` images."""
        arguments: dict[str, Any] = {}
        if self.make is not None:
            arguments["drafting"] = self.make(decoding, target, batch)
        if self.accept is not None:
            arguments["rule"] = AcceptanceRule(self.name, accept=self.accept)
        return arguments


def drafting_mistakes(decoding: Decoding) -> list[Mistake]:
    """Return the mistakes of a Jacobi or hybrid drafting between two steps, those that its coupling can have."""
    if decoding.drafting not in ("jacobi", "hybrid"):
        return []
    coupling, mistakes = decoding.value("coupling"), []
    is_hybrid = decoding.drafting == "hybrid"
    if coupling != "none":
        mistakes.append(Mistake("old q kept with a draft", make=_HybridOldQ if is_hybrid else _OldQ))
    if is_hybrid and decoding.value("share") != 1:
        mistakes.append(Mistake("verified with the drafter's q", make=DrafterQ))
    if not is_hybrid and coupling == "none":
        mistakes.append(Mistake("draft kept, with the new q", make=_KeptDraft))
    if not is_hybrid and coupling == "maximal":
        mistakes.append(_uniform_number_used_again())
    if not is_hybrid and coupling == "gumbel":
        mistakes.append(Mistake("noise kept by place in the window", make=_SlotNoise))
    return mistakes


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


class DrafterQ(HybridDrafting):
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
