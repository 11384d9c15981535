"""The networks as the published code runs them: modules called one after the other, caches that grow by concatenation.

It reads the weights of a target and a drafter of the package and shares no line of their forward. Two rows (guidance),
one image, eager, in the weights' own type.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lantern_bench.models.networks.conditions import Condition
from lantern_bench.models.networks.eagle import EagleDrafter
from lantern_bench.models.networks.target import TransformerTarget
from lantern_bench.models.networks.transformer import Block, grid_rotary

Past = list[tuple[Tensor, Tensor]]


def norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
    return wide.type_as(x) * module.weight


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [rows, n, heads, head_dim], turn [n, head_dim / 2, 2]."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    turn = turn.view(1, pairs.shape[1], 1, pairs.shape[3], 2)
    turned = torch.stack(
        [
            pairs[..., 0] * turn[..., 0] - pairs[..., 1] * turn[..., 1],
            pairs[..., 1] * turn[..., 0] + pairs[..., 0] * turn[..., 1],
        ],
        dim=-1,
    )
    return turned.flatten(3).type_as(x)


def layer(
    block: Block, x: Tensor, turn: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
):
    """One layer over new positions; returns its output and the longer cache."""
    attention = block.attention
    mlp = block.feed_forward
    rows, n, dim = x.shape
    hidden = norm(block.attention_norm, x) if isinstance(block.attention_norm, nn.RMSNorm) else x
    q, k, v = attention.wqkv(hidden).split([dim, dim, dim], dim=-1)
    q, k, v = (part.view(rows, n, attention.heads, attention.head_dim) for part in (q, k, v))
    q, k, v = (part.transpose(1, 2) for part in (rotate(q, turn), rotate(k, turn), v))
    if past is not None:
        k = torch.cat([past[0], k], dim=2)
        v = torch.cat([past[1], v], dim=2)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + attention.wo(mixed.transpose(1, 2).contiguous().view(rows, n, dim))
    hidden = norm(block.ffn_norm, x)
    return x + mlp.w2(functional.silu(mlp.w1(hidden)) * mlp.w3(hidden)), (k, v)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [rows, n, m] -> [rows, 1, n, m]."""
    mask = torch.zeros(allowed.shape, dtype=dtype)
    return mask.masked_fill(~allowed, float("-inf"))[:, None]


class PlainTarget:
    """The target with its cache."""

    def __init__(self, target: TransformerTarget) -> None:
        self.target = target
        self.net = target.transformer
        self.turns = grid_rotary(target.config)
        self.past: Past = []
        self.visible = torch.ones(0, dtype=torch.bool)

    @property
    def length(self) -> int:
        return self.past[0][0].shape[2] if self.past else 0

    def prefill(self, condition: Condition) -> tuple[Tensor, Tensor]:
        x = self.target.prefix(condition, guided=True)
        n = x.shape[1]
        self.past = []
        self.visible = condition.valid[0]
        allowed = torch.ones(n, n, dtype=torch.bool).tril() & self.visible | torch.eye(
            n, dtype=torch.bool
        )
        return self._run(x, torch.arange(n), allowed)

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n] at positions [n], who sees whom in `tree` [n, n]: logits [2, n, V] and features [2, n, dim]."""
        x = self.net.tok_embeddings(torch.stack([tokens, tokens]))
        before = torch.ones(len(tokens), self.length, dtype=torch.bool)
        before[:, : len(self.visible)] = self.visible
        return self._run(x, positions, torch.cat([before, tree], dim=1))

    def keep(self, before: int, path: list[int]) -> None:
        """Of what lies behind `before`, keep the nodes of `path`."""
        chosen = torch.tensor(path) + before
        self.past = [
            (
                torch.cat([k[:, :, :before], k[:, :, chosen]], dim=2),
                torch.cat([v[:, :, :before], v[:, :, chosen]], dim=2),
            )
            for k, v in self.past
        ]

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
        self.turns = grid_rotary(replace(drafter.config, prefix=drafter.config.prefix - 1))
        self.past: tuple[Tensor, Tensor] | None = None
        self.visible = torch.ones(0, dtype=torch.bool)

    @property
    def length(self) -> int:
        return self.past[0].shape[2] if self.past is not None else 0

    def prefill(
        self, condition: Condition, features: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        n = features.shape[1]
        self.past = None
        self.visible = condition.valid[0]
        tokens = torch.cat([torch.zeros(n - 1, dtype=torch.int64), first.view(1)])
        allowed = torch.ones(n, n, dtype=torch.bool).tril() & self.visible | torch.eye(
            n, dtype=torch.bool
        )
        return self._run(tokens, features, torch.arange(n), allowed)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [n], features [2, n, dim], positions [n], who sees whom behind the prefix [n, m]."""
        before = torch.ones(
            len(tokens), self.length + len(tokens) - seen.shape[1], dtype=torch.bool
        )
        before[:, : len(self.visible)] = self.visible
        return self._run(tokens, features, positions, torch.cat([before, seen], dim=1))

    def cut(self, length: int) -> None:
        """Forget what lies behind `length`."""
        assert self.past is not None
        self.past = (self.past[0][:, :, :length], self.past[1][:, :, :length])

    def _run(
        self, tokens: Tensor, features: Tensor, positions: Tensor, allowed: Tensor
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
