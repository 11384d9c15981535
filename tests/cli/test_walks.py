"""Walks in parts: which process walks which part, and what happens if the second one ends early."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern_bench.config.settings import Overrides
from lantern_bench.models.load import load_to_decode
from lantern_bench.models.loaded_model import LoadedModel
from lantern_bench.profile import walks
from lantern_bench.profile.exploration import explore_request
from lantern_bench.profile.walks import Part, parts_of, walk_in_two_processes, walked
from lantern_bench.sweeps.request import Request
from lantern_bench.utils.progress import ignore_events
from tests.helpers.tiny_model import TinyModel

CELLS = [
    {"mode": "lantern", "drafting": "static", "tree": "chain-3", "neighbours": 3, "delta": 0.2}
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def planned(name: str, images: int) -> tuple[Request, LoadedModel, list[Part]]:
    """Return an exploration, its model, and a part for each image; nothing is walked."""
    source = {"name": "some", "model": name, "cells": CELLS, "compile": False}
    request = explore_request(source, Overrides.from_flags({"images": images}), out=Path("out"))
    _, models = load_to_decode(request.experiment, ignore_events)
    strict, relaxed = (cell.decoding for cell in request.experiment.cells)
    tasks = [task for task in request.plan.tasks if task.cell == request.plan.cells[0]]
    model = models[name]
    for _ in model.prepare([task.prompt.text for task in tasks]):
        pass
    vocabulary = model.target.vocab_size
    parts = parts_of(
        strict, [strict, relaxed], tasks, vocab_size=vocabulary, folder=Path("out"), fields={}
    )
    assert len(parts) == images
    return request, model, parts


class Ended:
    """A process that has ended."""

    def poll(self) -> int:
        return 0


@pytest.mark.usefixtures("two_threads")
def test_the_second_process_walks_the_second_half(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tiny
    monkeypatch.setattr(walks, "_TOGETHER", 1)
    monkeypatch.setattr(walks, "has_room_for_second", lambda: True)
    request, model, parts = planned("tiny", images=5)
    alone = walked(model, parts, ignore_events)
    for part in parts[1:]:
        part.path.unlink()
    halves = []

    @contextmanager
    def here(work: Any, request: Request) -> Iterator[Ended]:
        sent, received = pickle.loads(pickle.dumps((work, request)))
        halves.append([part.path for part in sent.keywords["parts"]])
        sent(received, ignore_events)
        yield Ended()

    monkeypatch.setattr(walks, "unheard_process", here)
    walk_in_two_processes(request, model, parts=parts, emit=ignore_events)
    assert halves == [[part.path for part in parts[3:]]]
    assert all(part.path.is_file() for part in parts)
    assert torch.get_num_threads() == 2
    for together, one in zip(walked(model, parts, ignore_events), alone, strict=True):
        np.testing.assert_allclose(together, one)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("lacks", ["room", "threads", "parts"])
def test_without_room_this_process_walks_alone(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    del tiny
    monkeypatch.setattr(walks, "_TOGETHER", 1)
    monkeypatch.setattr(walks, "has_room_for_second", lambda: lacks != "room")
    request, model, parts = planned("tiny", images=1 if lacks == "parts" else 2)
    if lacks == "threads":
        torch.set_num_threads(1)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a second process was started")

    monkeypatch.setattr(walks, "unheard_process", fail)
    walk_in_two_processes(request, model, parts=parts, emit=ignore_events)
    assert not any(part.path.is_file() for part in parts)


@pytest.mark.long
@pytest.mark.usefixtures("two_threads")
def test_parts_of_a_process_that_ended_early_are_walked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(walks, "_TOGETHER", 1)
    monkeypatch.setattr(walks, "has_room_for_second", lambda: True)
    request, model, parts = planned("lanterns", images=2)
    walk_in_two_processes(request, model, parts=parts, emit=ignore_events)
    assert [part.path.is_file() for part in parts] == [True, True]
    whole = walked(model, parts, ignore_events)

    for part in parts:
        part.path.unlink()
    real = walks.unheard_process

    @contextmanager
    def killed(work: Any, request: Request) -> Iterator[Any]:
        with real(work, request) as worker:
            worker.kill()
            worker.wait()
            yield worker

    monkeypatch.setattr(walks, "unheard_process", killed)
    walk_in_two_processes(request, model, parts=parts, emit=ignore_events)
    assert [part.path.is_file() for part in parts] == [True, False]
    for again, before in zip(walked(model, parts, ignore_events), whole, strict=True):
        np.testing.assert_allclose(again, before, rtol=1e-4, atol=1e-6)
