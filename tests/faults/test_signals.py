"""Signals stop where nothing is half done; workers that hang are named; nothing outlives its
parent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from lantern_bench.storage.run_directory import read_manifest, read_records
from lantern_bench.utils import signals
from tests.faults.child import IMAGES
from tests.faults.conftest import SWEEP, Bench, Command, Outcome
from tests.helpers.tiny_model import PROMPTS

SLOW = {"TINY_SLEEP": "0.2"}
NAMES = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM"}


def children(command: Command) -> list[psutil.Process]:
    return psutil.Process(command.pid).children(recursive=True)


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_signals(
    bench: Bench, expected: dict[str, str], outcome: Outcome, number: signal.Signals, processes: str
) -> None:
    """SIGINT or SIGTERM in a sweep of one process, and in one of workers"""
    command = bench.start([*SWEEP, "run", "--processes", processes], **SLOW)
    command.until(lambda: bench.lines("run") >= 2)
    workers = children(command)
    os.kill(command.pid, number)
    code = command.end()
    output = command.output
    finished = bench.lines("run")
    assert code == 128 + number, output
    assert "Traceback" not in output
    assert f"interrupted: {finished} of 9 images are done and kept" in output
    assert "The same command continues." in output
    assert 2 <= finished < IMAGES
    assert len(bench.tokens("run")) == finished
    assert read_manifest(bench.folder / "run")["sessions"][0]["ended"] is not None
    assert len(workers) == (processes == "2")
    assert not any(worker.is_running() for worker in workers)
    code_again, output = bench.sweep("run", "--processes", processes)
    assert code_again == 0
    assert f"{finished} images kept" in output
    assert bench.tokens("run") == expected
    outcome(f"{NAMES[number]}: exit {code}, finished images kept")


def test_swallowed_interrupt(bench: Bench, expected: dict[str, str], outcome: Outcome) -> None:
    """SIGINT in a finalizer"""
    code, output = bench.sweep("run", TINY_SWALLOW="2")
    assert "Exception ignored in" in output
    assert "Stopped" in output
    assert code == 130
    assert "interrupted before the first image" in output
    assert bench.sweep("run")[0] == 0
    assert bench.tokens("run") == expected
    outcome(f"exit {code}: the next step or event stops")


def test_second_signal(bench: Bench, outcome: Outcome) -> None:
    """A second SIGINT during a step that hangs"""
    command = bench.start([*SWEEP, "run"], TINY_HANG=PROMPTS[1])
    command.until(
        lambda: (bench.folder / "run" / "manifest.json").exists() and bench.lines("run") >= 1
    )
    command.process.join(0.5)  # until it hangs
    os.kill(command.pid, signal.SIGINT)
    command.process.join(1.0)
    assert command.process.is_alive()
    os.kill(command.pid, signal.SIGINT)
    code = command.end()
    assert code == 130
    assert "Traceback" not in command.output
    outcome(f"exit {code} at once")


def test_hanging_worker(bench: Bench, expected: dict[str, str], outcome: Outcome) -> None:
    """A worker process that hangs"""
    # Long enough for its start on a busy machine.
    arguments = [*SWEEP, "run", "--processes", "2", "--worker-timeout", "12"]
    command = bench.start(arguments, TINY_HANG=PROMPTS[1])
    code = command.end()
    output = command.output
    line = next(line for line in output.splitlines() if "hangs" in line)
    assert code == 4
    assert "error: worker process " in line
    assert " of 2 hangs: no sign of life in 12 s after " in line
    assert "--worker-timeout" in output
    assert "Traceback" not in output
    assert bench.sweep("run", "--processes", "2")[0] == 0
    assert bench.tokens("run") == expected
    outcome(f"exit {code}: {line.removeprefix('error: ')}")


def test_a_worker_ends_with_its_parent(
    bench: Bench, expected: dict[str, str], outcome: Outcome
) -> None:
    """SIGKILL of the parent of a worker process"""
    command = bench.start([*SWEEP, "run", "--processes", "2"], **SLOW)
    command.until(lambda: bench.lines("run") >= 1)
    (worker,) = children(command)
    os.kill(command.pid, signal.SIGKILL)
    command.end()
    worker.wait(30)
    assert bench.lines("run") < IMAGES
    assert bench.sweep("run")[0] == 0
    assert bench.tokens("run") == expected
    outcome("the worker stops at its next step and leaves the run directory free")


@pytest.mark.parametrize("metrics", ["speed", "distance"])
def test_a_stop(bench: Bench, expected: dict[str, str], outcome: Outcome, metrics: str) -> None:
    """SIGSTOP in the middle of an image, and SIGCONT after 3 seconds"""
    command = bench.start([*SWEEP, "run", "--metrics", metrics], **SLOW)
    command.until(lambda: bench.lines("run") >= 2)
    (bench.folder / "stop").touch()
    process = psutil.Process(command.pid)
    command.until(lambda: process.status() == psutil.STATUS_STOPPED)
    threading.Event().wait(3.0)
    process.send_signal(signal.SIGCONT)
    assert command.end() == 0, command.output
    assert bench.tokens("run") == expected
    (session,) = read_manifest(bench.folder / "run")["sessions"]
    assert session["first_seconds"] >= 3.0
    records = read_records(bench.folder / "run")
    (stopped,) = [row for row in records if row["seconds"] >= 3.0] or [None]
    if metrics == "speed":
        assert stopped is None
        assert max(row["attempts"] for row in records) >= 2
        outcome("decoded again, to the same tokens; its seconds are without the stop")
    else:
        assert stopped is not None
        assert stopped["disturbed"]
        assert stopped["attempts"] == 1
        outcome("without the metric speed: marked as disturbed")


def test_worker_timeout_must_be_positive(bench: Bench) -> None:
    code, output = bench.sweep("run", "--worker-timeout", "0")
    assert code == 2
    assert "--worker-timeout 0: must be more than 0 seconds" in output


# ---- The module itself


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NAMES]
    yield
    assert [signal.getsignal(number) for number in NAMES] == before


@pytest.mark.parametrize("number", NAMES, ids=NAMES.get)
def test_a_held_signal_waits_for_a_check(number: signal.Signals) -> None:
    reached = []
    with pytest.raises(signals.Stopped) as raised, signals.signals_noted():
        with signals.delayed():
            os.kill(os.getpid(), number)
            reached.append("after the signal")
            with pytest.raises(signals.Stopped):
                signals.check()
        reached.append("after the block")
        signals.check()
        reached.append("after the check")
    assert raised.value.exit_code == 128 + number
    assert reached == [
        "after the signal",
        "after the block",
    ]
    signals.check()  # what is noted ends with the block


def test_a_signal_outside_stops_at_once_and_a_second_one_always() -> None:
    with signals.signals_noted():
        with pytest.raises(signals.Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1)
        with pytest.raises(signals.Stopped), signals.delayed():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1)


def test_other_threads_change_nothing() -> None:
    def inside() -> None:
        with signals.signals_noted():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_forked_process_dies_of_a_signal() -> None:
    with signals.signals_noted():
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _pid, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
