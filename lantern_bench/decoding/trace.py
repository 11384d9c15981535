"""What a decode did, step by step.

All counts of docs/algorithms.md, section 7, are sums over these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lantern_bench.utils.clock import Usage

ALL_REJECTED = -1
NOT_OFFERED = -2
"""In place of a child's rank, at a depth where no child was accepted."""


@dataclass(frozen=True)
class ImageTrace:
    """The steps of one image; lists have one entry per step (AR: per token but the first)."""

    # tokens committed before the step
    start: list[int]
    # tokens that the step committed, cut at the tokens asked for
    committed: list[int]
    # tokens that the step committed, before that cut
    uncut: list[int]
    # drafts among the committed tokens
    accepted: list[int]
    # the depth drafted
    offered_depth: list[int]
    # the accepted rank at each depth that offered children, -1 where all were rejected
    child_rank: list[list[int]]
    target_forwards: int
    drafter_forwards: int
    tokens: int
    # m(x) summed over accepted drafts
    neighbour_mass: float = 0.0
    # m(x) summed over tried drafts
    neighbour_mass_tried: float = 0.0
    # emitted TV summed over tried drafts; None where it is not known
    emitted_tv: float | None = None
    # seconds of the batch, divided by its images
    seconds: float = 0.0
    # the same for each phase
    phases: Mapping[str, float] = field(default_factory=dict)
    # of the processor, for the whole batch
    usage: Usage | None = None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed per step, bonus included; None for an image of one token (no step)."""
        return sum(self.committed) / len(self.committed) if self.committed else None

    @property
    def mal_uncut(self) -> float | None:
        """`mean_accepted_length` with the last step uncut, as the published code counts."""
        return sum(self.uncut) / len(self.uncut) if self.uncut else None

    @property
    def step_compression(self) -> float:
        """Tokens kept per target forward, prefill included."""
        return self.tokens / self.target_forwards


def plain_trace(committed: list[int]) -> ImageTrace:
    """Return the trace of an image that was decoded without drafts.

    Args:
        committed: The tokens of each step; the first token is of the prefill.
    """
    steps = len(committed)
    tokens = 1 + sum(committed)
    return ImageTrace(
        start=list(accumulate(committed[:-1], initial=1)) if committed else [],
        committed=committed,
        uncut=committed,
        accepted=[0] * steps,
        offered_depth=[0] * steps,
        child_rank=[[] for _ in range(steps)],
        target_forwards=1 + steps,
        drafter_forwards=0,
        tokens=tokens,
        emitted_tv=0.0,
    )


class StepRecorder:
    """What each step did to B images: named columns on the device, one row per step."""

    def __init__(self, *, image_tokens: int, batch: int, depth: int, device: torch.device) -> None:
        def column(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(image_tokens, batch, *shape, dtype=dtype, device=device)

        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = {
            # tokens committed before the step
            "start": column(),
            # drafts accepted
            "accepted": column(),
            # the depth drafted; 0 or less: nothing was drafted
            "offered_depth": column(),
            # of the accepted child at each depth, `ALL_REJECTED` or `NOT_OFFERED`
            "child_rank": column(depth),
            # m(x) summed over accepted drafts
            "neighbour_mass": column(dtype=torch.float32),
            # m(x) summed over tried drafts
            "neighbour_mass_tried": column(dtype=torch.float32),
            # emitted TV summed over tried drafts
            "emitted_tv": column(dtype=torch.float32),
        }

    def start(self) -> None:
        """Forget all steps."""
        self._row.zero_()

    def record(self, **values: Tensor) -> None:
        """Write down the running step: for each column a tensor [B, ...]."""
        for name, value in values.items():
            self._columns[name].index_copy_(0, self._row, value[None])
        self._row.add_(1)

    def traces(self, tokens_wanted: int, steps: int, drafter_forwards: int) -> list[ImageTrace]:
        """Return the trace of each image, without times.

        Args:
            tokens_wanted: How many tokens each image has.
            steps: How many steps the batch took. A complete image idles; its steps end before.
            drafter_forwards: How many forwards of the drafter each step took.
        """
        columns = {name: column[:steps].cpu() for name, column in self._columns.items()}
        uncut = columns["accepted"] + 1
        committed = uncut.minimum(tokens_wanted - columns["start"])
        columns |= {
            "uncut": uncut,
            "committed": committed,
            "accepted": columns["accepted"].minimum(committed),
            "offered_depth": columns["offered_depth"].clamp_min(0),
        }
        counts = (columns["start"] < tokens_wanted).sum(dim=0)
        traces = []
        for image, count in enumerate(counts.tolist()):
            values: dict[str, Any] = {
                name: column[:count, image].tolist() for name, column in columns.items()
            }
            values["child_rank"] = [_offered(ranks) for ranks in values["child_rank"]]
            for name in ("neighbour_mass", "neighbour_mass_tried", "emitted_tv"):
                values[name] = sum(values[name], 0.0)
            trace = ImageTrace(
                **values,
                target_forwards=count + 1,
                drafter_forwards=drafter_forwards * count,
                tokens=1 + sum(values["committed"]),
            )
            traces.append(trace)
        return traces


def _offered(ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if rank != NOT_OFFERED]
