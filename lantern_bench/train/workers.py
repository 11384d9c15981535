"""Processes that train together, one a GPU: who is the first, and how gradients are averaged.

Every worker draws the same batch and takes its share of the rows, so that two processes train as one would. The package
accelerate finds the processes and their devices; one process needs neither it nor this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from lantern_bench.errors import RefusedError

__all__ = ["ALONE", "Workers", "is_one_of_several", "join"]

_PATIENCE = timedelta(hours=24)  # the others wait while the first one samples, encodes and evaluates


def _nothing_to_average(_tensors: Sequence[Tensor]) -> None:
    """One process has the mean already."""


def _nobody_to_wait_for() -> None:
    """One process is always together."""


@dataclass(frozen=True)
class Workers:
    """`count` processes, of which this is number `rank`, on `device` (None: wherever it was told).

    `average` replaces tensors by their means over all; `wait` returns when all have called it.
    """

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    average: Callable[[Sequence[Tensor]], None] = _nothing_to_average
    wait: Callable[[], None] = _nobody_to_wait_for

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0


ALONE = Workers()


def is_one_of_several() -> bool:
    """Whether a launcher (`accelerate launch`, `torchrun`) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(cpu: bool = False) -> Workers:
    """The workers this process was started with; raises `RefusedError` for several without the package accelerate."""
    if not is_one_of_several():
        return ALONE
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise RefusedError(
            "several processes need the package accelerate, which is not installed",
            "Type `pip install 'lantern-bench[train]'`, or start one process.",
        ) from error
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])

    def average(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(accelerator.reduce(tensor, reduction="mean"))

    workers = (accelerator.process_index, accelerator.num_processes, accelerator.device)
    return Workers(*workers, average=average, wait=accelerator.wait_for_everyone)
