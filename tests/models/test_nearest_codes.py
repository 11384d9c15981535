"""Nearest-code tables: the recorded ones, spaces, types, chunks and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lantern_bench.decoding.neighbours import in_space, index_dtype, nearest_codes
from lantern_bench.models.loaded_model import LoadedModel
from tests.decoding.golden_cases import golden_path
from tests.tiny_model import TinyModel


@pytest.mark.parametrize("name", ["a", "b", "vq_model"])
def test_tables_are_the_recorded_ones(name):
    if name == "vq_model":
        codes = torch.load(golden_path("llamagen_vq", "vq.pt"), weights_only=True)["model"]["quantize.embedding.weight"]
    else:
        codes = torch.from_numpy(np.load(golden_path("nearest_table", "latents.npz"))[f"{name}_latents"])
    total = len(codes)
    ours = nearest_codes(codes, total - 1, dtype=torch.int16).numpy().astype(np.uint16)
    theirs = np.load(golden_path("nearest_table", f"{name}_top_{total - 1}_indices.npy"))
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    distance = torch.cdist(codes.double(), codes.double()).numpy()
    gap = np.take_along_axis(distance, ours.astype(int), 1) - np.take_along_axis(distance, theirs.astype(int), 1)
    assert np.abs(gap)[ours != theirs].max(initial=0.0) < 1e-5


def test_raw_and_normalised_spaces_have_other_neighbours():
    codes = torch.tensor([[1.0, 0.0], [0.1, 0.0], [1.0, 0.5]])
    assert nearest_codes(in_space(codes, "raw"), 1)[0].tolist() == [2]
    assert nearest_codes(in_space(codes, "normalised"), 1)[0].tolist() == [1]
    with pytest.raises(ValueError, match="raw, normalised"):
        in_space(codes, "cosine")


def test_index_type_is_the_smallest_that_fits():
    assert {index_dtype(codes) for codes in (8192, 16384, 32768)} == {torch.int16}
    assert {index_dtype(codes) for codes in (32769, 65536)} == {torch.uint16}
    assert index_dtype(65537) == torch.int32


def test_distances_are_computed_in_blocks(monkeypatch):
    seen = []
    real = torch.cdist

    def watched(rows, codes, **options):
        seen.append(len(rows) * len(codes))
        return real(rows, codes, **options)

    monkeypatch.setattr(torch, "cdist", watched)
    monkeypatch.setattr("lantern_bench.decoding.neighbours._DISTANCES_AT_ONCE", 1 << 16)
    codes = torch.randn(2048, 4, generator=torch.Generator().manual_seed(0))
    table = nearest_codes(codes, 20, dtype=index_dtype(2048))
    assert max(seen) <= 1 << 16 and sum(seen) == 2048**2 and table.shape == (2048, 20)


def test_model_computes_its_table_in_its_space():
    model: LoadedModel = TinyModel().load(torch.device("cpu"), torch.float32)
    raw = model.table(3)
    assert raw.dtype == torch.int32 and torch.equal(raw, nearest_codes(model.codebook, 3))
    other = TinyModel().load(torch.device("cpu"), torch.float32)
    other.neighbour_space = "normalised"
    assert torch.equal(other.table(3), nearest_codes(in_space(other.codebook, "normalised"), 3))
    assert not torch.equal(other.table(3), raw)
