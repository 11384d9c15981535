"""The transformer of all model families, in reading order: rotary embedding, cache, attention, layers, decoder.

It follows LlamaGen (arXiv 2406.06525, section 3.2): pre-norm, no biases, SwiGLU, grid rotary embedding of interleaved
pairs. `TransformerConfig` has the differences of Chameleon (arXiv 2405.09818, section 2.2) and of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.kv_cache import KVCache
from lantern_bench.models.networks.transformer_config import TransformerConfig

# ---- Rotary embedding

# Rows behind the grid serve draft nodes beyond its end, which are never committed (docs/algorithms.md, section 9, B5).
_MARGIN = 64


def grid_rotary(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """Return the rotary table [positions, head_dim / 2, 2] (cosine, sine) of prefix, grid and margin.

    The first half of the pairs rotates with the row, the second with the column; the first image token is cell (0, 0).
    `prefix` overrides the config's: a drafter's is one shorter (docs/algorithms.md, section 9, B5).
    """
    prefix = config.prefix if prefix is None else prefix
    half = config.head_dim // 2
    frequency = 1.0 / config.rope_base ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in config.grid)
    angles = (torch.cartesian_prod(rows, columns)[:, :, None] * frequency).flatten(1)
    grid = torch.stack([angles.cos(), angles.sin()], dim=-1)
    head = torch.zeros(prefix, half, 2)
    if config.prefix_rotary == "identity":
        head[..., 0] = 1.0
    return torch.cat([head, grid, torch.zeros(_MARGIN, half, 2)])


def rotary_table(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """Return the factors of `rotate` at each position, [positions, 2, head_dim]; `prefix` as in `grid_rotary`.

    First the cosine of each number's pair, then the sine with the sign of its partner.
    """
    if config.positions == "grid":
        table = grid_rotary(config, prefix)
    else:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        positions = torch.arange(config.prefix + config.image_tokens + _MARGIN, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / config.rope_base ** (steps / config.head_dim))
        table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    cosine, sine = table.unbind(-1)
    pairs = torch.stack(
        [torch.stack([cosine, cosine], dim=-1), torch.stack([-sine, sine], dim=-1)], dim=1
    )
    return (pairs if config.pairs == "interleaved" else pairs.mT).flatten(-2)


class Table(nn.Module):
    """A tensor that no checkpoint holds; it has values on the meta device too, and moving keeps its type."""

    values: Tensor

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.register_buffer("values", make(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        self.values = self.values.to(fn(self.values).device)
        return self


def rotate(x: Tensor, factors: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of x [rows, n, heads, head_dim] by `factors` [1 or rows, n, 2, head_dim]."""
    in_float32 = x.float()
    if interleaved:
        partner = in_float32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = in_float32.roll(in_float32.shape[-1] // 2, dims=-1)
    return (in_float32 * factors[:, :, :1] + partner * factors[:, :, 1:]).to(x.dtype)


# ---- Attention

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes q [rows, n, heads, head_dim] with k, v [rows, n, kv_heads, head_dim]."""

# `node_attention` of kernels.cpp has an array of the attention weights of all nodes
_MAX_KERNEL_NODES = 64


def attend_cached(
    cache: KVCache, layer: int, slots: Tensor, mask: Tensor, kernel: bool = False
) -> Attend:
    """Attention over a cache: writes the new keys and values, sees what `mask` [rows, 1, n, columns] allows.

    `kernel`: this package's kernel (`kernels.cpp`) is built, and the cache is on a CPU.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (store[:, :, : mask.shape[-1]] for store in cache.write(layer, slots, k, v))
        if kernel and q.shape[1] <= _MAX_KERNEL_NODES and q.shape[3] % 16 == 0:
            by_column = mask[:, 0].mT.float().contiguous()
            return torch.ops.lantern_bench.node_attention(
                q.float().contiguous(), keys, values, by_column
            ).to(q.dtype)
        return _scaled_dot_product(q=q, k=keys, v=values, mask=mask)

    return attend


def attend_plain(mask: Tensor, earlier: list[tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Attention without a cache, for training; the additive mask is [rows or 1, 1, n, n].

    The new keys and values are appended to those in `earlier`, all of which the mask [..., len(earlier) * n] covers.
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
    grouped = q.shape[2] != k.shape[1]
    if q.shape[1] == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
        # torch's kernel multiplies a single row in half precision three times as slowly as two.
        return _scaled_dot_product(
            q=q.expand(-1, 2, -1, -1), k=k, v=v, mask=mask.expand(-1, -1, 2, -1)
        )[:, :1]
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


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
        self.wqkv = nn.Linear(
            config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False
        )
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        rows, n, _ = x.shape
        qkv = self.wqkv(x).view(rows, n, -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        q, k = rotate(qk, rotary, self.interleaved).split([self.heads, self.kv_heads], dim=2)
        mixed = attend(q, k, v)
        return self.wo(mixed.reshape(rows, n, -1))


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer with this weight [out, in] and bias [out]; not for training."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class FeedForward(nn.Module):
    """SwiGLU; `join` merges its first two products for decoding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w13: nn.Module | None = None

    def join(self) -> None:
        """Merge the weights of the first two products; checkpoints are read and written before that."""
        if self.w13 is None:
            self.w13 = linear_of(torch.cat([self.w1.weight, self.w3.weight]))
            del self.w1, self.w3

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        gate, up = (self.w1(x), self.w3(x)) if self.w13 is None else self.w13(x).chunk(2, dim=-1)
        return self.w2(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer. EAGLE's drafter layer has no norm before its attention (`input_norm` False)."""

    def __init__(self, config: TransformerConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention_norm: nn.Module = (
            nn.RMSNorm(config.dim, config.norm_eps) if input_norm else nn.Identity()
        )
        self.attention = _Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """Map x [rows, n, dim] to the same shape; `rotary` as in `rotate`, attention is `attend`."""
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, rotary, attend))
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.feed_forward(self.ffn_norm(x))


class TokenEmbedding(nn.Embedding):
    """The embeddings of a vocabulary that may contain more than image tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.embedded_tokens, config.dim)
        self.ids = (
            None if config.token_ids is None else Table(lambda: torch.tensor(config.token_ids))
        )

    def of_text(self, numbers: Tensor) -> Tensor:
        """Return embeddings [..., dim] of numbers int64 [...] of the whole vocabulary."""
        return super().forward(numbers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., dim] of an image's tokens int64 [...]."""
        return super().forward(tokens if self.ids is None else self.ids.values[tokens])


class Head(nn.Linear):
    """Features to logits; moving keeps the head in its own type, whatever that of the other weights becomes.

    The bundled model's is float32: tokens are sampled by its logits, and in bfloat16 they would be off by 0.03.
    """

    def forward(self, features: Tensor) -> Tensor:
        """[..., dim] of any type -> [..., V] of the head's."""
        return super().forward(features.to(self.weight.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def in_own_type(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(in_own_type, recurse)


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

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return features of whole sequences x [rows, n, dim], without a cache (for training and references).

        `mask` [rows or 1, 1, n, n] is additive; `positions` int64 [rows, n] where they are not 0 to n - 1.
        """
        rotary = (
            self.table.values[None, : x.shape[1]]
            if positions is None
            else self.table.values[positions]
        )
        for layer in self.layers:
            x = layer(x, rotary, attend_plain(mask))
        return self._features(x)

    def step(
        self, x: Tensor, positions: Tensor, cache: KVCache, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """Return features of new nodes x [rows, n, dim] on a cache; `positions` int64 [1 or rows, n]."""
        rotary = self.table.values[positions.clamp_max(len(self.table.values) - 1)]
        for number, layer in enumerate(self.layers):
            x = layer(
                x,
                rotary,
                attend_cached(
                    cache=cache, layer=number, slots=slots, mask=mask, kernel=self.attention_kernel
                ),
            )
        return self._features(x)

    def _features(self, x: Tensor) -> Tensor:
        """Return what the output head multiplies."""
        x = self.norm(x)
        return x if self.head_layer is None else functional.gelu(self.head_layer(x))
