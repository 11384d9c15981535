"""Decoding: autoregressive, and speculative with any drafting and rule (methods/).

One loop serves all speculative modes, whose steps are in `step.py`. The only copy to the host in a step says how
far the images are and whose logits are broken; an autoregressive step has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lantern_bench import stopping
from lantern_bench.clock import Phases
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, rule_of
from lantern_bench.decoding.compile import Engine, take_inputs, tensors_of
from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.protocol import DecodableModel, Drafter, DrafterSession, Logits, Target, TargetSession
from lantern_bench.decoding.sampling import (
    Draws,
    broken_distributions,
    broken_logits,
    decoding_probabilities,
    exponential,
    guide,
    sample,
)
from lantern_bench.decoding.step import DRAFTER, First, Speculation, sampling_key
from lantern_bench.decoding.trace import ImageTrace, image_trace
from lantern_bench.errors import LogitsError
from lantern_bench.methods.tables import missing_drafter


@dataclass(frozen=True)
class Decoded:
    """One decoded image."""

    tokens: Tensor  # int32 [N] on the CPU
    trace: ImageTrace
    logits: Tensor | None = None  # guided [N, V], when asked for


def drafter_and_rule(model: DecodableModel, decoding: Decoding) -> tuple[Drafter | None, AcceptanceRule]:
    """Return what a speculative configuration needs of a model besides its target.

    Raises `RefusedError` for a drafter that the model does not have, and as `rule_of`.
    """
    needs_drafter = decoding.drafting_row.needs_drafter
    if model.drafter is None and needs_drafter:
        raise missing_drafter(decoding.mode)
    return model.drafter if needs_drafter else None, rule_of(decoding, model)


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
    rule: AcceptanceRule | None = None,
    drafting: DraftMethod | None = None,
) -> list[Decoded]:
    """Decode one image for each generator, together.

    `condition` is what the target's `prefill` takes, for as many images. `tokens` asks for fewer than the whole grid.
    Without an `engine` the steps run eagerly. `rule` and `drafting` replace those of the configuration, for tests of
    broken ones. Raises `RefusedError` for a missing drafter, and `LogitsError` for NaN or infinite logits.
    """
    image_tokens = model.target.image_tokens
    wanted = image_tokens if tokens is None else min(tokens, image_tokens)
    device = model.target.device
    batch = _Batch(model, decoding, wanted, keep_logits, engine or Engine(), Draws(generators, device), Phases(device))
    if decoding.drafts:
        return speculative(batch, condition, rule, drafting)
    return autoregressive(batch, condition)


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

    def prefill(self, session: TargetSession, condition: Any) -> tuple[Logits, First]:
        """Logits of the prefix, and the first tokens."""
        prefix = session.prefill(condition)
        logits = guide(prefix.cond, prefix.uncond, self.decoding.cfg_scale)[:, -1]
        token, broken = _next_token(logits, self.decoding, self.noise())
        return prefix, First(token, logits, broken)

    def refuse(self, whose: str, position: int, *sessions: TargetSession | DrafterSession | None) -> NoReturn:
        """Raise `LogitsError` for the logits behind `position` tokens, and clear the caches, which hold NaN."""
        for session in sessions:
            if session is not None:
                session.clear()
        behind = f"behind {position} of {self.tokens_wanted} tokens ({self.decoding.mode})"
        message = f"the {whose} gave NaN or infinite logits {behind}"
        advice = "Check its weights; a smaller type can overflow: --dtype float32."
        deep = " So can a deep draft, whose levels are each computed from the one before: give a smaller depth."
        raise LogitsError(message, advice + deep * (whose == "drafter"))

    def decoded(self, out: Tensor, traces: list[ImageTrace], logits: Tensor | None) -> list[Decoded]:
        """Copy the tokens [B, >= N] and logits to the host, and give each image its share of the times."""
        tokens = out[:, : self.tokens_wanted].to(torch.int32).cpu()
        of_images: Iterable[Tensor | None] = [None] * self.size if logits is None else logits.float().cpu()
        seconds, usage = self.phases.total() / self.size, self.phases.usage
        phases = {name: value / self.size for name, value in self.phases.seconds().items()}
        timed = [replace(trace, seconds=seconds, phases=phases, usage=usage) for trace in traces]
        return [Decoded(*image) for image in zip(tokens, timed, of_images, strict=True)]


def autoregressive(batch: _Batch, condition: Any) -> list[Decoded]:
    """Decode one token a forward, drawn in the same program; nothing is copied to the host before the end."""
    target, decoding, wanted = batch.model.target, batch.decoding, batch.tokens_wanted
    key = ("plain", (batch.size, sampling_key(decoding)))
    steps = batch.engine.cached(key, lambda: _PlainSteps(target, decoding, batch.size))
    step = batch.engine.program(key, steps.step, target.device)
    batch.phases.start()
    _, first = batch.prefill(steps.session, condition)
    every_logits = [first.logits]
    steps.start_images(first)
    batch.phases.mark("prefill")
    for _ in range(wanted - 1):
        stopping.check()
        noise = batch.noise()
        batch.phases.mark("noise")
        logits = step(noise)
        batch.phases.mark("target")
        if batch.keep_logits:
            every_logits.append(logits.clone())
    batch.phases.stop()
    if position := int(steps.broken):
        batch.refuse("target", max(position, 0), steps.session)
    trace = image_trace(wanted, [[position, 0, 0] for position in range(1, wanted)], [], 0)
    logits_of_images = torch.stack(every_logits, dim=1) if batch.keep_logits else None
    return batch.decoded(steps.out, [trace] * batch.size, logits_of_images)


def speculative(
    batch: _Batch, condition: Any, rule: AcceptanceRule | None, drafting: DraftMethod | None
) -> list[Decoded]:
    """Draft a tree, score it in one forward, walk it, commit what was accepted; until every image is complete."""
    engine, decoding = batch.engine, batch.decoding
    drafter, own_rule = drafter_and_rule(batch.model, decoding)
    values = (batch.model.target, drafter, decoding, rule or own_rule, batch.size, engine, batch.keep_logits)
    if rule is None and drafting is None:
        key = ("speculation", batch.size, sampling_key(decoding), batch.keep_logits)
        speculation = engine.cached(key, lambda: Speculation(*values))
    else:
        speculation = Speculation(*values, drafting, compiled=False)
    batch.phases.start()
    prefix, first = batch.prefill(speculation.session, condition)
    speculation.start_images(rule or own_rule, condition, prefix, first, batch.tokens_wanted)
    batch.phases.mark("prefill")
    paths: list[Tensor] = []
    steps, before = 0, [0] * batch.size
    positions, broken = speculation.progress.host_view.tolist()  # one copy of the prefill: its logits may be broken
    while any(position < batch.tokens_wanted for position in positions) and not any(broken):
        stopping.check()
        draft_bits, uniform_bits, bonus_bits = speculation.noise(batch.draws)
        batch.phases.mark("noise")
        drafted, tree = speculation.draft(draft_bits)
        batch.phases.mark("draft")
        scored = speculation.score(*tree)
        batch.phases.mark("target")
        path_logits = speculation.settle(drafted, scored, uniform_bits, bonus_bits)
        if path_logits is not None:
            paths.append(path_logits.clone())
        before, (positions, broken) = positions, speculation.progress.host_view.tolist()  # the one copy of a step
        batch.phases.mark("verify")
        steps += 1
    batch.phases.stop()
    for whose, position in zip(broken, before, strict=True):
        if whose:
            model = "drafter" if whose == DRAFTER else "target"
            batch.refuse(model, position, speculation.session, speculation.drafter_session)
    progress = speculation.progress
    traces = progress.traces(batch.tokens_wanted, steps, speculation.drafting.forwards)
    return batch.decoded(progress.out, traces, _join(first.logits, paths, traces) if batch.keep_logits else None)


def _join(first: Tensor, paths: list[Tensor], traces: list[ImageTrace]) -> Tensor:
    """Return the guided logits [B, tokens, V] of every committed token, from those of each step's path."""
    images = []
    for image, trace in enumerate(traces):
        # A complete image has no more steps in its trace.
        committed = [logits[image, :count] for logits, count in zip(paths, trace.committed, strict=False)]
        images.append(torch.cat([first[image, None], *committed]))
    return torch.stack(images)


class _PlainSteps:
    """Autoregressive steps of B images, each one program: score the last token, draw the next."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        device, self._decoding = target.device, decoding
        self.session, self._inputs = target.session(batch, decoding.cfg_scale != 1, 1), tensors_of(target)
        self.out = torch.zeros(batch, target.image_tokens, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        # How many tokens there were when logits were broken first: -1 for none, in the prefill; 0 while all are finite.
        self.broken = torch.zeros(1, dtype=torch.int64, device=device)
        self._token, self._zero = (torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2))
        self._count = torch.ones(batch, dtype=torch.int64, device=device)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)

    def start_images(self, first: First) -> None:
        """Reset to the state after the prefill, and store the first tokens."""
        self._position.fill_(1)
        self.broken[0] = -first.broken.any().long()
        self._token[:, 0] = self.out[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Append a token to each image and return the guided logits [B, V] it was drawn from."""
        take_inputs(self._inputs)
        scored = self.session.score(self._token, self._zero, self._itself)
        self.session.commit(self._zero, self._count)
        logits = guide(scored.cond, scored.uncond, self._decoding.cfg_scale)[:, 0]
        token, broken = _next_token(logits, self._decoding, noise)
        token = token[:, None]
        self.broken.copy_(torch.where((self.broken == 0) & broken.any(), self._position, self.broken))
        self._token.copy_(token)
        self.out.index_copy_(1, self._position, token)
        self._position.add_(1)
        return logits


def _next_token(logits: Tensor, decoding: Decoding, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token [B] from guided logits [B, V] with bits of noise; also return which logits are broken, bool [B]."""
    if decoding.greedy:
        return logits.argmax(dim=-1), broken_logits(logits)
    p = decoding_probabilities(logits, decoding)
    return sample(p, exponential(noise)), broken_distributions(p)
