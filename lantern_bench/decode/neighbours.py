"""The table of nearest codes: which tokens a relaxed rule may count for which.

Computed once per codebook (algorithms.md, section 4). The code itself is left out here and nowhere else. The published
tables measure the rows of the codebook as they are stored, while LlamaGen looks codes up at unit length (finding C1),
so the space is named by the caller. What is kept on disk is `models/tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SPACES", "Space", "in_space", "index_dtype", "nearest_codes"]

Space: TypeAlias = Literal["raw", "normalised"]
SPACES: tuple[Space, ...] = get_args(Space)
"""`raw`: rows as stored, as published tables measure; `normalised`: rows of unit length, as LlamaGen looks them up."""

# Distances held at once: a quarter of a GiB with the keys that order them.
_DISTANCES_AT_ONCE = 1 << 24


def in_space(codebook: Tensor, space: Space) -> Tensor:
    """The rows [V, d] of a codebook in a space, float32; raises ValueError for a space that is none of `SPACES`."""
    if space not in SPACES:
        raise ValueError(f"space must be one of {', '.join(SPACES)}, not {space}")
    rows = codebook.float()
    return functional.normalize(rows, dim=-1) if space == "normalised" else rows


def index_dtype(codes: int) -> torch.dtype:
    """The smallest type that numbers `codes` codes: int16, uint16 or int32."""
    if codes <= 1 << 15:
        return torch.int16
    return torch.uint16 if codes <= 1 << 16 else torch.int32


def nearest_codes(
    codebook: Tensor,
    neighbours: int,
    chunk: int | None = None,
    dtype: torch.dtype = torch.int32,
    on_rows: Callable[[int], None] | None = None,
) -> Tensor:
    """Return [V, neighbours]: for every code the nearest others, nearest first, ties by index.

    `codebook` [V, d] holds one row per code; the distance is Euclidean in float32, measured `chunk` rows at a time
    (by default what fits a fixed budget), so that no V x V matrix is ever made. `on_rows` hears how many rows were
    done since it was last called. `neighbours` above V - 1, and a `dtype` too small for V, raise ValueError.
    """
    codes = codebook.float()
    total = codes.shape[0]
    if not 0 <= neighbours <= total - 1:
        raise ValueError(f"neighbours must be from 0 to {total - 1} for {total} codes, not {neighbours}")
    if total - 1 > torch.iinfo(dtype).max:
        raise ValueError(f"{dtype} cannot number {total} codes")
    step = chunk or max(1, _DISTANCES_AT_ONCE // max(1, total))
    index = torch.arange(total, device=codes.device)
    table = torch.empty(total, neighbours, dtype=dtype, device=codes.device)
    for start in range(0, total, step):
        rows = index[start : start + step]
        # The direct difference: the matrix-product form loses small distances to cancellation.
        distance = torch.cdist(codes[rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        distance.scatter_(1, rows[:, None], torch.inf)
        # Bits of non-negative floats order like the floats: one integer key holds distance and index.
        key = (distance.view(torch.int32).long() << 32) | index
        table[start : start + step] = key.topk(neighbours, dim=1, largest=False).indices.to(dtype)
        if on_rows is not None:
            on_rows(len(rows))
    return table
