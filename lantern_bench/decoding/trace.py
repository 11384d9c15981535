"""What a decode did, step by step: gathered on the device and copied to the host once per batch.

All counts of docs/algorithms.md, section 7, are sums over these lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.clock import Usage
from lantern_bench.decoding.acceptance.walk import Verdict

_NOT_OFFERED = -2


class Times(NamedTuple):
    """The times of a batch, as `ImageTrace` describes them."""

    seconds: float
    phases: Mapping[str, float]
    usage: Usage | None


@dataclass(frozen=True)
class ImageTrace:
    """The steps of one image; lists have one entry per step (AR: per token but the first)."""

    start: list[int]  # tokens committed before the step
    committed: list[int]  # tokens the step committed, cut at the tokens asked for
    uncut: list[int]  # the same before that cut
    accepted: list[int]  # drafts among the committed tokens
    offered_depth: list[int]  # depth drafted
    child_rank: list[list[int]]  # accepted rank at each depth that offered children, -1 where all were rejected
    target_forwards: int
    drafter_forwards: int
    tokens: int
    neighbour_mass: float = 0.0  # m(x) summed over accepted drafts
    neighbour_mass_tried: float = 0.0  # m(x) summed over tried drafts
    seconds: float = 0.0  # of the batch, divided by its images
    phases: Mapping[str, float] = field(default_factory=dict)  # the same for each phase
    usage: Usage | None = None  # of the processor, for the whole batch

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
    """Gathers the verdicts of a batch on the device, in place, one row per step; `finish` copies them once."""

    def __init__(self, batch: int, steps: int, depth: int, device: torch.device) -> None:
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        # Of each step and image: position, accepted drafts, depth offered, and the accepted rank at each depth.
        self._counts = torch.zeros(steps, batch, 3 + depth, dtype=torch.int64, device=device)
        self._masses = torch.zeros(steps, batch, 2, device=device)

    def start_images(self) -> None:
        """Forget the steps of the batch before."""
        self._step.zero_()

    def add(self, start: Tensor, verdict: Verdict, offered_depth: Tensor) -> None:
        """Note one step: tokens committed before it [B], its verdict, the depth drafted [B]."""
        heads = torch.stack([start, verdict.accepted, offered_depth], dim=1)
        self._counts.index_copy_(0, self._step, torch.cat([heads, verdict.child_rank], dim=1)[None])
        masses = torch.stack([verdict.neighbour_mass, verdict.neighbour_mass_tried], dim=1)
        self._masses.index_copy_(0, self._step, masses[None])
        self._step.add_(1)

    def finish(self, tokens_wanted: int, steps: int, forwards: int, times: Times) -> list[ImageTrace]:
        """Return the `image_trace` of each image after `steps` steps of `forwards` drafter forwards each."""
        counts, masses = (values[:steps].transpose(0, 1).tolist() for values in (self._counts, self._masses))
        images = zip(counts, masses, strict=True)
        return [image_trace(tokens_wanted, rows, pairs, forwards, times) for rows, pairs in images]


def image_trace(
    tokens_wanted: int,
    rows: Sequence[Sequence[int]],
    masses: Sequence[Sequence[float]],
    forwards: int,
    times: Times,
) -> ImageTrace:
    """Return the trace of an image of `tokens_wanted` tokens from its steps as `StepRecorder` notes them."""
    # A finished image of a batch idles along; its steps end where it was complete.
    rows = [row for row in rows if row[0] < tokens_wanted]
    masses = masses[: len(rows)]
    uncut = [row[1] + 1 for row in rows]
    committed = [min(count, tokens_wanted - row[0]) for count, row in zip(uncut, rows, strict=True)]
    return ImageTrace(
        start=[row[0] for row in rows],
        committed=committed,
        uncut=uncut,
        accepted=[min(row[1], count) for row, count in zip(rows, committed, strict=True)],
        offered_depth=[max(0, row[2]) for row in rows],
        child_rank=[[rank for rank in row[3:] if rank != _NOT_OFFERED] for row in rows],
        target_forwards=len(rows) + 1,
        drafter_forwards=forwards * len(rows),
        tokens=min(tokens_wanted, 1 + sum(committed)),
        neighbour_mass=sum((pair[0] for pair in masses), 0.0),
        neighbour_mass_tried=sum((pair[1] for pair in masses), 0.0),
        seconds=times.seconds,
        phases=times.phases,
        usage=times.usage,
    )
