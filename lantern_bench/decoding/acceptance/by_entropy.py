"""Relaxed rules that look at the entropy H(p) = -sum p log p of the target's distribution: `entropy` and `typical`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lantern_bench.methods.draft_view import DraftView


def entropy(p: Tensor) -> Tensor:
    """Return H(p) [...] in nats of distributions [..., V]."""
    return -(p * p.clamp_min(1e-30).log()).sum(dim=-1)


def entropy_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """m(x) <= entropy_scale H(p) / log V: nothing where the target is certain (docs/algorithms.md, section 8.4)."""
    p: Tensor = draft.p
    return entropy(p) * torch.as_tensor(values["entropy_scale"] / math.log(p.shape[-1]), dtype=p.dtype, device=p.device)


def typical_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Give f = 1 where p(x) > min(epsilon, alpha exp(-H(p))), else 0 (Medusa, arXiv 2401.10774, section 2.3.1)."""
    p: Tensor = draft.p
    epsilon, alpha = (torch.as_tensor(values[key], dtype=p.dtype, device=p.device) for key in ("epsilon", "alpha"))
    own: Tensor = draft.p_x
    return (own > torch.minimum(epsilon, alpha * torch.exp(-entropy(p)))).to(p.dtype)
