"""The only clock: wall time, synchronised times of phases, and use of the processor."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch


_TASKS = Path("/proc/self/task")


def now() -> float:
    """Seconds on a monotonic clock; only differences have a meaning."""
    return time.perf_counter()


def stamp() -> str:
    """The current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def settle_garbage() -> None:
    """Collect garbage, then freeze the rest: a later collection of what a compiler keeps takes half an image's time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or what is collected at the end is reported as leaked


class Usage(NamedTuple):
    """Counters of the processor, or their change; None where the system has none."""

    cpu_seconds: float  # of all threads of this process
    # threads of this process could run and got no core, added up (Linux)
    waited_seconds: float | None
    involuntary_switches: int | None
    steal_seconds: float | None  # the hypervisor took them from the usable cores (Linux)
    busy_seconds: float  # CPU seconds of all programs on the usable cores

    def since(self, before: Usage) -> Usage:
        """Return the change from `before`."""
        pairs = zip(self, before, strict=True)
        return Usage(*(None if now is None or then is None else now - then for now, then in pairs))  # type: ignore[arg-type]

    def lost_seconds(self, seconds: float, threads: int) -> float:
        """Return the seconds by which a window of `seconds` may be too long because `threads` threads lacked a core."""
        # Threads wait for each other after every operation, so a second that one of them waits may delay all.
        if self.waited_seconds is not None:
            return self.waited_seconds + (self.steal_seconds or 0.0)
        others = max(0.0, self.busy_seconds - self.cpu_seconds)
        return max(0.0, others - seconds * max(0, len(usable_cores()) - threads))


def usage() -> Usage:
    """Read the counters of the processor and of this process; takes well under a millisecond."""
    cores = psutil.cpu_times(percpu=True)
    # not so where a container shows fewer cores than there are
    if len(cores) > max(mine := usable_cores()):
        cores = [cores[core] for core in mine]
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    steal = sum(core.steal for core in cores) if hasattr(cores[0], "steal") else None
    busy = sum(sum(core) for core in cores) - idle
    return Usage(
        cpu_seconds=time.process_time(),
        waited_seconds=_waited_seconds(),
        involuntary_switches=switches,
        steal_seconds=steal,
        busy_seconds=busy,
    )


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def _waited_seconds() -> float | None:
    """Seconds on the run queue, over all threads; None where the kernel keeps none."""
    waited = 0
    try:
        for task in _TASKS.iterdir():
            # a thread that has just ended
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                waited += int((task / "schedstat").read_text().split()[1])
    except OSError:
        return None
    return waited / 1e9


class Phases:
    """Seconds spent in named phases between `start` and `stop`, and the processor's `usage` between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self.usage: Usage | None = None

    def start(self) -> None:
        """Open the window; the device is idle when it opens."""
        synchronize(self._device)
        self._before = usage()
        self.mark("start")

    def mark(self, name: str) -> None:
        """End the running phase and add its seconds to `name`."""
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((name, event))

    def stop(self) -> None:
        """Close the window and wait for the device."""
        self.mark("other")
        synchronize(self._device)
        self.usage = usage().since(self._before)

    def _seconds(self, first: Any, second: Any) -> float:
        if self._device.type != "cuda":
            return float(second - first)
        return float(first.elapsed_time(second)) / 1000.0

    def total(self) -> float:
        """Seconds from `start` to `stop`."""
        return self._seconds(self._marks[0][1], self._marks[-1][1])

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase by name; `other` follows the last mark."""
        seconds: dict[str, float] = defaultdict(float)
        for (_, first), (name, second) in pairwise(self._marks):
            seconds[name] += self._seconds(first, second)
        return seconds
