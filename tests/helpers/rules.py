"""Acceptance rules and children of one node for tests, without a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.acceptance.draft_view import Codebook, DraftView, ScaledDistributions
from lantern_bench.decoding.acceptance.official import OfficialRule
from lantern_bench.methods.catalog import RULES
from lantern_bench.methods.rules import tree_rule

STRICT = ConfiguredRule(RULES["strict"])


def rule_named(
    name: str,
    neighbours: int = 0,
    bound: Any = None,
    *,
    residual: str = "exact",
    table: Tensor | None = None,
    codebook: Tensor | None = None,
    **values: Any,
) -> ConfiguredRule:
    """The rule of a row with these values, also those that an experiment refuses."""
    row = RULES[name]
    defaults = {parameter.name: parameter.default for parameter in row.parameters}
    if not row.lossless:
        values = {**defaults, row.bound: bound, **values}
    of_model = Codebook(neighbours=neighbours, nearest=table, embeddings=codebook)
    kind = OfficialRule if residual == "official" else ConfiguredRule
    return kind(row, values, of_model)


def broken(name: str, code: Any) -> ConfiguredRule:
    """A rule that is wrong on purpose: `code` decides in place of `accept_children`."""
    return ConfiguredRule(tree_rule(name)(code))


def neighbour_mass(draft: DraftView, rule: ConfiguredRule) -> tuple[Tensor, Tensor]:
    """m(x) [n], and which neighbours x takes it from, bool [n, k]."""
    _, within_limit = rule.neighbour_masses(draft)
    decision = rule.decide(draft)
    assert decision.neighbours is not None
    is_official = isinstance(rule, OfficialRule)
    return decision.neighbour_mass, within_limit if is_official else decision.neighbours.taken


def accept(
    p: Tensor, q: Tensor | None, tokens: Tensor, rule: ConfiguredRule, offered: Tensor | None = None
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
    """The distribution of a step's first token, given the root's children (docs/algorithms.md,
    section 4).
    """

    distribution: Tensor  # [N, V]
    # [N], m(x) of each child times the chance that the child is tried, summed
    neighbour_mass: Tensor


def emitted(
    p: Tensor, q: Tensor | None, tokens: Tensor, valid: Tensor, rule: ConfiguredRule
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


def view_of(p: Tensor, tokens: Tensor, rule: ConfiguredRule) -> DraftView:
    """Deterministic drafts `tokens` [n] of n roots with the distributions `p` [n, V], as a rule
    sees them.
    """
    return DraftView(
        token=tokens,
        depth=torch.ones_like(tokens),
        position=torch.zeros_like(tokens),
        target=ScaledDistributions(values=p, total=torch.ones_like(p[:, :1])),
        proposal=None,
        codebook=rule.codebook,
    )


def parents_of(attention: Tensor) -> Tensor:
    """The parent [..., M] of each node of a tree with this `attention` [..., M, M]; -1 for the
    root.
    """
    numbers = torch.arange(attention.shape[-1])
    return torch.where(attention & (numbers != numbers[:, None]), numbers, -1).amax(dim=-1)
