"""Programs on CUDA where the compiler or the capture fails: the right results, one warning, no
second try.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError

from lantern_bench.decoding.engine import Fallbacks, GraphedProgram

DEVICE = torch.device("cuda:1")
Function = Callable[[Tensor], Tensor]


class Cuda:
    """The streams and graphs of torch.cuda on a machine without: what was made, and where capture
    fails.
    """

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.captures = 0
        self.streams = list[Any]()
        self.current: Any = "usual"
        self.function: Function | None = None

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.captures += 1
        self.current = stream  # a capture that fails at its end leaves its stream
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = "usual"


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: Any) -> None:
        """Order two streams: here everything is in order."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cuda]:
    def arrange(fails: bool = False) -> Cuda:
        state = Cuda(fails)
        usual = Stream()

        class Graph:
            def replay(self) -> None:
                self.result.copy_(state.function(*self.inputs))

        def stream(device: Any = None) -> Stream:
            state.streams.append(Stream(device))
            return state.streams[-1]

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: usual)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.cuda, "set_stream", lambda stream: setattr(state, "current", "usual")
        )
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", state.graph)
        return state

    return arrange


def double(x: Tensor) -> Tensor:
    return x * 2


def results(program: Callable[[Tensor], Tensor], count: int = 4) -> list[float]:
    return [float(program(torch.full((3,), float(value))).sum()) for value in range(count)]


def failing(error: Exception) -> Function:
    def fail(_: Tensor) -> Tensor:
        raise error

    return fail


WANTED = [0.0, 6.0, 12.0, 18.0]


def test_capture_replays_with_new_inputs_on_the_programs_device(cuda: Any) -> None:
    state = cuda()
    fallbacks = Fallbacks()
    program = GraphedProgram(
        compiled=lambda x: double(x), plain=double, device=DEVICE, fallbacks=fallbacks
    )
    state.function = double
    results_before = results(program, 1)
    x = torch.full((3,), 1.0)
    assert results_before == [0.0]
    assert state.captures == 0
    with contextlib.suppress(AttributeError):  # the graph of this test has no inputs yet
        program(x)
    graph: Any = program._graph
    graph.inputs = program._copies
    graph.result = program._result
    assert results(program) == WANTED
    assert state.captures == 1
    assert state.streams[0].device == DEVICE
    assert not fallbacks.reasons


def test_failed_capture_runs_without_graphs_and_warns_once(cuda: Any) -> None:
    state = cuda(fails=True)
    fallbacks = Fallbacks()
    programs = [
        GraphedProgram(
            compiled=lambda x: double(x), plain=double, device=DEVICE, fallbacks=fallbacks
        )
        for _ in range(3)
    ]
    with pytest.warns(
        RuntimeWarning, match="capture failed on this GPU, so steps run without CUDA graphs"
    ) as warned:
        assert [results(program) for program in programs] == [WANTED] * 3
    assert len(warned) == 1
    assert state.captures == 1
    assert state.current == "usual"
    assert list(fallbacks.reasons) == ["capture"]
    assert not fallbacks.graphs


def test_failed_compilation_runs_uncompiled_and_warns_once(cuda: Any) -> None:
    state = cuda()
    fallbacks = Fallbacks()
    programs = [
        GraphedProgram(
            compiled=failing(InternalTorchDynamoError("no")),
            plain=double,
            device=DEVICE,
            fallbacks=fallbacks,
        )
        for _ in range(2)
    ]
    with pytest.warns(
        RuntimeWarning, match="compiling failed on this GPU, so steps run uncompiled"
    ) as warned:
        assert [results(program) for program in programs] == [WANTED] * 2
    assert len(warned) == 1
    assert state.captures == 0


def test_without_torchs_own_error_a_failed_compilation_is_raised(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is private; another torch may lack it."""
    cuda()
    monkeypatch.delattr("torch._dynamo.exc.TorchDynamoException")
    broken, whole = (
        GraphedProgram(compiled=run, plain=double, device=DEVICE, fallbacks=Fallbacks())
        for run in (failing(InternalTorchDynamoError("no")), double)
    )
    with pytest.raises(InternalTorchDynamoError):
        results(broken, 1)
    assert results(whole, 1) == [0.0]


def test_lack_of_memory_is_no_reason_to_fall_back(cuda: Any) -> None:
    """What has run may have changed state: the image fails, and the next one starts again with a
    warm-up.
    """
    cuda()
    fallbacks = Fallbacks()
    answers = [failing(torch.OutOfMemoryError("full")), double]
    program = GraphedProgram(
        compiled=lambda x: answers.pop(0)(x), plain=double, device=DEVICE, fallbacks=fallbacks
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            results(program, 1)
        assert results(program, 1) == [0.0]
    assert not fallbacks.reasons


def test_engine_can_be_told_to_capture_nothing(cuda: Any) -> None:
    state = cuda()
    fallbacks = Fallbacks(graphs=False)
    assert (
        results(
            GraphedProgram(
                compiled=lambda x: double(x), plain=double, device=DEVICE, fallbacks=fallbacks
            )
        )
        == WANTED
    )
    assert state.captures == 0
    assert not fallbacks.reasons


@pytest.mark.gpu
def test_gpu_recovers_from_a_failed_capture() -> None:
    device = torch.device("cuda")
    fallbacks = Fallbacks()

    def reads_the_host(x: Tensor) -> Tensor:
        return x * 2 + 0 * x.sum().item()

    def run(program: Any) -> list[float]:
        return [
            float(program(torch.full((3,), float(value), device=device)).sum())
            for value in range(4)
        ]

    with pytest.warns(RuntimeWarning, match="capture failed") as warned:
        assert (
            run(
                GraphedProgram(
                    compiled=lambda x: reads_the_host(x),
                    plain=reads_the_host,
                    device=device,
                    fallbacks=fallbacks,
                )
            )
            == WANTED
        )
    assert len(warned) == 1
    later = Fallbacks()
    assert (
        run(
            GraphedProgram(
                compiled=lambda x: double(x), plain=double, device=device, fallbacks=later
            )
        )
        == WANTED
    )
    assert not later.reasons
