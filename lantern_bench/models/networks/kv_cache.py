"""The key-value cache of a transformer."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.models.networks.transformer_config import TransformerConfig

# ---- Cache

_BLOCK = 32  # columns: those in use grow by so many, for fewer shapes of which kernels are made


class KVCache:
    """Keys and values [layers, 2, rows, heads, capacity, head_dim] for B images and `groups` rows an image.

    `lengths` int64 [B] are the committed positions. Shapes and addresses are fixed, so that a step is compiled once. On
    a CPU a forward reads only the columns in use; on other devices the host does not know their number.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: int,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = groups * batch
        heads = config.kv_heads or config.heads
        shape = (config.layers, 2, rows, heads, capacity, config.head_dim)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        # Views of single layers: a compiled forward would copy a view of the whole store to write into it.
        self._layers = [(layer[0], layer[1]) for layer in self._store]
        self.groups = groups
        self.batch = batch
        self.capacity = capacity
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
        """Set which of the first P positions attention sees, bool [B, P]; [rows, P] where an image's rows differ."""
        self._visible[:, : visible.shape[1]] = visible.repeat(len(self._rows) // len(visible), 1)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat values of the B images [B, ...] for their rows [rows, ...]."""
        return values if self.groups == 1 else torch.cat([values] * self.groups)

    def slots(self, offset: int, count: int) -> Tensor:
        """Return positions int64 [B, count] that start `offset` behind the committed ones."""
        return self.lengths[:, None] + self._columns[offset : offset + count]

    def write(
        self, layer: int, slots: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [rows, n, heads, head_dim] to `slots` [B, n]; return those of the whole layer."""
        store_k, store_v = self._layers[layer]
        if self.batch == 1:
            # The rows of one image have the same slots.
            store_k.index_copy_(2, slots[0], keys.transpose(1, 2))
            store_v.index_copy_(2, slots[0], values.transpose(1, 2))
        else:
            columns = self.per_row(slots)
            store_k[self._rows, :, columns] = keys
            store_v[self._rows, :, columns] = values
        return store_k, store_v

    def mask(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive attention mask [rows, 1, n, columns in use] of n new nodes.

        seen: bool [B or rows, n, m], which of the m uncommitted nodes, itself included, each new node sees.
        """
        rows = len(self._rows)
        nodes, uncommitted = seen.shape[1:]
        used = self.capacity
        if self.lengths.device.type == "cpu":
            blocks = (self.lengths.max() + uncommitted + _BLOCK - 1) // _BLOCK
            used = int((blocks * _BLOCK).clamp_max(self.capacity))
            # Bounds for the compiler, whose programs take any number of columns.
            torch._check(used > 1)
            torch._check(used <= self.capacity)
        committed = (
            self.per_row(self._columns[:used] < self.lengths[:, None]) & self._visible[:, :used]
        )
        seen = seen.expand(rows, -1, -1) if len(seen) == 1 else seen.repeat(rows // len(seen), 1, 1)
        columns = self.per_row(self.slots(0, uncommitted))[:, None].expand(-1, nodes, -1)
        before, new = (
            torch.where(allowed, 0.0, -torch.inf).to(dtype) for allowed in (committed, seen)
        )
        return before[:, None].expand(-1, nodes, -1).scatter(2, columns, new)[:, None]

    def advance(self, counts: Tensor) -> None:
        """Commit the first `counts` [B] uncommitted positions in place."""
        self.lengths.add_(counts)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Commit the first `counts` [B] of the nodes `path` [B, n], numbered from the first uncommitted position."""
        source = self.per_row(self.lengths[:, None] + path.clamp_min(0))
        target = self.per_row(self.slots(0, path.shape[1]))
        if self.batch == 1:
            self._store.index_copy_(4, target[0], self._store.index_select(4, source[0]))
        else:
            self._store[:, :, self._rows, :, target] = self._store[:, :, self._rows, :, source]
        self.advance(counts)
