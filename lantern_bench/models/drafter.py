"""The EAGLE drafter (arXiv 2401.15077): one decoder layer on the target's features, logits through the target's head.

At image position j it sees the embedding of token j and the feature that predicted it, and predicts the next feature.
Tree levels are one forward each; committed tokens are fed again with the target's true features, so its cache never
holds guessed ones (algorithms.md, section 5). The position table is one shorter than the target's (finding B5).
Chameleon's drafters read the prompt's tokens before the image, where LlamaGen's have fillers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_bench.decode.interface import Drafts
from lantern_bench.models.attention import attend_cached, attend_plain
from lantern_bench.models.cache import KVCache, Sessions
from lantern_bench.models.conditioning import Condition, prompt_words, visible_rows
from lantern_bench.models.line_ends import force_line_ends
from lantern_bench.models.rotary import rotary_table
from lantern_bench.models.target import causal_seen, padding_of
from lantern_bench.models.transformer import (
    Block,
    TokenEmbedding,
    TransformerConfig,
)

__all__ = ["EagleDrafter"]


class EagleDrafter(nn.Module):
    """Fuse, one layer, the target's frozen head.

    `mask_padding`: whether padded prefix positions are hidden (ours, and Chameleon's) or read (the published drafters
    of LlamaGen, finding B4). `input_norm`: whether the layer norms its input (Chameleon's) or not.
    The head belongs to the target and is not part of the drafter's parameters.
    """

    rotary: Tensor

    def __init__(
        self, config: TransformerConfig, head: nn.Module, mask_padding: bool = True, input_norm: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.mask_padding = mask_padding
        self.embed_tokens = TokenEmbedding(config)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layer = Block(config, input_norm=input_norm)
        self.register_buffer("rotary", None, persistent=False)
        self.compute_buffers(self.fc.weight.device)
        self._head = (head,)  # in a tuple, so that the module does not own it
        self._sessions = Sessions(lambda *shape: _Session(self, *shape))

    def session(self, batch: int, guided: bool, nodes: int) -> _Session:
        """The session of this shape; its cache is made at the first call and reused."""
        return self._sessions.of(batch, guided, nodes)

    def compute_buffers(self, device: torch.device) -> None:
        """Make anew what no checkpoint holds."""
        self.rotary = rotary_table(self.config, self.config.prefix - 1).to(device)

    def fuse(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Embedded tokens and the features that predicted them -> layer input, all [rows, n, dim]."""
        out: Tensor = self.fc(torch.cat([embedded.to(features.dtype), features], dim=-1))
        return out

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        mask: Tensor,
        words: Tensor | None = None,
        positions: Tensor | None = None,
        before: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Predicted features of whole sequences [rows, n, dim], without a cache (training).

        tokens int64 [rows, n] are shifted: token t follows features t; `mask` [rows or 1, 1, n, n] is additive.
        `words` [rows, m] of the whole vocabulary come before the tokens, which are then n - m; `positions` int64
        [rows, n] are given where they are not 0 to n - 1. `before`: as in `attend_plain`.
        """
        embedded = self.embed_tokens(tokens)
        if words is not None:
            embedded = torch.cat([self.embed_tokens.of_words(words), embedded], dim=1)
        turn = self.rotary[None, : features.shape[1]] if positions is None else self.rotary[positions]
        out: Tensor = self.layer(self.fuse(embedded, features), turn, attend_plain(mask, before))
        return out

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.layer.ffn_norm.weight.dtype

    def draft_with(self, head: nn.Module) -> None:
        """Take another head than the target's, which must give nearly the same."""
        self._head = (head,)

    @property
    def head_module(self) -> nn.Module:
        """The target's head, or what stands for it."""
        return self._head[0]

    def head(self, features: Tensor) -> Tensor:
        """Logits of predicted features, through the target's head and with no norm between."""
        out: Tensor = self._head[0](features)
        return out


class _Session:
    def __init__(self, drafter: EagleDrafter, batch: int, guided: bool, nodes: int) -> None:
        config = drafter.config
        weight = drafter.layer.ffn_norm.weight
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
        self._prefix = torch.zeros((), dtype=torch.int64, device=weight.device)
        self._padding = torch.zeros_like(self._rows)

    def prefill(self, condition: Condition, features: Tensor) -> None:
        n, device = features.shape[1] - 1, features.device
        visible = visible_rows(condition.valid.to(device), self._groups)
        self.cache.reset()
        self._prefix.fill_(n + 1)
        self._padding.copy_(padding_of(visible, len(features), self._drafter.config))
        visible = visible if self._drafter.mask_padding else torch.ones_like(visible)
        if n > 0:
            seen = causal_seen(len(visible), n, device) & visible[:, None, :n]
            seen = seen | torch.eye(n, dtype=torch.bool, device=device)
            self._forward(self._before_image(condition, n), features[:, :n], self._behind(n), seen)
        self.cache.hide(visible)
        self.cache.advance(torch.full_like(self.cache.lengths, n))

    def _before_image(self, condition: Condition, n: int) -> Tensor:
        """What the first n prefix positions are fed, [rows, n, dim]: the tokens behind each of them."""
        embed = self._drafter.embed_tokens
        if self._drafter.config.words is None:
            return embed(self._rows.new_zeros(len(self._rows), n))
        words = prompt_words(condition.values.to(self._rows.device), self._groups)
        return embed.of_words(words[:, 1:])

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> Drafts:
        n = tokens.shape[1]
        seen = causal_seen(1, n, tokens.device)
        out = self._forward(self._embed(tokens), features, self._behind(n), seen)
        self.cache.advance(counts)
        last = self.cache.per_row((counts - 1).clamp_min(0))[:, None]
        # `out` belongs to the root from here on: what is extended next hangs on it.
        self._features, self._level = out[self._rows, last], 0
        return self._drafts(self._features, self.cache.lengths[:, None] - 1)

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> Drafts:
        if self._features is None:
            raise RuntimeError("observe comes before extend")
        features = self._features[self._rows, self.cache.per_row(origin)]
        positions = (self.cache.lengths[:, None] + self._level).expand_as(tokens)
        out = self._forward(self._embed(tokens), features, positions, seen)
        self._level += 1
        self._features = out
        return self._drafts(out, positions)

    def _behind(self, n: int) -> Tensor:
        return self.cache.slots(0, n)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Image tokens [B, n] -> [rows, n, dim]."""
        return self.cache.per_row(self._drafter.embed_tokens(tokens))

    def _forward(self, embedded: Tensor, features: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        drafter = self._drafter
        x = drafter.fuse(embedded, features)
        mask = self.cache.mask(seen, x.dtype)
        slots = self.cache.slots(seen.shape[2] - seen.shape[1], x.shape[1])
        if drafter.config.positions == "sequence":
            at = (self.cache.per_row(positions) - self._padding).clamp_min(0)
        else:
            at = positions if self._batch == 1 else self.cache.per_row(positions)
        turn = drafter.rotary[at.clamp_max(len(drafter.rotary) - 1)]
        out: Tensor = drafter.layer(x, turn, attend_cached(self.cache, 0, slots, mask))
        return out

    def _drafts(self, out: Tensor, positions: Tensor) -> Drafts:
        """The drafts of what was fed at `positions` [B, n]: the last of the prefix holds the image's first token."""
        places = positions - self._prefix + 2
        logits = force_line_ends(self._drafter.head(out), places, self._drafter.config)
        if self._groups == 1:
            return Drafts(logits, None)
        return Drafts(logits[: self._batch], logits[self._batch :])
