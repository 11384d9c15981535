"""Acceptance rules and children of one node for tests, without a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.draft_view import DraftView, Weights
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, bind
from lantern_bench.methods.catalog import RULES

STRICT = AcceptanceRule()


def rule_named(
    name: str,
    neighbours: int = 0,
    bound: Any = None,
    residual: str = "exact",
    table: Tensor | None = None,
    codebook: Tensor | None = None,
    **values: Any,
) -> AcceptanceRule:
    """The rule of a row with these values, also those that an experiment refuses."""
    row = RULES[name]
    defaults = {parameter.name: parameter.default for parameter in row.parameters}
    return bind(
        row,
        values={} if row.lossless else {**defaults, row.bound: bound, **values},
        neighbours=neighbours,
        official=residual == "official",
        nearest_codes=table,
        codebook=codebook,
    )


def accept(
    p: Tensor, q: Tensor | None, tokens: Tensor, rule: AcceptanceRule, offered: Tensor | None = None
) -> Acceptance:
    """Accept the children `tokens` [N, C] of N roots; those that are -1 are not offered."""
    depth = torch.ones(len(p), dtype=torch.int64)
    nodes_per_rank = [len(p)] * tokens.shape[1]
    offered = tokens >= 0 if offered is None else offered
    q = None if q is None else q.clone()
    children = Children(
        p=p.clone(),
        q=q,
        tokens=tokens,
        offered=offered,
        nodes_per_rank=nodes_per_rank,
        depth=depth,
        position=torch.zeros_like(depth),
    )
    return accept_children(children, rule)


class Emission(NamedTuple):
    """The distribution of a step's first token, given the root's children (docs/algorithms.md, section 4)."""

    distribution: Tensor  # [N, V]
    # [N], m(x) of each child times the chance that the child is tried, summed
    neighbour_mass: Tensor


def emitted(
    p: Tensor, q: Tensor | None, tokens: Tensor, valid: Tensor, rule: AcceptanceRule
) -> Emission:
    """The exact emission of N roots with p and q [N, V] and children `tokens`, `valid` [N, C]."""
    acceptance = accept(p=p, q=q, tokens=tokens, rule=rule, offered=valid)
    all_rejected = (1.0 - acceptance.accept).cumprod(dim=1)
    reached = torch.cat([torch.ones_like(all_rejected[:, :1]), all_rejected[:, :-1]], dim=1)
    distribution = acceptance.bonus_distribution(torch.arange(len(p)), p) * all_rejected[:, -1:]
    distribution.scatter_add_(1, tokens, reached * acceptance.accept)
    return Emission(distribution, (reached * acceptance.neighbour_mass).sum(dim=1))


def total_variation(p: Tensor, other: Tensor) -> Tensor:
    """TV [...] of distributions [..., V]; the emitted TV is that of p and an emission."""
    return 0.5 * (p - other).abs().sum(dim=-1)


def at_start(p: Tensor) -> Tensor:
    """Positions [N] of children at the start of an image, for `p` [N, V]."""
    return torch.zeros(len(p), dtype=torch.int64)


def view_of(p: Tensor, tokens: Tensor, rule: AcceptanceRule) -> DraftView:
    """Deterministic drafts `tokens` [n] of n roots with the distributions `p` [n, V], as a rule sees them."""
    p_x = p.gather(1, tokens[:, None]).squeeze(1)
    return DraftView(
        rule=rule,
        token=tokens,
        p_x=p_x,
        q_x=None,
        target=Weights(values=p, total=torch.ones_like(p[:, :1])),
        proposal=None,
        depth=torch.ones_like(tokens),
        position=torch.zeros_like(tokens),
    )


def parents_of(attention: Tensor) -> Tensor:
    """The parent [..., M] of each node of a tree with this `attention` [..., M, M]; -1 for the root."""
    numbers = torch.arange(attention.shape[-1])
    return torch.where(attention & (numbers != numbers[:, None]), numbers, -1).amax(dim=-1)
