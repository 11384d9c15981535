"""Nearest-code tables: the recorded ones, spaces, storage, chunks, the cache on disk and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lantern_bench.decoding.neighbours import in_space, index_dtype, nearest_codes
from lantern_bench.models.io import neighbour_cache
from lantern_bench.models.io.neighbour_cache import neighbour_table, table_path
from lantern_bench.models.loaded_model import LoadedModel
from tests.decoding.golden_cases import golden_path
from tests.tiny_model import TinyModel


@pytest.fixture(autouse=True)
def small_tables_on_disk(monkeypatch):
    monkeypatch.setattr(neighbour_cache, "_FEW_CODES", 2)


def codebook(codes=50, width=4, seed=0):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(codes, width, generator=noise) * torch.rand(codes, 1, generator=noise)


@pytest.mark.parametrize("name", ["a", "b", "vq_model"])
def test_recorded_tables_survive_the_disk_in_int16(tmp_path, name):
    if name == "vq_model":
        codes = torch.load(golden_path("llamagen_vq", "vq.pt"), weights_only=True)["model"]["quantize.embedding.weight"]
    else:
        codes = torch.from_numpy(np.load(golden_path("nearest_table", "latents.npz"))[f"{name}_latents"])
    total = len(codes)
    neighbour_table(codes, "raw", total - 1, tmp_path)
    table = neighbour_table(codes, "raw", total - 1, tmp_path)
    assert table.dtype == torch.int16 and len(list(tmp_path.iterdir())) == 1
    ours = table.numpy().astype(np.uint16)
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
    assert [index_dtype(codes) for codes in (8192, 16384, 32768, 32769, 65536, 65537)] == [
        torch.int16,
        torch.int16,
        torch.int16,
        torch.uint16,
        torch.uint16,
        torch.int32,
    ]


def test_distances_are_computed_in_blocks(monkeypatch):
    seen = []
    real = torch.cdist

    def watched(rows, codes, **options):
        seen.append(len(rows) * len(codes))
        return real(rows, codes, **options)

    monkeypatch.setattr(torch, "cdist", watched)
    monkeypatch.setattr("lantern_bench.decoding.neighbours._DISTANCES_AT_ONCE", 1 << 16)
    codes = codebook(2048)
    table = nearest_codes(codes, 20, dtype=index_dtype(2048))
    assert max(seen) <= 1 << 16 and sum(seen) == 2048**2 and table.shape == (2048, 20)


def test_table_is_computed_once_and_widened_when_needed(tmp_path, monkeypatch):
    made = []
    real = neighbour_cache.nearest_codes
    monkeypatch.setattr(
        neighbour_cache, "nearest_codes", lambda *args, **more: made.append(args[1]) or real(*args, **more)
    )
    monkeypatch.setattr(neighbour_cache, "_WIDTH", 20)
    codes = codebook()
    first = neighbour_table(codes, "raw", 5, tmp_path)
    again = neighbour_table(codes, "raw", 20, tmp_path)
    assert made == [20] and torch.equal(first, again)
    wider = neighbour_table(codes, "raw", 30, tmp_path)
    assert made == [20, 30] and torch.equal(wider[:, :20], first)
    assert neighbour_table(codes, "raw", 5, tmp_path).shape == (50, 30) and made == [20, 30]
    neighbour_table(codes, "normalised", 5, tmp_path)
    neighbour_table(codebook(seed=1), "raw", 5, tmp_path)
    assert made == [20, 30, 20, 20] and len(list(tmp_path.iterdir())) == 3
    # Without a folder nothing is kept, and no more is made than is asked.
    assert neighbour_table(codes, "raw", 3).shape == (50, 3)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other codebook"])
def test_damaged_table_is_computed_again(tmp_path, damage):
    codes = codebook()
    wanted = neighbour_table(codes, "raw", 5, tmp_path)
    path = table_path(tmp_path, codes, "raw")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    if damage == "other codebook":
        neighbour_table(codebook(seed=1)[:40], "raw", 5, tmp_path / "other")
        content = next((tmp_path / "other").iterdir()).read_bytes()
    path.write_bytes(content[:-20] if damage == "cut" else content)
    assert torch.equal(neighbour_table(codes, "raw", 5, tmp_path), wanted)
    assert torch.equal(load_file(path)["table"], wanted)


def test_unwritable_directory_does_not_fail(tmp_path):
    (tmp_path / "file").write_text("")
    assert neighbour_table(codebook(), "raw", 5, tmp_path / "file").shape == (50, 49)


def test_model_reads_its_table_in_its_space(tmp_path):
    model: LoadedModel = TinyModel().load(torch.device("cpu"), torch.float32)
    model.table_folder = tmp_path
    raw = model.table(3)
    assert raw.dtype == torch.int32 and torch.equal(raw, nearest_codes(model.codebook, 3))
    assert torch.equal(load_file(next(tmp_path.iterdir()))["table"][:, :3].int(), raw)
    other: LoadedModel = TinyModel().load(torch.device("cpu"), torch.float32)
    other.neighbour_space = "normalised"
    assert torch.equal(other.table(3), nearest_codes(in_space(other.codebook, "normalised"), 3))
    assert not torch.equal(other.table(3), raw)
