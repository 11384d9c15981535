"""The EAGLE drafter (arXiv 2401.15077): one decoder layer on the target's features.

Its features become logits through the target's head. The token embedding is always loaded from the
drafter's file. In LlamaGen's drafters it equals the target's output head (docs/algorithms.md,
section 9, B3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lantern_bench.decoding.protocol import Drafter, DrafterLogits, DrafterSession
from lantern_bench.decoding.tree import index_along
from lantern_bench.models.networks.target import (
    CachedModel,
    CachedSession,
    CachedTarget,
    Condition,
    causal_seen,
    force_line_ends,
    prefix_seen,
    prompt_rows,
)
from lantern_bench.models.networks.transformer import (
    Block,
    Table,
    TokenEmbedding,
    attend_cached,
    attend_plain,
    rotary_table,
)
from lantern_bench.models.networks.transformer_config import TransformerConfig

Head: TypeAlias = Callable[[Tensor], Tensor]
"""Maps features to logits. It usually is a module."""


class _Session(CachedSession, DrafterSession):
    spare_trees = 3
    _model: EagleDrafter
    _level: int  # of the tree, below the root
    _features: Tensor  # of the nodes of this level

    def prefill(self, condition: Condition, features: Tensor) -> None:
        n = features.shape[1] - 1
        visible = self._start(condition, n + 1)
        if not self._model.mask_padding:
            visible = torch.ones_like(visible)
        if n > 0:
            self._forward(
                self._embedded_prefix(condition, n),
                features[:, :n],
                positions=self.cache.slots(0, n),
                seen=prefix_seen(visible, n),
            )
        self.cache.commit_prefix(visible, n)

    def _embedded_prefix(self, condition: Condition, n: int) -> Tensor:
        """Embed the tokens that follow each of the first n prefix positions."""
        embed = self._model.embed_tokens
        rows = self.cache.rows
        if self._config.text_vocab_size is None:
            return embed(rows.new_zeros(len(rows), n))
        prompts = prompt_rows(condition.values.to(rows.device), self.cache.groups)
        return embed.of_text(prompts[:, 1:])

    def observe(self, tokens: Tensor, features: Tensor, counts: Tensor) -> DrafterLogits:
        out = self._read(tokens, features)
        self.cache.advance(counts)
        last = self.cache.per_row((counts - 1).clamp_min(0))[:, None]
        self._features = out[self.cache.rows, last]
        self._level = 0
        return self._logits(self._features, self.cache.lengths[:, None] - 1)

    def observe_all(self, tokens: Tensor, features: Tensor) -> DrafterLogits:
        positions = self.cache.lengths[:, None] + index_along(tokens, 1)
        out = self._read(tokens, features)
        self.cache.advance(torch.full_like(tokens[:, 0], tokens.shape[1]))
        return self._logits(out, positions)

    def _read(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the features behind each of the tokens, whose keys and values enter the cache."""
        n = tokens.shape[1]
        return self._forward(
            self.cache.per_row(self._model.embed_tokens(tokens)),
            features,
            positions=self.cache.slots(0, n),
            seen=causal_seen(n, tokens.device),
        )

    def extend(self, tokens: Tensor, origin: Tensor, seen: Tensor) -> DrafterLogits:
        positions = (self.cache.lengths[:, None] + self._level).expand_as(tokens)
        self._features = self._forward(
            self.cache.per_row(self._model.embed_tokens(tokens)),
            self._features[self.cache.rows, self.cache.per_row(origin)],
            positions=positions,
            seen=seen,
        )
        self._level += 1
        return self._logits(self._features, positions)

    def _forward(
        self, embedded: Tensor, features: Tensor, *, positions: Tensor, seen: Tensor
    ) -> Tensor:
        drafter = self._model
        x = drafter.fuse(embedded, features)
        attend = attend_cached(
            self.cache,
            layer=0,
            mask=self.cache.mask(seen, x.dtype),
            slots=self.cache.slots(seen.shape[2] - seen.shape[1], x.shape[1]),
            kernel=drafter.attention_kernel,
        )
        return drafter.layer(x, drafter.table.at(self._rotary_positions(positions)), attend)

    def _logits(self, out: Tensor, positions: Tensor) -> DrafterLogits:
        """Return the logits of the tokens that follow `positions` [B, n] of the cache.

        The first token of the image follows the prefix.
        """
        positions = positions - self._prefix + 2
        logits = force_line_ends(self._model.head(out), positions, self._config)
        return DrafterLogits(*self._split(logits))


class EagleDrafter(CachedModel, Drafter):
    """Fuse tokens with features, one layer, then the target's frozen head.

    The head is not a parameter of the drafter.

    Args:
        config: Sizes of the layer. `layers` is ignored.
        head: The target's head.
        mask_padding: Whether padded prefix positions are hidden. LlamaGen's published drafters read
            them, because the LANTERN code did so in their training (docs/algorithms.md, section 9,
            B4).
        bias: Whether the fusion has a bias.
    """

    session_type = _Session
    attention_kernel = False  # set by `pack_for_decoding`, as in `attend_cached`

    def __init__(
        self, config: TransformerConfig, head: Head, *, mask_padding: bool = True, bias: bool = True
    ) -> None:
        super().__init__(replace(config, layers=1))
        self.mask_padding = mask_padding
        self.embed_tokens = TokenEmbedding(config)
        self.embed_tokens.requires_grad_(requires_grad=False)
        self.fc = nn.Linear(2 * config.dim, config.dim, bias=bias)
        self.layer = Block(config, input_norm=config.qk_norm)  # Chameleon's drafter has this norm
        # Its positions begin one later than the target's (docs/algorithms.md, section 9, B5).
        self.table = Table(lambda: rotary_table(replace(config, prefix=config.prefix - 1)))
        self._head = (head,)  # in a tuple, so that the module does not own it

    def fuse(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Fuse embedded tokens with the features that predicted them, all [rows, n, dim]."""
        return self.fc(torch.cat([embedded.to(features.dtype), features], dim=-1))

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        mask: Tensor,
        *,
        positions: Tensor,
        prompts: Tensor | None = None,
        earlier: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Predict the features of whole sequences without a cache, for training.

        Args:
            tokens: Tokens int64 [rows, n - m], shifted: token t follows features t.
            features: Features [rows, n, dim].
            mask: Additive mask [rows or 1, 1, n, columns].
            positions: Rotary positions int64 [1 or rows, n].
            prompts: Numbers int64 [rows, m] in the whole vocabulary, which come before the tokens.
            earlier: As in `attend_plain`.

        Returns:
            Predicted features [rows, n, dim].
        """
        embedded = self.embed_tokens(tokens)
        if prompts is not None:
            embedded = torch.cat([self.embed_tokens.of_text(prompts), embedded], dim=1)
        return self.layer(
            self.fuse(embedded, features), self.table.at(positions), attend_plain(mask, earlier)
        )

    def use_head(self, head: Head) -> None:
        """Replace the target's head by one that gives nearly the same logits."""
        self._head = (head,)

    @property
    def head(self) -> Head:
        """The target's head, or its replacement. No norm comes before it."""
        return self._head[0]


def published_drafter(config: TransformerConfig, target: CachedTarget) -> EagleDrafter:
    """Return a drafter in the published form with fresh weights. LlamaGen's reads padding."""
    return EagleDrafter(config, target.transformer.output, mask_padding=config.qk_norm)


def embedding_of(target: CachedTarget) -> Tensor:
    """Return the rows of a target's token embedding, for a drafter."""
    embedding = target.transformer.tok_embeddings
    if isinstance(embedding, TokenEmbedding):
        return embedding.weight.detach()
    codes = torch.arange(target.vocab_size, device=target.device)[None]
    return embedding(codes)[0].detach()


def untrained_drafter(target: CachedTarget) -> EagleDrafter:
    """Return a drafter with the target's embedding and weights from torch's current stream."""
    drafter = EagleDrafter(target.drafter_config, target.transformer.output)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    with torch.no_grad():
        # The fusion starts as the feature itself, a fair first guess of the next one.
        drafter.fc.weight[:, drafter.config.dim :] += torch.eye(drafter.config.dim)
        drafter.fc.bias.zero_()
        drafter.embed_tokens.weight.copy_(embedding_of(target))
    return drafter
