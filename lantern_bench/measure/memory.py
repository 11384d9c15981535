"""The most memory that a decode holds, beside what it cannot do without: weights, caches, one tree's logits.

On CUDA the allocator says it; on a CPU the profiler's record of allocations is added up, since the process holds much
that is not decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lantern_bench.clock import peak_memory_bytes, reset_peak_memory
from lantern_bench.models.loaded import LoadedModel
from lantern_bench.models.packing import weight_bytes

__all__ = ["Memory", "decode_memory"]


class Memory(NamedTuple):
    """Bytes: the most that was held, and weights + caches + nearest codes + logits of one tree."""

    peak: int
    accounted: int


def decode_memory(model: LoadedModel, nodes: int, guided: bool, columns: int, run: Callable[[], Any]) -> Memory:
    """Measure `run`, on transformers: a decode of one image with trees of `nodes` that has run before."""
    target, drafter = model.target, model.drafter
    parts: list[Any] = [target, drafter] if nodes > 1 and drafter is not None else [target]
    standing = sum(part.session(1, guided, nodes).cache.nbytes for part in parts)
    standing += sum(weight_bytes(part) for part in parts)
    standing += model.table(columns).nbytes if columns else 0
    logits = nodes * target.vocab_size * 4
    device = target.device
    if device.type == "cuda":
        reset_peak_memory(device)
        run()
        return Memory(peak_memory_bytes(device) or 0, standing + logits)
    return Memory(standing + _most_allocated(run), standing + logits)


def _most_allocated(run: Callable[[], Any]) -> int:
    """The most bytes that `run` held at once beyond what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
