"""Attention over a cache reads only the filled columns and equals masked attention over all of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lantern_bench.models.transformer import KVCache, attend_cached
from lantern_bench.models.transformer_config import TransformerConfig

NODES, CAPACITY = 9, 100


def filled_cache(lengths: list[int], dtype: torch.dtype, kv_heads: int) -> KVCache:
    config = TransformerConfig(2, 8 * kv_heads, 1, kv_heads, 1, prefix=1, grid=(1, 1))
    cache = KVCache(config, 2, len(lengths), CAPACITY, dtype, torch.device("cpu"))
    draws = torch.Generator().manual_seed(0)
    store = torch.randn(cache._store.shape, generator=draws).to(dtype)  # what earlier steps left
    cache._store.copy_(store)
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [40], [50], [3, 50, 20]])
@pytest.mark.parametrize("nodes", [1, NODES, 50])
def test_filled_columns_are_enough(lengths: list[int], dtype: torch.dtype, kv_heads: int, nodes: int) -> None:
    cache, rows = filled_cache(lengths, dtype, kv_heads), 2 * len(lengths)
    draws = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, nodes, heads, 8, generator=draws).to(dtype) for heads in (4, kv_heads, kv_heads))
    seen = torch.ones(len(lengths), nodes, nodes, dtype=torch.bool).tril()
    mask, slots = cache.mask(seen, dtype), cache.slots(0, nodes)
    got = attend_cached(cache, 0, slots, mask)(q, k, v)
    keys, values = cache.write(0, slots, k, v)  # all of them, hidden by a mask made here
    behind = torch.arange(CAPACITY) - torch.tensor(lengths * 2)[:, None]
    allowed = behind[:, None, :] <= torch.arange(nodes)[:, None]
    wanted = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, allowed[:, None], enable_gqa=kv_heads == 2
    )
    assert got.shape == q.shape
    assert (got.float() - wanted.transpose(1, 2).float()).abs().max() < (1e-6 if dtype == torch.float32 else 2e-2)


def test_unused_columns_are_not_read() -> None:
    """NaN behind the last block would pass any mask."""
    cache = filled_cache([5], torch.float32, 4)
    cache._store[..., 32:, :] = torch.nan
    q, k, v = torch.randn(3, 2, NODES, 4, 8, generator=torch.Generator().manual_seed(2))
    seen = torch.ones(1, NODES, NODES, dtype=torch.bool).tril()
    got = attend_cached(cache, 0, cache.slots(0, NODES), cache.mask(seen, torch.float32))(q, k, v)
    assert torch.isfinite(got).all()
