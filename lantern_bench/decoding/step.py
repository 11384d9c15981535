"""One step of speculative decoding, as three programs: draft a tree, score it, verify it and commit what is accepted.

Everything that changes from step to step is in tensors at fixed addresses, which the programs write (`ImageState`). So
the host only calls them, draws the noise and reads how far the images are. `engine.py` says how programs run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.bound_rule import BoundRule
from lantern_bench.decoding.acceptance.verify import Verdict, verify_greedy
from lantern_bench.decoding.drafting.draft_method import (
    Drafted,
    DraftInputs,
    DraftMethod,
    LastStep,
    Proposer,
    drafting_of,
)
from lantern_bench.decoding.engine import Engine, tensors_of
from lantern_bench.decoding.image_state import FirstTokens, ImageState
from lantern_bench.decoding.programs import touch_while_tracing
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
from lantern_bench.decoding.tree import DraftTree
from lantern_bench.methods.catalog import PARAMETERS, RULES
from lantern_bench.methods.rules import Rule

# The keys that drafting does not depend on.
_ACCEPTANCE = {"mode", "rule", *(key for rule in RULES.values() for key in rule.parameter_names)}


def sampling_key(decoding: Decoding, *without: str) -> tuple[tuple[str, str], ...]:
    """Return the key of a program: a configuration without what it reads from tensors, and without some keys.

    One program serves all sets of seeds and all values of float parameters of the rule.
    """
    omitted = {"seed_set", *float_values(decoding.rule_row), *without}
    settings = decoding.settings()
    return tuple((key, repr(value)) for key, value in settings.items() if key not in omitted)


def float_values(rule: Rule) -> list[str]:
    """Return the parameters of a rule that its program reads from tensors of one element."""
    return [name for name in rule.value_names if PARAMETERS[name].kind.dtype == "float"]


class TreeInputs(NamedTuple):
    """What the target reads of a draft tree of M nodes."""

    tokens: Tensor  # int64 [B, M]
    depths: Tensor  # int64 [B, M]
    attention: Tensor  # bool [B, M, M], node (row) sees node (column)


class TreeScores(NamedTuple):
    """The target's answer for a tree."""

    logits: Tensor  # guided, float32 [B, M, V]
    features: Tensor  # [rows, M, width]


class StepNoise(NamedTuple):
    """The random bits, int32, of one step; all empty at temperature 0."""

    draft: Tensor  # [B, noises, V]
    uniforms: Tensor  # [B, M, C], which decide on the children of each node
    bonus: Tensor  # [B, V], which draw the token behind the accepted drafts


class TreeScorer:
    """The target's session for trees of `nodes`, and the forward over one tree."""

    def __init__(self, target: Target, batch: int, nodes: int, cfg_scale: float) -> None:
        self.session = target.session(batch, guided=cfg_scale != 1, nodes=nodes)
        self._cfg_scale = cfg_scale
        self._inputs = tensors_of(target)

    def score(self, tree: TreeInputs) -> TreeScores:
        """Score the nodes of a tree behind the committed tokens."""
        touch_while_tracing(self._inputs)
        if self._cfg_scale == 1:
            answer = self.session.score(tree.tokens, tree.depths, tree.attention)
            return TreeScores(logits=guide(answer.cond, None, 1.0), features=answer.features)
        logits, features = self.session.score_guided(
            tokens=tree.tokens,
            depths=tree.depths,
            attention=tree.attention,
            cfg_scale=self._cfg_scale,
        )
        return TreeScores(logits=logits, features=features)


def tree_scorer(
    target: Target, batch: int, nodes: int, cfg_scale: float, engine: Engine
) -> tuple[TargetSession, Callable[[TreeInputs], TreeScores]]:
    """Return the target's session for trees of `nodes`, and the program that scores one."""
    key = ("score", batch, nodes, cfg_scale)
    scorer = engine.cached(
        key, lambda: TreeScorer(target=target, batch=batch, nodes=nodes, cfg_scale=cfg_scale)
    )
    return scorer.session, engine.program(key, scorer.score, target.device)


class SpeculativeStep:
    """The programs of one configuration for B images: call `draft`, `score` and `verify` in turn.

    Bounds of the rule may differ from batch to batch (`start_images`).
    """

    def __init__(
        self,
        *,
        target: Target,
        drafter: Drafter | None,
        decoding: Decoding,
        rule: BoundRule,
        batch: int,
        engine: Engine,
        keep_logits: bool,
        drafting: DraftMethod | None = None,
        compiled: bool = True,
    ) -> None:
        """Make or find the programs.

        Args:
            target: The model whose distribution is sampled.
            drafter: The model that proposes tokens, for draftings that use one.
            decoding: The configuration.
            rule: Its acceptance rule, or another one.
            batch: How many images are decoded together.
            engine: Compiles the programs, and keeps them for the next batch.
            keep_logits: Whether `verify` returns the logits along the accepted path.
            drafting: Replaces the drafting of the configuration, uncompiled, for tests of broken ones.
            compiled: Whether `verify` may be compiled; it is not for tests of broken rules.
        """
        self._target = target
        self._decoding = decoding
        self._batch = batch
        self._engine = engine
        self._keep_logits = keep_logits
        cfg_scale = decoding.cfg_scale

        if drafting is None:
            draft_key = ("draft", batch, sampling_key(decoding, *_ACCEPTANCE))
            self.drafting = engine.cached(
                ("drafting", draft_key), lambda: drafting_of(decoding, target, batch)
            )
            self.draft = engine.program(draft_key, self._draft, target.device)
        else:
            self.drafting = drafting
            self.draft = self._draft

        nodes = self.drafting.nodes
        self.session, self.score = tree_scorer(
            target=target, batch=batch, nodes=nodes, cfg_scale=cfg_scale, engine=engine
        )
        self.drafter_session = None
        if drafter is not None:
            self.drafter_session = drafter.session(batch, guided=cfg_scale != 1, nodes=nodes)
        self._inputs = tensors_of(drafter)

        # Floats of the rule are read from tensors, which `start_images` fills.
        exact = torch.float32 if target.device.type == "mps" else torch.float64
        self._floats = {
            name: torch.zeros(1, dtype=exact, device=target.device)
            for name in float_values(rule.rule)
        }
        self._rule = replace(rule, values={**rule.values, **self._floats})
        self.verify = self._verify
        if compiled:
            verify_key = ("verify", batch, sampling_key(decoding, "mode"), keep_logits)
            self.verify = engine.program(verify_key, self._verify, target.device)

    def start_images(
        self,
        *,
        rule: BoundRule,
        condition: Any,
        prefix: Logits,
        first: FirstTokens,
        tokens_wanted: int,
    ) -> None:
        """Start a batch of images whose prefill gave `prefix` and the tokens `first`."""
        for name, value in self._floats.items():
            value.fill_(rule.values[name])

        image_tokens = self._target.image_tokens
        depth = self.drafting.depth
        key = ("images", len(prefix.features), self._batch, image_tokens, depth)
        self.images = self._engine.cached(
            key,
            lambda: ImageState(
                batch=self._batch,
                image_tokens=image_tokens,
                depth=depth,
                prefix_features=prefix.features,
            ),
        )
        self.images.start_images(tokens_wanted, prefix.features, first)
        if self.drafter_session is not None:
            self.drafter_session.prefill(condition, prefix.features)
        if self.drafting.learns:
            self.drafting.start_images(decoding_probabilities(first.logits, self._decoding))

    def noise(self, draws: Draws) -> StepNoise:
        """Draw the random bits of a step."""
        if self._decoding.greedy:
            no_bits = torch.empty(self._batch, 0, dtype=torch.int32, device=draws.device)
            return StepNoise(draft=no_bits, uniforms=no_bits, bonus=no_bits)
        vocabulary = self._target.vocab_size
        nodes = self.drafting.nodes
        fanout = self.drafting.fanout
        noises = self.drafting.noises
        sizes = [noises * vocabulary, vocabulary, nodes * fanout]
        draft, bonus, uniforms = torch.split(draws.bits(sum(sizes)), sizes, dim=1)
        return StepNoise(
            draft=draft.view(self._batch, noises, vocabulary),
            uniforms=uniforms.view(self._batch, nodes, fanout),
            bonus=bonus,
        )

    def _draft(self, noise: Tensor) -> tuple[Drafted, TreeInputs]:
        """Show the drafter what was committed, and draft below it."""
        touch_while_tracing(self._inputs)
        images = self.images
        proposer = None
        if self.drafter_session is not None:
            proposer = Proposer(
                session=self.drafter_session,
                decoding=self._decoding,
                tokens=images.tokens,
                features=images.features,
                counts=images.counts,
            )
        inputs = DraftInputs(
            root=images.root,
            noise=exponential(noise),
            depth_limit=images.depth_limit,
            proposer=proposer,
        )
        drafted = self.drafting.draft(inputs)
        if proposer is not None:
            images.drafter_broken.copy_(proposer.broken)
        tree = self.drafting.tree(drafted)
        return drafted, TreeInputs(tokens=tree.tokens, depths=tree.depths, attention=tree.attention)

    def _verify(
        self, drafted: Drafted, scores: TreeScores, uniform_bits: Tensor, bonus_bits: Tensor
    ) -> Tensor | None:
        """Decide on the drafts, commit what is accepted, and let the drafting learn from the step.

        Args:
            drafted: What `draft` returned.
            scores: What `score` returned.
            uniform_bits: `StepNoise.uniforms`.
            bonus_bits: `StepNoise.bonus`.

        Returns:
            The guided logits [B, D + 1, V] along the accepted path, where they are kept.
        """
        images = self.images
        tree = self.drafting.tree(drafted)
        p = None
        if self.drafting.learns or not self._decoding.greedy:
            p = decoding_probabilities(scores.logits, self._decoding)
        if self._decoding.greedy:
            broken = broken_logits(scores.logits)
            verdict = verify_greedy(
                tree=tree,
                guided_logits=scores.logits,
                rule=self._rule,
                depth_limit=images.depth_limit,
                position=images.position,
            )
        else:
            assert p is not None
            broken = broken_distributions(p)
            verdict = self.drafting.verify(
                tree,
                p,
                self._rule,
                uniform(uniform_bits),
                exponential(bonus_bits),
                images.depth_limit,
                images.position,
            )
        active = images.active
        images.commit(verdict, scores.features, broken.any(dim=1))
        if self.drafting.learns:
            assert p is not None
            self.drafting.after_step(
                _last_step(tree=tree, p=p, verdict=verdict, position=images.position, active=active)
            )
        self.session.commit(verdict.path, images.counts)
        if not self._keep_logits:
            return None
        path = verdict.path.clamp_min(0)[:, :, None]
        return scores.logits.gather(1, path.expand(-1, -1, scores.logits.shape[-1]))


def _last_step(
    tree: DraftTree, p: Tensor, verdict: Verdict, position: Tensor, active: Tensor
) -> LastStep:
    return LastStep(
        tree=tree,
        p=p,
        path=verdict.path,
        accepted=verdict.accepted,
        tokens=verdict.tokens,
        position=position,
        active=active,
    )
