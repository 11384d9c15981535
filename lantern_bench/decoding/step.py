"""One step of speculative decoding, as three programs: draft, score, verify.

1. The host draws the random bits of the step (`noise`).
2. `draft`: show the drafter what the last step committed, and fill the draft tree below it.
3. `score`: run the target once over all nodes of the tree.
4. `verify_and_commit`: decide on the drafts, commit the accepted ones and the bonus token, record
   the step, and give the drafting what it needs for the next one.
5. The host reads the position of each image and whether logits are broken
   (`ImageState.host_view`). This is the only copy to the host in a step.

Everything that changes from step to step is in tensors at fixed addresses, which the programs
write: `ImageState` and the drafting's `DraftTree`. `engine.py` says how programs run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.verify import verify_greedy
from lantern_bench.decoding.drafting.draft_method import (
    DraftInputs,
    DraftMethod,
    LastStep,
    Proposer,
    drafting_of,
)
from lantern_bench.decoding.engine import Engine, tensors_of, touch_while_tracing
from lantern_bench.decoding.image_state import FirstTokens, ImageState
from lantern_bench.decoding.protocol import Drafter, Logits, Target, TargetSession
from lantern_bench.decoding.sampling import (
    Draws,
    broken_distributions,
    broken_logits,
    decoding_probabilities,
    exponential,
    uniform,
)
from lantern_bench.decoding.tree import at_nodes
from lantern_bench.methods.catalog import PARAMETERS, RULES
from lantern_bench.methods.rules import Rule

# The settings that a drafting does not depend on.
_ACCEPTANCE = {"mode", "rule"}.union(*(rule.parameter_names for rule in RULES.values()))

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(tokens [B, M], depths [B, M], attention [B, M, M]) -> (guided logits [B, M, V], features)."""


def sampling_key(decoding: Decoding, *without: str) -> tuple[tuple[str, str], ...]:
    """Return the key of a program: the values of a configuration that are compiled into it.

    One program serves all sets of seeds and all values of float parameters of the rule.

    Args:
        decoding: The configuration.
        without: Further parameters that the program does not depend on.
    """
    omitted = {"seed_set", *float_values(decoding.rule_row), *without}
    settings = decoding.settings()
    return tuple((key, repr(value)) for key, value in settings.items() if key not in omitted)


def float_values(rule: Rule) -> list[str]:
    """Return the parameters of a rule that its program reads from tensors of one element."""
    return [name for name in rule.value_names if PARAMETERS[name].kind.dtype == "float"]


class TreeScorer:
    """The target's session for trees of at most `nodes`, and the forward over one tree."""

    def __init__(self, target: Target, *, batch: int, nodes: int, cfg_scale: float) -> None:
        self.session = target.session(batch, guided=cfg_scale != 1, nodes=nodes)
        self._cfg_scale = cfg_scale
        self._inputs = tensors_of(target)

    def score(self, tokens: Tensor, depths: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Score the nodes of a tree behind the committed tokens.

        Args:
            tokens: int64 [B, M].
            depths: int64 [B, M].
            attention: Node (row) sees node (column), bool [B, M, M].

        Returns:
            Guided logits float32 [B, M, V], and features [rows, M, width].
        """
        touch_while_tracing(self._inputs)
        return self.session.score_guided(
            tokens, depths=depths, attention=attention, cfg_scale=self._cfg_scale
        )


def tree_scorer(
    target: Target, *, batch: int, nodes: int, cfg_scale: float, engine: Engine
) -> tuple[TargetSession, Score]:
    """Return the target's session for draft trees, and the program that scores one.

    Args:
        target: The target.
        batch: How many images are decoded together.
        nodes: The most nodes of a tree, root included.
        cfg_scale: The guidance scale.
        engine: Compiles the program and keeps it.
    """
    key = ("score", batch, nodes, cfg_scale)
    scorer = engine.cached(
        key, lambda: TreeScorer(target, batch=batch, nodes=nodes, cfg_scale=cfg_scale)
    )
    return scorer.session, engine.program(key, scorer.score, target.device)


class SpeculativeStep:
    """The programs of one configuration for B images.

    Call `draft`, `score` and `verify_and_commit` in turn. Float values of the rule may differ from
    batch to batch (`start_images`).
    """

    # made for the first images, because the prefill shows the width of the features
    images: ImageState

    def __init__(
        self,
        *,
        target: Target,
        drafter: Drafter | None,
        decoding: Decoding,
        rule: ConfiguredRule,
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
            rule: The acceptance rule; it may differ from the rule of `decoding`.
            batch: How many images are decoded together.
            engine: Compiles the programs, and keeps them for the next batch.
            keep_logits: Whether `verify_and_commit` returns the logits along the accepted path.
            drafting: Replaces the drafting of the configuration, uncompiled.
            compiled: Whether `verify_and_commit` may be compiled.
        """
        self._target = target
        self._decoding = decoding
        self._batch = batch
        self._engine = engine
        self._keep_logits = keep_logits
        is_guided = decoding.cfg_scale != 1

        if drafting is None:
            draft_key = ("draft", batch, sampling_key(decoding, *_ACCEPTANCE))
            self.drafting = engine.cached(
                ("drafting", draft_key), lambda: drafting_of(decoding, target, batch)
            )
            self.draft = engine.program(draft_key, self._draft, target.device)
        else:
            self.drafting = drafting
            self.draft = self._draft

        nodes = self.drafting.tree.tokens.shape[1]
        self.session, self._score = tree_scorer(
            target, batch=batch, nodes=nodes, cfg_scale=decoding.cfg_scale, engine=engine
        )
        self.drafter_session = None
        if drafter is not None:
            self.drafter_session = drafter.session(batch, guided=is_guided, nodes=nodes)
        self._inputs = tensors_of(drafter)

        # Floats of the rule are read from tensors, which `start_images` fills.
        exact = torch.float32 if target.device.type == "mps" else torch.float64
        self._floats = {
            name: torch.zeros(1, dtype=exact, device=target.device)
            for name in float_values(rule.row)
            if name in rule.values
        }
        self._rule = replace(rule, values={**rule.values, **self._floats})
        self.verify_and_commit = self._verify_and_commit
        if compiled:
            verify_key = ("verify", batch, sampling_key(decoding, "mode"), keep_logits)
            self.verify_and_commit = engine.program(
                verify_key, self._verify_and_commit, target.device
            )

    def start_images(
        self,
        *,
        rule: ConfiguredRule,
        condition: Any,
        prefix: Logits,
        first: FirstTokens,
        tokens_wanted: int,
    ) -> None:
        """Start a batch of images.

        Args:
            rule: The rule, whose float values may differ from batch to batch.
            condition: What the images are conditioned on.
            prefix: The result of the prefill.
            first: The first tokens.
            tokens_wanted: How many tokens each image gets.
        """
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
        if self.drafting.reads_last_step:
            self.drafting.start_images(decoding_probabilities(first.logits, self._decoding))

    def noise(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the random bits, int32, of a step; all empty at temperature 0.

        Returns:
            The bits that draw the drafts [B, noises, V], the bits that accept or reject the
            children of each node [B, M, C], and the bits that draw the bonus token [B, V].
        """
        if self._decoding.greedy:
            no_bits = draws.bits(0)
            return no_bits, no_bits, no_bits
        vocabulary = self._target.vocab_size
        noises = self.drafting.noises
        children = self.drafting.tree.children
        sizes = [noises * vocabulary, vocabulary, children[0].numel()]
        draft, bonus, uniforms = torch.split(draws.bits(sum(sizes)), sizes, dim=1)
        draft = draft.view(self._batch, noises, vocabulary)
        return draft, uniforms.view_as(children), bonus

    def score(self) -> tuple[Tensor, Tensor]:
        """Score the draft tree, as `TreeScorer.score`."""
        tree = self.drafting.tree
        return self._score(tree.tokens, tree.depths, tree.attention)

    def score_unguided(self) -> Logits:
        """Score the draft tree and keep the conditional and unconditional logits, uncompiled."""
        tree = self.drafting.tree
        return self.session.score(tree.tokens, tree.depths, tree.attention)

    def _draft(self, bits: Tensor) -> None:
        """Show the drafter the committed tokens, and draft below the last of them.

        Args:
            bits: Random bits for the drafts, from `noise`.
        """
        touch_while_tracing(self._inputs)
        images = self.images
        proposer = None
        if self.drafter_session is not None:
            proposer = Proposer(
                self.drafter_session,
                self._decoding,
                tokens=images.tokens,
                features=images.features,
                counts=images.counts,
            )
        inputs = DraftInputs(
            root=images.root,
            noise=exponential(bits),
            depth_limit=images.depth_limit,
            proposer=proposer,
        )
        self.drafting.draft(inputs)
        if proposer is not None:
            images.drafter_broken.copy_(proposer.broken)

    def _verify_and_commit(
        self, logits: Tensor, features: Tensor, uniform_bits: Tensor, bonus_bits: Tensor
    ) -> Tensor | None:
        """Decide on the drafts, commit the accepted ones, and give the drafting what it reads.

        Args:
            logits: The guided logits that `score` returned.
            features: The features that `score` returned.
            uniform_bits: Random bits that accept or reject drafts, from `noise`.
            bonus_bits: Random bits that draw the bonus token, from `noise`.

        Returns:
            The guided logits [B, D + 1, V] along the accepted path; None unless `keep_logits`.
        """
        images = self.images
        p = logits
        if self.drafting.reads_last_step or not self._decoding.greedy:
            p = decoding_probabilities(logits, self._decoding)
        if self._decoding.greedy:
            verdict = verify_greedy(
                self.drafting.tree,
                logits,
                self._rule,
                depth_limit=images.depth_limit,
                position=images.position,
            )
            broken = broken_logits(logits)
        else:
            verdict = self.drafting.verify(
                self.drafting.tree,
                p,
                self._rule,
                uniforms=uniform(uniform_bits),
                noise=exponential(bonus_bits),
                depth_limit=images.depth_limit,
                position=images.position,
            )
            broken = broken_distributions(p)
        images.commit(verdict, features, broken.any(dim=1))
        if self.drafting.reads_last_step:
            found = LastStep(
                p=p,
                path=verdict.path,
                accepted=verdict.accepted,
                tokens=verdict.tokens,
                position=images.position,
                visit_probability=verdict.visit_probability,
            )
            self.drafting.after_step(found)
        self.session.commit(verdict.path, images.counts)
        if not self._keep_logits:
            return None
        return at_nodes(logits, verdict.path.clamp_min(0))
