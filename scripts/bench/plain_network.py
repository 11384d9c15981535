"""The networks as the published code runs them.

Modules are called one after the other, and caches grow by concatenation. The weights are read from
a target and a drafter of the package, but no line of their forward is shared. There are two rows
(guidance) of one image, eager, in the dtype of the weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import Condition, TransformerTarget
from lantern_bench.models.networks.transformer import Block, rotary_turns

Past = list[tuple[Tensor, Tensor]]


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
    return wide.type_as(x) * module.weight


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate x [rows, n, heads, head_dim] by turn [n, head_dim / 2, 2]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turn[None, :, None].unbind(-1)
    turned = torch.stack([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
    return turned.flatten(3).type_as(x)


def layer(
    block: Block, x: Tensor, turn: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one layer over new positions; return its output and the longer cache."""
    attention = block.attention
    mlp = block.feed_forward
    rows, n, dim = x.shape
    hidden = norm(block.attention_norm, x) if isinstance(block.attention_norm, nn.RMSNorm) else x
    q, k, v = attention.wqkv(hidden).split([dim, dim, dim], dim=-1)
    heads = (rows, n, attention.heads, attention.head_dim)
    q = rotate(q.view(heads), turn).transpose(1, 2)
    k = rotate(k.view(heads), turn).transpose(1, 2)
    v = v.view(heads).transpose(1, 2)
    if past is not None:
        k = torch.cat([past[0], k], dim=2)
        v = torch.cat([past[1], v], dim=2)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + attention.wo(mixed.transpose(1, 2).contiguous().view(rows, n, dim))
    hidden = norm(block.ffn_norm, x)
    return x + mlp.w2(functional.silu(mlp.w1(hidden)) * mlp.w3(hidden)), (k, v)


def prefix_mask(visible: Tensor) -> Tensor:
    """Return who sees whom in a prefix, bool [n, n]: earlier visible positions, and itself."""
    n = len(visible)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return causal & visible | torch.eye(n, dtype=torch.bool)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bool [rows, n, m] to an additive mask [rows, 1, n, m]."""
    mask = torch.zeros(allowed.shape, dtype=dtype)
    return mask.masked_fill(~allowed, float("-inf"))[:, None]


class PlainTarget:
    """The target with its cache."""

    def __init__(self, target: TransformerTarget) -> None:
        self.target = target
        self.net = target.transformer
        self.turns = rotary_turns(target.config)
        self.past: Past = []
        self.visible = torch.ones(0, dtype=torch.bool)

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.past[0][0].shape[2] if self.past else 0

    def prefill(self, condition: Condition) -> tuple[Tensor, Tensor]:
        """Run the prefix; return logits and features."""
        x = self.target.prefix(condition, guided=True)
        self.past = []
        self.visible = condition.valid[0]
        return self._run(x, torch.arange(x.shape[1]), prefix_mask(self.visible))

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [2, n, V] and features [2, n, dim] of tokens [n] at positions [n].

        `tree` bool [n, n] says who sees whom.
        """
        x = self.net.tok_embeddings(torch.stack([tokens, tokens]))
        before = torch.ones(len(tokens), self.length, dtype=torch.bool)
        before[:, : len(self.visible)] = self.visible
        return self._run(x, positions, torch.cat([before, tree], dim=1))

    def keep(self, before: int, path: list[int]) -> None:
        """Keep the first `before` positions, and the nodes of `path` of what follows."""
        chosen = torch.tensor(path) + before
        kept: Past = []
        for keys, values in self.past:
            k = torch.cat([keys[:, :, :before], keys[:, :, chosen]], dim=2)
            v = torch.cat([values[:, :, :before], values[:, :, chosen]], dim=2)
            kept.append((k, v))
        self.past = kept

    def _run(self, x: Tensor, positions: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        turn = self.turns[positions]
        mask = additive(allowed[None], x.dtype)
        grown: Past = []
        for number, block in enumerate(self.net.layers):
            x, cache = layer(
                block=block,
                x=x,
                turn=turn,
                past=self.past[number] if self.past else None,
                mask=mask,
            )
            grown.append(cache)
        self.past = grown
        features = norm(self.net.norm, x)
        return self.net.output(features).float(), features


class PlainDrafter:
    """The drafter with its cache."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.turns = rotary_turns(replace(drafter.config, prefix=drafter.config.prefix - 1))
        self.past: tuple[Tensor, Tensor] | None = None
        self.visible = torch.ones(0, dtype=torch.bool)

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self.past[0].shape[2] if self.past is not None else 0

    def prefill(
        self, condition: Condition, features: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the prefix with the target's features; return logits and features."""
        n = features.shape[1]
        self.past = None
        self.visible = condition.valid[0]
        tokens = torch.cat([torch.zeros(n - 1, dtype=torch.int64), first.view(1)])
        return self._run(
            tokens, features, positions=torch.arange(n), allowed=prefix_mask(self.visible)
        )

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits and features of tokens [n] with features [2, n, dim] at positions [n].

        `seen` bool [n, m] says who sees whom behind the prefix.
        """
        n = len(tokens)
        before = torch.ones(n, self.length + n - seen.shape[1], dtype=torch.bool)
        before[:, : len(self.visible)] = self.visible
        allowed = torch.cat([before, seen], dim=1)
        return self._run(tokens, features, positions=positions, allowed=allowed)

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        assert self.past is not None
        self.past = (self.past[0][:, :, :length], self.past[1][:, :, :length])

    def _run(
        self, tokens: Tensor, features: Tensor, *, positions: Tensor, allowed: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafter = self.drafter
        embedded = drafter.embed_tokens(torch.stack([tokens, tokens])).to(features.dtype)
        x = drafter.fc(torch.cat([embedded, features], dim=-1))
        turn = self.turns[positions.clamp_max(len(self.turns) - 1)]
        out, self.past = layer(
            block=drafter.layer,
            x=x,
            turn=turn,
            past=self.past,
            mask=additive(allowed[None], x.dtype),
        )
        return drafter.head(out).float(), out
