"""Decoding with mistakes that are easily made, which tests must reject: in rules, in drafts, and
between images.

docs/algorithms.md, sections 3, 4 and 8; docs/audit.md has how many images it takes to reject each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lantern_bench.checks.trials import accepted_too_often, without_residual
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding import step
from lantern_bench.decoding.acceptance import traversal
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Codebook
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.decoding.acceptance.verify import Verdict, verify
from lantern_bench.decoding.drafting.draft_method import (
    DraftInputs,
    DraftMethod,
    LastStep,
    drafting_of,
)
from lantern_bench.decoding.drafting.jacobi import HybridDrafting, JacobiDrafting, Redraft
from lantern_bench.decoding.protocol import DecodableModel, Target
from lantern_bench.decoding.sampling import Draws, decoding_probabilities, guide, probabilities
from lantern_bench.methods.catalog import RULES
from lantern_bench.methods.rules import probability_rule
from lantern_bench.models.networks.kv_cache import KVCache
from tests.helpers.rules import broken


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and the rule, the drafting, or the code of the package, that is wrong so."""

    name: str
    accept: Callable[[Children, ConfiguredRule], Acceptance] | None = None
    make: Callable[[Decoding, Target, int], DraftMethod] | None = None
    rule: ConfiguredRule | None = None  # in place of `accept`
    patched: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def acceptance_rule(self) -> ConfiguredRule | None:
        """Return the rule that is wrong, if it is the rule."""
        if self.accept is None:
            return self.rule
        return broken(self.name, self.accept)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the drafting and the code of the package that is wrong.

        An engine keeps its steps, so a right step of the same engine would be decoded again.
        """
        with self.patched(), patch.object(step, "drafting_of", self.make or drafting_of):
            yield

    def arguments(self, decoding: Decoding, target: Any, batch: int) -> dict[str, Any]:
        """Return the arguments of `decode` that make this mistake with `batch` images."""
        made = {
            "drafting": self.make and self.make(decoding, target, batch),
            "rule": self.acceptance_rule(),
        }
        return {name: value for name, value in made.items() if value is not None}


def mistakes_of(decoding: Decoding, model: DecodableModel) -> list[Mistake]:
    """Return the mistakes that can be made in a decoding: in its rule, in its drafts, in everything
    around them.
    """
    return [*rule_mistakes(decoding, model), *drafting_mistakes(decoding), *step_mistakes(decoding)]


# ---- Rules


def rule_mistakes(decoding: Decoding, model: DecodableModel) -> list[Mistake]:
    """Return the mistakes of a decoding's rule."""
    is_strict = decoding.rule == "strict"
    accept = accept_children if is_strict else accept_traversal
    no_residual = strict_without_residual if is_strict else partial(without_residual, accept=accept)
    mistakes = [
        Mistake("residual left out", no_residual),
        Mistake(
            "a draft accepted once too often in 50", partial(accepted_too_often, accept=accept)
        ),
    ]
    if not is_strict:
        return [*mistakes, Mistake("visit probability not updated", visit_probability_kept)]
    codes: Any = model.target.vocab_size
    k = 2 if codes < 10 else min(100, codes // 4)
    near = Codebook(neighbours=k, nearest=model.table(k, "l2"))
    relaxed = ConfiguredRule(RULES["multiplicative"], {"lambda": 2.0}, near)
    mistakes.append(Mistake("relaxed with lambda 2", rule=relaxed))
    is_chain = decoding.drafting_row.chain or (decoding.paths and not any(map(any, decoding.paths)))
    if decoding.drafts and not is_chain:
        mistakes.append(
            Mistake("not renormalised after a rejected sibling", siblings_not_renormalised)
        )
    return mistakes


def strict_without_residual(children: Children, _rule: ConfiguredRule) -> Acceptance:
    """The strict rule without its residual: drafts are accepted as often as they should, so a weak
    test misses it.
    """
    keeps_p = probability_rule("keeps p", official_removal=0.0)
    return accept_children(children, OfficialRule(keeps_p(lambda draft, _values: draft.ratio)))


def visit_probability_kept(children: Children, rule: ConfiguredRule) -> Acceptance:
    """Traversal verification whose visit probability ignores the rejected children."""
    with patch.object(traversal, "visit_probability_after", lambda probability, _sum: probability):
        return accept_traversal(children, rule)


def siblings_not_renormalised(children: Children, _rule: ConfiguredRule) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not
    renormalise.
    """
    p = children.p
    q = children.q
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
    return Acceptance(
        accept=accept,
        neighbour_mass=torch.zeros_like(accept),
        residual=p,
        exhausted=torch.zeros_like(children.offered[:, 0]),
    )


# ---- A step: its noise, its q and p, its cache, the images of its batch


def step_mistakes(decoding: Decoding) -> list[Mistake]:
    """Return the mistakes of a step around its rule and its drafting."""
    mistakes = []
    if decoding.drafting_row.sampled:
        mistakes.append(Mistake("bonus token reuses the draft's noise", make=_noise_used_again))
        mistakes.append(
            Mistake("q of the step before in 1 of 100 drafts", make=partial(_stale_q, share=0.01))
        )
        mistakes.append(_verifying("q at temperature 1.05", _warmer_q))
    if decoding.drafts:
        mistakes.append(_verifying("p and q rounded to bfloat16", _rounded))
        mistakes.append(_verifying("uniform numbers of 8 bits", _eight_bits))
        mistakes.append(
            Mistake("uniform numbers of the step before in every other step", make=_uniforms_again)
        )
        if max(map(len, decoding.paths), default=4) >= 3:
            mistakes.append(Mistake("cache slot wrong at depth 3", patched=_third_slot_wrong))
    if decoding.paths and decoding.rule == "strict":
        if decoding.cfg_scale != 1 and any(len(path) > 1 for path in decoding.paths):
            mistakes.append(Mistake("q of other guidance at depth 2", make=_other_guidance))
        if decoding.top_k or decoding.top_p < 1:
            mistakes.append(
                Mistake("accepted with p before filters", make=_unfiltered, patched=_filters_seen)
            )
        if any(path[0] for path in decoding.paths):
            mistakes.append(
                Mistake("cache of the first branch after a switch", patched=_first_branch_kept)
            )
    mistakes.append(
        Mistake(
            "two images of a batch share bits",
            patched=lambda: _shared_bits(slice(1, 2), slice(0, 1)),
        )
    )
    mistakes.append(
        Mistake(
            "every two images of a batch share bits",
            patched=lambda: _shared_bits(slice(1, None, 2), slice(0, -1, 2)),
        )
    )
    return mistakes


def _filters_seen() -> AbstractContextManager[Any]:
    return patch.object(step, "decoding_probabilities", _seeing)


def _noise_used_again(decoding: Decoding, target: Target, batch: int) -> DraftMethod:
    """The clocks of the first drafts also draw the bonus token."""
    method: Any = drafting_of(decoding, target, batch)
    draft = method.draft
    clocks = []

    def with_noise(inputs: DraftInputs) -> None:
        clocks[:] = [inputs.noise[:, 0]]
        draft(inputs)

    def verified(*arguments: Any, noise: Tensor, **others: Any) -> Verdict:
        return verify(*arguments, noise=clocks[0], **others)

    method.draft = with_noise
    method.verify = verified
    return method


@dataclass
class Verified:
    """What verification reads, which a mistake may change."""

    tree: Any
    p: Tensor
    uniforms: Tensor


def _verifying(name: str, change: Callable[[Verified], None]) -> Mistake:
    """A mistake in what verification reads."""

    def make(decoding: Decoding, target: Target, batch: int) -> DraftMethod:
        method: Any = drafting_of(decoding, target, batch)

        def verified(
            tree: Any, p: Tensor, *arguments: Any, uniforms: Tensor, **others: Any
        ) -> Verdict:
            read = Verified(tree, p.clone(), uniforms.clone())
            change(read)
            return verify(read.tree, read.p, *arguments, uniforms=read.uniforms, **others)

        method.verify = verified
        return method

    return Mistake(name, make=make)


def _warmer_q(read: Verified) -> None:
    """Drafts are drawn at temperature 1, and verified with q at temperature 1.05."""
    warmer = read.tree.q ** (1 / 1.05)
    sums = warmer.sum(dim=-1, keepdim=True)
    read.tree = replace(read.tree, q=warmer / sums.clamp_min(1e-30))


def _rounded(read: Verified) -> None:
    """The walk keeps p and q in bfloat16."""
    read.p = read.p.bfloat16().float()
    if read.tree.q is not None:
        read.tree = replace(read.tree, q=read.tree.q.bfloat16().float())


def _eight_bits(read: Verified) -> None:
    """The uniform numbers are multiples of 1 / 256, rounded down."""
    read.uniforms = (256 * read.uniforms).floor() / 256


def _uniforms_again(decoding: Decoding, target: Target, batch: int) -> DraftMethod:
    """Every other step decides with the uniform numbers of the step before."""
    last: list[Tensor] = []

    def change(read: Verified) -> None:
        if last:
            read.uniforms = last.pop()
        else:
            last.append(read.uniforms)

    mistake = _verifying("", change)
    assert mistake.make is not None
    method = mistake.make(decoding, target, batch)
    start = method.start_images

    def start_images(p: Tensor) -> None:
        last.clear()  # otherwise the wrong steps differ between batches, and their shifts cancel
        start(p)

    method.start_images = start_images  # type: ignore[method-assign]
    method.reads_last_step = True  # so that `start_images` is called
    return method


def _stale_q(decoding: Decoding, target: Target, batch: int, share: float) -> DraftMethod:
    """A `share` of the nodes are verified with the q that the node had in the step before."""
    method: Any = drafting_of(decoding, target, batch)
    last = []
    picks = torch.Generator().manual_seed(0)

    def verified(tree: Any, *arguments: Any, **others: Any) -> Verdict:
        right = tree.q.clone()
        if last:
            is_stale = torch.rand(right.shape[:2], generator=picks) < share
            tree = replace(
                tree, q=torch.where(is_stale[:, :, None].to(right.device), last[0], right)
            )
        last[:] = [right]
        return verify(tree, *arguments, **others)

    method.verify = verified
    return method


def _other_guidance(decoding: Decoding, target: Target, batch: int) -> DraftMethod:
    """Children at depth 2 of a static tree are verified with the q of a scale larger by 0.5."""
    method: Any = drafting_of(decoding, target, batch)
    draft = method.draft
    nodes = method._shape.levels[1].nodes

    def drafted(inputs: DraftInputs) -> None:
        proposer: Any = inputs.proposer
        plain = proposer._distributions
        others = []

        def distributions(logits: Any) -> Tensor:
            guided = guide(logits.cond, logits.uncond, decoding.cfg_scale + 0.5)
            others.append(decoding_probabilities(guided, decoding))
            return plain(logits)

        proposer._distributions = distributions
        draft(inputs)
        method.tree.q[:, nodes] = others[0]

    method.draft = drafted
    return method


def _unfiltered(decoding: Decoding, target: Target, batch: int) -> DraftMethod:
    """Drafts are accepted with the p before filters, and the bonus token is drawn after them."""
    method: Any = drafting_of(decoding, target, batch)

    def verified(tree: Any, p: Tensor, _rule: Any, **others: Any) -> Verdict:
        plain = tree.rows(_SEEN[0])

        def accept(children: Children, rule: ConfiguredRule) -> Acceptance:
            assert children.q is not None
            before = accept_children(replace(children, p=plain.clone(), q=children.q.clone()), rule)
            return replace(accept_children(children, rule), accept=before.accept)

        return verify(tree, p, broken("unfiltered", accept), **others)

    method.verify = verified
    return method


_SEEN: list[Tensor] = []


def _seeing(logits: Tensor, decoding: Decoding) -> Tensor:
    """As `decoding_probabilities`; remembers p before filters."""
    _SEEN[:] = [probabilities(logits, decoding.temperature)]
    return decoding_probabilities(logits, decoding)


@contextlib.contextmanager
def _first_branch_kept() -> Iterator[None]:
    """The first child of the root stays in the cache, whichever child was accepted."""
    keep = KVCache.keep

    def kept(cache: KVCache, path: Tensor, counts: Tensor) -> None:
        keep(
            cache,
            torch.cat(
                [path[:, :1], torch.where(path[:, 1:2] > 0, 1, path[:, 1:2]), path[:, 2:]], 1
            ),
            counts,
        )

    with patch.object(KVCache, "keep", kept):
        yield


@contextlib.contextmanager
def _third_slot_wrong() -> Iterator[None]:
    """The draft at depth 3 stays in the cache as the draft at depth 2."""
    keep = KVCache.keep

    def kept(cache: KVCache, path: Tensor, counts: Tensor) -> None:
        wrong = path.clone()
        if path.shape[1] > 3:
            wrong[:, 3] = torch.where(path[:, 3] > 0, path[:, 2], path[:, 3])
        keep(cache, wrong, counts)

    with patch.object(KVCache, "keep", kept):
        yield


@contextlib.contextmanager
def _shared_bits(these: slice, those: slice) -> Iterator[None]:
    """Images of a batch have the random bits of others."""
    bits = Draws.bits

    def shared(draws: Draws, *shape: int) -> Tensor:
        drawn = bits(draws, *shape).clone()
        count = len(drawn[these])
        drawn[these] = drawn[those][:count]
        return drawn

    with patch.object(Draws, "bits", shared):
        yield


# ---- Drafts that are kept from step to step


def drafting_mistakes(decoding: Decoding) -> list[Mistake]:
    """Return the mistakes of a Jacobi or hybrid drafting between two steps, those that its coupling
    can have.
    """
    if decoding.drafting not in ("jacobi", "hybrid"):
        return []
    coupling = decoding.value("coupling")
    mistakes = []
    is_hybrid = decoding.drafting == "hybrid"
    if coupling != "none":
        mistakes.append(
            Mistake("old q kept with a draft", make=_HybridOldQ if is_hybrid else _OldQ)
        )
    if is_hybrid and decoding.value("drafter_weight") != 1:
        mistakes.append(Mistake("verified with the drafter's q", make=DrafterQ))
    if not is_hybrid and coupling == "none":
        mistakes.append(Mistake("draft kept, with the new q", make=_KeptDraft))
    looks_ahead = decoding.rule_row.gives_visit_probability
    if coupling == "maximal" and looks_ahead:
        base = HybridDrafting if is_hybrid else JacobiDrafting
        mistakes += [
            Mistake(name, make=type(f"_{how.__name__}", (_Shown, base), {"how": staticmethod(how)}))
            for name, how in SHOWN.items()
        ]
    if not is_hybrid and coupling == "maximal" and not looks_ahead:
        mistakes.append(_uniform_number_used_again())
    if not is_hybrid and coupling == "threshold":
        mistakes.append(Mistake("verified with the new p, as published", make=StoredP))
    if not is_hybrid and coupling == "gumbel":
        mistakes.append(Mistake("noise kept by place in the window", make=_SlotNoise))
    return mistakes


class _Remembering(JacobiDrafting):
    """A Jacobi drafting that remembers the last draft of each position and its q; `remembers` says
    where.
    """

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        batch, window, _ = self._q.shape
        self.last = torch.zeros(batch, window, dtype=torch.int64)
        self.last_q = torch.zeros_like(self._q)
        self.remembers = torch.zeros(batch, window, dtype=torch.bool)

    def after_step(self, step: LastStep) -> None:
        images, places = self._shifted(step.accepted + 1, self.depth)
        self.remembers = places < self.depth
        places = places.clamp_max(self.depth - 1)
        self.last = self.tree.tokens[:, 1:][images, places]
        self.last_q = self._q[images, places]
        super().after_step(step)


class _OldQ(_Remembering):
    """A draft that stays the same is verified with the q of the step before."""

    def draft(self, inputs: DraftInputs) -> None:
        super().draft(inputs)
        stays = self.remembers & (self.tree.tokens[:, 1:] == self.last)
        self._q.copy_(torch.where(stays[:, :, None], self.last_q, self._q))


class _HybridOldQ(_OldQ, HybridDrafting):
    """The same mistake in a hybrid window."""


class DrafterQ(HybridDrafting):
    """Drafts of a mixture are verified as if the drafter alone had drawn them."""

    def draft(self, inputs: DraftInputs) -> None:
        proposer: Any = inputs.proposer
        answers = [proposer.root_q]

        class Listener:
            root_q = proposer.root_q

            def extend(self, *nodes: Any) -> Any:
                answers.append(proposer.extend(*nodes))
                return answers[-1]

        listener: Any = Listener()
        super().draft(inputs._replace(proposer=listener))
        for depth, q in enumerate(answers):
            self._q[:, depth] = q[:, 0]


class StoredP(JacobiDrafting):
    """Drafts that may stay are verified as draws from the new p: SJD++ as published."""

    def redraft(self, p: Tensor, q: Tensor, x: Tensor) -> Redraft:
        return super().redraft(p, q, x)._replace(q=p)


class _Shown(JacobiDrafting):
    """Drafts behind a block walk are coupled as if it had had other visit probabilities."""

    how: Callable[[Tensor], Tensor | None]

    def after_step(self, step: LastStep) -> None:
        assert step.visit_probability is not None
        super().after_step(step._replace(visit_probability=self.how(step.visit_probability)))


def _none(_probability: Tensor) -> None:
    return None


def _of_the_node_above(probability: Tensor) -> Tensor:
    return torch.cat([probability[:, :1], probability[:, :-1]], dim=1)


SHOWN: dict[str, Callable[[Tensor], Tensor | None]] = {
    "coupled as if block had read no drafts": _none,
    "visit probability of 1": torch.ones_like,
    "visit probability of the node above": _of_the_node_above,
}


class _KeptDraft(_Remembering):
    """The last drafts are kept, and verified with the new q as if they had been drawn from it."""

    def draft(self, inputs: DraftInputs) -> None:
        super().draft(inputs)
        drafts = self.tree.tokens[:, 1:]
        drafts.copy_(torch.where(self.remembers, self.last, drafts))


class _SlotNoise(JacobiDrafting):
    """The noise of Gumbel coupling belongs to a place of the window, not to a position of the
    image.
    """

    def start_images(self, p: Tensor) -> None:
        super().start_images(p)
        self.has_noise = False

    def _noise(self, noise: Tensor) -> Tensor:
        if not self.has_noise:
            self._position_noise.copy_(noise)
        self.has_noise = True
        return self._position_noise


class _UniformNumbers(_Remembering):
    """Draws the uniform number of each draft after the fact: if the draft stays, it was below the
    chance to stay.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._generator = torch.Generator().manual_seed(0)

    def draft(self, inputs: DraftInputs) -> None:
        super().draft(inputs)
        chance = torch.where(
            self.remembers, self._coupled_q.gather(2, self.last[:, :, None]).squeeze(2), 1.0
        )
        uniform = torch.rand(chance.shape, generator=self._generator)
        stays = ~self.remembers | (self.tree.tokens[:, 1:] == self.last)
        self.uniforms = torch.where(stays, uniform * chance, chance + uniform * (1.0 - chance))


def _uniform_number_used_again() -> Mistake:
    """The uniform number that decides whether a draft is kept also decides on acceptance."""
    draftings: dict[int, _UniformNumbers] = {}  # by the size of their batch

    def make(decoding: Decoding, target: Target, batch: int) -> _UniformNumbers:
        draftings[batch] = _UniformNumbers(decoding, target, batch)
        return draftings[batch]

    def accept(children: Children, rule: ConfiguredRule) -> Acceptance:
        acceptance = accept_children(children, rule)
        assert children.layout is not None
        images = len(children.tokens) // len(children.layout.nodes)
        accepted = draftings[images].uniforms.T.reshape(-1, 1) < acceptance.accept
        return replace(acceptance, accept=accepted.to(acceptance.accept.dtype))

    return Mistake("uniform number used again", accept, make)
