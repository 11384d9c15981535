"""Programs kept in files: a later engine loads them, and compiles whatever does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding import kept_programs
from lantern_bench.decoding.compile import Engine
from lantern_bench.decoding.kept_programs import ProgramStore
from tests.decoding.test_engine import CELLS, Small, decoded, same


def no_compiler(*_: Any) -> Any:
    raise AssertionError("a program was compiled")


def test_later_engines_load_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, wanted = Decoding(**CELLS["static"]), decoded(Small(), Decoding(**CELLS["static"]), 1)
    first, small = Engine(True, store=ProgramStore(tmp_path)), Small()
    with first.compiling() as possible:
        assert possible
        decoded(small, decoding, 1, first)
    assert len(list(tmp_path.iterdir())) == 3
    same(decoded(small, decoding, 1, first), wanted)
    monkeypatch.setattr(kept_programs, "compile_alone", no_compiler)
    engine, model = Engine(True, store=ProgramStore(tmp_path)), Small()
    same(decoded(model, decoding, 1, engine), wanted)
    same(decoded(model, decoding, 1, engine), wanted)
    other = Decoding(**CELLS["static"] | {"lambda": 8.0})
    same(decoded(model, other, 1, engine), decoded(Small(), other, 1))


class Doubling:
    """A program with a tensor of its own, which counts its calls in place."""

    def __init__(self, width: int = 4) -> None:
        self.held, self.calls = torch.ones(width), torch.zeros(1)

    def step(self, given: tuple[torch.Tensor, None], more: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        self.calls.add_(1)
        return more * 2 + self.held, (given[0] + self.held, None)


def run(program: Callable[..., Any], width: int = 4) -> None:
    for number in (1.0, 5.0):
        first, (second, nothing) = program((torch.full((width,), number), None), torch.full((width,), 2 * number))
        assert nothing is None
        assert first.tolist() == [4 * number + 1] * width and second.tolist() == [number + 1] * width


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [damage, cut, empty])
def test_a_damaged_file_is_compiled_again(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProgramStore(tmp_path)
    run(store.program("key", Doubling().step))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    spoil(file)
    run(store.program("key", Doubling().step))
    assert len(file.read_bytes()) == len(whole)
    monkeypatch.setattr(kept_programs, "compile_alone", no_compiler)
    later = Doubling()
    run(store.program("key", later.step))
    assert later.calls.item() == 2


def test_a_file_of_other_shapes_is_compiled_again(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    run(store.program("key", Doubling().step))
    run(store.program("key", Doubling(6).step), 6)


def test_what_cannot_be_kept_still_runs(tmp_path: Path) -> None:
    hidden = torch.ones(3)
    program = ProgramStore(tmp_path).program("key", lambda x: x + _Hidden.value)
    _Hidden.value = hidden
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert program(torch.ones(3)).tolist() == [2, 2, 2]
    assert program(torch.zeros(3)).tolist() == [1, 1, 1]
    assert not list(tmp_path.iterdir())


class _Hidden:
    """A tensor that no path from the function leads to."""

    value = torch.zeros(3)


def test_keys_with_functions_are_not_kept(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    assert store.keeps(("settle", 1, (("mode", "'ar'"),), False, None))
    assert not store.keeps(("settle", 1, run))
