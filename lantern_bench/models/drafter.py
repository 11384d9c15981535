"""The EAGLE drafter (arXiv 2401.15077): one decoder layer on the target's features, logits through the target's head.

At image position j it sees the embedding of token j and the feature that predicted it, and predicts the next feature.
Tree levels are one forward each; committed tokens are fed again with the target's true features, so its cache never
holds guessed ones (algorithms.md, section 5). The position table is one shorter than the target's (finding B5).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_bench.decode.interface import Drafts
from lantern_bench.models.cache import KVCache, Sessions
from lantern_bench.models.conditioning import Condition
from lantern_bench.models.target import causal_seen
from lantern_bench.models.transformer import Block, TransformerConfig, attend_cached, attend_plain, grid_rotary

__all__ = ["EagleDrafter"]


class EagleDrafter(nn.Module):
    """Fuse, one layer, the target's frozen head.

    `mask_padding`: whether padded prefix positions are hidden (ours) or read (the published drafters, finding B4).
    The head belongs to the target and is not part of the drafter's parameters.
    """

    rotary: Tensor

    def __init__(self, config: TransformerConfig, head: nn.Linear, mask_padding: bool = True) -> None:
        super().__init__()
        self.config = config
        self.mask_padding = mask_padding
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layer = Block(config, input_norm=False)
        self.register_buffer("rotary", grid_rotary(config, config.prefix - 1), persistent=False)
        self._head = (head,)  # in a tuple, so that the module does not own it
        self._sessions = Sessions(lambda *shape: _Session(self, *shape))

    def session(self, batch: int, guided: bool, nodes: int) -> _Session:
        """The session of this shape; its cache is made at the first call and reused."""
        return self._sessions.of(batch, guided, nodes)

    def fuse(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Tokens [rows, n] and the features that predicted them [rows, n, dim] -> layer input [rows, n, dim]."""
        out: Tensor = self.fc(torch.cat([self.embed_tokens(tokens).to(features.dtype), features], dim=-1))
        return out

    def forward(self, tokens: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Predicted features of whole sequences [rows, n, dim], without a cache (training).

        tokens int64 [rows, n] are shifted: token t follows features t; `mask` [rows or 1, 1, n, n] is additive.
        """
        turn = self.rotary[None, : tokens.shape[1], None]
        out: Tensor = self.layer(self.fuse(tokens, features), turn, attend_plain(mask))
        return out

    def head(self, features: Tensor) -> Tensor:
        """Logits of predicted features, through the target's head and with no norm between."""
        out: Tensor = self._head[0](features)
        return out


class _Session:
    def __init__(self, drafter: EagleDrafter, batch: int, guided: bool, nodes: int) -> None:
        config = drafter.config
        weight = drafter.fc.weight
        self._drafter, self._batch = drafter, batch
        self._groups = 2 if guided else 1
        self.cache = KVCache(
            1,
            self._groups,
            batch,
            config.prefix + config.image_tokens + 3 * nodes,
            config.kv_heads or config.heads,
            config.head_dim,
            weight.dtype,
            weight.device,
        )
        self._rows = torch.arange(self._groups * batch, device=weight.device)[:, None]
        self._level = 0
        self._features: Tensor | None = None

    def prefill(self, condition: Condition, features: Tensor, tokens: Tensor) -> Drafts:
        n = features.shape[1]
        fillers = tokens.new_zeros(self._batch, n - 1)
        valid = condition.valid.to(tokens.device)
        self.cache.reset(valid if self._drafter.mask_padding else torch.ones_like(valid))
        seen = causal_seen(self._batch, n, tokens.device) & self.cache.visible[:, None, :n]
        seen = seen | torch.eye(n, dtype=torch.bool, device=tokens.device)
        out = self._forward(torch.cat([fillers, tokens[:, None]], dim=1), features, self._behind(n), seen)
        self.cache.advance(torch.full_like(self.cache.lengths, n), n)
        return self._root(out[:, -1:])

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor, longest: int) -> Drafts:
        n = tokens.shape[1]
        out = self._forward(tokens, features, self._behind(n), causal_seen(self._batch, n, tokens.device))
        self.cache.advance(counts, self._drafter.config.prefix + longest)
        last = (counts - 1).clamp_min(0).repeat(self._groups)[:, None]
        return self._root(out[self._rows, last])

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Drafts:
        if self._features is None:
            raise RuntimeError("prefill or observe comes before extend")
        features = self._features[self._rows, origin.repeat(self._groups, 1)]
        positions = (self.cache.lengths[:, None] + self._level).expand_as(tokens)
        out = self._forward(tokens, features, positions, seen)
        self._level += 1
        self._features = out
        return self._drafts(out)

    def _behind(self, n: int) -> Tensor:
        return self.cache.lengths[:, None] + torch.arange(n, device=self.cache.lengths.device)

    def _root(self, out: Tensor) -> Drafts:
        """`out` [rows, 1, dim] belongs to the root: what is extended next hangs on it."""
        self._features, self._level = out, 0
        return self._drafts(out)

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        drafter = self._drafter
        x = drafter.fuse(tokens.repeat(self._groups, 1), features)
        mask = self.cache.mask(seen, x.dtype)
        slots = self.cache.slots(seen.shape[2] - seen.shape[1], tokens.shape[1])
        at = positions.repeat(self._groups, 1).clamp_max(len(drafter.rotary) - 1)
        out: Tensor = drafter.layer(x, drafter.rotary[at][:, :, None], attend_cached(self.cache, 0, slots, mask))
        return out

    def _drafts(self, out: Tensor) -> Drafts:
        logits = self._drafter.head(out)
        if self._groups == 1:
            return Drafts(logits, None)
        return Drafts(logits[: self._batch], logits[self._batch :])
