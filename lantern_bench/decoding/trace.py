"""What a decode did, step by step: gathered on the device, copied once an image, summed into every count.

All counts of docs/algorithms.md, section 7, are sums over these lists; nothing is counted a second way.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        # Of each step and image: position, accepted drafts, depth offered, and the accepted rank at each depth.
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
        self, asked: int, steps: int, forwards: int, seconds: float, phases: Mapping[str, float]
    ) -> list[ImageTrace]:
        """Return one trace per image of `asked` tokens after `steps` steps of `forwards` drafter forwards each.

        Times are divided evenly among the images of the batch.
        """
        counts, masses = self._counts[:steps].transpose(0, 1).tolist(), self._masses[:steps].transpose(0, 1).tolist()
        traces = []
        for of_image, masses_of_image in zip(counts, masses, strict=True):
            # A finished image of a batch idles along; its steps end where it was complete.
            rows = [row for row in of_image if row[0] < asked]
            mass = [pair for row, pair in zip(of_image, masses_of_image, strict=True) if row[0] < asked]
            uncut = [row[1] + 1 for row in rows]
            committed = [min(count, asked - row[0]) for count, row in zip(uncut, rows, strict=True)]
            trace = ImageTrace(
                start=[row[0] for row in rows],
                committed=committed,
                uncut=uncut,
                accepted=[min(row[1], count) for row, count in zip(rows, committed, strict=True)],
                offered_depth=[max(0, row[2]) for row in rows],
                child_rank=[[rank for rank in row[3:] if rank != _NOT_OFFERED] for row in rows],
                target_forwards=len(rows) + 1,
                drafter_forwards=forwards * len(rows),
                tokens=min(asked, 1 + sum(committed)),
                moved_mass=sum(pair[0] for pair in mass),
                moved_mass_tried=sum(pair[1] for pair in mass),
                seconds=seconds / self._batch,
                phases={name: value / self._batch for name, value in phases.items()},
            )
            traces.append(trace)
        return traces
