"""Tokens are made once, continue after an interruption and are refused when damaged; the log of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.training import data
from lantern_bench.training.run import TrainingLog


def silent(_label: str, _done: float) -> None:
    """Ignore progress."""


def test_token_files_continue_where_they_were_interrupted(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def tokens(start: int, stop: int) -> Tensor:
        if start == 8 and len(calls) == 2:
            calls.clear()
            raise KeyboardInterrupt
        calls.append((start, stop))
        return torch.arange(start, stop)[:, None].expand(-1, 3).int()

    folder = data._folder(tmp_path, "rows", {"a": 1})
    with pytest.raises(KeyboardInterrupt):
        data._in_files(folder, 11, 4, tokens, "rows", silent)
    rows = data._in_files(folder, 11, 4, tokens, "rows", silent)
    assert rows[:, 0].tolist() == list(range(11)) and calls == [(8, 11)]
    assert torch.equal(data._in_files(folder, 11, 4, tokens, "rows", silent), rows) and len(calls) == 1
    assert data._folder(tmp_path, "rows", {"a": 2}) != folder == data._folder(tmp_path, "rows", {"a": 1})
    (folder / "00000.safetensors").write_bytes(b"short")
    with pytest.raises(RefusedError, match="damaged"):
        data._in_files(folder, 11, 4, tokens, "rows", silent)


def row(step: int, seconds: float) -> dict[str, float | None]:
    return {"step": step, "seconds": seconds, "loss": 1 / 3, "mal": None}


def test_log_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = TrainingLog(path, resume=True)
    for step in (10, 20, 30):
        log.add(row(step, step / 10))
    again = TrainingLog(path, resume=True)
    assert again.before(31) == (30, 3.0) and again.before(20) == (10, 1.0)
    again.add(row(20, 5.0))
    again.add(row(30, 6.0))
    lines = path.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "10", "20", "30"]
    assert lines[2].startswith("20,,5,0.333333,") and again.before(31) == (30, 6.0)
    TrainingLog(path, resume=False).add(row(10, 1.0))
    assert len(path.read_text().splitlines()) == 2
    path.write_text("something else\n")
    with pytest.raises(RefusedError, match="is not the log of a training"):
        TrainingLog(path, resume=True)
