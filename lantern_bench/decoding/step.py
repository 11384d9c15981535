"""One step of speculative decoding as three programs: draft a tree, score it, settle what is committed.

Everything that changes from step to step is in tensors at fixed addresses, which the programs write, so that the host
only calls them, draws the noise and reads how far the images are. `compile.py` says how they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.acceptance.walk import Verdict, verify_greedy
from lantern_bench.decoding.compile import Engine, take_inputs, tensors_of
from lantern_bench.decoding.drafting import drafting_of
from lantern_bench.decoding.drafting.draft_method import Drafted, DraftInputs, DraftMethod, LastStep, Proposer
from lantern_bench.decoding.protocol import Drafter, Logits, Target, TargetSession
from lantern_bench.decoding.sampling import (
    Draws,
    broken_distributions,
    broken_logits,
    decoding_probabilities,
    exponential,
    guide,
    uniform,
)
from lantern_bench.decoding.trace import ImageTrace, image_trace
from lantern_bench.methods.tables import RULES, tensor_parameters

# The keys that drafting does not depend on.
_ACCEPTANCE = {"mode", "rule", *(key for rule in RULES.values() for key in rule.parameter_names)}

TARGET, DRAFTER = 1, 2
"""Whose logits are broken: in `Progress.host_view`, where 0 is for finite logits."""


def sampling_key(decoding: Decoding, *without: str) -> tuple[tuple[str, str], ...]:
    """Return the key of a program: a configuration without what it reads from tensors, and without the keys `without`.

    One program serves all sets of seeds, and every bound that is a tensor; external rules may branch on their bounds.
    """
    omitted = {"seed_set", *tensor_parameters(decoding.rule), *without}
    return tuple((key, repr(value)) for key, value in decoding.settings().items() if key not in omitted)


class Scored(NamedTuple):
    """The target's answer for a tree."""

    logits: Tensor  # guided, float32 [B, M, V]
    features: Tensor  # [rows, M, width]


class Scoring:
    """The target's session for trees of `nodes`, and the forward over one tree."""

    def __init__(self, target: Target, batch: int, nodes: int, cfg_scale: float) -> None:
        self.session, self._cfg_scale = target.session(batch, cfg_scale != 1, nodes), cfg_scale
        self._inputs = tensors_of(target)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> Scored:
        """Score tokens, depths int64 [B, M] and attention bool [B, M, M]."""
        take_inputs(self._inputs)
        if self._cfg_scale != 1:
            return Scored(*self.session.score_guided(tokens, depths, attention, self._cfg_scale))
        logits = self.session.score(tokens, depths, attention)
        return Scored(guide(logits.cond, None, 1.0), logits.features)


def scoring(
    target: Target, batch: int, nodes: int, cfg_scale: float, engine: Engine
) -> tuple[TargetSession, Callable[[Tensor, Tensor, Tensor], Scored]]:
    """Return the target's session for trees of `nodes`, and the program that scores tokens, depths and attention."""
    key = ("score", batch, nodes, cfg_scale)
    scoring = engine.cached(key, lambda: Scoring(target, batch, nodes, cfg_scale))
    return scoring.session, engine.program(key, scoring.score, target.device)


class First(NamedTuple):
    """The first tokens of B images."""

    tokens: Tensor  # int64 [B]
    logits: Tensor  # guided [B, V], what the tokens are drawn from
    broken: Tensor  # bool [B], which of the logits are NaN or infinite


class Progress:
    """Where B images are, in tensors at fixed addresses: shared by configurations of equal size."""

    def __init__(self, batch: int, image_tokens: int, depth: int, prefix_features: Tensor) -> None:
        device = prefix_features.device
        rows, _, width = prefix_features.shape
        self._image_tokens, self._depth = image_tokens, depth

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.out = numbers(batch, image_tokens + depth + 1)  # the tokens so far, then filler
        self.position = numbers(batch)  # how many tokens of each image count
        self.depth_limit = numbers(batch)  # the depth that may still be drafted
        # Of the last step: its tokens, their features, how many count, and the last of them.
        self.tokens, self.counts, self.root = numbers(batch, depth + 1), numbers(batch), numbers(batch)
        self.features = torch.zeros(rows, depth + 1, width, dtype=prefix_features.dtype, device=device)
        self.drafter_broken = torch.zeros(batch, dtype=torch.bool, device=device)  # in the draft of the running step
        self.tokens_wanted = numbers()
        self.host_view = numbers(2, batch)  # read by the host: positions, and whose logits were broken first
        self._step = numbers(1)
        # Of each step and image: position, accepted drafts, depth offered, and the accepted rank at each depth.
        self._counts = numbers(image_tokens, batch, 3 + depth)
        self._masses = torch.zeros(image_tokens, batch, 2, device=device)
        self._ahead = torch.arange(depth + 1, device=device)

    def start_images(self, tokens_wanted: int, prefix_features: Tensor, first: First) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self._step.zero_()
        self.tokens_wanted.fill_(tokens_wanted)
        self.position.fill_(1)
        self.depth_limit.fill_(min(self._depth, self._image_tokens - 2))
        self.counts.fill_(1)
        self.drafter_broken.zero_()
        self.host_view[0], self.host_view[1] = 1, first.broken * TARGET
        self.root.copy_(first.tokens)
        self.out[:, 0] = self.tokens[:, 0] = first.tokens
        self.features.zero_()  # filler is computed with too, and a NaN of the images before would spread
        self.features[:, 0] = prefix_features[:, -1]

    def commit(self, verdict: Verdict, features: Tensor, broken: Tensor) -> None:
        """Append what a verdict accepts; complete images stay as they are. `broken` bool [B]: the target's logits."""
        heads = torch.stack([self.position, verdict.accepted, self.depth_limit], dim=1)
        self._counts.index_copy_(0, self._step, torch.cat([heads, verdict.child_rank], dim=1)[None])
        masses = torch.stack([verdict.neighbour_mass, verdict.neighbour_mass_tried], dim=1)
        self._masses.index_copy_(0, self._step, masses[None])
        self._step.add_(1)
        active = self.position < self.tokens_wanted
        counts = torch.where(active, verdict.accepted + 1, 0)
        # Filler behind the tokens that count is overwritten by the next step or cut off at the end.
        columns = (self.position[:, None] + self._ahead).clamp_max(self.out.shape[1] - 1)
        self.out.scatter_(1, columns, torch.where(active[:, None], verdict.tokens, self.out.gather(1, columns)))
        last = verdict.tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        self.root.copy_(torch.where(active, last, self.root))
        self.position.add_(counts)
        self.counts.copy_(counts)
        self.depth_limit.copy_((self._image_tokens - 1 - self.position).clamp_max(self._depth))
        whose = torch.where(broken, TARGET, self.drafter_broken * DRAFTER)
        whose = torch.where(active & (self.host_view[1] == 0), whose, self.host_view[1])
        self.host_view.copy_(torch.stack([self.position, whose]))
        self.tokens.copy_(verdict.tokens)
        index = verdict.path.clamp_min(0).repeat(len(features) // len(active), 1)
        self.features.copy_(features.gather(1, index[:, :, None].expand(-1, -1, features.shape[-1])))

    def traces(self, tokens_wanted: int, steps: int, forwards: int) -> list[ImageTrace]:
        """Return the `image_trace` of each image after `steps` steps of `forwards` drafter forwards each."""
        counts, masses = (values[:steps].transpose(0, 1).tolist() for values in (self._counts, self._masses))
        images = zip(counts, masses, strict=True)
        return [image_trace(tokens_wanted, rows, pairs, forwards) for rows, pairs in images]


class Speculation:
    """The programs of one configuration for B images; bounds may differ from batch to batch (`start_images`).

    A `drafting` that is given replaces that of the configuration. `compiled` False runs the settle program eagerly.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        decoding: Decoding,
        rule: AcceptanceRule,
        batch: int,
        engine: Engine,
        keep_logits: bool,
        drafting: DraftMethod | None = None,
        compiled: bool = True,
    ) -> None:
        self._target, self._decoding, self._batch, self._engine = target, decoding, batch, engine
        self._keep_logits, device, scale = keep_logits, target.device, decoding.cfg_scale
        draft_key = ("draft", batch, sampling_key(decoding, *_ACCEPTANCE))
        if drafting is None:
            self.drafting = engine.cached(("drafting", draft_key), lambda: drafting_of(decoding, target, batch))
            self.draft = engine.program(draft_key, self._draft, device)
        else:
            self.drafting, self.draft = drafting, self._draft
        nodes = self.drafting.nodes
        self.session, self.score = scoring(target, batch, nodes, scale, engine)
        self.drafter_session = None if drafter is None else drafter.session(batch, scale != 1, nodes)
        self._inputs = tensors_of(drafter)
        # One program serves all values of a bound: it reads them from tensors, of one element each.
        exact = torch.float32 if device.type == "mps" else torch.float64
        names = tensor_parameters(decoding.rule) if rule.values else ()
        self._values = {name: torch.zeros(1, dtype=exact, device=device) for name in names}
        self._rule = replace(rule, values={**rule.values, **self._values})
        settle_key = ("settle", batch, sampling_key(decoding, "mode"), keep_logits)
        self.settle = engine.program(settle_key, self._settle, device) if compiled else self._settle

    def start_images(
        self, rule: AcceptanceRule, condition: Any, prefix: Logits, first: First, tokens_wanted: int
    ) -> None:
        """Start a batch of images whose prefill gave `prefix`."""
        for name, value in self._values.items():
            value.fill_(rule.values[name])
        shape = (self._batch, self._target.image_tokens, self.drafting.depth)
        key = ("progress", len(prefix.features), shape)
        self.progress = self._engine.cached(key, lambda: Progress(*shape, prefix.features))
        self.progress.start_images(tokens_wanted, prefix.features, first)
        if self.drafter_session is not None:
            self.drafter_session.prefill(condition, prefix.features)
        if self.drafting.learns:
            self.drafting.start_images(decoding_probabilities(first.logits, self._decoding))

    def noise(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Return the random bits of a step: for the draft, for the uniforms of the walk, for the bonus token."""
        if self._decoding.greedy:
            no_bits = torch.empty(self._batch, 0, dtype=torch.int32, device=draws.device)
            return no_bits, no_bits, no_bits
        drafting, vocabulary = self.drafting, self._target.vocab_size
        sizes = [drafting.noises * vocabulary, vocabulary, drafting.nodes * drafting.fanout]
        draft, bonus, uniforms = torch.split(draws.bits(sum(sizes)), sizes, dim=1)
        uniforms = uniforms.view(self._batch, drafting.nodes, drafting.fanout)
        return draft.view(self._batch, drafting.noises, vocabulary), uniforms, bonus

    def _draft(self, noise: Tensor) -> tuple[Drafted, tuple[Tensor, Tensor, Tensor]]:
        """Show the drafter what was committed and draft below it; `noise` [B, noises, V], bits.

        Also returns what the target scores: tokens, depths [B, M] and attention [B, M, M].
        """
        take_inputs(self._inputs)
        progress, session, proposer = self.progress, self.drafter_session, None
        if session is not None:
            proposer = Proposer(session, self._decoding, progress.tokens, progress.features, progress.counts)
        drafted = self.drafting.draft(DraftInputs(progress.root, exponential(noise), progress.depth_limit, proposer))
        if proposer is not None:
            progress.drafter_broken.copy_(proposer.broken)
        tree = self.drafting.tree(drafted)
        return drafted, (tree.tokens, tree.depths, tree.attention)

    def _settle(self, drafted: Drafted, scored: Scored, uniforms: Tensor, noise: Tensor) -> Tensor | None:
        """Verify, commit and record the step.

        `uniforms` [B, M, C] and `noise` [B, V] are bits for those of `verify`. Returns the guided logits
        [B, D + 1, V] along the accepted path, where they are kept.
        """
        decoding, drafting, progress = self._decoding, self.drafting, self.progress
        tree, logits = drafting.tree(drafted), scored.logits
        if drafting.learns or not decoding.greedy:
            p = decoding_probabilities(logits, decoding)
        if decoding.greedy:
            broken = broken_logits(logits)
            verdict = verify_greedy(tree, logits, self._rule, progress.depth_limit, progress.position)
        else:
            broken = broken_distributions(p)
            bonus = exponential(noise)
            verdict = drafting.verify(
                tree, p, self._rule, uniform(uniforms), bonus, progress.depth_limit, progress.position
            )
        active = progress.position < progress.tokens_wanted
        progress.commit(verdict, scored.features, broken.any(dim=1))
        if drafting.learns:
            position = progress.position
            drafting.after_step(LastStep(tree, p, verdict.path, verdict.accepted, verdict.tokens, position, active))
        self.session.commit(verdict.path, progress.counts)
        if not self._keep_logits:
            return None
        return logits.gather(1, verdict.path.clamp_min(0)[:, :, None].expand(-1, -1, logits.shape[-1]))
