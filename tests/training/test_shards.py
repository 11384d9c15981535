"""Shards are written once, continue after an interruption and are refused when damaged; the log of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_bench.errors import RefusedError
from lantern_bench.training.drafter.dataset import Shards
from lantern_bench.training.drafter.run import TrainingLog


def make(start: int, stop: int) -> dict[str, Tensor]:
    return {"tokens": torch.arange(start, stop)[:, None].expand(-1, 3).int()}


def silent(_what: str, _done: float) -> None:
    """Ignore progress."""


def test_shards_continue_where_they_were_interrupted(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def counted(start: int, stop: int) -> dict[str, Tensor]:
        if start == 8:
            raise KeyboardInterrupt
        calls.append((start, stop))
        return make(start, stop)

    with pytest.raises(KeyboardInterrupt):
        Shards(tmp_path, "rows", {"a": 1}).fill(11, 4, counted, "rows", silent)
    shards = Shards(tmp_path, "rows", {"a": 1})
    assert len(shards) == 8 and calls == [(0, 4), (4, 8)]
    shards.fill(11, 4, make, "rows", silent)
    assert shards.whole("tokens")[:, 0].tolist() == list(range(11))
    assert [int(shards.row(index)["tokens"][0]) for index in (10, 0, 7)] == [10, 0, 7]
    again = Shards(tmp_path, "rows", {"a": 1})
    again.fill(11, 4, counted, "rows", silent)
    assert len(again) == 11 and len(calls) == 2
    assert len(Shards(tmp_path, "rows", {"a": 2})) == 0


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    shards = Shards(tmp_path, "rows", {"a": 1})
    shards.fill(4, 4, make, "rows", silent)
    (shards.folder / "00000.safetensors").write_bytes(b"short")
    with pytest.raises(RefusedError, match="damaged"):
        Shards(tmp_path, "rows", {"a": 1}).row(0)
    (shards.folder / "manifest.json").write_text("{")
    with pytest.raises(RefusedError, match=r"manifest.json: damaged"):
        Shards(tmp_path, "rows", {"a": 1})


def row(step: int, seconds: float) -> dict[str, float | None]:
    return {"step": step, "seconds": seconds, "loss": 1 / 3, "mal": None}


def test_log_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = TrainingLog(path, resume=True)
    for step in (10, 20, 30):
        log.add(row(step, step / 10))
    with path.open("a") as file:
        file.write("40,1")  # cut off while it was written
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
