"""Later calls of a program go to the compiler's code, and to torch where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern_bench.decoding.direct_program import DirectProgram, _Call, call_and_shorten
from lantern_bench.decoding.engine import Engine, SavedProgram, _cpu_options, compile_function
from tests.decoding.test_saved_programs import Doubling, run

CPU = torch.device("cpu")


def test_later_calls_are_direct_and_change_the_state(tmp_path: Path) -> None:
    owner = Doubling()
    program = SavedProgram(owner.step, tmp_path / "doubling.program", Engine())
    run(program)
    assert isinstance(program._run, DirectProgram)
    run(program)
    assert owner.calls.item() == 4


def test_without_torchs_class_a_program_runs_as_torch_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Doubling()
    run(SavedProgram(owner.step, tmp_path / "doubling.program", Engine()))
    monkeypatch.delattr("torch._inductor.output_code.CompiledFxGraph")
    program = SavedProgram(owner.step, tmp_path / "doubling.program", Engine())
    run(program)
    assert program._run is not None
    assert not isinstance(program._run, DirectProgram)
    assert owner.calls.item() == 4


def view(x: torch.Tensor) -> tuple[Any, ...]:
    return x + 1, x[:2]


def several(x: torch.Tensor) -> Any:
    return compile_function(lambda x: x * 2, CPU)(x) + compile_function(lambda x: x * 3, CPU)(x)


@pytest.mark.parametrize("program", [view, several, compile_function(view, CPU)])
def test_a_program_that_is_more_than_its_code_stays_as_it_is(
    program: Callable[[torch.Tensor], Any],
) -> None:
    x = torch.arange(4.0)
    _, later = call_and_shorten(program, (x,))
    assert later is program


def test_options_that_torch_lacks_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace(cpp_wrapper=True))
    assert _cpu_options.__wrapped__() == {"cpp_wrapper": True}


def test_an_output_that_is_no_result_is_torchs_to_handle() -> None:
    """Torch copies it to an argument, for example."""
    x, y, z = torch.zeros(3, 1)
    call = _Call(code=lambda _: (y, z), inputs=[x], outputs=(y, z))
    assert DirectProgram(call, arguments=(x,), result=(z, y))(x) == (z, y)
    with pytest.raises(LookupError, match="is not in the result"):
        DirectProgram(call, arguments=(x,), result=y)
