"""The only clock: wall time, synchronised times of phases, and processor usage."""

from __future__ import annotations

import atexit
import contextlib
import gc
import resource
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from lantern_bench.utils.cores import usable_cores

if TYPE_CHECKING:
    import torch


_TASKS = Path("/proc/self/task")


def now() -> float:
    """Return seconds on a monotonic clock; only differences have a meaning."""
    return time.perf_counter()


def stamp() -> str:
    """Return the current time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def collect_seldom() -> None:
    """Have Python look for garbage less often. Loading torch's compiler makes many lasting objects.

    This is a choice of a whole process, so the Python API does not call it.
    """
    gc.set_threshold(10_000)  # Python's own number is 700


def collect_garbage() -> None:
    """Collect garbage and exempt what remains from later collections.

    A compiler keeps many objects. Visiting them during a timed image can take half of its time.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise frozen objects are reported as leaked at exit


class Usage(NamedTuple):
    """Processor counters, or their change over a window; None where the system has no counter."""

    # CPU seconds of all threads of this process.
    cpu_seconds: float
    # Seconds that threads of this process were ready and had no core, summed over threads (Linux).
    waited_seconds: float | None
    involuntary_switches: int | None
    # Seconds that the hypervisor took from the usable cores (Linux).
    steal_seconds: float | None
    # CPU seconds of all programs on the usable cores.
    busy_seconds: float
    # CPU seconds of the thread that reads; None where it waits for a device.
    thread_seconds: float | None = None
    # Seconds that the machine slept (Linux), which `now` does not count.
    asleep_seconds: float = 0.0

    def since(self, before: Usage) -> Usage:
        """Return the change from `before`."""
        return Usage._make(
            None if now is None or then is None else now - then
            for now, then in zip(self, before, strict=True)
        )

    def lost_seconds(self, seconds: float, threads: int) -> float:
        """Return the seconds by which a window may be too long because its threads did not run.

        Threads wait for each other after every operation, so one waiting thread may delay them all.
        Without counters of waiting, the estimate is the excess of other programs' load over the
        cores that this process leaves free. A stopped process waits for no core, but computes
        nothing either.
        """
        lost = self.absent_seconds(seconds, threads)
        if self.waited_seconds is not None:
            return max(lost, self.waited_seconds + (self.steal_seconds or 0.0))
        others = max(0.0, self.busy_seconds - self.cpu_seconds)
        return max(lost, others - seconds * max(0, len(usable_cores()) - threads))

    def absent_seconds(self, seconds: float, threads: int) -> float:
        """Return the seconds of a window in which its thread did not run.

        The process was stopped or frozen, the machine slept, or memory was read from disk. A thread
        also sleeps while it waits for slower threads: their further CPU seconds are not counted.
        """
        if self.thread_seconds is None:
            return self.asleep_seconds
        others = self.cpu_seconds - self.thread_seconds
        further = max(0.0, others - (threads - 1) * self.thread_seconds)
        return max(0.0, seconds - self.thread_seconds - further) + self.asleep_seconds


def usage() -> Usage:
    """Read the counters of the processor and of this process, in well under a millisecond."""
    cores = psutil.cpu_times(percpu=True)
    mine = usable_cores()
    # A container may list fewer cores than their numbers suggest.
    if len(cores) > max(mine):
        cores = [cores[core] for core in mine]
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    return Usage(
        cpu_seconds=time.process_time(),
        waited_seconds=_waited_seconds(),
        involuntary_switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        steal_seconds=sum(core.steal for core in cores) if hasattr(cores[0], "steal") else None,
        busy_seconds=sum(map(sum, cores)) - idle,
        thread_seconds=time.thread_time(),
        asleep_seconds=_asleep_seconds(),
    )


def _asleep_seconds() -> float:
    """Return seconds that the machine has slept; 0 where the system does not count them."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _waited_seconds() -> float | None:
    """Return seconds on the run queue, summed over threads; None where the kernel counts none."""
    waited = 0
    try:
        for task in _TASKS.iterdir():
            # A thread may just have ended.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                waited += int((task / "schedstat").read_text().split()[1])
    except OSError:
        return None
    return waited / 1e9


class Phases:
    """Seconds spent in named phases between `start` and `stop`, and the processor usage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Open the window once the device is idle."""
        synchronize(self._device)
        self._before = usage()
        self.mark("start")

    def mark(self, name: str) -> None:
        """End the running phase, which gets the name `name`; phases of one name are added."""
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
        if self._device.type != "cpu":
            self.usage = self.usage._replace(thread_seconds=None)

    def _seconds(self, first: Any, second: Any) -> float:
        if self._device.type != "cuda":
            return float(second - first)
        return float(first.elapsed_time(second)) / 1000.0

    def total(self) -> float:
        """Return the seconds from `start` to `stop`."""
        return self._seconds(self._marks[0][1], self._marks[-1][1])

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase by name; `other` follows the last mark."""
        seconds: dict[str, float] = defaultdict(float)
        for (_, first), (name, second) in pairwise(self._marks):
            seconds[name] += self._seconds(first, second)
        return seconds
