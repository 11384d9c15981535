"""What a decode did, step by step: all counts of docs/algorithms.md, section 7, are sums over these lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lantern_bench.utils.clock import Usage

ALL_REJECTED = -1
NOT_OFFERED = -2
"""In place of a child's rank, at a depth where no child was accepted."""


class StepRecord(NamedTuple):
    """What one step did to one image."""

    start: int  # tokens committed before the step
    accepted: int  # drafts accepted
    offered_depth: int  # depth drafted; 0 or less: nothing was drafted
    child_rank: list[
        int
    ]  # rank of the accepted child at each depth, `ALL_REJECTED` or `NOT_OFFERED`
    neighbour_mass: float  # m(x) summed over accepted drafts
    neighbour_mass_tried: float  # m(x) summed over tried drafts


@dataclass(frozen=True)
class ImageTrace:
    """The steps of one image; lists have one entry per step (AR: per token but the first)."""

    start: list[int]  # tokens committed before the step
    committed: list[int]  # tokens the step committed, cut at the tokens asked for
    uncut: list[int]  # the same before that cut
    accepted: list[int]  # drafts among the committed tokens
    offered_depth: list[int]  # depth drafted
    child_rank: list[
        list[int]
    ]  # accepted rank at each depth that offered children, -1 where all were rejected
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


def image_trace(
    records: Sequence[StepRecord], tokens_wanted: int, drafter_forwards: int
) -> ImageTrace:
    """Return an image's trace, without times.

    Args:
        records: What each step of its batch did. A complete image idles along in a batch; its steps end before.
        tokens_wanted: How many tokens were asked for.
        drafter_forwards: How many forwards of the drafter each step took.
    """
    steps = [record for record in records if record.start < tokens_wanted]
    uncut = [step.accepted + 1 for step in steps]
    committed = [
        min(count, tokens_wanted - step.start) for count, step in zip(uncut, steps, strict=True)
    ]
    return ImageTrace(
        start=[step.start for step in steps],
        committed=committed,
        uncut=uncut,
        accepted=[min(step.accepted, count) for step, count in zip(steps, committed, strict=True)],
        offered_depth=[max(0, step.offered_depth) for step in steps],
        child_rank=[[rank for rank in step.child_rank if rank != NOT_OFFERED] for step in steps],
        target_forwards=len(steps) + 1,
        drafter_forwards=drafter_forwards * len(steps),
        tokens=min(tokens_wanted, 1 + sum(committed)),
        neighbour_mass=sum((step.neighbour_mass for step in steps), 0.0),
        neighbour_mass_tried=sum((step.neighbour_mass_tried for step in steps), 0.0),
    )
