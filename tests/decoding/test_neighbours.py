"""What near means: the three metrics of the table of nearest codes, and what all of them keep to."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.decoding.neighbours import nearest_codes

CODES = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("metric", ["l2", "cosine", "random"])
def test_a_table_holds_every_other_code_once(metric) -> None:
    table = nearest_codes(CODES, 39, metric=metric)
    rows = torch.arange(40)
    assert (table != rows[:, None]).all()
    assert all(sorted([*row.tolist(), code]) == rows.tolist() for code, row in enumerate(table))


@pytest.mark.parametrize("metric", ["l2", "cosine", "random"])
def test_narrower_tables_and_chunks_give_the_same_columns(metric, monkeypatch) -> None:
    whole = nearest_codes(CODES, 39, metric=metric)
    monkeypatch.setattr("lantern_bench.decoding.neighbours._DISTANCES_AT_ONCE", 9 * 40)
    assert torch.equal(nearest_codes(CODES, 7, metric=metric), whole[:, :7])


def test_cosine_orders_by_the_angle_alone() -> None:
    stretched = CODES * torch.linspace(0.1, 10, 40)[:, None]
    table = nearest_codes(stretched, 39, metric="cosine")
    unit = torch.nn.functional.normalize(CODES.double(), dim=1)
    cosines = (unit @ unit.T).gather(1, table.long())
    assert (cosines.diff(dim=1) <= 1e-6).all()
    assert not torch.equal(table, nearest_codes(stretched, 39))
    normalised = torch.nn.functional.normalize(CODES, dim=1)
    assert torch.equal(nearest_codes(normalised, 39)[:, :3], nearest_codes(normalised, 39, metric="cosine")[:, :3])


def test_random_neighbours_ignore_geometry_and_repeat() -> None:
    first = nearest_codes(CODES, 10, metric="random")
    assert torch.equal(first, nearest_codes(CODES.flip(0), 10, metric="random"))
    expected = 10 * 10 / 39
    near = nearest_codes(CODES, 10)
    shared = [len(set(a) & set(b)) for a, b in zip(first.tolist(), near.tolist(), strict=True)]
    assert abs(sum(shared) / len(shared) - expected) < 1
