"""The transformer of all model families: rotary embedding, attention, layers, decoder.

It follows LlamaGen (arXiv 2406.06525, section 3.2): pre-norm, no biases, SwiGLU, grid rotary
embedding of interleaved pairs. `TransformerConfig` lists where Chameleon (arXiv 2405.09818,
section 2.2) and the other families differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.transformer_config import TransformerConfig

# ---- Rotary embedding

# Rows after the grid are for draft nodes beyond its end, which are never committed
# (docs/algorithms.md, section 9, B5).
_MARGIN = 64


def rotary_turns(config: TransformerConfig) -> Tensor:
    """Return the rotary table of prefix, image and margin.

    On a grid the first half of the pairs rotates with the row, the second half with the column. The
    first image token is cell (0, 0). In a sequence all pairs rotate with the position. With three
    axes a part of the pairs rotates with each axis, and the rest does not rotate.

    Returns:
        Cosines and sines [positions, head_dim / 2, 2].
    """
    if config.positions == "axes":
        return _axis_turns(config)
    is_grid = config.positions == "grid"
    counts = config.grid if is_grid else [config.prefix + config.image_tokens + _MARGIN]
    width = config.head_dim // len(counts)
    frequency = 1.0 / config.rope_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    axes = torch.meshgrid(*map(torch.arange, counts), indexing="ij")
    angles = torch.cat([axis.reshape(-1, 1) * frequency for axis in axes], dim=1)
    turns = torch.stack([angles.cos(), angles.sin()], dim=-1)
    if not is_grid:
        return turns
    prefix = turns.new_zeros(config.prefix, *turns.shape[1:])
    if config.prefix_rotary == "identity":
        prefix[..., 0] = 1.0
    return torch.cat([prefix, turns, turns.new_zeros(_MARGIN, *turns.shape[1:])])


def axis_positions(grids: Sequence[tuple[int, int]], prefix: int) -> Tensor:
    """Return the positions on three axes of prefix, grids and margin, [positions, 3].

    The first image token is at (0, 0, 0), and the prefix has negative positions, the same on all
    axes. A cell of a grid is at (s, s + row, s + column), where s is the first position of the
    grid. The next grid starts behind the longer side.
    """
    words = torch.arange(-prefix, 0)
    positions = [words[:, None].expand(-1, 3)]
    start = 0
    for rows, columns in grids:
        cells = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        positions.append(start + functional.pad(cells, (1, 0)))
        start += max(rows, columns)
    positions.append(torch.full((_MARGIN, 3), start))
    return torch.cat(positions)


def _axis_turns(config: TransformerConfig) -> Tensor:
    pairs = torch.arange(sum(config.axis_pairs), dtype=torch.float32)
    frequency = 1.0 / config.rope_base ** (pairs / len(pairs))
    axis = torch.arange(3).repeat_interleave(torch.tensor(config.axis_pairs))
    angles = axis_positions(config.grids, config.prefix)[:, axis] * frequency
    angles = functional.pad(angles, (0, config.head_dim // 2 - len(pairs)))
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotary_table(config: TransformerConfig) -> Tensor:
    """Return the factors of `rotate` at each position, [positions, 2, head_dim].

    The first factor of a number is the cosine of its pair, the second is the sine with the sign
    that belongs to its partner.
    """
    cosine, sine = rotary_turns(config).unbind(-1)
    cosines = torch.stack([cosine, cosine], dim=-1)
    sines = torch.stack([-sine, sine], dim=-1)
    pairs = torch.stack([cosines, sines], dim=1)
    return (pairs if config.pairs == "interleaved" else pairs.mT).flatten(-2)


class Table(nn.Module):
    """A tensor that no checkpoint holds.

    It has values on the meta device too, and `in_dtype` keeps its type.
    """

    values: Tensor

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("values", make(), persistent=False)

    def at(self, positions: Tensor) -> Tensor:
        """Return the rows at `positions`. Positions beyond the end get the last row."""
        return self.values[positions.clamp_max(len(self.values) - 1)]


def rotate(x: Tensor, factors: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs of numbers of each head.

    Args:
        x: Queries or keys [rows, n, heads, head_dim].
        factors: Rows of `rotary_table` [1 or rows, n, 2, head_dim].
        interleaved: Whether a pair is (2i, 2i + 1). Otherwise it is (i, i + head_dim / 2).

    Returns:
        The rotated numbers, in the shape and the type of `x`.
    """
    in_float32 = x.float()
    if interleaved:
        partner = in_float32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = in_float32.roll(in_float32.shape[-1] // 2, dims=-1)
    return (in_float32 * factors[:, :, :1] + partner * factors[:, :, 1:]).to(x.dtype)


# ---- Attention

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes q [rows, n, heads, head_dim] with k, v [rows, n, kv_heads, head_dim]."""

# `node_attention` of kernels.cpp keeps the attention weights of all nodes in an array of this size.
_MAX_KERNEL_NODES = 64


def attend_cached(
    cache: KVCache, *, layer: int, slots: Tensor, mask: Tensor, kernel: bool = False
) -> Attend:
    """Return attention over a cache, which also writes the new keys and values.

    Args:
        cache: The cache.
        layer: Number of the layer in the cache.
        slots: Positions of the new nodes, int64 [B, n].
        mask: Additive mask [rows, 1, n, columns in use].
        kernel: Whether to use this package's kernel (`kernels.cpp`). It must be built, and the
            cache must be on a CPU.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.write(layer, slots=slots, keys=k, values=v, used=mask.shape[-1])
        if kernel and q.shape[1] <= _MAX_KERNEL_NODES and q.shape[3] % 16 == 0:
            by_column = mask[:, 0].mT.float().contiguous()
            return torch.ops.lantern_bench.node_attention(
                q.float().contiguous(), keys, values, by_column
            ).to(q.dtype)
        return _scaled_dot_product(q=q, k=keys, v=values, mask=mask)

    return attend


def attend_plain(mask: Tensor, earlier: list[tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Return attention without a cache, for training.

    Args:
        mask: Additive mask [rows or 1, 1, n, columns].
        earlier: Keys and values of earlier passes over the same n positions, which are attended
            to as well. The new keys and values are appended, and `mask` has n columns for each
            entry, the new one included.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if earlier is not None:
            earlier.append((k, v))
            k, v = (torch.cat(tensors, dim=1) for tensors in zip(*earlier, strict=True))
        return _scaled_dot_product(
            q=q, k=k.transpose(1, 2), v=v.transpose(1, 2), mask=mask.to(q.dtype)
        )

    return attend


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Mix q [rows, n, heads, head_dim] with k and v [rows, kv_heads, columns, head_dim]."""
    n = q.shape[1]
    if n == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # In half precision torch's kernel needs three times as long for one row as for two.
        q = q.expand(-1, 2, -1, -1)
        mask = mask.expand(-1, -1, 2, -1)
    q = q.transpose(1, 2)
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and q.device.type != "cpu":
        mixed = _grouped_attention(q, k=k, v=v, mask=mask)
    else:
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=is_grouped
        )
    return mixed.transpose(1, 2)[:, :n]


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Mix q [rows, heads, n, head_dim] as `_scaled_dot_product` does, with fewer kv_heads.

    On a GPU torch has no fast kernel that takes a mask and grouped heads. So the heads that share
    keys become further nodes.
    """
    heads_and_nodes = (q.shape[1] // k.shape[1], q.shape[2])
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    mask = mask[:, :, None].expand(-1, -1, heads_and_nodes[0], -1, -1).flatten(2, 3)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed.unflatten(2, heads_and_nodes).flatten(1, 2)


# ---- Layers


class _HeadNorm(nn.Module):
    """LayerNorm over each head, with a scale and an offset for each head."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=1e-5) * self.weight + self.bias


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.head_dim
        self.interleaved = config.pairs == "interleaved"
        self.q_norm = _HeadNorm(self.heads, self.head_dim) if config.qk_norm else None
        self.k_norm = _HeadNorm(self.kv_heads, self.head_dim) if config.qk_norm else None
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.wqkv = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        rows, n, _ = x.shape
        qkv = self.wqkv(x).view(rows, n, -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        rotated = rotate(qk, rotary, interleaved=self.interleaved)
        q, k = rotated.split([self.heads, self.kv_heads], dim=2)
        return self.wo(attend(q, k, v).reshape(rows, n, -1))


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer with this weight [out, in] and bias [out], without gradients."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class FeedForward(nn.Module):
    """SwiGLU. `join` merges its first two products for decoding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w13: nn.Module | None = None

    def join(self) -> None:
        """Merge the weights of the first two products.

        Read and write checkpoints before this call.
        """
        if self.w13 is None:
            self.w13 = linear_of(torch.cat([self.w1.weight, self.w3.weight]))
            del self.w1, self.w3

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if self.w13 is None:
            gate = self.w1(x)
            up = self.w3(x)
        else:
            gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer. EAGLE's drafter layer has no norm before its attention (`input_norm` False)."""

    def __init__(self, config: TransformerConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention_norm: nn.Module = (
            nn.RMSNorm(config.dim, config.norm_eps) if input_norm else nn.Identity()
        )
        self.attention = _Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.attention_output_norm: nn.Module = nn.Identity()
        self.ffn_output_norm: nn.Module = nn.Identity()
        if config.norm_both:
            self.attention_output_norm = nn.RMSNorm(config.dim, config.norm_eps)
            self.ffn_output_norm = nn.RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """Apply the layer.

        Args:
            x: Input [rows, n, dim].
            rotary: Factors of `rotate`.
            attend: Mixes queries with keys and values.

        Returns:
            Output [rows, n, dim].
        """
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, rotary, attend))
            return x + self.ffn_norm(self.feed_forward(x))
        attended = self.attention(self.attention_norm(x), rotary, attend)
        x = x + self.attention_output_norm(attended)
        return x + self.ffn_output_norm(self.feed_forward(self.ffn_norm(x)))


class TokenEmbedding(nn.Embedding):
    """Embeddings of a vocabulary that may contain more than image tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.embedded_tokens, config.dim)
        self.ids: Table | None = None
        if config.token_ids is not None:
            self.ids = Table(lambda: torch.tensor(config.token_ids))

    def of_text(self, numbers: Tensor) -> Tensor:
        """Embed numbers int64 [...] of the whole vocabulary to [..., dim]."""
        return super().forward(numbers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens int64 [...] of an image to [..., dim]."""
        return super().forward(tokens if self.ids is None else self.ids.values[tokens])


class Head(nn.Linear):
    """Features to logits, in the type of the head."""

    def forward(self, features: Tensor) -> Tensor:
        """Map features [..., dim] of any type to logits [..., V] of the head's type."""
        return super().forward(features.to(self.weight.dtype))


M = TypeVar("M", bound=nn.Module)


def in_dtype(module: M, dtype: torch.dtype) -> M:
    """Convert a module's weights in place, except its head and its tables.

    The head of the bundled model is float32. In bfloat16 its logits, by which tokens are sampled,
    would be off by 0.03.

    Returns:
        The module.
    """
    for part in module.modules():
        if isinstance(part, Head | Table):
            continue
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))
    return module


# ---- Decoder


class Transformer(nn.Module):
    """Embedding, layers, final norm and output head."""

    attention_kernel = False  # set by `pack_for_decoding`, as in `attend_cached`

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = TokenEmbedding(config)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head_layer = nn.Linear(config.dim, config.dim) if config.head_layer else None
        self.output = Head(config.dim, config.vocab_size, bias=config.head_layer)
        self.table = Table(lambda: rotary_table(config))

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Compute features of whole sequences without a cache, for training and as a reference.

        Args:
            x: Embeddings [rows, n, dim].
            mask: Additive mask [rows or 1, 1, n, n].
            positions: Rotary positions int64 [1 or rows, n].

        Returns:
            Features [rows, n, dim], which the output head multiplies.
        """
        rotary = self.table.at(positions)
        for layer in self.layers:
            x = layer(x, rotary, attend_plain(mask))
        return self._features(x)

    def step(
        self, x: Tensor, *, positions: Tensor, cache: KVCache, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """Compute features of new nodes on a cache, to which their keys and values are written.

        Args:
            x: Embeddings [rows, n, dim].
            positions: Rotary positions int64 [1 or rows, n].
            cache: Keys and values of all earlier positions.
            slots: Positions of the nodes in the cache, int64 [B, n].
            mask: Additive mask [rows, 1, n, columns in use].

        Returns:
            Features [rows, n, dim].
        """
        rotary = self.table.at(positions)
        for number, layer in enumerate(self.layers):
            attend = attend_cached(
                cache, layer=number, slots=slots, mask=mask, kernel=self.attention_kernel
            )
            x = layer(x, rotary, attend)
        return self._features(x)

    def _features(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.head_layer is None else functional.gelu(self.head_layer(x))
