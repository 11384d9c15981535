"""The number of threads is chosen by time, fewer on a tie; waiting threads stop spinning unless the user decides."""

from __future__ import annotations

import os

import pytest
import torch

from lantern_bench import clock
from lantern_bench.models.packed_linear import pack_for_decoding
from lantern_bench.models.random_model import random_model_of_size, read_size
from lantern_bench.runs.threads import calibrate, prepare_environment, step_work


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 0.010, 2: 0.006, 4: 0.005}, 4),
        ({1: 0.010, 2: 0.006, 4: 0.0058}, 2),  # 3 % slower than four threads
        ({1: 0.010, 2: 0.012, 4: 0.030}, 1),  # threads that wait for each other
    ],
)
def test_fewest_threads_that_are_about_fastest(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], chosen: int
) -> None:
    state = {"threads": 4, "now": 0.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    monkeypatch.setattr(clock, "now", lambda: state["now"])
    found = calibrate(lambda: state.update(now=state["now"] + seconds[int(state["threads"])]))
    assert found.threads == chosen and state["threads"] == 4
    assert found.milliseconds == pytest.approx({count: 1e3 * one for count, one in seconds.items()})


def test_compiled_models_are_timed_by_their_products() -> None:
    model = random_model_of_size(
        read_size("2x64x128x4"), torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0)
    )
    steps = step_work(model, model.condition(["a"]), 2.0)
    pack_for_decoding(model.target, model.drafter)
    model.engine.compile = True
    products = step_work(model, model.condition(["a"]), 2.0)
    assert (steps.__name__, products.__name__) == ("steps", "products")
    products()
    assert not any(layer._forward_pre_hooks for layer in model.target.modules())


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
