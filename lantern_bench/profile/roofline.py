"""What the device can do at best, what a forward needs at least, and how much memory a decode holds.

A forward takes at least its bytes over the read rate, and its operations over the multiply rate. Peak memory comes from
the allocator on CUDA, and from the profiler's allocation record on a CPU, where the process holds other things too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lantern_bench.clock import now, peak_memory_bytes, reset_peak_memory, synchronize
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.models.packed_linear import weight_bytes, weight_count
from lantern_bench.models.transformer.target import TransformerTarget


class Rates(NamedTuple):
    """Bytes read per second, and operations per second (a multiply-add counts as two)."""

    bytes_per_s: float
    operations_per_s: float


class Need(NamedTuple):
    """The least that one forward needs: bytes of weights and cache, operations."""

    bytes: int
    operations: float

    def bound_ms(self, rates: Rates) -> float:
        """The least milliseconds it can take: the larger of the two times."""
        return 1e3 * max(self.bytes / rates.bytes_per_s, self.operations / rates.operations_per_s)


@torch.inference_mode()
def device_rates(device: torch.device, dtype: torch.dtype, working_set: int) -> Rates:
    """Measure repeated reads of `working_set` bytes, and square matrix products in `dtype`; the best of 12 each."""
    numbers = torch.ones(max(1, working_set // 4), device=device)
    read = min(seconds_of(numbers.sum, device, 12))
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    multiply = min(seconds_of(lambda: a @ b, device, 12))
    return Rates(numbers.nbytes / read, 2.0 * side**3 / multiply)


def forward_need(target: TransformerTarget, nodes: int, guided: bool) -> Need:
    """The need of a forward over `nodes` of one image, with half an image in the cache."""
    config, rows = target.config, 2 if guided else 1
    layers = [*target.transformer.layers, target.transformer.norm, target.transformer.output]
    length = config.prefix + config.image_tokens // 2
    kv_width = (config.kv_heads or config.heads) * config.head_dim
    size = torch.finfo(target.dtype).bits // 8
    cache = 2 * config.layers * rows * length * kv_width * size
    weights = sum(weight_bytes(module) for module in layers)
    products = sum(weight_count(module) for module in layers)
    attention = 2 * config.layers * (length + nodes) * config.heads * config.head_dim
    return Need(weights + cache, 2.0 * rows * nodes * (products + attention))


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Run `work` several times and return the seconds of each, with the device idle before and after."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = now()
        work()
        synchronize(device)
        seconds.append(now() - began)
    return seconds


def decode_memory(model: LoadedModel, nodes: int, guided: bool, run: Callable[[], Any]) -> tuple[int, int]:
    """Measure the bytes of `run`, a decode of one image with trees of `nodes`, after a warm-up.

    Returns the peak, and the sum of weights, caches and logits of one tree. For transformer targets only.
    """
    target, drafter = model.target, model.drafter
    parts: list[Any] = [target, drafter] if nodes > 1 and drafter is not None else [target]
    standing = sum(part.session(1, guided, nodes).cache.nbytes for part in parts)
    standing += sum(weight_bytes(part) for part in parts)
    logits = nodes * target.vocab_size * 4
    device = target.device
    if device.type == "cuda":
        reset_peak_memory(device)
        run()
        return peak_memory_bytes(device) or 0, standing + logits
    return standing + _most_allocated(run), standing + logits


def _most_allocated(run: Callable[[], Any]) -> int:
    """The most bytes that `run` holds at once beyond those held before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
