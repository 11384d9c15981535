"""The only clock. Wall time for people, synchronised phase times for tables.

On a GPU a phase is bounded by events on the stream, read once at the end of an image, so that measuring puts no wait
inside a decode step. On a CPU work is done when the call returns and the wall clock is enough.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch


def now() -> float:
    """Seconds on a monotonic clock; only differences have a meaning."""
    return time.perf_counter()


def stamp() -> str:
    """The current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; returns at once on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def settle_garbage() -> None:
    """Collect garbage from loading and compiling, then freeze the rest; call it before timing.

    A collection over all that a compiler keeps takes as long as half an image, and falls into any of them.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or what is collected at the end is reported as leaked


def reset_peak_memory(device: torch.device) -> None:
    """Start a new window for `peak_memory_bytes`."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most device memory in use since the last reset; None on a CPU, where the process holds more than decoding."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))


class Phases:
    """Seconds spent in named phases between `start` and `stop`.

    `mark(name)` ends the phase that began at the last mark (or at `start`) and books it under `name`. Names may repeat;
    their times add up. `stop` waits for the device; `total` is the whole window, so that what no mark covered can be
    reported as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._begin: Any = None
        self._end: Any = None

    def _tick(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self) -> None:
        """Open the window; the device is idle when it opens."""
        synchronize(self._device)
        self._marks.clear()
        self._begin = self._tick()

    def mark(self, name: str) -> None:
        """End the running phase and add its seconds to `name`."""
        self._marks.append((name, self._tick()))

    def stop(self) -> None:
        """Close the window and wait for the device."""
        self._end = self._tick()
        synchronize(self._device)

    def _seconds(self, first: Any, second: Any) -> float:
        if self._device.type != "cuda":
            return float(second - first)
        return float(first.elapsed_time(second)) / 1000.0

    def total(self) -> float:
        """Seconds from `start` to `stop`."""
        return self._seconds(self._begin, self._end)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase by name."""
        out: dict[str, float] = {}
        last = self._begin
        for name, at in self._marks:
            out[name] = out.get(name, 0.0) + self._seconds(last, at)
            last = at
        return out


OnProgress: TypeAlias = Callable[[str, float], None]
"""Progress callback: a description of the work, and the share that is done."""


def no_progress(_what: str, _done: float) -> None:
    """Ignore progress: the default callback."""
