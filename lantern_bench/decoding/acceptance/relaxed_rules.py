"""The relaxed acceptance rules: limits of the neighbour mass, and acceptance probabilities.

A rule is one function of the drafts and of its parameter values. A limit says how much neighbour mass m(x) a draft may
take; a chance is the probability f(x) to accept each token that a draft could have been.
docs/algorithms.md, sections 4 and 8.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern_bench.decoding.acceptance.rule import DraftView, as_number


def additive_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN: m(x) <= delta (arXiv 2410.03355)."""
    return as_number(values["delta"], draft.p_x).expand_as(draft.p_x)


def multiplicative_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """LANTERN++: m(x) <= (lambda - 1) p(x) (arXiv 2502.06352)."""
    return draft.p_x * as_number(values["lambda"] - 1.0, draft.p_x)


def entropy_limit(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """m(x) <= entropy_scale H(p) / log V: nothing where the target is certain."""
    p = draft.p
    return entropy(p) * as_number(values["entropy_scale"] / math.log(p.shape[-1]), p)


def annealed_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Cool-SD: f = min(1, w p(x) / q(x)), w = strength exp(-decay (depth - 1)) (arXiv 2601.09212)."""
    ratio = draft.strict_ratio
    strength, decay = as_number(values["strength"], ratio), as_number(values["decay"], ratio)
    w = strength * torch.exp(-decay * (draft.depth - 1).to(ratio.dtype))
    return w * ratio


def typical_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Medusa: f = 1 where p(x) > min(epsilon, alpha exp(-H(p))), else 0 (arXiv 2401.10774, section 2.3.1)."""
    p = draft.p
    epsilon, alpha = as_number(values["epsilon"], p), as_number(values["alpha"], p)
    return (draft.p_x > torch.minimum(epsilon, alpha * torch.exp(-entropy(p)))).to(p.dtype)


def grouped_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """GSD: f = min(1, p(C) / q(C)), sums over the cluster C of x (arXiv 2508.07747).

    C holds the tokens whose rank in descending order of p is at most `cluster` // 2 behind that of x or
    (`cluster` - 1) // 2 before it, without those whose p differs by `probability_gap` or more, or whose code is
    `code_gap` or more away (squared Euclidean; 0: any distance). A deterministic draft has q(C) = 1.
    """
    behind, before = values["cluster"] // 2, (values["cluster"] - 1) // 2
    p, order = torch.sort(draft.p_x, dim=-1, descending=True, stable=True)
    q = torch.ones_like(p) if draft.q_x is None else draft.q_x.gather(-1, order)

    def windows(values: Tensor, outside: float) -> Tensor:
        """Show the `cluster` values around each rank, [..., V, cluster]."""
        return pad(values, (before, behind), value=outside).unfold(-1, before + behind + 1, 1)

    # One operation over all ranks of a cluster: a loop would give compiled programs a part for each of them.
    other_p = windows(p, torch.inf)  # infinitely far from every p, so never in a cluster
    inside = (other_p - p[..., None]).abs() < values["probability_gap"]
    if values["code_gap"] > 0:
        codes = draft.codebook[order].movedim(-1, 0)
        inside &= (windows(codes, 0.0) - codes[..., None]).square().sum(dim=0) < values["code_gap"]
    cluster_p = torch.where(inside, other_p, 0.0).sum(dim=-1)
    cluster_q = torch.where(inside, windows(q, 0.0), 0.0).sum(dim=-1)
    ratio = cluster_p if draft.q_x is None else cluster_p / cluster_q
    return torch.empty_like(ratio).scatter_(-1, order, ratio)


def entropy(p: Tensor) -> Tensor:
    """Return H(p) [...] in nats of distributions [..., V]."""
    return -(p * p.clamp_min(1e-30).log()).sum(dim=-1)
