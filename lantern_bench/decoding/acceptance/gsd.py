"""Grouped speculative decoding, GSD (arXiv 2508.07747): p and q of a draft's cluster of codes decide, not its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern_bench.plugins import DraftView


def grouped_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Give f = min(1, p(C) / q(C)), sums over the cluster C of x (docs/algorithms.md, section 8.4).

    C holds the tokens whose place in descending order of p is at most `cluster` // 2 behind that of x or
    (`cluster` - 1) // 2 before it, without those whose p differs by `probability_gap` or more, or whose code is
    `code_gap` or more away (squared Euclidean; 0: any distance). A deterministic draft has q(C) = 1.
    """
    behind, before = values["cluster"] // 2, (values["cluster"] - 1) // 2
    own: Tensor = draft.own
    p, order = torch.sort(own, dim=-1, descending=True, stable=True)
    q = torch.ones_like(p) if draft.q is None else draft.q.gather(-1, order)
    codes = draft.codebook[order].movedim(-1, 0) if values["code_gap"] > 0 else p.new_empty(0, *p.shape)
    # Places before the first and behind the last: infinitely far from every p, so never in a cluster.
    padded_p, padded_q = pad(p, (before, behind), value=torch.inf), pad(q, (before, behind))
    padded_codes, places = pad(codes, (before, behind)), p.shape[-1]
    mass_p, mass_q = torch.zeros_like(p), torch.zeros_like(p)
    for start in range(before + behind + 1):
        here = slice(start, start + places)
        other = padded_p[..., here]
        inside = (other - p).abs() < values["probability_gap"]
        if values["code_gap"] > 0:
            inside &= (padded_codes[..., here] - codes).square().sum(dim=0) < values["code_gap"]
        mass_p = mass_p + torch.where(inside, other, 0.0)
        mass_q = mass_q + torch.where(inside, padded_q[..., here], 0.0)
    ratio = mass_p if draft.q is None else mass_p / mass_q
    return torch.empty_like(ratio).scatter_(-1, order, ratio)
