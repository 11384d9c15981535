"""The number of threads is chosen by time, fewer on a tie; waiting threads stop spinning unless the
user decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import Engine
from lantern_bench.devices.environment import prepare_environment
from lantern_bench.models.random_weights import random_model_of_size, read_size
from lantern_bench.sweeps import choose_threads as choose_threads_module
from lantern_bench.sweeps.choose_threads import (
    Calibrated,
    calibrate,
    choose_threads,
    timed_tasks,
)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.010, 4: 0.006, 16: 0.005}, 16),
        ({1: 0.010, 4: 0.006, 16: 0.0058}, 4),  # 3% slower than sixteen threads
        ({1: 0.010, 4: 0.012, 16: 0.030}, 1),  # threads that wait for each other
    ],
)
def test_fewest_threads_that_are_about_fastest(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int
) -> None:
    state = {"threads": 16, "now": 0.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    monkeypatch.setattr(choose_threads_module, "now", lambda: state["now"])
    calibrated = calibrate(lambda: state.update(now=state["now"] + seconds[int(state["threads"])]))
    assert calibrated.threads == chosen
    assert state["threads"] == 16
    assert calibrated.milliseconds == pytest.approx(
        {count: 1e3 * time for count, time in seconds.items()}
    )


def test_one_thread_is_tried_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"now": 0.0, "calls": 0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(choose_threads_module, "now", lambda: state["now"])
    calibrated = calibrate(lambda: state.update(now=state["now"] + 0.1, calls=state["calls"] + 1))
    assert calibrated.threads == 1
    assert calibrated.milliseconds == pytest.approx({1: 100.0})
    assert state["calls"] <= 8


def test_known_threads_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[int]()
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", tried.append)
    calibrated = calibrate(lambda: None, recorded=3)
    assert calibrated.threads == 3
    assert list(calibrated.milliseconds) == [3]
    assert set(tried) == {3, before}


def test_the_choice_is_stored_with_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not read for other kinds of cells or numbers, from a busy machine, or from a damaged
    file.
    """
    recorded = list[int | None]()
    lost_share = 0.0

    def choose(_work: object, number: int | None) -> Calibrated:
        recorded.append(number)
        return Calibrated(1, {1: 4.0}, lost_share)

    monkeypatch.setattr(choose_threads_module, "calibrate", choose)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    target = SimpleNamespace(device=torch.device("cpu"))
    model: Any = SimpleNamespace(
        target=target, engine=SimpleNamespace(folder=tmp_path), condition=lambda texts: texts
    )
    ar = Decoding("ar")
    drafting = Decoding("speculative", tree="chain-3")

    def chosen(*decodings: Decoding) -> int | None:
        choose_threads(
            model=model, prompt="a lantern", decodings=decodings, emit=lambda _note: None
        )
        return recorded[-1]

    lost_share = 0.5
    assert chosen(ar, drafting) is None is chosen(ar, drafting)
    lost_share = 0.0
    assert chosen(ar, drafting) is None
    assert chosen(drafting, ar) == 1
    assert chosen(drafting) is None
    assert chosen(drafting) == 1
    assert chosen(ar) is None
    assert chosen(Decoding("zipar")) is None
    assert chosen(ar) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert chosen(ar, drafting) is None
    name = b'{"ar and drafting, at most 2": '
    no_numbers = [name + value + b"}" for value in (b"64", b"0", b"true", b'"2"', b"[1]")]
    for damaged in (b"", b"[1]", b"{", *no_numbers):
        (tmp_path / "threads.json").write_bytes(damaged)
        assert chosen(ar, drafting) is None
    model.engine.folder = None
    assert chosen(drafting) is None is chosen(drafting)


def test_compiled_steps_are_compiled_for_every_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model_of_size(
        config=read_size("2x64x128x4"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        generator=torch.Generator().manual_seed(0),
    )
    compiled_with = list[int]()

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        compiled_with.append(torch.get_num_threads())
        return graph.forward

    model.engine = Engine(compile=True, backend=backend)
    cells = [Decoding(mode="ar"), Decoding(mode="speculative", tree="chain-3")]
    before = torch.get_num_threads()

    def time(work: Callable[[], object], _recorded: int | None) -> Calibrated:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            work()
        return Calibrated(before, {}, 1.0)

    monkeypatch.setattr(choose_threads_module, "calibrate", time)
    choose_threads(model=model, prompt="a", decodings=cells, emit=lambda _note: None)
    # An autoregressive step, and the forward over a draft.
    assert compiled_with == [1] * 2 + [2] * 2


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_the_users_wait_policy_wins(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prepare_environment()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


@pytest.mark.parametrize("drafting", [[0, 1, 0], [0, 1, 1, 0], [1, 0, 1], [1, 1, 0], [0, 0]])
def test_the_first_task_of_each_kind_is_timed_in_order(drafting: list[int]) -> None:
    tasks: list[Any] = [
        SimpleNamespace(cell=SimpleNamespace(model="a", decoding=SimpleNamespace(drafts=drafts)))
        for drafts in map(bool, drafting)
    ]
    other = SimpleNamespace(cell=SimpleNamespace(model="b", decoding=SimpleNamespace(drafts=True)))
    timed = timed_tasks([tasks[0], other, *tasks[1:]])
    assert timed[0] is tasks[0]
    assert [tasks.index(task) for task in timed[1:]] == [
        number for number in range(1, len(tasks)) if drafting[number] != drafting[0]
    ][:1]
