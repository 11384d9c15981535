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
    """Keys and values [layers, rows, capacity, heads, head_dim] for B images and `groups` rows an image.

    `lengths` int64 [B] are the committed positions; `longest` is their maximum, known on the host.
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
        shape = (2, layers, groups * batch, capacity, heads, head_dim)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        self.groups, self.batch, self.capacity = groups, batch, capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest = 0
        self.visible = torch.ones(batch, capacity, dtype=torch.bool, device=device)
        self._rows = torch.arange(groups * batch, device=device)[:, None]
        self._columns = torch.arange(capacity, device=device)

    @property
    def nbytes(self) -> int:
        """The memory that keys and values take, also on the meta device, where they take none."""
        return self._store.nbytes

    def reset(self, visible: Tensor | None = None) -> None:
        """Forget everything. `visible` bool: which of the first P positions may ever be seen (padding not).

        [B, P] where all rows of an image are padded alike, [rows, P] where each is padded in its own way.
        """
        self.lengths.zero_()
        self.longest = 0
        self.visible.fill_(True)
        if visible is not None:
            if len(visible) != len(self.visible):
                self.visible = self.visible.new_ones(len(visible), self.capacity)
            self.visible[:, : visible.shape[1]] = visible

    def slots(self, offset: int, count: int) -> Tensor:
        """Positions [rows, count] that start `offset` behind what is committed."""
        at = self.lengths[:, None] + self._columns[offset : offset + count]
        return at.repeat(self.groups, 1)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """Put keys and values [rows, n, heads, head_dim] at `slots`; return all of the layer up to `span`."""
        store_k, store_v = self._store[0, layer], self._store[1, layer]
        if self.batch == 1:
            # One image: the slots are one run, and a slice is cheaper than an index.
            start = span - keys.shape[1]
            store_k[:, start:span] = keys
            store_v[:, start:span] = values
        else:
            store_k[self._rows, slots] = keys
            store_v[self._rows, slots] = values
        return store_k[:, :span], store_v[:, :span]

    def mask(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """The additive attention mask [rows, 1, n, span] of n new nodes.

        seen: bool [B or rows, n, m], which of the m uncommitted nodes, its own included, each new node sees; the
        committed and visible positions are seen by all.
        """
        width = seen.shape[2]
        span = self.longest + width
        columns = self._columns[:span]
        padded = len(self.visible) // self.batch  # guidance groups that are padded in a way of their own
        if len(seen) != len(self.visible):
            seen = seen.repeat(padded, 1, 1)
        behind = (columns[None, :] - self.lengths[:, None]).repeat(padded, 1)  # [B or rows, span]
        committed = (behind < 0) & self.visible[:, :span]
        inside = (behind >= 0) & (behind < width)
        index = behind.clamp(0, width - 1)[:, None, :].expand(-1, seen.shape[1], -1)
        allowed = committed[:, None, :] | (seen.gather(2, index) & inside[:, None, :])
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
        return mask.repeat(self.groups // padded, 1, 1)[:, None]

    def advance(self, counts: Tensor, longest: int) -> None:
        """Commit the first `counts` [B] uncommitted positions where they stand; `longest` is then max(lengths)."""
        self.lengths += counts
        self.longest = longest

    def keep(self, path: Tensor, counts: Tensor, longest: int) -> None:
        """Commit the nodes `path` [B, n] (their order behind what is committed; negative ones are filler).

        Only the first `counts` [B] of them count; the rest is written behind and never seen.
        """
        source = (self.lengths[:, None] + path.clamp_min(0)).repeat(self.groups, 1)
        target = self.slots(0, path.shape[1])
        moved = self._store[:, :, self._rows, source]
        self._store[:, :, self._rows, target] = moved
        self.advance(counts, longest)
