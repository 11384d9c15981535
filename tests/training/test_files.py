"""Tokens are made once, continue after an interruption and are refused when damaged; the log of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.training import task
from lantern_bench.training.run import read_log


def silent(_label: str, _done: float) -> None:
    """Ignore progress."""


def test_token_files_continue_where_they_were_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(task, "_BATCH", 4)

    def tokens(start: int, stop: int) -> Tensor:
        if start == 8 and len(calls) == 2:
            calls.clear()
            raise KeyboardInterrupt
        calls.append((start, stop))
        return torch.arange(start, stop)[:, None].expand(-1, 3).int()

    def make() -> Tensor:
        return task._in_files(tmp_path, "rows", {"a": 1}, 11, tokens, "rows", silent)

    with pytest.raises(KeyboardInterrupt):
        make()
    rows = make()
    assert rows[:, 0].tolist() == list(range(11)) and calls == [(8, 11)]
    assert torch.equal(make(), rows) and len(calls) == 1
    (folder,) = tmp_path.iterdir()
    task._in_files(tmp_path, "rows", {"a": 2}, 3, tokens, "rows", silent)
    assert len(list(tmp_path.iterdir())) == 2
    (folder / "00000.safetensors").write_bytes(b"short")
    with pytest.raises(RefusedError, match="damaged"):
        make()


def test_another_file_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    assert read_log(path) == []
    path.write_text("something else\n")
    with pytest.raises(RefusedError, match="is not the log of a training"):
        read_log(path)
