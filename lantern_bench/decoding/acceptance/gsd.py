"""Grouped speculative decoding, GSD (arXiv 2508.07747): p and q of a draft's cluster of codes decide, not its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lantern_bench.methods.draft_view import DraftView


def grouped_chance(draft: DraftView, values: Mapping[str, Any]) -> Tensor:
    """Give f = min(1, p(C) / q(C)), sums over the cluster C of x (docs/algorithms.md, section 8.4).

    C holds the tokens whose place in descending order of p is at most `cluster` // 2 behind that of x or
    (`cluster` - 1) // 2 before it, without those whose p differs by `probability_gap` or more, or whose code is
    `code_gap` or more away (squared Euclidean; 0: any distance). A deterministic draft has q(C) = 1.
    """
    behind, before = values["cluster"] // 2, (values["cluster"] - 1) // 2
    own: Tensor = draft.p_x
    p, order = torch.sort(own, dim=-1, descending=True, stable=True)
    q = torch.ones_like(p) if draft.q_x is None else draft.q_x.gather(-1, order)

    def windows(values: Tensor, outside: float) -> Tensor:
        """Show the `cluster` values around each place, [..., V, cluster]."""
        return pad(values, (before, behind), value=outside).unfold(-1, before + behind + 1, 1)

    # One operation over all places of a cluster: a loop would give compiled programs a part for each of them.
    other = windows(p, torch.inf)  # infinitely far from every p, so never in a cluster
    inside = (other - p[..., None]).abs() < values["probability_gap"]
    if values["code_gap"] > 0:
        codes = draft.codebook[order].movedim(-1, 0)
        inside &= (windows(codes, 0.0) - codes[..., None]).square().sum(dim=0) < values["code_gap"]
    mass_p = torch.where(inside, other, 0.0).sum(dim=-1)
    mass_q = torch.where(inside, windows(q, 0.0), 0.0).sum(dim=-1)
    ratio = mass_p if draft.q_x is None else mass_p / mass_q
    return torch.empty_like(ratio).scatter_(-1, order, ratio)
