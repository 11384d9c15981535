"""Decoding: autoregressive, and speculative with any drafting and rule (methods/).

One loop serves all speculative modes, whose steps are in `step.py`. The only copy to the host in a step says how far
the images are and whose logits are broken; an autoregressive step has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.bound_rule import BoundRule
from lantern_bench.decoding.acceptance.draft_view import Codes
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.engine import Engine, tensors_of
from lantern_bench.decoding.image_state import DRAFTER, FirstTokens
from lantern_bench.decoding.programs import touch_while_tracing
from lantern_bench.decoding.protocol import (
    DecodableModel,
    Drafter,
    DrafterSession,
    Logits,
    Target,
    TargetSession,
)
from lantern_bench.decoding.sampling import (
    Draws,
    broken_distributions,
    broken_logits,
    decoding_probabilities,
    exponential,
    guide,
    sample,
)
from lantern_bench.decoding.step import SpeculativeStep, sampling_key
from lantern_bench.decoding.trace import ImageTrace, StepRecord, image_trace
from lantern_bench.methods.catalog import missing_drafter
from lantern_bench.utils import signals
from lantern_bench.utils.clock import Phases
from lantern_bench.utils.errors import LogitsError


@dataclass(frozen=True)
class Decoded:
    """One decoded image."""

    tokens: Tensor  # int32 [N] on the CPU
    trace: ImageTrace
    logits: Tensor | None = None  # guided [N, V], when asked for


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
    rule: BoundRule | None = None,
    drafting: DraftMethod | None = None,
) -> list[Decoded]:
    """Decode one image for each generator, together.

    Args:
        model: What is decoded with.
        condition: What the target's `prefill` takes, for as many images.
        decoding: The mode and its parameters.
        generators: The random numbers of each image.
        tokens: How many tokens of the grid are wanted; None: all.
        keep_logits: Whether to return the logits that the tokens were drawn from.
        engine: Compiles the steps; without one they run eagerly.
        rule: Replaces the rule of the configuration, for tests of broken ones.
        drafting: Replaces the drafting of the configuration, likewise.

    Raises:
        RefusedError: The model has no drafter, and the drafting needs one.
        LogitsError: The target or the drafter gave NaN or infinite logits.
    """
    image_tokens = model.target.image_tokens
    device = model.target.device
    batch = _Batch(
        model=model,
        decoding=decoding,
        tokens_wanted=image_tokens if tokens is None else min(tokens, image_tokens),
        keep_logits=keep_logits,
        engine=engine or Engine(),
        draws=Draws(generators, device),
        phases=Phases(device),
    )
    if decoding.drafts:
        return _speculative(batch=batch, condition=condition, rule=rule, drafting=drafting)
    return _autoregressive(batch, condition)


def drafter_and_rule(model: DecodableModel, decoding: Decoding) -> tuple[Drafter | None, BoundRule]:
    """Return what a speculative configuration needs of a model besides its target.

    Raises `RefusedError` for a drafter that the model does not have, and as `bound_rule`.
    """
    if not decoding.drafting_row.needs_drafter:
        return None, bound_rule(decoding, model)
    if model.drafter is None:
        raise missing_drafter(decoding.mode)
    return model.drafter, bound_rule(decoding, model)


def bound_rule(decoding: Decoding, model: DecodableModel) -> BoundRule:
    """Return the acceptance rule of a decoding.

    Raises as `DecodableModel.table` and `DecodableModel.codes`.
    """
    rule = decoding.rule_row
    if rule.lossless:
        return BoundRule(rule)
    is_official = decoding.residual == "official"
    neighbours = decoding.neighbours or 0
    columns = neighbours
    if is_official and neighbours and rule.decide == "by neighbours":
        columns += 1  # a rejection treats one neighbour more
    codes = Codes(
        count=model.target.n_codes,
        neighbours=neighbours,
        nearest=model.table(columns, decoding.neighbour_metric) if columns else None,
        embeddings=model.codes if rule.codebook else None,
    )
    values = {key: decoding.value(key) for key in rule.value_names}
    if is_official:
        return OfficialRule(rule, values, codes)
    return BoundRule(rule, values, codes)


@dataclass(frozen=True)
class _Batch:
    """What stays the same from step to step of one batch of images."""

    model: DecodableModel
    decoding: Decoding
    tokens_wanted: int
    keep_logits: bool
    engine: Engine
    draws: Draws
    phases: Phases

    @property
    def size(self) -> int:
        """How many images there are."""
        return len(self.draws.generators)

    def noise(self) -> Tensor:
        """Random bits [B, V] for one token of each image, or nothing for greedy decoding."""
        if self.decoding.greedy:
            return torch.empty(self.size, 0, dtype=torch.int32, device=self.draws.device)
        return self.draws.bits(self.model.target.vocab_size)

    def prefill(self, session: TargetSession, condition: Any) -> tuple[Logits, FirstTokens]:
        """Return the logits of the prefix, and the first tokens."""
        prefix = session.prefill(condition)
        logits = guide(prefix.cond, prefix.uncond, self.decoding.cfg_scale)[:, -1]
        tokens, broken = _next_tokens(logits, self.decoding, self.noise())
        return prefix, FirstTokens(tokens=tokens, logits=logits, broken=broken)

    def refuse(
        self, whose: str, position: int, *sessions: TargetSession | DrafterSession | None
    ) -> NoReturn:
        """Raise `LogitsError` for the logits behind `position` tokens, and clear the caches, which hold NaN."""
        for session in sessions:
            if session is not None:
                session.clear()
        behind = f"behind {position} of {self.tokens_wanted} tokens ({self.decoding.mode})"
        advice = "Check its weights; a smaller type can overflow: --dtype float32."
        if whose == "drafter":
            advice += " So can a deep draft, whose levels are each computed from the one before: give a smaller depth."
        raise LogitsError(f"the {whose} gave NaN or infinite logits {behind}", advice)

    def decoded(
        self, out: Tensor, traces: list[ImageTrace], logits: Tensor | None
    ) -> list[Decoded]:
        """Copy the tokens [B, >= N] and logits to the host, and give each image its part of the times."""
        tokens = out[:, : self.tokens_wanted].to(torch.int32).cpu()
        logits_of_images: Iterable[Tensor | None] = [None] * self.size
        if logits is not None:
            logits_of_images = logits.float().cpu()
        times: dict[str, Any] = {
            "seconds": self.phases.total() / self.size,
            "phases": {
                name: seconds / self.size for name, seconds in self.phases.seconds().items()
            },
            "usage": self.phases.usage,
        }
        return [
            Decoded(tokens=image, trace=replace(trace, **times), logits=image_logits)
            for image, trace, image_logits in zip(tokens, traces, logits_of_images, strict=True)
        ]


def _speculative(
    batch: _Batch, condition: Any, rule: BoundRule | None, drafting: DraftMethod | None
) -> list[Decoded]:
    """Draft a tree, score it in one forward, verify it and commit what was accepted; until every image is complete."""
    step, rule = _speculative_step(batch, rule, drafting)
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
        noise = step.noise(batch.draws)
        batch.phases.mark("noise")
        drafted, tree = step.draft(noise.draft)
        batch.phases.mark("draft")
        scores = step.score(tree)
        batch.phases.mark("target")
        logits = step.verify(drafted, scores, noise.uniforms, noise.bonus)
        if logits is not None:
            path_logits.append(logits.clone())
        positions_before = positions
        positions, broken = step.images.host_view.tolist()  # the one copy of a step
        batch.phases.mark("verify")
        steps += 1
    batch.phases.stop()

    for whose, position in zip(broken, positions_before, strict=True):
        if whose:
            network = "drafter" if whose == DRAFTER else "target"
            batch.refuse(network, position, step.session, step.drafter_session)
    traces = step.images.traces(batch.tokens_wanted, steps, step.drafting.forwards)
    every_logits = _join(first.logits, path_logits, traces) if batch.keep_logits else None
    return batch.decoded(step.images.out, traces, every_logits)


def _speculative_step(
    batch: _Batch, rule: BoundRule | None, drafting: DraftMethod | None
) -> tuple[SpeculativeStep, BoundRule]:
    """Return the programs of a batch, and its rule; what replaces those of the configuration is not compiled."""
    drafter, own_rule = drafter_and_rule(batch.model, batch.decoding)
    is_replaced = rule is not None or drafting is not None
    rule = rule or own_rule

    def make() -> SpeculativeStep:
        return SpeculativeStep(
            target=batch.model.target,
            drafter=drafter,
            decoding=batch.decoding,
            rule=rule,
            batch=batch.size,
            engine=batch.engine,
            keep_logits=batch.keep_logits,
            drafting=drafting,
            compiled=not is_replaced,
        )

    if is_replaced:
        return make(), rule
    key = ("speculative step", batch.size, sampling_key(batch.decoding), batch.keep_logits)
    return batch.engine.cached(key, make), rule


def _join(first: Tensor, path_logits: list[Tensor], traces: list[ImageTrace]) -> Tensor:
    """Return the guided logits [B, tokens, V] of every committed token, from those of each step's path."""
    images = []
    for image, trace in enumerate(traces):
        # A complete image has no more steps in its trace.
        steps = zip(path_logits, trace.committed, strict=False)
        committed = [logits[image, :count] for logits, count in steps]
        images.append(torch.cat([first[image, None], *committed]))
    return torch.stack(images)


def _autoregressive(batch: _Batch, condition: Any) -> list[Decoded]:
    """Decode one token a forward, drawn in the same program; nothing is copied to the host before the end."""
    target = batch.model.target
    key = ("plain", (batch.size, sampling_key(batch.decoding)))
    steps = batch.engine.cached(key, lambda: _PlainSteps(target, batch.decoding, batch.size))
    step = batch.engine.program(key, steps.step, target.device)
    batch.phases.start()
    _, first = batch.prefill(steps.session, condition)
    every_logits = [first.logits]
    steps.start_images(first)
    batch.phases.mark("prefill")
    for _ in range(batch.tokens_wanted - 1):
        signals.check()
        noise = batch.noise()
        batch.phases.mark("noise")
        logits = step(noise)
        batch.phases.mark("target")
        if batch.keep_logits:
            every_logits.append(logits.clone())
    batch.phases.stop()

    if position := int(steps.broken):
        batch.refuse("target", max(position, 0), steps.session)
    records = [
        StepRecord(
            start=position,
            accepted=0,
            offered_depth=0,
            child_rank=[],
            neighbour_mass=0.0,
            neighbour_mass_tried=0.0,
        )
        for position in range(1, batch.tokens_wanted)
    ]
    trace = image_trace(records, batch.tokens_wanted, drafter_forwards=0)
    logits_of_images = torch.stack(every_logits, dim=1) if batch.keep_logits else None
    return batch.decoded(steps.out, [trace] * batch.size, logits_of_images)


class _PlainSteps:
    """Autoregressive steps of B images, each one program: score the last token, draw the next."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=target.device)

        self._decoding = decoding
        self._inputs = tensors_of(target)
        self.session = target.session(batch, guided=decoding.cfg_scale != 1, nodes=1)
        self.out = numbers(batch, target.image_tokens)
        self._position = numbers(1)
        # How many tokens there were when logits were broken first: -1 for none, in the prefill; 0 while all are finite.
        self.broken = numbers(1)
        # The tree of one node that a step scores and commits.
        self._token = numbers(batch, 1)
        self._depth = numbers(batch, 1)
        self._count = torch.ones(batch, dtype=torch.int64, device=target.device)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=target.device)

    def start_images(self, first: FirstTokens) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self._position.fill_(1)
        self.broken[0] = -first.broken.any().long()
        self._token[:, 0] = first.tokens
        self.out[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Append a token to each image and return the guided logits [B, V] it was drawn from."""
        touch_while_tracing(self._inputs)
        scored = self.session.score(self._token, self._depth, self._itself)
        self.session.commit(self._depth, self._count)
        logits = guide(scored.cond, scored.uncond, self._decoding.cfg_scale)[:, 0]
        tokens, broken = _next_tokens(logits, self._decoding, noise)
        self.broken.copy_(
            torch.where((self.broken == 0) & broken.any(), self._position, self.broken)
        )
        self._token.copy_(tokens[:, None])
        self.out.index_copy_(1, self._position, tokens[:, None])
        self._position.add_(1)
        return logits


def _next_tokens(logits: Tensor, decoding: Decoding, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens [B] from guided logits [B, V] with bits of noise; also return which logits are broken, bool [B]."""
    if decoding.greedy:
        return logits.argmax(dim=-1), broken_logits(logits)
    p = decoding_probabilities(logits, decoding)
    return sample(p, exponential(noise)), broken_distributions(p)
