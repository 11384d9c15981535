"""What a target teaches its drafter: features of whole sequences under teacher forcing, for every kind of condition.

One plain forward without a cache; the features are those that decoding sees (`decode.forcing` has them from the decode
sessions). Which sequences, and in which order, is `lessons`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.models.conditioning import Condition, prompt_words, visible_rows
from lantern_bench.models.target import TransformerTarget, padding_of
from lantern_bench.models.transformer import TransformerConfig

__all__ = ["Taught", "positions_of", "prefix_mask", "teach"]


class Taught(NamedTuple):
    """B sequences of N tokens behind a prefix of P, on the target's device.

    tokens int64 [B, N]. hidden [B, P + N - 1, dim]: final-norm hidden states, of which number P - 1 predicts the first
    token. valid bool [B, P], False for padding. words int64 [B, P]: prompts in the model's own vocabulary, else None.
    """

    tokens: Tensor
    hidden: Tensor
    valid: Tensor
    words: Tensor | None


def prefix_mask(valid: Tensor, length: int) -> Tensor:
    """The additive mask [B, 1, n, n] of training: causal, padding (`valid` bool [B, P]) seen by itself alone."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril().repeat(len(valid), 1, 1)
    allowed[:, :, : valid.shape[1]] &= valid[:, None, :]
    allowed |= torch.eye(length, dtype=torch.bool, device=valid.device)
    return torch.zeros(allowed.shape, device=valid.device).masked_fill_(~allowed, -torch.inf)[:, None]


def positions_of(valid: Tensor, length: int, config: TransformerConfig) -> Tensor | None:
    """Positions int64 [B, length] behind the padding, for models that count them; None for those on a grid."""
    if config.positions == "grid":
        return None
    padding = padding_of(valid, len(valid), config)
    return (torch.arange(length, device=valid.device) - padding).clamp_min(0)


def teach(target: TransformerTarget, condition: Condition, tokens: Tensor, dropped: Tensor) -> Taught:
    """The features along tokens int64 [B, N]; rows of `dropped` bool [B] have the null condition."""
    tokens, dropped = tokens.to(target.device), dropped.to(target.device)[:, None]
    given, null = target.prefix(condition, guided=True).chunk(2)
    visible, words = visible_rows(condition.valid.to(target.device), 2), None
    if target.config.words is not None:
        with_caption, without = prompt_words(condition.values.to(target.device), 2).chunk(2)
        words = torch.where(dropped, without, with_caption)
    if len(visible) > len(tokens):
        with_caption, without = visible.chunk(2)
        visible = torch.where(dropped, without, with_caption)
    prefix = torch.where(dropped[:, :, None], null, given)
    x = torch.cat([prefix, target.transformer.tok_embeddings(tokens[:, :-1])], dim=1)
    length = x.shape[1]
    hidden = target.transformer(x, prefix_mask(visible, length), positions_of(visible, length, target.config))
    return Taught(tokens, hidden, visible, words)
