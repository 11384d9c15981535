"""The table of nearest codes: which tokens a relaxed rule may count for which.

Computed once per codebook (algorithms.md, section 4). The code itself is left out here and nowhere else. Whether raw or
normalised rows are measured is for the model to say, by what it hands in.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nearest_codes"]


def nearest_codes(codebook: Tensor, neighbours: int, chunk: int = 1024) -> Tensor:
    """Return int32 [V, neighbours]: for every code the nearest others, nearest first, ties by index.

    `codebook` [V, d] holds one row per code; the distance is Euclidean in float32, measured `chunk` rows at a time to
    bound memory. `neighbours` above V - 1 raises ValueError.
    """
    codes = codebook.float()
    total = codes.shape[0]
    if not 0 <= neighbours <= total - 1:
        raise ValueError(f"neighbours must be from 0 to {total - 1} for {total} codes, not {neighbours}")
    index = torch.arange(total, device=codes.device)
    table = torch.empty(total, neighbours, dtype=torch.int32, device=codes.device)
    for start in range(0, total, chunk):
        rows = index[start : start + chunk]
        # The direct difference: the matrix-product form loses small distances to cancellation.
        distance = torch.cdist(codes[rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        distance.scatter_(1, rows[:, None], torch.inf)
        # Bits of non-negative floats order like the floats: one integer key holds distance and index.
        key = (distance.view(torch.int32).long() << 32) | index
        table[rows] = key.topk(neighbours, dim=1, largest=False).indices.int()
    return table
