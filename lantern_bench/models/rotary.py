"""Rotary position embeddings: of a grid behind a prefix (LlamaGen) and of a sequence (Chameleon), in both pairings.

Tables are made once for a configuration; queries and keys are turned by their rows (`transformer.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lantern_bench.models.transformer import TransformerConfig

__all__ = ["grid_rotary", "rotary_table", "rotate"]

# Rows behind the grid serve nodes that run over its end; their tokens are never kept (finding B5).
_MARGIN = 64


def grid_rotary(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """The rotary table [positions, head_dim / 2, 2] (cosine, sine) of prefix, grid and margin.

    The first half of the pairs turns with the row, the second with the column; the first image token is cell (0, 0).
    `prefix` overrides the config's (a drafter's is one shorter, finding B5).
    """
    prefix = config.prefix if prefix is None else prefix
    half = config.head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float32)[: half // 2]
    frequency = 1.0 / config.rope_base ** (steps / half)
    rows, columns = config.grid
    by_row = torch.outer(torch.arange(rows, dtype=torch.float32), frequency)
    by_column = torch.outer(torch.arange(columns, dtype=torch.float32), frequency)
    angles = torch.cat(
        [
            by_row[:, None, :].expand(rows, columns, -1),
            by_column[None, :, :].expand(rows, columns, -1),
        ],
        dim=-1,
    ).reshape(rows * columns, half)
    grid = torch.stack([angles.cos(), angles.sin()], dim=-1)
    head = torch.zeros(prefix, half, 2)
    if config.prefix_rotary == "identity":
        head[..., 0] = 1.0
    return torch.cat([head, grid, torch.zeros(_MARGIN, half, 2)])


def rotary_table(config: TransformerConfig, prefix: int | None = None) -> Tensor:
    """What queries and keys are turned by at each position, [positions, 2, head_dim], as `rotary_turns` says.

    `prefix` overrides the config's; a sequence has none of its own to override.
    """
    interleaved = config.pairs == "interleaved"
    if config.positions == "grid":
        return rotary_turns(grid_rotary(config, prefix), interleaved)
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    places = torch.arange(config.prefix + config.image_tokens + _MARGIN, dtype=torch.float32)
    angles = torch.outer(places, 1.0 / config.rope_base ** (steps / config.head_dim))
    return rotary_turns(torch.stack([angles.cos(), angles.sin()], dim=-1), interleaved)


def rotary_turns(rotary: Tensor, interleaved: bool) -> Tensor:
    """What `_rotate` multiplies with, [positions, 2, head_dim], of a table [positions, head_dim / 2, 2].

    The cosine of each number's pair, and the sine with the sign with which its partner enters.
    """
    cosine, sine = rotary.unbind(-1)
    if interleaved:
        pairs = [torch.stack([cosine, cosine], dim=-1), torch.stack([-sine, sine], dim=-1)]
        return torch.stack([pair.flatten(-2) for pair in pairs], dim=1)
    return torch.stack([torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)], dim=1)


def rotate(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs: x [rows, n, heads, head_dim], turn [1 or rows, n, 2, head_dim]."""
    wide = x.float()
    if interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(wide.shape[-1] // 2, dims=-1)
    return (wide * turn[:, :, :1] + partner * turn[:, :, 1:]).to(x.dtype)
