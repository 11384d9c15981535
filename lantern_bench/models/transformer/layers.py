"""THE decoder: RMSNorm, rotary attention over a cache with a tree mask, SwiGLU. Every model here is one of its sizes.

It follows LlamaGen (arXiv 2406.06525, section 3.2): pre-norm, no biases, grid rotary embedding of interleaved pairs.
`TransformerConfig` has the differences of Chameleon (arXiv 2405.09818, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.transformer import TransformerConfig
from lantern_bench.models.transformer.attention import (
    Attend,
    KVCache,
    attend_cached,
    attend_plain,
    rotary_table,
    rotate,
)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


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
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.head_dim
        self.interleaved = config.pairs == "interleaved"
        self.q_norm = _HeadNorm(self.heads, self.head_dim) if config.qk_norm else None
        self.k_norm = _HeadNorm(self.kv_heads, self.head_dim) if config.qk_norm else None
        self.wqkv = nn.Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        rows, n, _ = x.shape
        made = self.wqkv(x).view(rows, n, -1, self.head_dim)
        turned, v = made.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turned.split([self.heads, self.kv_heads], dim=2)
            turned = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        q, k = rotate(turned, turn, self.interleaved).split([self.heads, self.kv_heads], dim=2)
        mixed = attend(q, k, v)
        out: Tensor = self.wo(mixed.reshape(rows, n, -1))
        return out


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with a given weight [out, in] and bias [out]; not for training."""
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
        gate, wide = (self.w1(x), self.w3(x)) if self.w13 is None else self.w13(x).chunk(2, dim=-1)
        out: Tensor = self.w2(functional.silu(gate) * wide)
        return out


class Block(nn.Module):
    """One layer. EAGLE's drafter layer has no norm before its attention (`input_norm` False)."""

    def __init__(self, config: TransformerConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.norm_after = config.norm_after
        self.attention_norm: nn.Module = RMSNorm(config.dim, config.norm_eps) if input_norm else nn.Identity()
        self.attention = _Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        """X [rows, n, dim]; turn [1 or rows, n, 2, head_dim]; attend mixes q, k, v [rows, n, heads, head_dim]."""
        out: Tensor
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, turn, attend))
            out = x + self.ffn_norm(self.feed_forward(x))
        else:
            x = x + self.attention(self.attention_norm(x), turn, attend)
            out = x + self.feed_forward(self.ffn_norm(x))
        return out


class TokenEmbedding(nn.Embedding):
    """The embeddings of a vocabulary that may contain more than image tokens (`TransformerConfig.token_ids`)."""

    token_ids: Tensor | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.words or config.vocab_size, config.dim)
        self._ids = config.token_ids
        self.register_buffer("token_ids", None, persistent=False)
        self.compute_buffers(self.weight.device)

    def compute_buffers(self, device: torch.device) -> None:
        """Compute the tables that no checkpoint holds."""
        self.token_ids = None if self._ids is None else torch.tensor(self._ids, device=device)

    def of_words(self, words: Tensor) -> Tensor:
        """Embeddings [..., dim] of numbers of the whole vocabulary int64 [...]."""
        return super().forward(words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., dim] of an image's tokens int64 [...]."""
        return super().forward(tokens if self.token_ids is None else self.token_ids[tokens])


class Head(nn.Linear):
    """Features to float32 logits, whatever the type of the other weights: moving keeps the head in its own type.

    Tokens are sampled, accepted and rejected by these numbers; bfloat16 logits would be off by 0.03.
    """

    def forward(self, features: Tensor) -> Tensor:
        """[..., dim] of any type -> float32 [..., V]."""
        return super().forward(features.to(self.weight.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        return super()._apply(moved, recurse)


class Transformer(nn.Module):
    """Embedding, layers, final norm and output head over the image vocabulary.

    The logits are linear in its features, so that guiding features guides logits.
    """

    rotary: Tensor
    attention_kernel = False  # set by `pack_for_decoding`, as in `attend_cached`

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = TokenEmbedding(config)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head_layer = nn.Linear(config.dim, config.dim) if config.head_layer else None
        self.output = Head(config.dim, config.vocab_size, bias=config.head_layer)
        self.register_buffer("rotary", None, persistent=False)
        self.compute_buffers(self.output.weight.device)

    def compute_buffers(self, device: torch.device) -> None:
        """Compute the tables that no checkpoint holds."""
        self.rotary = rotary_table(self.config).to(device)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """Features of whole sequences x [rows, n, dim] (no cache, for training and references).

        `mask` [rows or 1, 1, n, n] is additive; `positions` int64 [rows, n] where they are not 0 to n - 1.
        """
        turn = self.rotary[None, : x.shape[1]] if positions is None else self.rotary[positions]
        for layer in self.layers:
            x = layer(x, turn, attend_plain(mask))
        return self._features(x)

    def step(self, x: Tensor, positions: Tensor, cache: KVCache, slots: Tensor, mask: Tensor) -> Tensor:
        """Features of new nodes x [rows, n, dim] on a cache; `positions` int64 [1 or rows, n]."""
        turn = self.rotary[positions.clamp_max(len(self.rotary) - 1)]
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, attend_cached(cache, number, slots, mask, self.attention_kernel))
        return self._features(x)

    def _features(self, x: Tensor) -> Tensor:
        """What the output head multiplies: final-norm hidden states, or what `head_layer` makes of them."""
        out: Tensor = self.norm(x)
        return out if self.head_layer is None else functional.gelu(self.head_layer(out))
