"""THE decoder: RMSNorm, rotary attention over a cache with a tree mask, SwiGLU. Every model here is one of its sizes.

It follows LlamaGen (arXiv 2406.06525, section 3.2): pre-norm, no biases, grid rotary embedding of interleaved pairs,
in which the prefix is either not rotated or, as in the published weights, multiplied by zero. What goes in (class,
caption features, words) is `conditioning`; what is done with the answer is `decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.cache import KVCache

__all__ = ["Block", "RMSNorm", "Transformer", "TransformerConfig", "grid_rotary"]

# Rows behind the grid serve nodes that run over its end; their tokens are never kept (finding B5).
_MARGIN = 64

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder. `prefix` positions of condition come before `grid` (rows, columns) image tokens.

    `prefix_rotary` is what the rotary embedding does to the prefix: "zero" (LlamaGen: queries and keys there vanish)
    or "identity" (left as they are).
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int
    grid: tuple[int, int]
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    prefix_rotary: Literal["zero", "identity"] = "zero"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture."""
        return self.grid[0] * self.grid[1]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def grid_rotary(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """The rotary table [positions, head_dim / 2, 2] (cosine, sine) of prefix, grid and margin.

    The first half of the pairs turns with the row, the second with the column; the first image token is cell (0, 0).
    `prefix` overrides the config's (a drafter's is one shorter, finding B5).
    """
    prefix = config.prefix if prefix is None else prefix
    half = config.head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32)[: half // 2]
    frequency = 1.0 / config.rope_base ** (steps / half)
    rows, columns = config.grid
    by_row = torch.outer(torch.arange(rows, dtype=torch.float32), frequency)
    by_column = torch.outer(torch.arange(columns, dtype=torch.float32), frequency)
    angles = torch.cat(
        [
            by_row[:, None, :].expand(rows, columns, -1),
            by_column[None, :, :].expand(rows, columns, -1),
        ],
        dim=-1,
    ).reshape(rows * columns, half)
    grid = torch.stack([angles.cos(), angles.sin()], dim=-1)
    head = torch.zeros(prefix, half, 2)
    if config.prefix_rotary == "identity":
        head[..., 0] = 1.0
    return torch.cat([head, grid, torch.zeros(_MARGIN, half, 2)])


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate interleaved pairs: x [rows, n, heads, head_dim], turn [rows, n, 1, head_dim / 2, 2]."""
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = turn.unbind(-1)
    return torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1).flatten(-2).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.head_dim
        self.wqkv = nn.Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        rows, n, _ = x.shape
        sizes = [self.heads * self.head_dim] + [self.kv_heads * self.head_dim] * 2
        q, k, v = (part.view(rows, n, -1, self.head_dim) for part in self.wqkv(x).split(sizes, dim=-1))
        mixed = attend(_rotate(q, turn), _rotate(k, turn), v)
        out: Tensor = self.wo(mixed.reshape(rows, n, -1))
        return out


class _FeedForward(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer. EAGLE's drafter layer has no norm before its attention (`input_norm` False)."""

    def __init__(self, config: TransformerConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.attention_norm: nn.Module = RMSNorm(config.dim, config.norm_eps) if input_norm else nn.Identity()
        self.attention = _Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = _FeedForward(config)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        """X [rows, n, dim]; turn [rows, n, 1, head_dim / 2, 2]; attend mixes q, k, v [rows, n, heads, head_dim]."""
        x = x + self.attention(self.attention_norm(x), turn, attend)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


def attend_cached(cache: KVCache, layer: int, slots: Tensor, mask: Tensor) -> Attend:
    """Attention over a cache: writes the new keys and values, sees what `mask` [rows, 1, n, span] allows."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.write(layer, slots, k, v, mask.shape[-1])
        return _scaled_dot_product(q, keys, values, mask)

    return attend


def attend_plain(mask: Tensor) -> Attend:
    """Attention without a cache, for training: mask [rows or 1, 1, n, n], additive."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _scaled_dot_product(q, k, v, mask.to(q.dtype))

    return attend


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


class Transformer(nn.Module):
    """Embedding, layers, final norm and output head over the image vocabulary."""

    rotary: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rotary", grid_rotary(config), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Final-norm hidden states of whole sequences x [rows, n, dim] (no cache, for training and references).

        `mask` [rows or 1, 1, n, n] is additive.
        """
        turn = self.rotary[None, : x.shape[1], None]
        for layer in self.layers:
            x = layer(x, turn, attend_plain(mask))
        out: Tensor = self.norm(x)
        return out

    def step(self, x: Tensor, positions: Tensor, cache: KVCache, slots: Tensor, mask: Tensor) -> Tensor:
        """Final-norm hidden states of new nodes x [rows, n, dim] at `positions` int64 [rows, n], on top of a cache."""
        turn = self.rotary[positions.clamp_max(len(self.rotary) - 1)][:, :, None]
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, attend_cached(cache, number, slots, mask))
        out: Tensor = self.norm(x)
        return out
