"""The kernels of compiled programs on a GPU, counted without one.

The programs are lowered to Triton with fake tensors, in a process that pretends to have a GPU. This
takes minutes: `long`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lantern_bench.profile.cost_model import KERNEL_COUNTS
from tests.helpers.fake_cuda import DIFFERENT

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """What `fake_cuda.py` counts."""
    command = [sys.executable, "-m", "tests.helpers.fake_cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == DIFFERENT:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.long
def test_compiled_kernels_are_those_of_the_lowered_programs(counted: dict[str, int]) -> None:
    stack = KERNEL_COUNTS["compiled"]
    assert (stack.layer, stack.forward) == (counted["layer"], counted["forward"])
    for depth in (1, 4):
        predicted = depth * (stack.drafter + stack.level)
        # The first forward also reads the last step.
        assert predicted == pytest.approx(counted[f"draft {depth}"], abs=8)
    for fanout in (1, 3):
        predicted = stack.verify + stack.rank * fanout + 2 * stack.keep
        assert predicted == pytest.approx(counted[f"verify {fanout}"], rel=0.08)


@pytest.mark.long
def test_grouped_heads_do_not_fall_to_the_slow_attention(counted: dict[str, int]) -> None:
    """Math attention would need six kernels more in each layer."""
    assert counted["grouped layer"] <= counted["layer"] + 2
