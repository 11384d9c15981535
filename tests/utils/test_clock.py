"""The clock: what the processor did over a window, and how long threads lacked a core."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lantern_bench.utils.clock import Usage, now, usable_cores, usage


def burn(seconds: float) -> Usage:
    """Use the processor for so many seconds of CPU time in this thread."""
    before = usage()
    while usage().since(before).cpu_seconds < seconds:
        pass
    return usage().since(before)


def test_cpu_seconds_count_every_thread() -> None:
    before = usage()
    threads = [threading.Thread(target=burn, args=(0.2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert usage().since(before).cpu_seconds >= 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long threads waited")
def test_waiting_for_a_core_explains_the_wall_time() -> None:
    endless = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(endless) for _ in range(2 * len(usable_cores()))]
    try:
        began = now()
        used = burn(0.5)
        seconds = now() - began
    finally:
        for other in others:
            other.kill()
            other.wait()
    lost = used.lost_seconds(seconds, 1)
    assert lost > 0.1 * seconds
    assert used.cpu_seconds + lost == pytest.approx(seconds, rel=0.2)


def test_without_run_queue_times_others_take_what_is_over() -> None:
    cores = len(usable_cores())
    quiet = Usage(
        cpu_seconds=1.0,
        waited_seconds=None,
        involuntary_switches=None,
        steal_seconds=None,
        busy_seconds=1.0,
    )
    assert quiet.lost_seconds(1.0, cores) == 0.0
    assert quiet._replace(busy_seconds=1.5).lost_seconds(1.0, cores) == 0.5
    assert quiet._replace(busy_seconds=1.5).lost_seconds(1.0, cores - 1) == 0.0
    assert quiet.since(quiet).busy_seconds == 0.0
    assert quiet.since(quiet).waited_seconds is None
