"""The table of nearest codes of each code, without the code itself (docs/algorithms.md, section 4).

The caller names the space (docs/algorithms.md, section 9, C1). The metrics `cosine` and `random`
are for LANTERN's Table 3.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional

from lantern_bench.decoding.sampling import keys_of
from lantern_bench.methods.parameters import NeighbourMetric
from lantern_bench.utils.progress import slow_task

Space: TypeAlias = Literal["raw", "normalised"]
SPACES: tuple[Space, ...] = get_args(Space)
"""`raw`: rows as stored (published tables). `normalised`: rows of unit length (LlamaGen)."""

_DISTANCES_AT_ONCE = 1 << 24  # a quarter of a GiB with the keys that order them
_RANDOM_SEED = 20_250_331  # part of what `random` means: the same neighbours in every run


def in_space(codebook: Tensor, space: Space) -> Tensor:
    """Return the rows [V, d] of a codebook in a space, float32.

    Raises `ValueError` for a space that is not in `SPACES`.
    """
    if space not in SPACES:
        raise ValueError(f"space must be one of {', '.join(SPACES)}, not {space}")
    rows = codebook.float()
    return functional.normalize(rows, dim=-1) if space == "normalised" else rows


def nearest_codes(codebook: Tensor, neighbours: int, metric: NeighbourMetric = "l2") -> Tensor:
    """Return for every code the nearest other codes, int32 [V, neighbours], ties by index.

    Args:
        codebook: The rows that are measured, [V, d].
        neighbours: How many codes, at most V - 1.
        metric: `l2`, `cosine` (a row of zeros is equally far from all), or `random` (a fixed order
            for every code, the same on every machine).

    Raises:
        ValueError: `neighbours` is out of range.
    """
    total = len(codebook)
    if not 0 <= neighbours <= total - 1:
        raise ValueError(
            f"neighbours must be from 0 to {total - 1} for {total} codes, not {neighbours}"
        )
    # Between rows of unit length the Euclidean distance orders as the angle does.
    measured = in_space(codebook, "normalised" if metric == "cosine" else "raw")
    index = torch.arange(total, device=codebook.device)
    parts = []
    measured_rows = slow_task("nearest codes", total)
    for rows in torch.split(index, max(1, _DISTANCES_AT_ONCE // total)):
        if metric == "random":
            # Each code has its own seed and the CPU draws: neither part nor device matters.
            seeds = [torch.Generator().manual_seed(_RANDOM_SEED + row) for row in rows.tolist()]
            drawn = [torch.rand(total, generator=seed) for seed in seeds]
            distance = torch.stack(drawn).to(codebook.device)
        else:
            # The direct difference: the matrix-product form loses small distances to cancellation.
            distance = torch.cdist(
                measured[rows], measured, compute_mode="donot_use_mm_for_euclid_dist"
            )
        distance.scatter_(1, rows[:, None], torch.inf)
        parts.append(keys_of(distance, index).topk(neighbours, dim=1, largest=False).indices.int())
        measured_rows(len(rows))
    return torch.cat(parts)
