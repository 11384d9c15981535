"""A sweep that is killed at any moment goes on to the records of one that is not."""

from __future__ import annotations

import shutil
import signal
import time

import numpy as np
import pytest

from tests.faults.conftest import SWEEP, Bench, Outcome


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
def test_sigkill(bench: Bench, whole: dict[str, str], outcome: Outcome, kills: int) -> None:
    """SIGKILL at random moments of a sweep"""
    moments, finished, same = np.random.default_rng(0), [], 0
    began = time.monotonic()
    assert bench.sweep("measured")[0] == 0
    length = time.monotonic() - began
    for number in range(kills):
        out = f"run{number}"
        killed = False
        while not killed:
            command = bench.start(*SWEEP, out)
            command.process.join(length * moments.uniform(0.05, 0.95))
            command.process.kill()
            killed = command.end() == -signal.SIGKILL
            if not killed:  # the sweep was faster than its moment
                length = min(length, time.monotonic() - command.began)
                shutil.rmtree(bench.folder / out)
        finished.append(bench.lines(out))
        code, output = bench.sweep(out)
        assert code == 0, output
        same += bench.tokens(out) == whole
        assert bench.problems(out) == []
    assert same == kills
    assert len(set(finished)) >= min(4, kills - 2), "the moments are not spread over the sweep"
    killed_after = f"killed after {min(finished)} to {max(finished)} of 18 images"
    outcome(f"{same} of {kills} runs resumed to the same tokens; {killed_after}")
