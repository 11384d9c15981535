"""Nearest-code tables: spaces, blocks, the model that computes its own."""

from __future__ import annotations

import pytest
import torch

from lantern_bench.decoding.neighbours import in_space, nearest_codes
from lantern_bench.models.loaded_model import LoadedModel
from tests.helpers.tiny_model import TinyModel


def codebook(codes=50, width=4, seed=0):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(codes, width, generator=noise) * torch.rand(codes, 1, generator=noise)


def test_raw_and_normalised_spaces_have_other_neighbours():
    codes = torch.tensor([[1.0, 0.0], [0.1, 0.0], [1.0, 0.5]])
    assert nearest_codes(in_space(codes, "raw"), 1)[0].tolist() == [2]
    assert nearest_codes(in_space(codes, "normalised"), 1)[0].tolist() == [1]
    with pytest.raises(ValueError, match="raw, normalised"):
        in_space(codes, "cosine")


def test_distances_are_computed_in_blocks(monkeypatch):
    seen = []
    real = torch.cdist

    def watched(rows, codes, **options):
        seen.append(len(rows) * len(codes))
        return real(rows, codes, **options)

    monkeypatch.setattr(torch, "cdist", watched)
    monkeypatch.setattr("lantern_bench.decoding.neighbours._DISTANCES_AT_ONCE", 1 << 16)
    codes = codebook(2048)
    table = nearest_codes(codes, 20)
    assert max(seen) <= 1 << 16
    assert sum(seen) == 2048**2
    assert table.shape == (2048, 20)


def test_model_computes_its_table_in_its_space():
    model: LoadedModel = TinyModel().load(torch.device("cpu"), torch.float32)
    raw = model.table(3)
    assert raw.dtype == torch.int32
    assert torch.equal(raw, nearest_codes(model.codebook, 3))
    other = TinyModel().load(torch.device("cpu"), torch.float32)
    other.neighbour_space = "normalised"
    assert torch.equal(other.table(3), nearest_codes(in_space(other.codebook, "normalised"), 3))
    assert not torch.equal(other.table(3), raw)
