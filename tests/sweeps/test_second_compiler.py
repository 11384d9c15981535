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
from lantern_bench.models.load import compile_models, load_uncompiled
from lantern_bench.sweeps import (
    choose_threads,
    decode_missing,
    second_compiler,
    worker_process,
)
from lantern_bench.sweeps.choose_threads import timed_tasks
from lantern_bench.sweeps.decoder import decode_batch
from lantern_bench.sweeps.request import Request, prepare
from lantern_bench.sweeps.second_compiler import SecondCompiler
from lantern_bench.utils import files, signals
from lantern_bench.utils.clock import now
from lantern_bench.utils.progress import Emit, Note, ignore_events

LONGEST = 300.0  # seconds to wait for the second process


def children() -> set[psutil.Process]:
    """The processes that this one has started, those of other tests included."""
    return set(psutil.Process().children())


@pytest.fixture(params=[1])
def request_to_compile(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Request]:
    """A compiled sweep of `ar`, with an empty cache of programs. Parameter: its threads."""
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_process, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(worker_process, "cpu_quota", lambda: None)
    files._usable.cache_clear()
    flags = {"images": 1, "threads": request.param, "compile": True, "metrics": ["speed"]}
    overrides = Overrides.from_flags(flags, modes="ar")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield prepare("lanterns", overrides, out=tmp_path / "run")
    torch.set_num_threads(threads)


def test_this_process_loads_what_the_second_one_has_compiled(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, models = load_uncompiled(request_to_compile.experiment, ignore_events)
    batches = list(request_to_compile.plan.batches())
    before = children()
    with SecondCompiler(request_to_compile, models, compute) as second:
        assert second.helps
        second.compile_steps(batches, torch.get_num_threads())
        (process,) = children() - before
        assert process.wait(LONGEST) == 0
    assert not SecondCompiler(request_to_compile, models, compute).helps
    assert compile_models(models.values(), compute) is None

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a program was compiled")

    monkeypatch.setattr(torch, "compile", fail)
    (image,) = decode_batch(models["lanterns"], batches[0], compute, tokens=16)
    assert len(image.tokens) == 16


def test_what_is_timed_runs_for_every_other_number_of_threads(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    ran = list[tuple[int, int]]()

    @contextmanager
    def record(work: Any, *_: Any) -> Iterator[None]:
        sent.append(work)
        yield

    def decode(**arguments: Any) -> None:
        ran.append((torch.get_num_threads(), arguments["tokens"]))

    monkeypatch.setattr(second_compiler, "unheard_process", record)
    monkeypatch.setattr(second_compiler, "compile_models", lambda *_, **__: None)
    monkeypatch.setattr(choose_threads, "decode", decode)
    compute, models = load_uncompiled(request_to_compile.experiment, ignore_events)
    with SecondCompiler(request_to_compile, models, compute) as second:
        second.compile_timed(timed_tasks(request_to_compile.plan.tasks))
    (work,) = sent
    torch.set_num_threads(4)
    work(request_to_compile, ignore_events)
    assert ran == [(1, 12)]  # two threads are the first process's


def test_the_second_process_begins_with_the_last_batch(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    @contextmanager
    def record(work: Any, *_: Any) -> Iterator[None]:
        sent.append(work.keywords["batches"])
        yield

    monkeypatch.setattr(second_compiler, "unheard_process", record)
    compute, models = load_uncompiled(request_to_compile.experiment, ignore_events)
    first = next(iter(request_to_compile.plan.batches()))
    with SecondCompiler(request_to_compile, models, compute) as second:
        second.compile_steps([first, ()], threads=1)
    assert sent == [[(), first]]


@pytest.mark.parametrize("lacks", ["core", "quota", "memory"])
def test_a_machine_without_room_compiles_in_one_process(
    request_to_compile: Request, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    compute, models = load_uncompiled(request_to_compile.experiment, ignore_events)
    if lacks == "core":
        monkeypatch.setattr(worker_process, "usable_cores", lambda: [0])
    elif lacks == "quota":
        monkeypatch.setattr(worker_process, "cpu_quota", lambda: 1.5)
    else:
        memory = psutil.virtual_memory()._replace(available=10**6)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    before = children()
    with SecondCompiler(request_to_compile, models, compute) as second:
        assert not second.helps
        second.compile_steps(list(request_to_compile.plan.batches()), threads=1)
        assert children() <= before


@pytest.mark.parametrize(
    ("request_to_compile", "processes"),
    [(1, []), (None, ["_compile_timed"])],
    indirect=["request_to_compile"],
)
def test_without_a_compiler_no_second_process_compiles_steps(
    request_to_compile: Request, processes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @contextmanager
    def record(work: Any, *_: Any) -> Iterator[None]:
        started.append(work.func.__name__)
        yield

    monkeypatch.setattr(second_compiler, "unheard_process", record)
    warning = Note("decoding is not compiled: no g++", level="warning")
    monkeypatch.setattr(decode_missing, "compile_models", lambda *_: warning)
    events: list[Any] = []
    decode_missing.decode_missing(request_to_compile, events.append)
    assert warning in events
    assert started == processes


def _talk(_request: Request, emit: Emit) -> None:
    for _ in range(20_000):
        emit(None)


def test_a_process_that_nobody_hears_can_say_any_amount(request_to_compile: Request) -> None:
    with worker_process.unheard_process(_talk, request_to_compile) as worker:
        start = now()
        while worker.poll() is None and now() - start < LONGEST:
            signals.check()
        assert worker.poll() == 0
