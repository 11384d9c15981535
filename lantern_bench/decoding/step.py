"""One step of speculative decoding as three programs: draft a tree, score it, settle what is kept.

Everything that changes from step to step is in tensors at fixed addresses, which the programs write, so that the host
only calls them, draws the noise and reads how far the images are. `loop.py` calls them; `compile.py` says how they run
(eagerly, compiled, as CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.relaxation import Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Accept
from lantern_bench.decoding.acceptance.walk import Verdict, verify, verify_greedy
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.protocol import (
    Drafted,
    Drafter,
    DrafterLogits,
    DrafterSession,
    DraftMethod,
    GuidesFeatures,
    KeepsState,
    LastStep,
    Logits,
    Target,
    TargetSession,
    VerifiesItself,
)
from lantern_bench.decoding.sampling import (
    Draws,
    decoding_probabilities,
    exponential,
    guide,
    has_broken,
    is_broken,
    uniform,
)
from lantern_bench.decoding.trace import StepRecorder
from lantern_bench.methods.code import Code
from lantern_bench.methods.tables import RULES, tensor_parameters

# The keys that drafting does not depend on.
_ACCEPTANCE = {"mode", "rule", *(key for rule in RULES.values() for key in rule.parameter_names)}


def sampling_key(decoding: Decoding, *without: str) -> tuple[tuple[str, str], ...]:
    """Return the key of a program: a configuration without what it reads from tensors, and without the keys `without`.

    One program serves all sets of seeds, and every bound that is a tensor; external rules may branch on their bounds.
    """
    left_out = {"seed_set", *tensor_parameters(decoding.rule), *without}
    return tuple((key, repr(value)) for key, value in decoding.settings().items() if key not in left_out)


class Scored(NamedTuple):
    """The target's answer for a tree: guided logits float32 [B, M, V], features [rows, M, width]."""

    logits: Tensor
    features: Tensor


def scoring(
    target: Target, batch: int, nodes: int, cfg_scale: float, engine: Engine
) -> tuple[TargetSession, Callable[[Tensor, Tensor, Tensor], Scored]]:
    """Return the target's session for trees of `nodes`, and the program that scores tokens, depths and attention."""
    session = target.session(batch, cfg_scale != 1, nodes)
    guiding = session if cfg_scale != 1 and isinstance(session, GuidesFeatures) else None

    def score(tokens: Tensor, depths: Tensor, attention: Tensor) -> Scored:
        if guiding is not None:
            return Scored(*guiding.score_guided(tokens, depths, attention, cfg_scale))
        scores = session.score(tokens, depths, attention)
        return Scored(guide(scores.cond, scores.uncond, cfg_scale), scores.features)

    return session, engine.program(("score", batch, nodes, cfg_scale), score, target.device)


TARGET, DRAFTER, PREFILL = 1, 2, 3
"""Whose logits are broken: in `Progress.told`, where 0 is for whole logits."""


class _Watched:
    """A drafter's session that keeps all its answers, to find broken ones when a draft is made."""

    def __init__(self, session: DrafterSession, cfg_scale: float) -> None:
        self._session, self._scale = session, cfg_scale
        self._made: list[DrafterLogits] = []

    def prefill(self, condition: Any, features: Tensor) -> None:
        self._session.prefill(condition, features)

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        self._made = [self._session.observe(tokens, features, counts)]
        return self._made[0]

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        self._made.append(self._session.extend(tokens, origin, seen))
        return self._made[-1]

    def broken(self) -> Tensor:
        """Return bool [B]: the images with a broken answer."""
        found = [has_broken(guide(one.cond, one.uncond, self._scale)).any(dim=1) for one in self._made]
        return torch.stack(found).any(dim=0)


class Progress:
    """Where B images are, in tensors at fixed addresses: shared by all configurations of one batch size and depth.

    out: int64 [B, N + D + 1], the tokens so far, then filler. position: [B], how many count. limit: [B], the depth that
    may still be drafted. tokens [B, D + 1], features [rows, D + 1, width], counts [B], root [B]: of the last step.
    told: [2, B], what the host reads of a step: positions, and whose logits were broken first (`TARGET`, ...).
    drafter_broken: bool [B], those of the running step's draft.
    """

    def __init__(self, batch: int, image_tokens: int, depth: int, prefix_features: Tensor) -> None:
        device = prefix_features.device
        rows, _, width = prefix_features.shape
        self._grid, self._depth = image_tokens, depth
        self.out = torch.zeros(batch, image_tokens + depth + 1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(batch, depth + 1, dtype=torch.int64, device=device)
        self.features = torch.zeros(rows, depth + 1, width, dtype=prefix_features.dtype, device=device)
        self.position, self.limit, self.counts, self.root = (
            torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.drafter_broken = torch.zeros(batch, dtype=torch.bool, device=device)
        self.asked = torch.zeros((), dtype=torch.int64, device=device)
        self.told = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.recorder = StepRecorder(batch, image_tokens, depth, device)
        self._ahead = torch.arange(depth + 1, device=device)

    def begin(self, asked: int, prefix_features: Tensor, root: Tensor, broken: Tensor) -> None:
        """The prefill is done and the first tokens `root` [B] are drawn; `broken` bool [B]: from broken logits."""
        self.recorder.begin()
        self.asked.fill_(asked)
        self.position.fill_(1)
        self.limit.fill_(min(self._depth, self._grid - 2))
        self.counts.fill_(1)
        self.drafter_broken.zero_()
        self.told[0], self.told[1] = 1, broken * PREFILL
        self.root.copy_(root)
        self.out[:, 0] = self.tokens[:, 0] = root
        self.features.zero_()  # filler is computed with too, and a NaN of the images before would spread
        self.features[:, 0] = prefix_features[:, -1]

    def commit(self, verdict: Verdict, features: Tensor, broken: Tensor) -> None:
        """Append what a verdict keeps; complete images stay as they are. `broken` bool [B]: the target's logits."""
        self.recorder.add(self.position, verdict, self.limit)
        active = self.position < self.asked
        counts = torch.where(active, verdict.accepted + 1, 0)
        # Filler behind the tokens that count is overwritten by the next step or cut off at the end.
        at = (self.position[:, None] + self._ahead).clamp_max(self.out.shape[1] - 1)
        self.out.scatter_(1, at, torch.where(active[:, None], verdict.tokens, self.out.gather(1, at)))
        last = verdict.tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        self.root.copy_(torch.where(active, last, self.root))
        self.position.add_(counts)
        self.counts.copy_(counts)
        self.limit.copy_((self._grid - 1 - self.position).clamp_max(self._depth))
        whose = torch.where(broken, TARGET, self.drafter_broken * DRAFTER)
        whose = torch.where(active & (self.told[1] == 0), whose, self.told[1])
        self.told.copy_(torch.stack([self.position, whose]))
        self.tokens.copy_(verdict.tokens)
        index = verdict.path.clamp_min(0).repeat(len(features) // len(active), 1)
        self.features.copy_(features.gather(1, index[:, :, None].expand(-1, -1, features.shape[-1])))


class First(NamedTuple):
    """The first tokens int64 [B], the guided logits [B, V] that they are drawn from, and which of them are broken."""

    tokens: Tensor
    logits: Tensor
    broken: Tensor


@dataclass(eq=False)
class Speculation:
    """The programs of one configuration for B images; bounds may differ from one image to the next (`begin`)."""

    target: Target
    drafter: Drafter | None
    decoding: Decoding
    relaxation: Relaxation
    table: Tensor | None
    batch: int
    engine: Engine
    keep_logits: bool
    accept: Accept | None = None
    make: Code | None = None

    def __post_init__(self) -> None:
        target, decoding, batch, engine = self.target, self.decoding, self.batch, self.engine
        device, scale = target.device, decoding.cfg_scale
        drafted = (batch, sampling_key(decoding, *_ACCEPTANCE))
        self.drafting: DraftMethod = engine.cached(
            ("drafting", drafted, self.make), lambda: drafting_of(decoding, target, batch, self.make)
        )
        nodes = self.drafting.nodes
        self.session, self._score = scoring(target, batch, nodes, scale, engine)
        self.drafter_session = None if self.drafter is None else self.drafter.session(batch, scale != 1, nodes)
        exact = torch.float32 if device.type == "mps" else torch.float64
        keys = tensor_parameters(decoding.rule)
        self._values = {key: torch.zeros((), dtype=exact, device=device) for key in keys}
        if keys:
            values = {**self.relaxation.values, **self._values}
            bound = values.pop(decoding.rule_row.bound)
            self.relaxation = replace(self.relaxation, bound=bound, others=tuple(values.items()))
        kind = ("settle", batch, sampling_key(decoding, "mode"), self.keep_logits, self.accept)
        # A test of what is broken takes less time than compiling it.
        self.draft = engine.program(("draft", drafted), self._draft, device) if self.make is None else self._draft
        broken = self.accept is not None or self.make is not None
        self.settle = self._settle if broken else engine.program(kind, self._settle, device)

    def begin(self, relaxation: Relaxation, condition: Any, scores: Logits, first: First, asked: int) -> None:
        """Start a batch of images whose prefill gave `scores`."""
        for key, value in self._values.items():
            value.fill_(relaxation.values[key])
        shape = (self.batch, self.target.image_tokens, self.drafting.depth)
        self.progress = self.engine.cached(
            ("progress", len(scores.features), shape), lambda: Progress(*shape, scores.features)
        )
        self.progress.begin(asked, scores.features, first.tokens, first.broken)
        if self.drafter_session is not None:
            self.drafter_session.prefill(condition, scores.features)
        if isinstance(self.drafting, KeepsState):
            self.drafting.start_images(decoding_probabilities(first.logits, self.decoding))

    def _draft(self, noise: Tensor) -> Drafted:
        """Show the drafter what was committed and draft below it; `noise` [B, noises, V], bits."""
        at, drafter = self.progress, self.drafter_session
        if drafter is None:
            return self.drafting.draft(None, None, at.root, exponential(noise), at.limit)
        watched = _Watched(drafter, self.decoding.cfg_scale)
        drafts = watched.observe(at.tokens, at.features, at.counts)
        drafted = self.drafting.draft(watched, drafts, at.root, exponential(noise), at.limit)
        at.drafter_broken.copy_(watched.broken())
        return drafted

    def score(self, drafted: Drafted) -> Scored:
        """One forward of the target over the tree."""
        return self._score(*self.drafting.to_score(drafted))

    def _settle(self, drafted: Drafted, scored: Scored, uniforms: Tensor, noise: Tensor) -> Tensor | None:
        """Verify, commit and record the step.

        `uniforms` [B, M, C] and `noise` [B, V] are bits for those of `verify`. Returns the guided logits
        [B, D + 1, V] along the accepted path, where they are kept.
        """
        decoding, relaxation, table = self.decoding, self.relaxation, self.table
        tree, logits, at = self.drafting.tree(drafted), scored.logits, self.progress
        learner = self.drafting if isinstance(self.drafting, KeepsState) else None
        if learner is not None or not decoding.greedy:
            p = decoding_probabilities(logits, decoding)
        if decoding.greedy:
            verdict = verify_greedy(tree, logits, relaxation, table, at.limit, at.position)
        else:
            last, chances = exponential(noise), uniform(uniforms)
            walk = self.drafting.verify if isinstance(self.drafting, VerifiesItself) else verify
            verdict = walk(tree, p, relaxation, table, chances, last, at.limit, self.accept, at.position)
        active = at.position < at.asked
        broken = has_broken(logits) if decoding.greedy else is_broken(p)
        at.commit(verdict, scored.features, broken.any(dim=1))
        if learner is not None:
            learner.after_step(LastStep(tree, p, verdict.path, verdict.accepted, verdict.tokens, at.position, active))
        self.session.commit(verdict.path, at.counts)
        if not self.keep_logits:
            return None
        return logits.gather(1, verdict.path.clamp_min(0)[:, :, None].expand(-1, -1, logits.shape[-1]))

    def noise(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """The random bits of a step: for the noise of the draft and of the last token, for the uniforms."""
        if self.decoding.greedy:
            none = torch.empty(self.batch, 0, dtype=torch.int32, device=draws.device)
            return none, none, none
        drafting, vocabulary = self.drafting, self.target.vocab_size
        parts = [drafting.noises * vocabulary, vocabulary, drafting.nodes * drafting.fanout]
        drafted, last, uniforms = torch.split(draws.bits(sum(parts)), parts, dim=1)
        uniforms = uniforms.view(self.batch, drafting.nodes, drafting.fanout)
        return drafted.view(self.batch, drafting.noises, vocabulary), last, uniforms
