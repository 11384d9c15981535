"""The key-value cache of a transformer."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.models.networks.transformer_config import TransformerConfig

# The columns in use grow in blocks of 32, so that kernels are made for fewer shapes.
_BLOCK = 32

# Columns that fill 16 bytes in bfloat16. With another capacity the compiler pads the mask of each
# layer on a GPU.
_ALIGNED = 8

# States a fact for the compiler. A torch without it compiles fewer programs.
_promise = getattr(torch, "_check", bool)


class KVCache:
    """Keys and values [layers, 2, rows, heads, capacity, head_dim] of B images.

    An image has `groups` rows. `lengths` int64 [B] counts the committed positions. Shapes and
    addresses are fixed, so that a step is compiled once. On a CPU a forward reads only the columns
    in use. On other devices the host does not know their number.

    Args:
        config: Sizes of the transformer.
        groups: Rows of each image: 2 with guidance, otherwise 1.
        batch: Number of images B.
        capacity: Number of positions that are needed. A GPU gets a multiple of 8.
        dtype: Type of keys and values.
        device: Device of keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        groups: int,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if device.type != "cpu":
            capacity = -(-capacity // _ALIGNED) * _ALIGNED
        rows = groups * batch
        heads = config.kv_heads or config.heads
        self._store = torch.zeros(
            (config.layers, 2, rows, heads, capacity, config.head_dim), dtype=dtype, device=device
        )
        # Views of single layers. A compiled forward would copy a view of the whole store to write.
        self._layers = [(layer[0], layer[1]) for layer in self._store]
        self.groups = groups
        self.batch = batch
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._visible = torch.ones(rows, capacity, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)[:, None]  # numbers of the rows
        self._columns = torch.arange(capacity, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values. On the meta device: the bytes that they would take."""
        return self._store.nbytes

    def clear(self) -> None:
        """Fill keys and values with zeros."""
        self._store.zero_()

    def commit_prefix(self, visible: Tensor, count: int) -> None:
        """Commit the first `count` positions.

        Attention skips each of the first P positions whose `visible`, bool [rows, P], is False.
        """
        self._visible.fill_(value=True)
        self._visible[:, : visible.shape[1]] = visible
        self.lengths.fill_(count)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat values of the B images [B, ...] for their rows [rows, ...]."""
        return values if self.groups == 1 else torch.cat([values] * self.groups)

    def slots(self, offset: int, count: int) -> Tensor:
        """Return positions int64 [B, count] that start `offset` after the committed positions."""
        return self.lengths[:, None] + self._columns[offset : offset + count]

    def write(
        self, layer: int, *, slots: Tensor, keys: Tensor, values: Tensor, used: int
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values.

        Args:
            layer: Number of the layer.
            slots: Positions int64 [B, n].
            keys: Keys [rows, n, heads, head_dim].
            values: Values [rows, n, heads, head_dim].
            used: Number of columns in use, as `mask` has them.

        Returns:
            The keys and the values of these columns, [rows, heads, used, head_dim].
        """
        store_k, store_v = self._layers[layer]
        if self.batch == 1:
            # The rows of one image have the same slots.
            store_k.index_copy_(2, slots[0], keys.transpose(1, 2))
            store_v.index_copy_(2, slots[0], values.transpose(1, 2))
        else:
            columns = self.per_row(slots)
            store_k[self.rows, :, columns] = keys
            store_v[self.rows, :, columns] = values
        return store_k[:, :, :used], store_v[:, :, :used]

    def mask(self, seen: Tensor, dtype: torch.dtype, *, hidden: Tensor | None = None) -> Tensor:
        """Return the additive attention mask of n new nodes.

        Args:
            seen: Whether each new node sees each of the m uncommitted nodes, itself included:
                bool [1 or B or rows, n, m].
            dtype: Type of the mask.
            hidden: Whether each new node does not see a column, if that is committed: bool
                [B, n, capacity]. None: it sees all.

        Returns:
            The mask [rows, 1, n, columns in use].
        """
        nodes, uncommitted = seen.shape[1:]
        used = self._columns_in_use(uncommitted)
        committed = self.per_row(self._columns[:used] < self.lengths[:, None])
        committed = committed & self._visible[:, :used]
        before = _additive(committed, dtype)[:, None].expand(-1, nodes, -1)
        if hidden is not None:
            before = before.masked_fill(self.per_row(hidden[:, :, :used]), -torch.inf)
        seen = seen.repeat(len(before) // len(seen), 1, 1)
        columns = self.per_row(self.slots(0, uncommitted))[:, None].expand(-1, nodes, -1)
        return before.scatter(2, columns, _additive(seen, dtype))[:, None]

    def _columns_in_use(self, uncommitted: int) -> int:
        if self.lengths.device.type != "cpu":
            return self.capacity
        blocks = (self.lengths.max() + uncommitted + _BLOCK - 1) // _BLOCK
        used = int((blocks * _BLOCK).clamp_max(self.capacity))
        if torch.compiler.is_compiling():
            # Programs take any number of columns between these bounds.
            _promise(used > 1)
            _promise(used <= self.capacity)
        return used

    def advance(self, counts: Tensor) -> None:
        """Commit the first `counts` [B] uncommitted positions in place."""
        self.lengths.add_(counts)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Move the nodes of the accepted path together and commit them.

        Args:
            path: Nodes [B, n], numbered from the first uncommitted position.
            counts: How many nodes of each path are committed, [B].
        """
        source = self.per_row(self.lengths[:, None] + path.clamp_min(0))
        target = self.per_row(self.slots(0, path.shape[1]))
        if self.batch == 1:
            self._store.index_copy_(4, target[0], self._store.index_select(4, source[0]))
        else:
            self._store[:, :, self.rows, :, target] = self._store[:, :, self.rows, :, source]
        self.advance(counts)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where attention is allowed and minus infinity elsewhere."""
    return torch.where(allowed, 0.0, -torch.inf).to(dtype)
