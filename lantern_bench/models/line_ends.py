"""Tokens that nobody chooses: the ends of an image's lines (Lumina-mGPT), certain in place and impossible elsewhere.

Said in the logits of target and drafter alike, so that every way of decoding obeys without knowing: a drafter proposes
the end of the line with q = 1, the target accepts it with p = 1, and neither ever spends mass on it elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.models.transformer import TransformerConfig

__all__ = ["force_line_ends", "with_line_ends", "without_line_ends"]


def force_line_ends(logits: Tensor, places: Tensor, config: TransformerConfig) -> Tensor:
    """Logits [rows, n, V] of the tokens at `places` int64 [B, n] of their images, rows being groups of the B images.

    Both rows of guidance get the same values where nothing is left to choose, so that no scale moves them. The lowest
    finite number stands for impossible: of two infinities guidance would make no number.
    """
    if not config.line_ends:
        return logits
    ends = ((places + 1) % config.line_length == 0).repeat(len(logits) // len(places), 1)[:, :, None]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(ends, 0.0).masked_fill(ends != is_end, torch.finfo(logits.dtype).min)


def without_line_ends(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The codes int [B, rows * columns] of images int [B, rows * (columns + 1)] whose lines have ends."""
    rows, columns = grid
    return tokens.reshape(len(tokens), rows, columns + 1)[:, :, :columns].flatten(1)


def with_line_ends(codes: Tensor, grid: tuple[int, int], end: int) -> Tensor:
    """The inverse of `without_line_ends`: codes int [B, rows * columns] with token `end` behind each line."""
    lines = codes.reshape(len(codes), *grid)
    return torch.cat([lines, torch.full_like(lines[:, :, :1], end)], dim=2).flatten(1)
