"""The table of nearest codes: which tokens a relaxed rule may count for which.

Computed once per codebook and metric (algorithms.md, section 4). The code itself is left out here and nowhere else.
Whether raw or normalised rows are measured is for the model to say, by what it hands in. `cosine` and `random` are
there for the ablation of LANTERN's Table 3: does it matter that neighbours are near?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from lantern_bench.spec.decoding import NeighbourMetric

__all__ = ["nearest_codes"]

# Part of what `random` means: the same neighbours in every run.
_RANDOM_SEED = 20_250_331


def nearest_codes(codebook: Tensor, neighbours: int, chunk: int = 1024, metric: NeighbourMetric = "l2") -> Tensor:
    """Return int32 [V, neighbours]: for every code the nearest others, nearest first, ties by index.

    `codebook` [V, d] holds one row per code. `metric` says what near is: `l2` (Euclidean, float32), `cosine` (the angle
    between rows; a row of zeros is as far from all), `random` (no geometry: for every code a fixed random order of the
    others, the same on every machine). Measured `chunk` rows at a time to bound memory. `neighbours` above V - 1 and an
    unknown metric raise ValueError.
    """
    if metric not in get_args(NeighbourMetric):
        raise ValueError(f"unknown metric {metric!r}; the metrics are {', '.join(get_args(NeighbourMetric))}")
    codes = codebook.float()
    total = codes.shape[0]
    if not 0 <= neighbours <= total - 1:
        raise ValueError(f"neighbours must be from 0 to {total - 1} for {total} codes, not {neighbours}")
    distances = _distances(codes, metric)
    index = torch.arange(total, device=codes.device)
    table = torch.empty(total, neighbours, dtype=torch.int32, device=codes.device)
    for start in range(0, total, chunk):
        rows = index[start : start + chunk]
        distance = distances(rows)
        distance.scatter_(1, rows[:, None], torch.inf)
        # Bits of non-negative floats order like the floats: one integer key holds distance and index.
        key = (distance.view(torch.int32).long() << 32) | index
        table[rows] = key.topk(neighbours, dim=1, largest=False).indices.int()
    return table


def _distances(codes: Tensor, metric: NeighbourMetric) -> Callable[[Tensor], Tensor]:
    """Return what gives the distances float32 [rows, V], none negative, of some rows to all codes."""
    if metric == "random":
        return lambda rows: torch.stack([_draw(int(row), len(codes)) for row in rows]).to(codes.device)
    # Between rows of unit length the Euclidean distance orders as the angle does.
    measured = torch.nn.functional.normalize(codes, dim=1) if metric == "cosine" else codes
    # The direct difference: the matrix-product form loses small distances to cancellation.
    return lambda rows: torch.cdist(measured[rows], measured, compute_mode="donot_use_mm_for_euclid_dist")


def _draw(row: int, total: int) -> Tensor:
    """Random distances of one code, drawn on the CPU from its own seed: neither chunk nor device changes them."""
    return torch.rand(total, generator=torch.Generator().manual_seed(_RANDOM_SEED + row))
