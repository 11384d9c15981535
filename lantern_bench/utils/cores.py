"""The cores that this process may use, and the CPU quota of its container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def cpu_quota() -> float | None:
    """Return how many cores' time the container of this process may use; None without a limit.

    The smallest quota of its control group and of the groups around it counts.
    """
    quotas = []
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.lstrip("/"))
            for around in (own, *own.parents):
                if not controllers:  # version 2
                    quotas.append(_quota(_CGROUPS / around / "cpu.max"))
                elif "cpu" in controllers.split(","):
                    folder = _CGROUPS / controllers / around
                    quotas.append(_quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(*files: Path) -> float | None:
    """Return microseconds of CPU time by microseconds; the files contain the two numbers."""
    try:
        used, period = " ".join(file.read_text() for file in files).split()
        quota = int(used) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no limit is `max`, or -1
        return None
    return quota if quota > 0 else None
