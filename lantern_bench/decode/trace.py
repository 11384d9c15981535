"""What a decode did, step by step: gathered on the device, copied once an image, summed into every count.

All counts of algorithms.md, section 7, are sums over these lists; nothing is counted a second way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lantern_bench.decode.verify import Verdict

__all__ = ["ImageTrace", "StepRecorder"]

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
    """Gathers the verdicts of a batch on the device; `finish` copies them once."""

    def __init__(self, batch: int, asked: int) -> None:
        self._batch, self._asked = batch, asked
        self._starts: list[Tensor] = []
        self._accepted: list[Tensor] = []
        self._ranks: list[Tensor] = []
        self._offered: list[Tensor] = []
        self._mass: list[Tensor] = []
        self._tried: list[Tensor] = []

    def add(self, start: Tensor, verdict: Verdict, offered_depth: Tensor) -> None:
        """Note one step: tokens committed before it [B], its verdict, the depth drafted [B]."""
        self._starts.append(start)
        self._accepted.append(verdict.accepted)
        self._ranks.append(verdict.child_rank)
        self._offered.append(offered_depth)
        self._mass.append(verdict.mass_accepted)
        self._tried.append(verdict.mass_tried)

    def finish(self, drafter_forwards: Sequence[int], seconds: float, phases: Mapping[str, float]) -> list[ImageTrace]:
        """One trace an image; times are shared evenly among the images of the batch."""
        share = {name: value / self._batch for name, value in phases.items()}
        if not self._starts:
            return [self._trace([], [], [], [], 0.0, 0.0, 0, seconds / self._batch, share)] * self._batch
        starts, accepted, offered = (
            torch.stack(part).cpu().tolist() for part in (self._starts, self._accepted, self._offered)
        )
        ranks = torch.stack(self._ranks).cpu().tolist()
        mass, tried = (torch.stack(part).cpu().double() for part in (self._mass, self._tried))
        traces = []
        for image in range(self._batch):
            # A finished image of a batch idles along; its steps end where it was complete.
            steps = [step for step in range(len(starts)) if starts[step][image] < self._asked]
            traces.append(
                self._trace(
                    [starts[s][image] for s in steps],
                    [accepted[s][image] for s in steps],
                    [offered[s][image] for s in steps],
                    [ranks[s][image] for s in steps],
                    float(mass[steps, image].sum()),
                    float(tried[steps, image].sum()),
                    sum(drafter_forwards[s] for s in steps),
                    seconds / self._batch,
                    share,
                )
            )
        return traces

    def _trace(
        self,
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
        committed = [min(count, self._asked - at) for count, at in zip(uncut, starts, strict=True)]
        return ImageTrace(
            start=starts,
            committed=committed,
            uncut=uncut,
            accepted=[min(a, c) for a, c in zip(accepted, committed, strict=True)],
            offered_depth=[max(0, depth) for depth in offered],
            child_rank=[[rank for rank in row if rank != _NOT_OFFERED] for row in ranks],
            target_forwards=len(starts) + 1,
            drafter_forwards=drafter_forwards,
            tokens=min(self._asked, 1 + sum(committed)),
            moved_mass=mass,
            moved_mass_tried=tried,
            seconds=seconds,
            phases=phases,
        )
