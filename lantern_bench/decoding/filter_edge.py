"""The edge of the filters: tokens of which rounding decides whether top-k and top-p keep them.

Decode steps and teacher forcing round differently (docs/algorithms.md, section 6.1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.sampling import decoding_probabilities

# Rounding error of the difference of two logits without guidance, by dtype.
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.04}


def edge_tolerance(dtype: str, decoding: Decoding) -> float:
    """Return how far rounding may move the difference of two logits."""
    scale = decoding.cfg_scale
    return float(_ROUNDING[dtype] * (abs(scale) + abs(scale - 1)) / decoding.temperature)


def sure_tokens(
    logits: Tensor, p: Tensor, decoding: Decoding, *, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return the tokens that pass the filters, and that fail them, whatever rounding does.

    Args:
        logits: Guided logits [..., V].
        p: Their distributions [..., V] after the filters.
        decoding: Temperature and filters.
        tolerance: See `edge_tolerance`.

    Returns:
        Two masks, bool as p.
    """
    if not decoding.top_k and decoding.top_p >= 1:
        return p > 0, p == 0
    strict_p = p  # under a stricter filter
    loose_p = p  # under a looser filter
    top_p = decoding.top_p
    if top_p < 1:
        # Logits that move by a tolerance change the odds of a set by at most exp(tolerance).
        strict = top_p / (top_p + (1 - top_p) * math.exp(tolerance))
        loose = top_p / (top_p + (1 - top_p) * math.exp(-tolerance))
        strict_p = decoding_probabilities(logits, decoding.changed(top_p=strict))
        loose_p = decoding_probabilities(logits, decoding.changed(top_p=loose))
    scaled = logits.double() / decoding.temperature
    excluded = scaled.masked_fill(strict_p > 0, -torch.inf).amax(dim=-1, keepdim=True)
    if 0 < decoding.top_k < logits.shape[-1]:
        # Of equal logits a step may keep one and drop another.
        largest = scaled.topk(decoding.top_k + 1, dim=-1).values
        excluded = excluded.maximum(largest[..., -1:])
    lowest = scaled.masked_fill(loose_p == 0, torch.inf).amin(dim=-1, keepdim=True)
    passes = (strict_p > 0) & (scaled >= excluded + tolerance)
    return passes, (loose_p == 0) & (scaled <= lowest - tolerance)
