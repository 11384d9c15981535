"""Decoding: without drafts, and speculative with any drafting and rule (methods/).

One loop serves all speculative modes, whose steps are in `step.py`. Another one serves the modes
that draft nothing, whose steps are in `orders/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Codebook
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.engine import Engine
from lantern_bench.decoding.image_state import DRAFTER, FirstTokens
from lantern_bench.decoding.orders.plain import Steps
from lantern_bench.decoding.protocol import (
    DecodableModel,
    Drafter,
    DrafterSession,
    Logits,
    TargetSession,
)
from lantern_bench.decoding.sampling import Draws, draw_tokens, guide
from lantern_bench.decoding.step import SpeculativeStep, sampling_key
from lantern_bench.decoding.trace import ImageTrace, plain_trace
from lantern_bench.methods.catalog import missing_drafter
from lantern_bench.methods.parameters import load_code
from lantern_bench.utils import signals
from lantern_bench.utils.clock import Phases
from lantern_bench.utils.errors import LogitsError

Observer: TypeAlias = Callable[[SpeculativeStep, Logits], None]
"""Sees each step between scoring and verification, with all logits of the target."""


@dataclass(frozen=True)
class Decoded:
    """One decoded image."""

    # int32 [N] on the CPU
    tokens: Tensor
    trace: ImageTrace
    # guided [N, V], when asked for
    logits: Tensor | None = None


def image_generators(model: DecodableModel, seeds: Iterable[int]) -> list[torch.Generator]:
    """Return a seeded generator for each image, on the model's device."""
    device = model.target.device
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


@torch.inference_mode()
def decode(
    model: DecodableModel,
    condition: Any,
    decoding: Decoding,
    generators: Sequence[torch.Generator],
    *,
    tokens: int | None = None,
    keep_logits: bool = False,
    engine: Engine | None = None,
    rule: ConfiguredRule | None = None,
    drafting: DraftMethod | None = None,
    observe: Observer | None = None,
) -> list[Decoded]:
    """Decode one image for each generator, together.

    Tests pass a wrong rule or drafting to see whether they notice it; these run uncompiled.

    Args:
        model: The model to decode with.
        condition: The argument of the target's `prefill`, for this number of images.
        decoding: The mode and its parameters.
        generators: One random generator for each image.
        tokens: How many tokens to decode; None: all tokens of the grid.
        keep_logits: Whether to return the logits that the tokens were drawn from.
        engine: Compiles the steps; without one they run eagerly.
        rule: Replaces the rule of the configuration.
        drafting: Replaces the drafting of the configuration.
        observe: Sees every speculative step. Its target forwards run uncompiled.

    Returns:
        The images, in the order of the generators.

    Raises:
        RefusedError: The model lacks what the configuration needs, as `check_decodable`.
        UserError: As `check_decodable`.
        LogitsError: The target or the drafter gave NaN or infinite logits.
    """
    batch = _Batch(
        model, decoding, generators, tokens=tokens, keep_logits=keep_logits, engine=engine
    )
    if not decoding.drafts:
        return _without_drafts(batch, condition)
    drafter, own_rule = drafter_and_rule(model, decoding)
    if rule is None and drafting is None:
        step = cached_step(
            model, decoding, batch=batch.size, engine=batch.engine, keep_logits=keep_logits
        )
    else:
        step = SpeculativeStep(
            target=batch.target,
            drafter=drafter,
            decoding=decoding,
            rule=rule or own_rule,
            batch=batch.size,
            engine=batch.engine,
            keep_logits=keep_logits,
            drafting=drafting,
            compiled=False,
        )
    return _speculative(batch, condition, step=step, rule=rule or own_rule, observe=observe)


def cached_step(
    model: DecodableModel,
    decoding: Decoding,
    *,
    batch: int,
    engine: Engine,
    keep_logits: bool = False,
) -> SpeculativeStep:
    """Return the programs of a speculative configuration, which the engine keeps.

    Args:
        model: The model to decode with.
        decoding: The mode and its parameters.
        batch: How many images are decoded together.
        engine: Compiles the programs.
        keep_logits: Whether `verify_and_commit` returns the logits along the accepted path.

    Raises:
        RefusedError: The model lacks what the configuration needs, as `check_decodable`.
        UserError: As `check_decodable`.
    """

    def make() -> SpeculativeStep:
        drafter, rule = drafter_and_rule(model, decoding)
        return SpeculativeStep(
            target=model.target,
            drafter=drafter,
            decoding=decoding,
            rule=rule,
            batch=batch,
            engine=engine,
            keep_logits=keep_logits,
        )

    return engine.cached(("speculative step", batch, sampling_key(decoding), keep_logits), make)


def check_decodable(model: DecodableModel, decoding: Decoding) -> None:
    """Check that a model has what a configuration needs.

    Raises:
        RefusedError: A drafter is missing, or the tokens do not form rows.
        UserError: A value does not fit the model.
    """
    if decoding.drafts:
        drafter_and_rule(model, decoding)
    else:
        _steps_of(decoding).check(model.target, decoding)


def _steps_of(decoding: Decoding) -> type[Steps]:
    """Return the class of the steps of a configuration without drafts."""
    steps: Any = load_code(decoding.drafting_row.steps)
    return cast("type[Steps]", steps)


def drafter_and_rule(
    model: DecodableModel, decoding: Decoding
) -> tuple[Drafter | None, ConfiguredRule]:
    """Return the drafter (None: not needed) and the acceptance rule of a speculative configuration.

    Raises `RefusedError` if the drafting needs a drafter that the model does not have; also as
    `configured_rule`.
    """
    if not decoding.drafting_row.needs_drafter:
        return None, configured_rule(decoding, model)
    if model.drafter is None:
        raise missing_drafter(decoding.mode)
    return model.drafter, configured_rule(decoding, model)


def configured_rule(decoding: Decoding, model: DecodableModel) -> ConfiguredRule:
    """Return the acceptance rule of a decoding.

    Raises as `DecodableModel.table` and `DecodableModel.codes`.
    """
    rule = decoding.rule_row
    if rule.lossless:
        return ConfiguredRule(rule)
    is_official = decoding.residual == "official"
    neighbours = decoding.neighbours or 0
    columns = neighbours
    if is_official and neighbours and rule.kind == "by neighbours":
        # The authors' code handles one more neighbour in a rejection.
        columns += 1
    codebook = Codebook(
        n_codes=model.target.n_codes,
        neighbours=neighbours,
        nearest=model.table(columns, decoding.neighbour_metric) if columns else None,
        embeddings=model.codes if rule.codebook else None,
    )
    values = {key: decoding.value(key) for key in rule.value_names}
    make = OfficialRule if is_official else ConfiguredRule
    return make(rule, values, codebook)


class _Batch:
    """The parts of decoding one batch of images that do not change between steps."""

    def __init__(
        self,
        model: DecodableModel,
        decoding: Decoding,
        generators: Sequence[torch.Generator],
        *,
        tokens: int | None,
        keep_logits: bool,
        engine: Engine | None,
    ) -> None:
        target = model.target
        self.target = target
        self.decoding = decoding
        self.size = len(generators)
        all_tokens = target.image_tokens
        self.tokens_wanted = all_tokens if tokens is None else min(tokens, all_tokens)
        self.keep_logits = keep_logits
        self.engine = engine or Engine()
        self.draws = Draws(generators, target.device)
        self.phases = Phases(target.device)

    def noise(self, tokens: int = 1) -> Tensor:
        """Random bits [B, tokens * V] that draw tokens; [B, 0] for greedy decoding."""
        return self.draws.bits(0 if self.decoding.greedy else tokens * self.target.vocab_size)

    def prefill(self, session: TargetSession, condition: Any) -> tuple[Logits, FirstTokens]:
        """Return the logits of the prefix, and the first tokens."""
        prefix = session.prefill(condition)
        logits = guide(prefix.cond, prefix.uncond, self.decoding.cfg_scale)[:, -1]
        tokens, broken = draw_tokens(logits, self.decoding, self.noise())
        return prefix, FirstTokens(tokens=tokens, logits=logits, broken=broken)

    def refuse(
        self,
        whose: str,
        position: int,
        *,
        sessions: Iterable[TargetSession | DrafterSession | None],
    ) -> NoReturn:
        """Raise `LogitsError` after clearing the caches, which hold NaN.

        Args:
            whose: `target` or `drafter`.
            position: How many tokens there were before the broken logits.
            sessions: Their caches are cleared.
        """
        for session in sessions:
            if session is not None:
                session.clear()
        place = f"after {position} of {self.tokens_wanted} tokens ({self.decoding.mode})"
        advice = "Check its weights. A 16-bit type can overflow: try --dtype float32."
        if whose == "drafter":
            advice += " Errors also grow with each level of a draft: try a smaller depth."
        raise LogitsError(f"the {whose} gave NaN or infinite logits {place}", advice)

    def decoded(
        self, out: Tensor, traces: list[ImageTrace], logits: Tensor | None
    ) -> list[Decoded]:
        """Return the images, each with its share of the batch's times.

        Args:
            out: The tokens [B, >= N].
            traces: What each step did to each image.
            logits: The guided logits [B, N, V], where they are kept.
        """
        tokens = out[:, : self.tokens_wanted].to(torch.int32).cpu()
        logits_of_images = [None] * self.size if logits is None else logits.float().cpu()
        shared: dict[str, Any] = {
            "seconds": self.phases.total() / self.size,
            "phases": {name: total / self.size for name, total in self.phases.seconds().items()},
            "usage": self.phases.usage,
        }
        if self.decoding.emitted_tv_problem is not None:
            shared["emitted_tv"] = None
        return [
            Decoded(tokens=image, trace=replace(trace, **shared), logits=image_logits)
            for image, trace, image_logits in zip(tokens, traces, logits_of_images, strict=True)
        ]


def _speculative(
    batch: _Batch,
    condition: Any,
    *,
    step: SpeculativeStep,
    rule: ConfiguredRule,
    observe: Observer | None,
) -> list[Decoded]:
    """Draft, score, verify and commit until every image is complete."""
    batch.phases.start()
    prefix, first = batch.prefill(step.session, condition)
    step.start_images(
        rule=rule,
        condition=condition,
        prefix=prefix,
        first=first,
        tokens_wanted=batch.tokens_wanted,
    )
    batch.phases.mark("prefill")

    steps = 0
    path_logits: list[Tensor] = []
    positions_before = [0] * batch.size
    positions, broken = step.images.host_view.tolist()  # the logits of the prefill may be broken
    while min(positions) < batch.tokens_wanted and not any(broken):
        signals.check()
        draft_bits, uniform_bits, bonus_bits = step.noise(batch.draws)
        batch.phases.mark("noise")
        step.draft(draft_bits)
        batch.phases.mark("draft")
        if observe is None:
            logits, features = step.score()
        else:
            scored = step.score_unguided()
            observe(step, scored)
            logits = guide(scored.cond, scored.uncond, batch.decoding.cfg_scale)
            features = scored.features
        batch.phases.mark("target")
        along_path = step.verify_and_commit(logits, features, uniform_bits, bonus_bits)
        if along_path is not None:
            path_logits.append(along_path.clone())
        positions_before = positions
        positions, broken = step.images.host_view.tolist()  # the one copy of a step
        batch.phases.mark("verify")
        steps += 1
    batch.phases.stop()

    for whose, position in zip(broken, positions_before, strict=True):
        if whose:
            network = "drafter" if whose == DRAFTER else "target"
            batch.refuse(network, position, sessions=(step.session, step.drafter_session))
    traces = step.images.steps.traces(batch.tokens_wanted, steps, step.drafting.forwards)
    every_logits = _join(first.logits, path_logits, traces) if batch.keep_logits else None
    return batch.decoded(step.images.out, traces, every_logits)


def _join(first: Tensor, path_logits: list[Tensor], traces: list[ImageTrace]) -> Tensor:
    """Return the guided logits [B, tokens, V] of every committed token.

    Args:
        first: The logits of the first tokens.
        path_logits: For each step the logits along its paths.
        traces: How many tokens each step committed.
    """
    images = []
    for image, trace in enumerate(traces):
        # A complete image has no more steps in its trace.
        steps = zip(path_logits, trace.committed, strict=False)
        committed = [logits[image, :count] for logits, count in steps]
        images.append(torch.cat([first[image, None], *committed]))
    return torch.stack(images)


def _without_drafts(batch: _Batch, condition: Any) -> list[Decoded]:
    """Decode in steps that draft nothing; nothing is copied to the host before the end."""
    target = batch.target
    make = _steps_of(batch.decoding)
    key = ("plain", (batch.size, sampling_key(batch.decoding)))
    steps = batch.engine.cached(key, lambda: make(target, batch.decoding, batch.size))
    step = batch.engine.program(key, steps.step, target.device)
    positions_of_steps = steps.positions(batch.tokens_wanted)

    batch.phases.start()
    _, first = batch.prefill(steps.session, condition)
    steps.start_images(first)
    every_logits = None
    if batch.keep_logits:
        every_logits = first.logits.new_zeros(batch.size, batch.tokens_wanted, target.vocab_size)
        every_logits[:, 0] = first.logits
    batch.phases.mark("prefill")
    for positions in positions_of_steps:
        signals.check()
        noise = batch.noise(steps.noises)
        batch.phases.mark("noise")
        logits = step(noise)
        batch.phases.mark("target")
        if every_logits is not None:
            every_logits[:, positions] = logits[:, : len(positions)]
    batch.phases.stop()

    position = int(steps.broken)
    if position != 0:
        batch.refuse("target", max(position, 0), sessions=(steps.session,))
    trace = plain_trace(list(map(len, positions_of_steps)))
    return batch.decoded(steps.out, [trace] * batch.size, every_logits)
