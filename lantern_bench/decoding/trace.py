"""What a decode did, step by step: gathered on the device, copied once an image, summed into every count.

All counts of docs/algorithms.md, section 7, are sums over these lists; nothing is counted a second way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.walk import Verdict

_NOT_OFFERED = -2


@dataclass(frozen=True)
class ImageTrace:
    """The course of one image; lists have one entry a step (AR: one a token but the first).

    start: tokens committed before the step. committed: tokens it committed and kept. uncut: committed before the cut
    at the tokens asked for. accepted: drafts among the kept. offered_depth: depth drafted. child_rank: rank taken at
    each depth at which the walk was offered children, -1 where all were rejected. seconds: by phase; in a batch the
    batch's seconds divided by its images. moved_mass, moved_mass_tried: m(x) over accepted and over tried drafts.
    """

    start: list[int]
    committed: list[int]
    uncut: list[int]
    accepted: list[int]
    offered_depth: list[int]
    child_rank: list[list[int]]
    target_forwards: int
    drafter_forwards: int
    tokens: int
    moved_mass: float = 0.0
    moved_mass_tried: float = 0.0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed per step, bonus included; None for an image of one token (no step)."""
        return sum(self.committed) / len(self.committed) if self.committed else None

    @property
    def mal_uncut(self) -> float | None:
        """The same with the last step uncut, as the published code counts."""
        return sum(self.uncut) / len(self.uncut) if self.uncut else None

    @property
    def step_compression(self) -> float:
        """Tokens kept per target forward, prefill included."""
        return self.tokens / self.target_forwards


class StepRecorder:
    """Gathers the verdicts of a batch on the device, in place, a row a step; `finish` copies them once."""

    def __init__(self, batch: int, steps: int, depth: int, device: torch.device) -> None:
        self._batch = batch
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        # Of each step and image: position, accepted drafts, depth offered, and the rank taken at each depth.
        self._counts = torch.zeros(steps, batch, 3 + depth, dtype=torch.int64, device=device)
        self._masses = torch.zeros(steps, batch, 2, device=device)

    def begin(self) -> None:
        """Forget the steps of the batch before."""
        self._step.zero_()

    def add(self, start: Tensor, verdict: Verdict, offered_depth: Tensor) -> None:
        """Note one step: tokens committed before it [B], its verdict, the depth drafted [B]."""
        heads = torch.stack([start, verdict.accepted, offered_depth], dim=1)
        self._counts.index_copy_(0, self._step, torch.cat([heads, verdict.child_rank], dim=1)[None])
        masses = torch.stack([verdict.mass_accepted, verdict.mass_tried], dim=1)
        self._masses.index_copy_(0, self._step, masses[None])
        self._step.add_(1)

    def finish(
        self, asked: int, drafter_forwards: Sequence[int], seconds: float, phases: Mapping[str, float]
    ) -> list[ImageTrace]:
        """One trace an image of `asked` tokens; `drafter_forwards` has an entry a step.

        Times are shared evenly among the images of the batch.
        """
        share = {name: value / self._batch for name, value in phases.items()}
        taken = len(drafter_forwards)
        counts = self._counts[:taken].cpu()
        heads = (part.tolist() for part in counts[..., :3].unbind(-1))
        starts, accepted, offered = heads
        ranks = counts[..., 3:].tolist()
        masses = self._masses[:taken].tolist()
        traces = []
        for image in range(self._batch):
            # A finished image of a batch idles along; its steps end where it was complete.
            steps = [step for step in range(len(starts)) if starts[step][image] < asked]
            traces.append(
                self._trace(
                    asked,
                    [starts[s][image] for s in steps],
                    [accepted[s][image] for s in steps],
                    [offered[s][image] for s in steps],
                    [ranks[s][image] for s in steps],
                    sum(masses[s][image][0] for s in steps),
                    sum(masses[s][image][1] for s in steps),
                    sum(drafter_forwards[s] for s in steps),
                    seconds / self._batch,
                    share,
                )
            )
        return traces

    def _trace(
        self,
        asked: int,
        starts: list[int],
        accepted: list[int],
        offered: list[int],
        ranks: list[list[int]],
        mass: float,
        tried: float,
        drafter_forwards: int,
        seconds: float,
        phases: Mapping[str, float],
    ) -> ImageTrace:
        uncut = [count + 1 for count in accepted]
        committed = [min(count, asked - at) for count, at in zip(uncut, starts, strict=True)]
        return ImageTrace(
            start=starts,
            committed=committed,
            uncut=uncut,
            accepted=[min(a, c) for a, c in zip(accepted, committed, strict=True)],
            offered_depth=[max(0, depth) for depth in offered],
            child_rank=[[rank for rank in row if rank != _NOT_OFFERED] for row in ranks],
            target_forwards=len(starts) + 1,
            drafter_forwards=drafter_forwards,
            tokens=min(asked, 1 + sum(committed)),
            moved_mass=mass,
            moved_mass_tried=tried,
            seconds=seconds,
            phases=phases,
        )
