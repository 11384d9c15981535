"""What a decode did, step by step: all counts of docs/algorithms.md, section 7, are sums over these lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lantern_bench.clock import Usage


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


def image_trace(
    tokens_wanted: int, rows: Sequence[Sequence[int]], masses: Sequence[Sequence[float]], forwards: int
) -> ImageTrace:
    """Return an image's trace without times from the counters of `Progress`; `forwards` of the drafter a step."""
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
        child_rank=[[rank for rank in row[3:] if rank != -2] for row in rows],
        target_forwards=len(rows) + 1,
        drafter_forwards=forwards * len(rows),
        tokens=min(tokens_wanted, 1 + sum(committed)),
        neighbour_mass=sum((pair[0] for pair in masses), 0.0),
        neighbour_mass_tried=sum((pair[1] for pair in masses), 0.0),
    )
