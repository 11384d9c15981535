"""Tables of nearest codes that are kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lantern_bench.decoding import neighbours
from lantern_bench.decoding.neighbours import nearest_codes
from lantern_bench.models import neighbour_tables
from lantern_bench.models.neighbour_tables import kept_nearest_codes, read_own_table
from lantern_bench.utils.errors import UserError
from lantern_bench.utils.progress import heard_by
from tests.helpers.tiny_model import TinyModel

CODES = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache that keeps every table."""
    monkeypatch.setenv("LANTERN_BENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(neighbour_tables, "_WORTH_KEEPING", -1.0)
    return tmp_path / "nearest-codes"


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The columns of every table that is computed."""
    columns: list[int] = []

    def compute(codebook, count, metric):
        columns.append(count)
        return nearest_codes(codebook, count, metric=metric)

    monkeypatch.setattr(neighbours, "nearest_codes", compute)
    return columns


def test_a_table_is_computed_once_for_all_processes(cache, computed):
    first = kept_nearest_codes(CODES, 7, "l2")
    assert torch.equal(first, nearest_codes(CODES, 7))
    assert torch.equal(kept_nearest_codes(CODES.clone(), 7, "l2"), first)
    assert computed == [7]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("codebook", "columns", "metric"),
    [
        (CODES + 1e-6, 7, "l2"),
        (CODES.view(20, 8), 7, "l2"),
        (CODES, 8, "l2"),
        (CODES, 7, "cosine"),
        (CODES, 7, "random"),
    ],
)
def test_what_changes_a_table_changes_its_file(cache, codebook, columns, metric):
    kept_nearest_codes(CODES, 7, "l2")
    other = kept_nearest_codes(codebook, columns, metric)
    assert torch.equal(other, nearest_codes(codebook, columns, metric=metric))
    assert len(list(cache.iterdir())) == 2


def test_other_code_makes_another_table(cache, monkeypatch, tmp_path):
    kept_nearest_codes(CODES, 7, "l2")
    changed = tmp_path / "neighbours.py"
    changed.write_text("# another rule for equal distances\n")
    monkeypatch.setattr(neighbours, "__file__", str(changed))
    kept_nearest_codes(CODES, 7, "l2")
    assert len(list(cache.iterdir())) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_codes(path: Path) -> None:
    """A table that could be one, under the hash of the true one."""
    content = bytearray(path.read_bytes())
    content[-4] = (content[-4] + 1) % 20
    path.write_bytes(content)


def without_hash(path: Path) -> None:
    save_file(load_file(path), path)


def of_floats(path: Path) -> None:
    save_file({"nearest": torch.zeros(40, 7)}, path, {"sha256": "0"})


@pytest.mark.parametrize("damage", [cut, empty, other_codes, without_hash, of_floats])
def test_a_damaged_table_is_computed_again(cache, computed, damage):
    first = kept_nearest_codes(CODES, 7, "l2")
    [path] = cache.iterdir()
    good = path.read_bytes()
    damage(path)
    assert path.read_bytes() != good
    assert torch.equal(kept_nearest_codes(CODES, 7, "l2"), first)
    assert computed == [7, 7]
    assert path.read_bytes() == good


def test_without_a_place_to_keep_it_a_table_is_computed(cache, computed):
    cache.write_text("a file where the folder would be")
    assert torch.equal(kept_nearest_codes(CODES, 7, "l2"), nearest_codes(CODES, 7))
    assert computed == [7]


def test_a_quick_table_is_not_kept(cache, monkeypatch):
    monkeypatch.setattr(neighbour_tables, "_WORTH_KEEPING", 60.0)
    kept_nearest_codes(CODES, 7, "l2")
    assert not cache.exists()


def test_models_use_the_kept_table(computed):
    tables = [
        TinyModel().load(torch.device("cpu"), torch.float32).table(columns) for columns in (3, 3, 5)
    ]
    assert computed == [3, 5]
    assert torch.equal(tables[0], tables[2][:, :3])


def test_a_slow_table_shows_its_progress(monkeypatch):
    monkeypatch.setattr("lantern_bench.utils.progress._SLOW_SECONDS", -1.0)
    monkeypatch.setattr(neighbours, "_DISTANCES_AT_ONCE", 400)
    events = []
    with heard_by(events.append):
        nearest_codes(CODES, 7)
    assert [event.done for event in events] == [0.25, 0.5, 0.75, 1.0]
    assert {event.label for event in events} == {"nearest codes"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[1, 2], [0, 2], [1, 0]], None),
        ([[1, 2], [2, 2], [1, 0]], "a row names a code twice"),
        ([[1, 2], [1, 2], [1, 0]], "each row must name other codes, from 0 to 2"),
        ([[1, 2], [0, 3], [1, 0]], "each row must name other codes, from 0 to 2"),
    ],
)
def test_a_table_of_the_user_names_other_codes_once(tmp_path, rows, problem):
    file = tmp_path / "mine.npy"
    np.save(file, np.array(rows))
    if problem is None:
        assert read_own_table(file, 3).tolist() == rows
        return
    with pytest.raises(UserError, match=problem):
        read_own_table(file, 3)
