"""Attention, without a cache (training) and over one (decoding).

A cache has a fixed capacity, and a mask hides what is not in use. A processor need not read that part at all: there the
filled part alone goes through the kernel, which for a picture from start to end is half of it. On other devices, where
how much is filled is not known on the host, the whole capacity is read.
"""

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

_BLOCK = 32  # columns are read in blocks of so many
_WORTH = 4  # nodes from which reading less saves more than finding out how much
_library = torch.library.Library("lantern_bench", "FRAGMENT")
_library.define("attend_filled(Tensor q, Tensor keys, Tensor values, Tensor mask, Tensor slots) -> Tensor")


def attend_cached(cache: KVCache, layer: int, slots: Tensor, mask: Tensor) -> Attend:
    """Attention over a cache: writes the new keys and values, sees what `mask` [rows, 1, n, capacity] allows."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.write(layer, slots, k, v)
        if q.device.type == "cpu" and q.shape[1] >= _WORTH:
            made: Tensor = torch.ops.lantern_bench.attend_filled(q, keys, values, mask, slots)
            return made
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
        return _scaled_dot_product(q, k, v, mask.to(q.dtype))

    return attend


def _attend_filled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, slots: Tensor) -> Tensor:
    """What is behind the last slot [B, n] of the nodes themselves, nobody sees."""
    last = slots[:, -1]
    filled = int(last if len(last) == 1 else last.max()) + 1
    filled = min(-(-filled // _BLOCK) * _BLOCK, keys.shape[1])
    keys, values, mask = keys[:, :filled], values[:, :filled], mask[..., :filled]
    return _scaled_dot_product(q, keys, values, mask).contiguous()


_library.impl("attend_filled", _attend_filled, "CPU")


@torch.library.register_fake("lantern_bench::attend_filled")  # type: ignore[untyped-decorator]
def _shape(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, slots: Tensor) -> Tensor:  # noqa: ARG001  # the op's
    return q.new_empty(q.shape)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    if q.shape[1] == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # torch's kernel multiplies a single row in half precision three times as slowly as two.
        return _scaled_dot_product(q.expand(-1, 2, -1, -1), k, v, mask.expand(-1, -1, 2, -1))[:, :1]
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)
