"""Attention, without a cache (training) and over one (decoding)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.models.cache import KVCache

__all__ = ["Attend", "attend_cached", "attend_plain"]

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes q [rows, n, heads, head_dim] with k, v [rows, n, kv_heads, head_dim]."""

_MANY = 24  # nodes: from here two products in half precision are faster than torch's attention kernel


def attend_cached(cache: KVCache, layer: int, slots: Tensor, mask: Tensor) -> Attend:
    """Attention over a cache: writes the new keys and values, sees what `mask` [rows, 1, n, columns] allows."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (part[:, :, : mask.shape[-1]] for part in cache.write(layer, slots, k, v))
        if q.device.type == "cpu" and q.dtype != torch.float32 and q.shape[1] >= _MANY:
            return _two_products(q, keys, values, mask)
        return _scaled_dot_product(q, keys, values, mask)

    return attend


def attend_plain(mask: Tensor, before: list[tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Attention without a cache, for training: mask [rows or 1, 1, n, n], additive.

    Keys and values in `before` are seen as well, the mask then [rows or 1, 1, n, (1 + len(before)) * n], and the new
    ones are appended to it.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if before is not None:
            before.append((k, v))
            k, v = (torch.cat(part, dim=1) for part in zip(*before, strict=True))
        return _scaled_dot_product(q, k.transpose(1, 2), v.transpose(1, 2), mask.to(q.dtype))

    return attend


def _two_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """As `_scaled_dot_product`, the softmax in float32 of scores that were rounded to the type of the products.

    torch's kernel does not round them, but takes the nodes of a tree in small blocks, at a third of the rate.
    """
    rows, nodes, heads, width = q.shape
    apart = rows * keys.shape[1]  # queries that share keys are rows of one product
    # In one piece: the product would copy a part of the cache turned over, which takes longer than the product.
    whole = keys.flatten(0, 1).contiguous()
    scores = torch.bmm((q * width**-0.5).transpose(1, 2).reshape(apart, -1, width), whole.transpose(1, 2))
    weights = (scores.float().view(rows, heads, nodes, -1) + mask).softmax(-1).to(q.dtype)
    mixed = torch.bmm(weights.view(apart, scores.shape[1], -1), values.flatten(0, 1))
    return mixed.view(rows, heads, nodes, width).transpose(1, 2)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Q [rows, n, heads, head_dim] with k and v [rows, kv_heads, columns, head_dim]."""
    grouped = q.shape[2] != k.shape[1]
    if q.shape[1] == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # torch's kernel multiplies a single row in half precision three times as slowly as two.
        return _scaled_dot_product(q.expand(-1, 2, -1, -1), k, v, mask.expand(-1, -1, 2, -1))[:, :1]
    mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)
