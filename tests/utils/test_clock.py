"""The clock: what the processor did over a window, and how long threads lacked a core."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lantern_bench.cli.main import main
from lantern_bench.devices import environment
from lantern_bench.sweeps import decoded_image
from lantern_bench.utils import cores
from lantern_bench.utils.clock import Usage, now, usage
from lantern_bench.utils.cores import cpu_quota, usable_cores


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


STOPPED = """
import sys
from lantern_bench.utils.clock import now, usage
before, began = usage(), now()
print("computes", flush=True)
while usage().since(before).cpu_seconds < 0.5:
    pass
used = usage().since(before)
seconds = now() - began
print(seconds, used.lost_seconds(seconds, 1), used.waited_seconds)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="run queue times are of Linux")
@pytest.mark.parametrize("stop", [0.0, 1.0])
def test_a_stopped_process_did_not_run(stop: float) -> None:
    """SIGSTOP, as of a suspended batch job; nobody took its core."""
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    if stop:
        child.send_signal(signal.SIGSTOP)
        threading.Event().wait(stop)
        child.send_signal(signal.SIGCONT)
    seconds, lost, waited = map(float, child.stdout.readline().split())
    child.wait()
    assert seconds >= 0.5 + stop
    assert lost >= 0.9 * stop
    assert lost <= stop + waited + 0.2


def test_time_of_the_computing_thread_by_what_the_others_did() -> None:
    used = Usage(
        cpu_seconds=2.0,
        waited_seconds=0.0,
        involuntary_switches=None,
        steal_seconds=None,
        busy_seconds=2.0,
        thread_seconds=1.0,
    )
    # Two threads computed for a second of ten.
    assert used.lost_seconds(10.0, threads=2) == 9.0
    # The thread waited for a slower one.
    slower = used._replace(cpu_seconds=3.0)
    assert slower.lost_seconds(2.0, threads=2) == 0.0
    assert slower.lost_seconds(10.0, threads=2) == 8.0
    # It waited for a device, which is no loss; the machine slept.
    assert used._replace(thread_seconds=None).lost_seconds(10.0, threads=2) == 0.0
    asleep = used._replace(thread_seconds=None, asleep_seconds=5.0)
    assert asleep.lost_seconds(1.0, threads=2) == 5.0


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b", {"cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4.0),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/elsewhere", {}, None),
        (
            "3:cpu,cpuacct:/x\n0::/",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "50000 0"}, None),
    ],
)
def test_quota_of_a_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    quota: float | None,
) -> None:
    (tmp_path / "own").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_OWN_CGROUPS", tmp_path / "own")
    assert cpu_quota() == quota
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for module in (environment, decoded_image):
        monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])
    environment.prepare_environment()
    few = quota is not None and quota < 2
    assert os.environ.get("OMP_NUM_THREADS") == ("1" if few else None)
    assert ("CPU quota of this container" in decoded_image.quiet_advice()) == few


def test_commands_look_for_garbage_less_often(capsys: pytest.CaptureFixture[str]) -> None:
    usual = gc.get_threshold()
    try:
        gc.set_threshold(700)
        assert main(["models"]) == 0
        assert gc.get_threshold()[0] > 5_000
    finally:
        gc.set_threshold(*usual)
    assert "lanterns" in capsys.readouterr().out
