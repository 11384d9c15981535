"""The number of threads is chosen by time, fewer on a tie; waiting threads stop spinning unless the user decides."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lantern_bench import clock
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.compile import Engine
from lantern_bench.models.random_model import random_model_of_size, read_size
from lantern_bench.runs.threads import KeptThreads, calibrate, prepare_environment, step_work


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.010, 4: 0.006, 16: 0.005}, 16),
        ({1: 0.010, 4: 0.006, 16: 0.0058}, 4),  # 3 % slower than sixteen threads
        ({1: 0.010, 4: 0.012, 16: 0.030}, 1),  # threads that wait for each other
    ],
)
def test_fewest_threads_that_are_about_fastest(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int
) -> None:
    state = {"threads": 16, "now": 0.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    monkeypatch.setattr(clock, "now", lambda: state["now"])
    found = calibrate(lambda: state.update(now=state["now"] + seconds[int(state["threads"])]))
    assert found.threads == chosen and state["threads"] == 16
    assert found.milliseconds == pytest.approx({count: 1e3 * one for count, one in seconds.items()})


def test_one_thread_is_tried_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"now": 0.0, "calls": 0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(clock, "now", lambda: state["now"])
    found = calibrate(lambda: state.update(now=state["now"] + 0.1, calls=state["calls"] + 1))
    assert found.threads == 1 and found.milliseconds == pytest.approx({1: 100.0})
    assert state["calls"] <= 8


def test_known_threads_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, before = list[int](), torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    found = calibrate(lambda: None, known=3)
    assert found.threads == 3 and list(found.milliseconds) == [3] and set(tried) == {3, before}


def test_threads_are_kept_with_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number chosen by other kinds of cells or among other numbers, or a damaged file, is none."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    kept = KeptThreads(tmp_path, [True, False])
    assert kept.read() is None
    kept.write(1)
    KeptThreads(tmp_path, [True]).write(4)
    assert KeptThreads(tmp_path, [False, True]).read() == 1 and KeptThreads(tmp_path, [True]).read() == 4
    assert KeptThreads(tmp_path, [False]).read() is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert KeptThreads(tmp_path, [True]).read() is None
    for damaged in (b"", b"[1]", b"{"):
        (tmp_path / "threads.json").write_bytes(damaged)
        assert kept.read() is None
    KeptThreads(None, [True]).write(1)
    assert KeptThreads(None, [True]).read() is None


def test_compiled_steps_are_compiled_for_every_number_of_threads() -> None:
    model = random_model_of_size(
        read_size("2x64x128x4"), torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0)
    )
    made = list[int]()

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        made.append(torch.get_num_threads())
        return graph.forward

    model.engine = Engine(compile=True, backend=backend)
    cells = [Decoding(mode="ar"), Decoding(mode="speculative", tree="chain-3")]
    work, before = step_work(model, model.condition(["a"]), cells), torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            work()
    finally:
        torch.set_num_threads(before)
    # An autoregressive step; draft, score and settle.
    assert made == [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_the_users_wait_policy_wins(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    prepare_environment()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
