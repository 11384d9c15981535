"""A sweep that is killed at any moment goes on to the records of one that is not."""

from __future__ import annotations

import shutil
import signal
import time

import numpy as np
import pytest

from tests.faults.conftest import SWEEP, Bench, Outcome

KILLS = 20


@pytest.mark.timeout(1200)  # it takes half a minute on a machine with nothing else to do
def test_sigkill(bench: Bench, whole: dict[str, str], outcome: Outcome) -> None:
    """SIGKILL at 20 random moments of a sweep"""
    moments, kept, same = np.random.default_rng(0), [], 0
    began = time.monotonic()
    assert bench.sweep("measured")[0] == 0
    length = time.monotonic() - began
    for number in range(KILLS):
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
        kept.append(bench.lines(out))
        code, said = bench.sweep(out)
        assert code == 0, said
        same += bench.tokens(out) == whole
        assert bench.problems(out) == []
    assert same == KILLS
    assert len(set(kept)) >= 4, "the moments are not spread over the sweep"
    outcome(f"{same} of {KILLS} runs resumed to the same tokens; killed after {min(kept)} to {max(kept)} of 18 images")
