"""Compiled programs in files: a later engine loads them, and compiles whatever does not fit."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.engine import BeingCompiledError, Engine, SavedProgram
from tests.decoding.test_engine import CELLS, Small, decoded, same


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise AssertionError("a program was compiled")

        monkeypatch.setattr(torch, "compile", fail)

    return forbid


def test_compiled_steps_give_the_same_tokens_and_later_engines_load_them(
    tmp_path: Path, no_compiler: Callable[[], None]
) -> None:
    cell = CELLS["static"] | {"tree": [[0], [1], [0, 0]]}  # each depth is compiled by itself
    decoding = Decoding(**cell)
    wanted = decoded(Small(), decoding, 1)
    same(
        decoded(
            model=Small(), decoding=decoding, images=1, engine=Engine(compile=True, folder=tmp_path)
        ),
        wanted,
    )
    assert len(list(tmp_path.glob("*.program"))) == 3
    no_compiler()
    engine = Engine(compile=True, folder=tmp_path)
    model = Small()
    same(decoded(model=model, decoding=decoding, images=1, engine=engine), wanted)
    same(decoded(model=model, decoding=decoding, images=1, engine=engine), wanted)
    other = Decoding(**cell | {"lambda": 8.0})
    same(decoded(model=model, decoding=other, images=1, engine=engine), decoded(Small(), other, 1))


class Doubling:
    """A program with a tensor of its own, which counts its calls in place."""

    def __init__(self, width: int = 4) -> None:
        self.added = torch.ones(width)
        self.calls = torch.zeros(1)

    def step(
        self, pair: tuple[torch.Tensor, None], more: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        self.calls.add_(1)
        return more * 2 + self.added, (pair[0] + self.added, None)


def run(program: Callable[..., Any]) -> None:
    for number in (1.0, 5.0):
        first, (second, nothing) = program(
            (torch.full((4,), number), None), torch.full((4,), 2 * number)
        )
        assert nothing is None
        assert first.tolist() == [4 * number + 1] * 4
        assert second.tolist() == [number + 1] * 4


@pytest.mark.parametrize(
    "spoil", [lambda content: content[:-1] + b"x", lambda content: content[:50], lambda _: b""]
)
def test_a_damaged_file_is_compiled_again(
    spoil: Callable[[bytes], bytes], tmp_path: Path, no_compiler: Callable[[], None]
) -> None:
    file = tmp_path / "new folder" / "doubling.program"
    run(SavedProgram(Doubling().step, file, Engine()))
    file.write_bytes(spoil(file.read_bytes()))
    run(SavedProgram(Doubling().step, file, Engine()))
    no_compiler()
    later = Doubling()
    run(SavedProgram(later.step, file, Engine()))
    assert later.calls.item() == 2


def test_a_program_that_another_process_compiles_is_loaded(
    tmp_path: Path, no_compiler: Callable[[], None]
) -> None:
    file = tmp_path / "doubling.program"
    run(SavedProgram(Doubling().step, file, Engine()))
    content = file.read_bytes()
    file.unlink()
    no_compiler()
    lock = FileLock(file.with_suffix(".lock"))
    with ThreadPoolExecutor(1) as pool, lock:
        waiting = pool.submit(run, SavedProgram(Doubling().step, file, Engine()))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        file.write_bytes(content)
        lock.release()
        waiting.result()


def test_a_program_that_another_process_compiles_can_be_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "doubling.program"
    engine = Engine()
    program = SavedProgram(Doubling().step, file, engine)
    lock = FileLock(file.with_suffix(".lock"))
    with lock, engine.without_waiting(), pytest.raises(BeingCompiledError):
        run(program)
    assert engine.waits
    assert not file.exists()
    with engine.without_waiting():  # the other process has failed
        run(program)
    assert file.exists()


def test_a_file_system_without_locks_compiles_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    run(SavedProgram(Doubling().step, tmp_path / "doubling.program", Engine()))
    assert [file.suffix for file in tmp_path.iterdir()] == [".program"]


def test_what_cannot_be_saved_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.warns(UserWarning, match="cannot be kept"):
        run(SavedProgram(Doubling().step, occupied / "doubling.program", Engine()))
    monkeypatch.delattr(torch.compiler, "load_compiled_function", raising=False)
    owner = Doubling()
    run(Engine(compile=True, folder=tmp_path).program("key", owner.step, torch.device("cpu")))
    assert list(tmp_path.iterdir()) == [occupied]
    assert owner.calls.item() == 2
