"""Decoding: autoregressive, and speculative with any drafting and rule; spec.modes names the combinations.

One loop serves `speculative`, `lantern` and `lantern++`; they differ in what their `Decoding` says. The only copy to
the host inside a step is the number of tokens it committed; all else stays on the device until the image is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lantern_bench.clock import Phases
from lantern_bench.decode.drafting import drafting_of
from lantern_bench.decode.interface import Drafter, Scores, Target, WithForcedTokens
from lantern_bench.decode.judge import Judge, judge_children
from lantern_bench.decode.relax import Relaxation
from lantern_bench.decode.sampling import Draws, decoding_probabilities, guide, sample
from lantern_bench.decode.trace import ImageTrace, StepRecorder
from lantern_bench.decode.tree import DraftTree
from lantern_bench.decode.verify import Verdict, verify
from lantern_bench.decode.verify_greedy import verify_greedy
from lantern_bench.errors import RefusedError
from lantern_bench.spec.decoding import Decoding, NeighbourMetric

__all__ = ["Decoded", "Model", "decode", "relaxation_of"]


class Model(Protocol):
    """What `decode` needs: a target, a drafter where drafts are asked for, nearest codes where they are merged."""

    target: Target
    drafter: Drafter | None

    def table(self, columns: int, metric: NeighbourMetric) -> Tensor:
        """The nearest codes int [V, columns] by a metric."""
        ...


@dataclass(frozen=True)
class Decoded:
    """One image: its tokens int32 [N] on the CPU, what happened, and the guided logits [N, V] when asked for."""

    tokens: Tensor
    trace: ImageTrace
    logits: Tensor | None = None


def relaxation_of(decoding: Decoding, target: object = None) -> Relaxation:
    """The acceptance rule of a configuration, as it is for this target."""
    if decoding.rule in ("none", "strict"):
        return Relaxation("strict")
    choices = target.choices if isinstance(target, WithForcedTokens) else None
    bound = decoding.delta or decoding.lambda_ or decoding.bound or 0.0
    return Relaxation(decoding.rule, decoding.neighbours or 0, bound, decoding.residual, choices)


@torch.inference_mode()
def decode(
    model: Model,
    condition: Any,
    decoding: Decoding,
    generators: Sequence[torch.Generator],
    *,
    tokens: int | None = None,
    keep_logits: bool = False,
    judge: Judge = judge_children,
) -> list[Decoded]:
    """Decode one image for each generator, together.

    `condition` is what the target's `prefill` takes, for as many images. `tokens` asks for fewer than the whole grid.
    `keep_logits` keeps the guided logits that each token was drawn from. `judge` as in `verify`. Raises
    `RefusedError` when drafts are asked of a model without a drafter.
    """
    asked = model.target.image_tokens if tokens is None else min(tokens, model.target.image_tokens)
    run = _Run(model, decoding, generators, asked, keep_logits, judge)
    return run.autoregressive(condition) if decoding.drafting == "none" else run.speculative(condition)


class _Run:
    """The decoding of one batch: what stays the same from step to step."""

    def __init__(
        self,
        model: Model,
        decoding: Decoding,
        generators: Sequence[torch.Generator],
        asked: int,
        keep_logits: bool,
        judge: Judge,
    ) -> None:
        self.judge = judge
        self.model, self.decoding, self.asked, self.keep_logits = model, decoding, asked, keep_logits
        self.batch = len(generators)
        self.device = model.target.device
        self.draws = Draws(list(generators), self.device)
        self.guided = decoding.cfg_scale != 1
        self.phases = Phases(self.device)
        self.logits: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        """One token [B] from guided logits [B, V]."""
        if self.decoding.greedy:
            return logits.argmax(dim=-1)
        return sample(decoding_probabilities(logits, self.decoding), self.draws.exponential(logits.shape[-1]))

    def guide(self, scores: Scores) -> Tensor:
        """Guided logits [B, n, V] of the target."""
        return guide(scores.cond, scores.uncond, self.decoding.cfg_scale)

    # ---- autoregressive

    def autoregressive(self, condition: Any) -> list[Decoded]:
        """One token a forward; nothing is copied to the host before the end."""
        session = self.model.target.session(self.batch, self.guided, 1)
        zero = torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
        one = torch.ones(self.batch, dtype=torch.int64, device=self.device)
        itself = torch.ones(self.batch, 1, 1, dtype=torch.bool, device=self.device)
        out = torch.empty(self.batch, self.asked, dtype=torch.int64, device=self.device)
        self.phases.start()
        logits = self.guide(session.prefill(condition))[:, -1]
        self.phases.mark("target")
        for made in range(self.asked):
            if self.keep_logits:
                self.logits.append(logits)
            out[:, made] = self.choose(logits)
            self.phases.mark("verify")
            if made + 1 < self.asked:
                logits = self.guide(session.score(out[:, made : made + 1], zero, itself))[:, 0]
                session.commit(zero, one, made + 1)
                self.phases.mark("target")
        self.phases.stop()
        kept = torch.stack(self.logits, dim=1).float().cpu() if self.keep_logits else None
        traces = [self._plain_trace() for _ in range(self.batch)]
        return self._decoded(out, traces, kept)

    def _plain_trace(self) -> ImageTrace:
        steps = self.asked - 1
        share = {name: seconds / self.batch for name, seconds in self.phases.seconds().items()}
        return ImageTrace(
            start=list(range(1, self.asked)),
            committed=[1] * steps,
            uncut=[1] * steps,
            accepted=[0] * steps,
            offered_depth=[0] * steps,
            child_rank=[[] for _ in range(steps)],
            target_forwards=self.asked,
            drafter_forwards=0,
            tokens=self.asked,
            seconds=self.phases.total() / self.batch,
            phases=share,
        )

    # ---- speculative

    def speculative(self, condition: Any) -> list[Decoded]:
        """Draft a tree, score it in one forward, walk it, commit what was accepted; until every image is complete."""
        if self.model.drafter is None:
            raise RefusedError(
                f"mode {self.decoding.mode} needs a drafter, and this model has none",
                "use --modes ar, or add a drafter",
            )
        drafting = drafting_of(self.decoding, self.device)
        relaxation = relaxation_of(self.decoding, self.model.target)
        table = self.model.table(relaxation.columns, self.decoding.neighbour_metric) if relaxation.merges else None
        target = self.model.target.session(self.batch, self.guided, drafting.nodes)
        drafter = self.model.drafter.session(self.batch, self.guided, drafting.nodes)
        recorder = StepRecorder(self.batch, self.asked)
        state = _State(self.batch, self.asked, drafting.depth, self.device)
        forwards: list[int] = []
        self.phases.start()
        scores = target.prefill(condition)
        logits = self.guide(scores)[:, -1]
        self.phases.mark("target")
        root = self.choose(logits)
        state.out[:, 0] = root
        self.phases.mark("verify")
        first_logits = logits
        kept: list[tuple[Tensor, Tensor]] = []
        drafts = drafter.prefill(condition, scores.features, root) if self.asked > 1 else None
        while drafts is not None:
            limit = (self.model.target.image_tokens - 1 - state.position).clamp_max(drafting.depth)
            tree = drafting.draft(drafter, drafts, root, self.draws, limit)
            forwards.append(drafting.forwards)
            self.phases.mark("draft")
            scores = target.score(tree.tokens, tree.depths, tree.attention)
            self.phases.mark("target")
            logits = self.guide(scores)
            verdict = self._verify(tree, logits, relaxation, table, limit)
            recorder.add(state.position, verdict, limit)
            if self.keep_logits:
                kept.append((state.position, _at_path(logits, verdict.path)))
            counts, widest = state.commit(verdict)
            self.phases.mark("verify")
            target.commit(verdict.path, counts, state.longest)
            self.phases.mark("target")
            root = state.last_token(verdict, counts, root)
            drafts = None
            if not state.complete:
                features = _features_on_path(scores.features, verdict.path[:, :widest])
                drafts = drafter.observe(verdict.tokens[:, :widest], features, counts, state.longest)
            self.phases.mark("draft")
        self.phases.stop()
        traces = recorder.finish(forwards, self.phases.total(), self.phases.seconds())
        return self._decoded(state.out, traces, self._assemble(first_logits, kept) if self.keep_logits else None)

    def _verify(
        self, tree: DraftTree, logits: Tensor, relaxation: Relaxation, table: Tensor | None, limit: Tensor
    ) -> Verdict:
        if self.decoding.greedy:
            return verify_greedy(tree, logits, relaxation, table, limit)
        uniforms = self.draws.uniform(*tree.children.shape[1:])
        noise = self.draws.exponential(logits.shape[-1])
        p = decoding_probabilities(logits, self.decoding)
        return verify(tree, p, relaxation, table, uniforms, noise, limit, self.judge)

    def _assemble(self, first: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Guided logits [B, asked, V] of every kept token, from those of each step's path."""
        width = kept[0][1].shape[1] if kept else 1
        whole = first.new_zeros(self.batch, self.asked + width, first.shape[-1])
        whole[:, 0] = first
        rows = torch.arange(self.batch, device=first.device)[:, None]
        for position, logits in kept:
            at = position[:, None] + torch.arange(width, device=first.device)
            whole[rows, at.clamp_max(self.asked + width - 1)] = logits
        return whole[:, : self.asked].float().cpu()

    def _decoded(self, out: Tensor, traces: list[ImageTrace], logits: Tensor | None) -> list[Decoded]:
        tokens = out[:, : self.asked].to(torch.int32).cpu()
        return [
            Decoded(tokens[image], traces[image], None if logits is None else logits[image])
            for image in range(self.batch)
        ]


class _State:
    """Where each image stands: tokens, positions on the device, and what the host knows of them."""

    def __init__(self, batch: int, asked: int, depth: int, device: torch.device) -> None:
        self._asked = asked
        self.out = torch.zeros(batch, asked + depth + 1, dtype=torch.int64, device=device)
        self.position = torch.ones(batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch, device=device)[:, None]
        self._ahead = torch.arange(depth + 1, device=device)
        self._host = [1] * batch
        self.longest = 0

    @property
    def complete(self) -> bool:
        """Whether every image has the tokens asked for."""
        return all(at >= self._asked for at in self._host)

    def commit(self, verdict: Verdict) -> tuple[Tensor, int]:
        """Append the tokens of a verdict; return how many each image takes [B], and the most of them."""
        active = self.position < self._asked
        counts = torch.where(active, verdict.accepted + 1, 0)
        # Behind what counts stands filler: it is overwritten by the next step or cut off at the end.
        at = (self.position[:, None] + self._ahead[: verdict.tokens.shape[1]]).clamp_max(self.out.shape[1] - 1)
        keep = active[:, None].expand_as(at)
        self.out[self._rows, at] = torch.where(keep, verdict.tokens, self.out[self._rows, at])
        self.position = self.position + counts
        taken = counts.tolist()  # the one copy to the host of a step
        self._host = [before + more for before, more in zip(self._host, taken, strict=True)]
        self.longest = max(self._host) - 1
        return counts, max([1, *taken])

    def last_token(self, verdict: Verdict, counts: Tensor, root: Tensor) -> Tensor:
        """The new root [B]: the last token committed; that of a complete image stays."""
        last = verdict.tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        return torch.where(counts > 0, last, root)


def _at_path(logits: Tensor, path: Tensor) -> Tensor:
    """Logits [B, D + 1, V] at the nodes of a path [B, D + 1]."""
    return logits.gather(1, path.clamp_min(0)[:, :, None].expand(-1, -1, logits.shape[-1]))


def _features_on_path(features: Tensor, path: Tensor) -> Tensor:
    """Features [rows, n, width] at the nodes `path` [B, n] of each image, for all its rows."""
    groups = len(features) // len(path)
    index = path.clamp_min(0).repeat(groups, 1)[:, :, None].expand(-1, -1, features.shape[-1])
    return features.gather(1, index)
