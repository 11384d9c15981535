"""The levels of a draft followed over whole sequences at once, for training (HASS, arXiv 2408.15766, section 3.2).

While decoding, a draft's first level sees true features alone. At level k the last k - 1 features are guesses, each of
the level it was made at. Here every position of a sequence is the root of such a draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.models.drafter import EagleDrafter
from lantern_bench.train.teacher import Taught, positions_of, prefix_mask

__all__ = ["level_mask", "unroll"]


def unroll(drafter: EagleDrafter, taught: Taught, features: Tensor, levels: int) -> list[Tensor]:
    """Predicted features of each level, [B, P + N - 1, dim]; position t sees feature t and the token that follows it.

    `features` [B, P + N - 1, dim] are what the first level sees. Level k is a draft's from position P + k - 2 on; what
    it predicts before is of no use.
    """
    tokens, words, valid = taught.tokens, taught.words, taught.valid
    length, first = features.shape[1], features.shape[1] - drafter.config.image_tokens
    if words is None:
        tokens = torch.cat([tokens.new_zeros(len(tokens), valid.shape[1] - 1), tokens], dim=1)
    causal = prefix_mask(valid if drafter.mask_padding else torch.ones_like(valid), length)
    before = None if words is None else words[:, 1:]
    positions = positions_of(valid, length, drafter.config)
    seen: list[tuple[Tensor, Tensor]] | None = [] if levels > 1 else None
    made, fed = list[Tensor](), features
    for level in range(levels):
        made.append(drafter(tokens, fed, level_mask(causal, level), before, positions, seen))
        fed = torch.cat([features[:, : first + 1], made[-1][:, first:-1].to(features.dtype)], dim=1)
    return made


def level_mask(causal: Tensor, level: int) -> Tensor:
    """The additive mask [B, 1, n, (level + 1) * n] of a level (0: the first) over its keys and those of all before.

    `causal` [B, 1, n, n] is the first level's. A position sees the true features that end `level` places before it,
    then the one guess of each level between, and itself.
    """
    n = causal.shape[-1]
    behind = torch.arange(n, device=causal.device)[:, None] - torch.arange(n, device=causal.device)[None, :]
    parts = [causal.masked_fill(behind < level, -torch.inf)]
    for between in range(1, level + 1):
        parts.append(torch.zeros_like(causal).masked_fill(behind != level - between, -torch.inf))
    return torch.cat(parts, dim=-1)
