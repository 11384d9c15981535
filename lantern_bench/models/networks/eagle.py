"""The EAGLE drafter (arXiv 2401.15077): one decoder layer on the target's features, logits through the target's head.

The token embedding is always loaded from the drafter's file; LlamaGen's equals the target's output head
(docs/algorithms.md, section 9, B3).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lantern_bench.decoding.protocol import Drafter, DrafterLogits, DrafterSession
from lantern_bench.models.networks.conditions import Condition, prompt_rows
from lantern_bench.models.networks.target import (
    CachedModel,
    CachedSession,
    CachedTarget,
    causal_seen,
    force_line_ends,
    prefix_seen,
)
from lantern_bench.models.networks.transformer import (
    Block,
    Table,
    TokenEmbedding,
    attend_cached,
    attend_plain,
    rotary_table,
)
from lantern_bench.models.networks.transformer_config import (
    TransformerConfig,
)

Head: TypeAlias = Callable[[Tensor], Tensor]
"""Features to logits: mostly a module."""


class _Session(CachedSession, DrafterSession):
    def __init__(self, drafter: EagleDrafter, *shape: Any) -> None:
        super().__init__(drafter, 3, *shape)
        self._drafter = drafter
        self._rows = torch.arange(self._groups * self._batch, device=drafter.device)[:, None]
        self._level = 0  # of the tree, below the root
        self._features: Tensor | None = None  # of the nodes of this level

    def prefill(self, condition: Condition, features: Tensor) -> None:
        n = features.shape[1] - 1
        visible = self._start(condition, n + 1, features.device)
        visible = visible if self._drafter.mask_padding else torch.ones_like(visible)
        if n > 0:
            # The tokens that follow each of the first n prefix positions.
            embed = self._drafter.embed_tokens
            if self._drafter.config.text_vocab_size is None:
                following = embed(self._rows.new_zeros(len(self._rows), n))
            else:
                following = embed.of_text(
                    prompt_rows(condition.values.to(self._rows.device), self._groups)[:, 1:]
                )
            self._forward(
                following, features[:, :n], self.cache.slots(0, n), prefix_seen(visible, n)
            )
        self._commit_prefix(visible, n)

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        n = tokens.shape[1]
        embedded = self.cache.per_row(self._drafter.embed_tokens(tokens))
        out = self._forward(
            embedded, features, self.cache.slots(0, n), causal_seen(1, n, tokens.device)
        )
        self.cache.advance(counts)
        last = self.cache.per_row((counts - 1).clamp_min(0))[:, None]
        self._features = out[self._rows, last]
        self._level = 0
        return self._logits(self._features, self.cache.lengths[:, None] - 1)

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        assert self._features is not None  # `observe` comes first
        features = self._features[self._rows, self.cache.per_row(origin)]
        positions = (self.cache.lengths[:, None] + self._level).expand_as(tokens)
        embedded = self.cache.per_row(self._drafter.embed_tokens(tokens))
        out = self._forward(embedded, features, positions, seen)
        self._features = out
        self._level = self._level + 1
        return self._logits(out, positions)

    def _forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, seen: Tensor
    ) -> Tensor:
        drafter = self._drafter
        x = drafter.fuse(embedded, features)
        mask = self.cache.mask(seen, x.dtype)
        slots = self.cache.slots(seen.shape[2] - seen.shape[1], x.shape[1])
        table = drafter.table.values
        rotary = table[self._rotary_positions(positions).clamp_max(len(table) - 1)]
        attend = attend_cached(
            cache=self.cache, layer=0, slots=slots, mask=mask, kernel=drafter.attention_kernel
        )
        return drafter.layer(x, rotary, attend)

    def _logits(self, out: Tensor, positions: Tensor) -> DrafterLogits:
        """Return the logits of the tokens that follow `positions` [B, n]; the first token follows the prefix."""
        logits = force_line_ends(
            self._drafter.head(out), positions - self._prefix + 2, self._drafter.config
        )
        return DrafterLogits(*self._split(logits))


class EagleDrafter(CachedModel, Drafter):
    """Fuse tokens with features, one layer, then the target's frozen head, which is not a parameter of the drafter.

    `mask_padding`: padded prefix positions are hidden. LlamaGen's published drafters read them instead, as the LANTERN
    code made them for their training (docs/algorithms.md, section 9, B4).
    """

    session_type = _Session
    attention_kernel = False  # set by `pack_for_decoding`, as in `attend_cached`

    def __init__(
        self, config: TransformerConfig, head: Head, mask_padding: bool = True, bias: bool = True
    ) -> None:
        super().__init__(replace(config, layers=1))
        self.mask_padding = mask_padding
        self.embed_tokens = TokenEmbedding(config)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=bias)
        self.layer = Block(config, input_norm=config.qk_norm)  # as Chameleon's does
        self.table = Table(lambda: rotary_table(config, config.prefix - 1))
        self._head = (head,)  # in a tuple, so that the module does not own it

    def fuse(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Embedded tokens and the features that predicted them -> layer input, all [rows, n, dim]."""
        return self.fc(torch.cat([embedded.to(features.dtype), features], dim=-1))

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        mask: Tensor,
        prompts: Tensor | None = None,
        positions: Tensor | None = None,
        earlier: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Return predicted features of whole sequences [rows, n, dim], without a cache (training).

        tokens int64 [rows, n] are shifted: token t follows features t; `mask` [rows or 1, 1, n, n] is additive.
        `prompts` [rows, m] in the whole vocabulary come before the tokens, which are then n - m; `positions` int64
        [rows, n] where they are not 0 to n - 1. `earlier`: as in `attend_plain`.
        """
        embedded = self.embed_tokens(tokens)
        if prompts is not None:
            embedded = torch.cat([self.embed_tokens.of_text(prompts), embedded], dim=1)
        rotary = (
            self.table.values[None, : features.shape[1]]
            if positions is None
            else self.table.values[positions]
        )
        return self.layer(self.fuse(embedded, features), rotary, attend_plain(mask, earlier))

    def use_head(self, head: Head) -> None:
        """Replace the target's head by one that gives nearly the same logits."""
        self._head = (head,)

    @property
    def head(self) -> Head:
        """The target's head, or its replacement; predicted features go through it with no norm between."""
        return self._head[0]


def build_drafter(
    config: TransformerConfig, target: CachedTarget, bias: bool = True
) -> EagleDrafter:
    """Return a drafter as published: LlamaGen's reads padding, Chameleon's hides it."""
    return EagleDrafter(
        config=config, head=target.transformer.output, mask_padding=config.qk_norm, bias=bias
    )


def untrained_drafter(target: CachedTarget) -> EagleDrafter:
    """Return a drafter with the target's embedding and weights drawn from torch's current stream."""
    embedding = target.transformer.tok_embeddings
    drafter = build_drafter(target.drafter_config, target)
    drafter.mask_padding = True
    for name, parameter in drafter.named_parameters():
        if parameter.dim() >= 2 and parameter.requires_grad and not re.search(r"[qk]_norm\.", name):
            nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        # The fusion starts as the feature itself: a fair first guess of the next one.
        drafter.fc.weight[:, drafter.config.dim :] += torch.eye(drafter.config.dim)
        drafter.fc.bias.zero_()
        codes = torch.arange(target.vocab_size, device=target.device)[None]
        weight = embedding.weight if isinstance(embedding, TokenEmbedding) else embedding(codes)[0]
        drafter.embed_tokens.weight.copy_(weight)
    return drafter
