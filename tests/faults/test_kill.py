"""A sweep that is killed at any moment goes on to the records of one that is not."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.faults.child import IMAGES
from tests.faults.conftest import SWEEP, Bench, Outcome


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long)])
def test_sigkill(bench: Bench, expected: dict[str, str], outcome: Outcome, kills: int) -> None:
    """SIGKILL at random moments of a sweep"""
    moments = np.random.default_rng(0)
    counts = []
    same = 0
    for number in range(kills):
        out = f"run{number}"
        lines = number * IMAGES // kills
        command = bench.start([*SWEEP, out], TINY_SLEEP="0.1")
        if lines:
            command.until(lambda out=out, lines=lines: bench.lines(out) >= lines)
        command.process.join(moments.uniform(0.0, 0.1 if lines else 1.0))
        command.process.kill()
        assert command.end() == -signal.SIGKILL
        counts.append(bench.lines(out))
        code, output = bench.sweep(out)
        assert code == 0, output
        same += bench.tokens(out) == expected
        assert bench.problems(out) == []
    assert same == kills
    assert len(set(counts)) >= 4
    outcome(f"{same} of {kills} runs resumed to the same tokens")
