"""The key/value cache: allocated once for a shape, written in place, moved instead of rebuilt.

Images of a batch have lengths of their own. A forward writes its nodes behind what is committed; `commit` moves the
accepted ones into place, and everything behind is free again. Rows are guidance groups of the batch: row g * B + b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["KVCache", "Sessions"]

S = TypeVar("S")

_BLOCK = 32  # columns: what is in use grows by so many, for fewer shapes of which kernels are made


class Sessions(Generic[S]):
    """Sessions by their shape (batch, guided, nodes): made at the first call, reused with their caches ever after."""

    def __init__(self, make: Callable[[int, bool, int], S]) -> None:
        self._make = make
        self._made: dict[tuple[int, bool, int], S] = {}

    def of(self, batch: int, guided: bool, nodes: int) -> S:
        """The session of this shape."""
        shape = (batch, guided, nodes)
        if shape not in self._made:
            self._made[shape] = self._make(*shape)
        return self._made[shape]


class KVCache:
    """Keys and values [layers, 2, rows, heads, capacity, head_dim] for B images and `groups` rows an image.

    `lengths` int64 [B] are the committed positions. All of it has fixed shapes and fixed places, and a mask says what
    is seen: a step can be compiled once (or captured as a graph) and run for ever, whatever changes between steps. On a
    processor a forward reads no more than the columns in use, half of them for a picture from start to end; on other
    devices, where the host does not know how many these are, it reads the whole capacity.
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
        # The layers apart: a compiled forward writes each in place, and a view of the whole would be copied whole.
        self._layers = [(layer[0], layer[1]) for layer in self._store]
        self.groups, self.batch, self.capacity = groups, batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._columns = torch.arange(capacity, device=device)

    @property
    def nbytes(self) -> int:
        """The memory that keys and values take, also on the meta device, where they take none."""
        return self._store.nbytes

    def reset(self) -> None:
        """Forget everything."""
        self.lengths.zero_()
        self._visible.fill_(True)

    def hide(self, visible: Tensor) -> None:
        """Say which of the first P positions may be seen from now on (padding not), once they are committed.

        bool [B, P] where all rows of an image are padded alike, [rows, P] where each is padded in its own way.
        """
        self._visible[:, : visible.shape[1]] = visible.repeat(len(self._rows) // len(visible), 1)

    def per_row(self, values: Tensor) -> Tensor:
        """What holds for the B images [B, ...], for their rows [rows, ...]."""
        return values if self.groups == 1 else torch.cat([values] * self.groups)

    def slots(self, offset: int, count: int) -> Tensor:
        """Positions int64 [B, count] that start `offset` behind what is committed."""
        return self.lengths[:, None] + self._columns[offset : offset + count]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values [rows, n, heads, head_dim] at `slots` [B, n]; return all of the layer."""
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

        seen: bool [B or rows, n, m], which of the m uncommitted nodes, its own included, each new node sees; the
        committed and visible positions are seen by all.
        """
        rows, (nodes, ahead) = len(self._rows), seen.shape[1:]
        used = self._in_use(ahead)
        committed = self.per_row(self._columns[:used] < self.lengths[:, None]) & self._visible[:, :used]
        seen = seen.expand(rows, -1, -1) if len(seen) == 1 else seen.repeat(rows // len(seen), 1, 1)
        places = self.per_row(self.slots(0, ahead))[:, None].expand(-1, nodes, -1)
        before, new = (torch.where(allowed, 0.0, -torch.inf).to(dtype) for allowed in (committed, seen))
        return before[:, None].expand(-1, nodes, -1).scatter(2, places, new)[:, None]

    def _in_use(self, ahead: int) -> int:
        """How many columns are read for `ahead` nodes behind what is committed."""
        if self.lengths.device.type != "cpu":
            return self.capacity
        blocks = (self.lengths.max() + ahead + _BLOCK - 1) // _BLOCK
        used = int((blocks * _BLOCK).clamp_max(self.capacity))
        # Said for the compiler, which makes programs for any number of columns.
        torch._check(used > 1)
        torch._check(used <= self.capacity)
        return used

    def advance(self, counts: Tensor) -> None:
        """Commit the first `counts` [B] uncommitted positions where they stand."""
        self.lengths.add_(counts)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Commit the nodes `path` [B, n] (their order behind what is committed; negative ones are filler).

        Only the first `counts` [B] of them count; the rest is written behind and never seen.
        """
        source = self.per_row(self.lengths[:, None] + path.clamp_min(0))
        target = self.per_row(self.slots(0, path.shape[1]))
        if self.batch == 1:
            self._store.index_copy_(4, target[0], self._store.index_select(4, source[0]))
        else:
            self._store[:, :, self._rows, :, target] = self._store[:, :, self._rows, :, source]
        self.advance(counts)
