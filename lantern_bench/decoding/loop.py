"""Decoding: autoregressive, and speculative with any drafting and rule (lantern_bench/methods).

One loop serves all speculative modes, whose steps are in `step.py`. The only copy to the host in a step is how far the
images are; an autoregressive step has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from lantern_bench import stopping
from lantern_bench.clock import Phases
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.relaxation import Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Accept
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.protocol import Drafter, KeepsCache, Logits, Target, WithForcedTokens
from lantern_bench.decoding.sampling import (
    Draws,
    decoding_probabilities,
    exponential,
    guide,
    has_broken,
    is_broken,
    sample,
)
from lantern_bench.decoding.step import DRAFTER, PREFILL, First, Speculation, sampling_key
from lantern_bench.decoding.trace import ImageTrace, Times, image_trace
from lantern_bench.errors import LogitsError, RefusedError
from lantern_bench.methods.code import Code
from lantern_bench.methods.parameters import NeighbourMetric


class Model(Protocol):
    """What `decode` needs: a target, a drafter where drafts are asked for, nearest codes where a rule reads them."""

    target: Target
    drafter: Drafter | None

    @property
    def codes(self) -> Tensor:
        """Embeddings of the tokens [V, d] on the target's device, in the space that neighbours are measured in."""

    def table(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """The nearest codes int [V, columns] by a metric."""


@dataclass(frozen=True)
class Decoded:
    """One image: its tokens int32 [N] on the CPU, what happened, and the guided logits [N, V] when asked for."""

    tokens: Tensor
    trace: ImageTrace
    logits: Tensor | None = None


def relaxation_of(decoding: Decoding, model: Model) -> Relaxation:
    """The acceptance rule of a configuration, with what it reads of a model; raises as `Model.codes`."""
    row, target = decoding.rule_row, model.target
    if row.lossless:
        return Relaxation(decoding.rule if decoding.drafts else "strict")
    choices = target.n_codes if isinstance(target, WithForcedTokens) else None
    bound, *others = ((key, decoding.value(key)) for key in row.value_names)
    codes = model.codes if row.codebook else None
    values: tuple[Any, ...] = (
        decoding.neighbours or 0,
        bound[1],
        decoding.residual or "exact",
        choices,
        tuple(others),
        codes,
    )
    return Relaxation(decoding.rule, *values)


def drafter_and_table(model: Model, decoding: Decoding) -> tuple[Drafter | None, Tensor | None]:
    """Return the drafter and the table of nearest codes that a speculative configuration uses.

    Raises `RefusedError` for a model without a drafter, and as `Model.table` and `Model.codes`.
    """
    if model.drafter is None and decoding.drafting_row.needs_drafter:
        raise RefusedError(
            f"mode {decoding.mode} needs a drafter, and this model has none", "Use --modes ar, or add a drafter."
        )
    columns = relaxation_of(decoding, model).columns
    drafter = model.drafter if decoding.drafting_row.needs_drafter else None
    return drafter, model.table(columns, decoding.neighbour_metric) if columns else None


@torch.inference_mode()
def decode(
    model: Model,
    condition: Any,
    decoding: Decoding,
    generators: Sequence[torch.Generator],
    *,
    tokens: int | None = None,
    keep_logits: bool = False,
    engine: Engine | None = None,
    accept: Accept | None = None,
    make: Code | None = None,
) -> list[Decoded]:
    """Decode one image for each generator, together.

    `condition` is what the target's `prefill` takes, for as many images. `tokens` asks for fewer than the whole grid.
    `keep_logits` keeps the guided logits that each token was drawn from. `engine` runs the steps; without one
    they run eagerly. `accept` as in `verify`; `make` replaces that of the drafting's row, for tests of broken ones.
    Raises `RefusedError` for a model without a drafter that needs one, and `LogitsError` for NaN or infinite logits: at
    the step, without a copy to the host of its own; of autoregressive decoding at the end of the image.
    """
    asked = model.target.image_tokens if tokens is None else min(tokens, model.target.image_tokens)
    run = _Run(model, decoding, generators, asked, keep_logits, Engine() if engine is None else engine, accept, make)
    return run.autoregressive(condition) if not decoding.drafts else run.speculative(condition)


@dataclass(eq=False)
class _Run:
    """The decoding of one batch: what stays the same from step to step."""

    model: Model
    decoding: Decoding
    generators: Sequence[torch.Generator]
    asked: int
    keep_logits: bool
    engine: Engine
    accept: Accept | None
    make: Code | None

    def __post_init__(self) -> None:
        self.batch, self.device = len(self.generators), self.model.target.device
        self.draws, self.phases = Draws(self.generators, self.device), Phases(self.device)

    def noise(self) -> Tensor:
        """Random bits [B, V] for one token of each image, or nothing for greedy decoding."""
        if self.decoding.greedy:
            return torch.empty(self.batch, 0, dtype=torch.int32, device=self.device)
        return self.draws.bits(self.model.target.vocab_size)

    def prefill(self, session: Any, condition: Any) -> tuple[Logits, First]:
        """Logits of the prefix, and the first tokens."""
        scores = session.prefill(condition)
        logits = guide(scores.cond, scores.uncond, self.decoding.cfg_scale)[:, -1]
        token, broken = _chosen(logits, self.decoding, self.noise())
        return scores, First(token, logits, broken)

    def times(self, last: str) -> Times:
        """Return the times of the batch, whose steps end with the phase `last`."""
        phases = {name: value / self.batch for name, value in self.phases.seconds().items()}
        ends = self.phases.ends("prefill", last)
        return Times(self.phases.total() / self.batch, phases, self.phases.usage, ends)

    def autoregressive(self, condition: Any) -> list[Decoded]:
        """One token a forward, drawn in the same program; nothing is copied to the host before the end."""
        key = (self.batch, sampling_key(self.decoding))
        target, decoding = self.model.target, self.decoding
        steps = self.engine.cached(("plain", key), lambda: _PlainSteps(target, decoding, self.batch))
        step = self.engine.program(("plain", key), steps.step, self.device)
        self.phases.start()
        _, first = self.prefill(steps.session, condition)
        kept = [first.logits]
        steps.begin(first)
        self.phases.mark("prefill")
        for _ in range(self.asked - 1):
            stopping.check()
            noise = self.noise()
            self.phases.mark("noise")
            logits = step(noise)
            self.phases.mark("target")
            if self.keep_logits:
                kept.append(logits.clone())
        self.phases.stop()
        if (behind := int(steps.broken)) and not self.engine.only_compiles:
            self._refuse("target", max(behind, 0), steps.session)
        trace = image_trace(self.asked, [[at, 0, 0] for at in range(1, self.asked)], [], 0, self.times("target"))
        return self._decoded(steps.out, [trace] * self.batch, torch.stack(kept, dim=1) if self.keep_logits else None)

    def speculative(self, condition: Any) -> list[Decoded]:
        """Draft a tree, score it in one forward, walk it, commit what was accepted; until every image is complete."""
        relaxation = relaxation_of(self.decoding, self.model)
        drafter, table = drafter_and_table(self.model, self.decoding)
        values = (self.model.target, drafter, self.decoding, relaxation, table, self.batch, self.engine)
        key = ("speculation", self.batch, sampling_key(self.decoding), self.keep_logits, self.accept, self.make)
        speculation = self.engine.cached(key, lambda: Speculation(*values, self.keep_logits, self.accept, self.make))
        self.phases.start()
        scores, first = self.prefill(speculation.session, condition)
        speculation.begin(relaxation, condition, scores, first, self.asked)
        self.phases.mark("prefill")
        kept: list[tuple[list[int], Tensor]] = []
        positions, steps = [1] * self.batch, 0
        while any(at < self.asked for at in positions):
            stopping.check()
            drafting, last, uniforms = speculation.noise(self.draws)
            self.phases.mark("noise")
            drafted = speculation.draft(drafting)
            self.phases.mark("draft")
            scored = speculation.score(drafted)
            self.phases.mark("target")
            on_path = speculation.settle(drafted, scored, uniforms, last)
            if on_path is not None:
                kept.append((positions, on_path.clone()))
            before, (positions, broken) = positions, speculation.progress.told.tolist()  # the one copy of a step
            self.phases.mark("verify")
            steps += 1
            if self.engine.only_compiles:
                break
            if any(broken):
                self._refuse_step(speculation, broken, before)
        self.phases.stop()
        if steps == 0:
            self._refuse_step(speculation, speculation.progress.told[1].tolist(), positions)
        progress, forwards = speculation.progress, speculation.drafting.forwards
        traces = progress.recorder.finish(self.asked, steps, forwards, self.times("verify"))
        return self._decoded(progress.out, traces, self._assemble(first.logits, kept) if self.keep_logits else None)

    def _refuse_step(self, speculation: Speculation, broken: list[int], positions: list[int]) -> None:
        """Raise `LogitsError` for the first image whose logits were `broken`; its tokens before: `positions`."""
        sessions = (speculation.session, speculation.drafter_session)
        for whose, behind in zip(broken, positions, strict=True):
            if whose:
                self._refuse("drafter" if whose == DRAFTER else "target", 0 if whose == PREFILL else behind, *sessions)

    def _refuse(self, whose: str, behind: int, *sessions: object) -> NoReturn:
        for session in sessions:
            if isinstance(session, KeepsCache):
                session.clear()
        what = f"the {whose} gave NaN or infinite logits behind {behind} of {self.asked} tokens ({self.decoding.mode})"
        raise LogitsError(what, "Check its weights; a smaller type can overflow: --dtype float32.")

    def _assemble(self, first: Tensor, kept: list[tuple[list[int], Tensor]]) -> Tensor:
        """Guided logits [B, asked, V] of every kept token, from those of each step's path."""
        width = kept[0][1].shape[1] if kept else 1
        whole = first.new_zeros(self.batch, self.asked + width, first.shape[-1])
        whole[:, 0] = first
        for positions, logits in kept:
            for image, at in enumerate(positions):
                if at < self.asked:
                    whole[image, at : at + width] = logits[image]
        return whole[:, : self.asked]

    def _decoded(self, out: Tensor, traces: list[ImageTrace], logits: Tensor | None) -> list[Decoded]:
        tokens = out[:, : self.asked].to(torch.int32).cpu()
        kept: Iterable[Tensor | None] = [None] * self.batch if logits is None else logits.float().cpu()
        return [Decoded(*parts) for parts in zip(tokens, traces, kept, strict=True)]


class _PlainSteps:
    """Autoregressive steps of B images, each one program: score the last token, draw the next."""

    def __init__(self, target: Target, decoding: Decoding, batch: int) -> None:
        device, self._decoding = target.device, decoding
        self.session = target.session(batch, decoding.cfg_scale != 1, 1)
        self.out = torch.zeros(batch, target.image_tokens, dtype=torch.int64, device=device)
        self._made = torch.zeros(1, dtype=torch.int64, device=device)
        # How many tokens there were when logits were broken first: -1 for none, in the prefill; 0 while all are whole.
        self.broken = torch.zeros(1, dtype=torch.int64, device=device)
        self._token, self._zero = (torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2))
        self._one = torch.ones(batch, dtype=torch.int64, device=device)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)

    def begin(self, first: First) -> None:
        """The first tokens are drawn."""
        self._made.fill_(1)
        self.broken[0] = -first.broken.any().long()
        self._token[:, 0] = self.out[:, 0] = first.tokens

    def step(self, noise: Tensor) -> Tensor:
        """Append a token to each image and return the guided logits [B, V] it was drawn from."""
        scores = self.session.score(self._token, self._zero, self._itself)
        self.session.commit(self._zero, self._one)
        logits = guide(scores.cond, scores.uncond, self._decoding.cfg_scale)[:, 0]
        token, broken = _chosen(logits, self._decoding, noise)
        token = token[:, None]
        self.broken.copy_(torch.where((self.broken == 0) & broken.any(), self._made, self.broken))
        self._token.copy_(token)
        self.out.index_copy_(1, self._made, token)
        self._made.add_(1)
        return logits


def _chosen(logits: Tensor, decoding: Decoding, noise: Tensor) -> tuple[Tensor, Tensor]:
    """One token [B] from guided logits [B, V] and bits of noise, and which of the logits are broken, bool [B]."""
    if decoding.greedy:
        return logits.argmax(dim=-1), has_broken(logits)
    p = decoding_probabilities(logits, decoding)
    return sample(p, exponential(noise)), is_broken(p)
