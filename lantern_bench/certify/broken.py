"""Acceptance rules that are broken on purpose: what a certificate and an audit must reject to have power.

A rule of another package gets the mistakes that any rule can have. docs/algorithms.md, section 6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.relaxed_rules import multiplicative_limit
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, rule_of
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.models.loaded_model import LoadedModel

Accept: TypeAlias = Callable[[Children, AcceptanceRule], Acceptance]

TOO_OFTEN, LAMBDA = 0.02, 2.0
"""What a draft's acceptance probability is raised by, and the bound of the relaxed rule among the broken ones."""


def broken_rules(decoding: Decoding, model: LoadedModel) -> list[AcceptanceRule]:
    """Return a decoding's rule with the mistakes that show without siblings, by name; none where nothing is drafted."""
    if not decoding.drafts:
        return []
    accept = rule_of(decoding, model).accept or accept_children
    rules = [
        AcceptanceRule("residual left out", accept=partial(without_residual, accept=accept)),
        AcceptanceRule("a draft accepted once too often in 50", accept=partial(accepted_too_often, accept=accept)),
    ]
    if accept is accept_traversal:
        stale = partial(accept_traversal, update=lambda share, _sum: share)
        rules.append(AcceptanceRule("share not updated after a rejection", accept=stale))
    if accept is accept_children:
        rules[0] = AcceptanceRule("residual left out", accept=strict_without_residual)
    if accept is accept_children and model.codebook is not None:
        k = min(100, len(model.codebook) // 4)
        name, values = f"relaxed: lambda {LAMBDA:g}, k {k}", {"lambda": LAMBDA}
        limit, nearest_codes = multiplicative_limit, model.table(k)
        rules.append(AcceptanceRule(name, values, limit=limit, neighbours=k, nearest_codes=nearest_codes))
    return rules


def broken_sibling_rules(decoding: Decoding) -> list[AcceptanceRule]:
    """Return the strict rule with a mistake with siblings, which is small unless few tokens are possible."""
    has_siblings = decoding.branches or not decoding.drafting_row.sampled
    if decoding.rule != "strict" or not has_siblings:
        return []
    return [AcceptanceRule("not renormalised after a rejected sibling", accept=siblings_not_renormalised)]


def strict_without_residual(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Each draft is accepted with the right probability and only the distribution of the tokens is wrong, which makes it
    the mistake that a weak test misses.
    """
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        q_x = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))


def without_residual(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, and draw the bonus token from the node's own p also after a rejection."""
    p = children.p.clone()
    return replace(accept(children, rule), residual=p, exhausted=torch.zeros_like(children.offered[:, 0]))


def accepted_too_often(children: Children, rule: AcceptanceRule, accept: Accept) -> Acceptance:
    """Decide as `accept`, with probabilities raised by `TOO_OFTEN`, to at most 1, of drafts that it can accept."""
    acceptance = accept(children, rule)
    raised = (acceptance.accept + TOO_OFTEN).clamp(max=1.0)
    can_be_accepted = children.offered & (acceptance.accept > 0)
    return replace(acceptance, accept=torch.where(can_be_accepted, raised, 0.0))


def siblings_not_renormalised(children: Children, _rule: AcceptanceRule) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not renormalise."""
    p, q = children.p, children.q
    accept = torch.zeros_like(children.tokens, dtype=p.dtype)
    for rank in range(accept.shape[1]):
        x = children.tokens[:, rank, None]
        p_x = p.gather(1, x)
        q_x = torch.ones_like(p_x) if q is None else q.gather(1, x)
        tried = children.offered[:, rank, None] & (q_x > 0)
        accept[:, rank] = torch.where(tried, (p_x / q_x).clamp(max=1.0), 0.0).squeeze(1)
        if q is None:
            p.scatter_(1, x, torch.where(tried, 0.0, p_x))
        else:
            residual = (p - q).clamp_min(0.0)
            residual_sum = residual.sum(dim=1, keepdim=True)
            p.copy_(torch.where(tried & (residual_sum > 0), residual / residual_sum, p))
            q.scatter_(1, x, torch.where(tried, 0.0, q_x))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros_like(children.offered[:, 0]))
