"""The second process of a first start: it compiles what this process then only loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lantern_bench.config.settings import Overrides
from lantern_bench.models.load import load_to_decode
from lantern_bench.sweeps import second_compiler, worker_process
from lantern_bench.sweeps.decoder import decode_batch
from lantern_bench.sweeps.request import Request, prepare
from lantern_bench.sweeps.second_compiler import SecondCompiler
from lantern_bench.utils import files, signals
from lantern_bench.utils.clock import now
from lantern_bench.utils.progress import Emit, ignore_events

LONGEST = 300.0  # seconds to wait for the second process


def children() -> set[psutil.Process]:
    """The processes that this one has started, those of other tests included."""
    return set(psutil.Process().children())


@pytest.fixture
def request_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A compiled sweep of `ar`, with an empty cache of programs."""
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_process, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(worker_process, "cpu_quota", lambda: None)
    files._usable.cache_clear()
    flags = {"images": 1, "threads": 1, "compile": True, "metrics": ["speed"]}
    overrides = Overrides.from_flags(flags, modes="ar")
    return prepare("lanterns", overrides, out=tmp_path / "run")


def test_this_process_loads_what_the_second_one_has_compiled(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, models = load_to_decode(request_to_compile.experiment, ignore_events)
    batches = list(request_to_compile.plan.batches())
    second = SecondCompiler(request_to_compile, models.values())
    model = models["lanterns"]
    assert second.helps
    before = children()
    with second.compiling(batches, [torch.get_num_threads()]):
        (process,) = children() - before
        assert process.wait(LONGEST) == 0

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a program was compiled")

    monkeypatch.setattr(torch, "compile", fail)
    (image,) = decode_batch(model, batches[0], compute, tokens=16)
    assert len(image.tokens) == 16
    assert not SecondCompiler(request_to_compile, models.values()).helps


def test_the_second_process_begins_with_the_last_batch(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    @contextmanager
    def record(work: Any, *_: Any) -> Iterator[None]:
        sent.append(work.keywords["batches"])
        yield

    monkeypatch.setattr(second_compiler, "unheard_process", record)
    _, models = load_to_decode(request_to_compile.experiment, ignore_events)
    first = next(iter(request_to_compile.plan.batches()))
    with SecondCompiler(request_to_compile, models.values()).compiling([first, ()], [1]):
        pass
    assert sent == [[(), first]]


@pytest.mark.parametrize("lacks", ["core", "quota", "memory"])
def test_a_machine_without_room_compiles_in_one_process(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    _, models = load_to_decode(request_to_compile.experiment, ignore_events)
    if lacks == "core":
        monkeypatch.setattr(worker_process, "usable_cores", lambda: [0])
    elif lacks == "quota":
        monkeypatch.setattr(worker_process, "cpu_quota", lambda: 1.5)
    else:
        memory = psutil.virtual_memory()._replace(available=10**6)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    second = SecondCompiler(request_to_compile, models.values())
    assert not second.helps
    before = children()
    with second.compiling(list(request_to_compile.plan.batches()), [1]):
        assert children() <= before


def _talk(_request: Request, emit: Emit) -> None:
    for _ in range(20_000):
        emit(None)


def test_a_process_that_nobody_hears_can_say_any_amount(request_to_compile: Request) -> None:
    with worker_process.unheard_process(_talk, request_to_compile) as worker:
        start = now()
        while worker.poll() is None and now() - start < LONGEST:
            signals.check()
        assert worker.poll() == 0
