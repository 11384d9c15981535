"""Rotary position embeddings, the key/value cache, and attention with it (decoding) and without (training)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.models.transformer import TransformerConfig

# Rows behind the grid serve draft nodes beyond its end, which are never kept (docs/algorithms.md, section 9, B5).
_MARGIN = 64


def grid_rotary(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """The rotary table [positions, head_dim / 2, 2] (cosine, sine) of prefix, grid and margin.

    The first half of the pairs turns with the row, the second with the column; the first image token is cell (0, 0).
    `prefix` overrides the config's: a drafter's is one shorter (docs/algorithms.md, section 9, B5).
    """
    prefix = config.prefix if prefix is None else prefix
    half = config.head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32)[: half // 2]
    frequency = 1.0 / config.rope_base ** (steps / half)
    rows, columns = config.grid
    by_row = torch.outer(torch.arange(rows, dtype=torch.float32), frequency)
    by_column = torch.outer(torch.arange(columns, dtype=torch.float32), frequency)
    both = [by_row[:, None].expand(rows, columns, -1), by_column[None].expand(rows, columns, -1)]
    angles = torch.cat(both, dim=-1).reshape(rows * columns, half)
    grid = torch.stack([angles.cos(), angles.sin()], dim=-1)
    head = torch.zeros(prefix, half, 2)
    if config.prefix_rotary == "identity":
        head[..., 0] = 1.0
    return torch.cat([head, grid, torch.zeros(_MARGIN, half, 2)])


def rotary_table(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """The factors of `rotary_turns` at each position, [positions, 2, head_dim].

    `prefix` overrides the config's for positions on a grid.
    """
    interleaved = config.pairs == "interleaved"
    if config.positions == "grid":
        return rotary_turns(grid_rotary(config, prefix), interleaved)
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    places = torch.arange(config.prefix + config.image_tokens + _MARGIN, dtype=torch.float32)
    angles = torch.outer(places, 1.0 / config.rope_base ** (steps / config.head_dim))
    return rotary_turns(torch.stack([angles.cos(), angles.sin()], dim=-1), interleaved)


def rotary_turns(rotary: Tensor, interleaved: bool) -> Tensor:
    """The factors of `rotate` [positions, 2, head_dim] from a table [positions, head_dim / 2, 2].

    First the cosine of each number's pair, then the sine with the sign of its partner.
    """
    cosine, sine = rotary.unbind(-1)
    pairs = torch.stack([torch.stack([cosine, cosine], dim=-1), torch.stack([-sine, sine], dim=-1)], dim=1)
    return (pairs if interleaved else pairs.mT).flatten(-2)


def rotate(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs: x [rows, n, heads, head_dim], turn [1 or rows, n, 2, head_dim]."""
    wide = x.float()
    if interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * turn[:, :, :1] + partner * turn[:, :, 1:]).to(x.dtype)


_BLOCK = 32  # columns: what is in use grows by so many, for fewer shapes of which kernels are made


class KVCache:
    """Keys and values [layers, 2, rows, heads, capacity, head_dim] for B images and `groups` rows an image.

    `lengths` int64 [B] are the committed positions. Shapes and addresses are fixed and a mask hides the rest, so that a
    step is compiled (or captured as a graph) once. On a CPU a forward reads only the columns in use, on average half of
    them; on other devices the host does not know their number, and it reads the whole capacity.
    """

    def __init__(
        self,
        layers: int,
        groups: int,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = groups * batch
        self._store = torch.zeros((layers, 2, rows, heads, capacity, head_dim), dtype=dtype, device=device)
        # Views of single layers: a compiled forward would copy a view of the whole to write into it.
        self._layers = [(layer[0], layer[1]) for layer in self._store]
        self.groups, self.batch, self.capacity = groups, batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._columns = torch.arange(capacity, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values; on the meta device, the bytes they would take."""
        return self._store.nbytes

    def clear(self) -> None:
        """Fill keys and values with zeros."""
        self._store.zero_()

    def reset(self) -> None:
        """Forget everything."""
        self.lengths.zero_()
        self._visible.fill_(True)

    def hide(self, visible: Tensor) -> None:
        """Set which of the first P positions attention sees (not padding), before they are committed.

        bool [B, P] where all rows of an image have the same padding, else [rows, P].
        """
        self._visible[:, : visible.shape[1]] = visible.repeat(len(self._rows) // len(visible), 1)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat values of the B images [B, ...] for their rows [rows, ...]."""
        return values if self.groups == 1 else torch.cat([values] * self.groups)

    def slots(self, offset: int, count: int) -> Tensor:
        """Positions int64 [B, count] that start `offset` behind the committed ones."""
        return self.lengths[:, None] + self._columns[offset : offset + count]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [rows, n, heads, head_dim] to `slots` [B, n]; return the whole layer's."""
        store_k, store_v = self._layers[layer]
        if self.batch == 1:
            # One image: its rows have the same slots.
            store_k.index_copy_(2, slots[0], keys.transpose(1, 2))
            store_v.index_copy_(2, slots[0], values.transpose(1, 2))
        else:
            places = self.per_row(slots)
            store_k[self._rows, :, places] = keys
            store_v[self._rows, :, places] = values
        return store_k, store_v

    def mask(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """The additive attention mask [rows, 1, n, columns in use] of n new nodes.

        seen: bool [B or rows, n, m], which of the m uncommitted nodes (itself included) each new node sees; all see the
        committed and visible positions.
        """
        rows, (nodes, ahead) = len(self._rows), seen.shape[1:]
        used = self.capacity
        if self.lengths.device.type == "cpu":
            blocks = (self.lengths.max() + ahead + _BLOCK - 1) // _BLOCK
            used = int((blocks * _BLOCK).clamp_max(self.capacity))
            # Bounds for the compiler, whose programs take any number of columns.
            torch._check(used > 1)
            torch._check(used <= self.capacity)
        committed = self.per_row(self._columns[:used] < self.lengths[:, None]) & self._visible[:, :used]
        seen = seen.expand(rows, -1, -1) if len(seen) == 1 else seen.repeat(rows // len(seen), 1, 1)
        places = self.per_row(self.slots(0, ahead))[:, None].expand(-1, nodes, -1)
        before, new = (torch.where(allowed, 0.0, -torch.inf).to(dtype) for allowed in (committed, seen))
        return before[:, None].expand(-1, nodes, -1).scatter(2, places, new)[:, None]

    def advance(self, counts: Tensor) -> None:
        """Commit the first `counts` [B] uncommitted positions in place."""
        self.lengths.add_(counts)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Commit the nodes `path` [B, n], numbered from the first uncommitted position; negative ones are filler.

        Only the first `counts` [B] are committed; the rest is written behind them and never seen.
        """
        source = self.per_row(self.lengths[:, None] + path.clamp_min(0))
        target = self.per_row(self.slots(0, path.shape[1]))
        if self.batch == 1:
            self._store.index_copy_(4, target[0], self._store.index_select(4, source[0]))
        else:
            self._store[:, :, self._rows, :, target] = self._store[:, :, self._rows, :, source]
        self.advance(counts)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes q [rows, n, heads, head_dim] with k, v [rows, n, kv_heads, head_dim]."""

_MOST = 64  # nodes: the kernel of this package keeps the scores of all of them


def attend_cached(cache: KVCache, layer: int, slots: Tensor, mask: Tensor, kernel: bool = False) -> Attend:
    """Attention over a cache: writes the new keys and values, sees what `mask` [rows, 1, n, columns] allows.

    `kernel`: this package's kernel (`kernels.cpp`) is built, and the cache is on a CPU.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (part[:, :, : mask.shape[-1]] for part in cache.write(layer, slots, k, v))
        if kernel and q.shape[1] <= _MOST and q.shape[3] % 16 == 0:
            turned = mask[:, 0].mT.float().contiguous()
            mixed: Tensor = torch.ops.lantern_bench.node_attention(q.float().contiguous(), keys, values, turned)
            return mixed.to(q.dtype)
        return _scaled_dot_product(q, keys, values, mask)

    return attend


def attend_plain(mask: Tensor, before: list[tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Attention without a cache, for training; the additive mask is [rows or 1, 1, n, n].

    With `before`, attention also sees its keys and values, the mask is [rows or 1, 1, n, (1 + len(before)) * n], and
    the new keys and values are appended to it.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if before is not None:
            before.append((k, v))
            k, v = (torch.cat(part, dim=1) for part in zip(*before, strict=True))
        return _scaled_dot_product(q, k.transpose(1, 2), v.transpose(1, 2), mask.to(q.dtype))

    return attend


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Q [rows, n, heads, head_dim] with k and v [rows, kv_heads, columns, head_dim]."""
    grouped = q.shape[2] != k.shape[1]
    if q.shape[1] == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # torch's kernel multiplies a single row in half precision three times as slowly as two.
        return _scaled_dot_product(q.expand(-1, 2, -1, -1), k, v, mask.expand(-1, -1, 2, -1))[:, :1]
    mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)
