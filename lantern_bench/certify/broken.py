"""Acceptance rules that are broken on purpose: what the certificate must reject to have power.

`broken_rules` says which belong to a decoding. Rules of other packages get those that any rule can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.certify.broken_drafts import BROKEN_DRAFTS
from lantern_bench.config.decoding import Decoding
from lantern_bench.decoding.acceptance.relaxation import ROOTS, Relaxation
from lantern_bench.decoding.acceptance.traversal import accept_traversal
from lantern_bench.decoding.acceptance.tree_acceptance import Accept, Acceptance, Nodes, accept_children, decide_each
from lantern_bench.decoding.loop import relaxation_of
from lantern_bench.methods.code import Code
from lantern_bench.models.loaded_model import LoadedModel

TOO_OFTEN, LAMBDA = 0.02, 2.0
"""What a draft's acceptance probability is raised by, and the bound of the relaxed rule among the broken ones."""


class Broken(NamedTuple):
    """What is broken on purpose, and how: a rule, a drafting, or both; `accept` and `make` as in `decode`."""

    name: str
    accept: Accept | None = None
    make: Code | None = None


def broken_draftings(decoding: Decoding) -> list[Broken]:
    """Return the mistakes of the decoding's drafting, of those that its coupling can have."""
    mistakes = ((name, plant(decoding)) for name, plant in BROKEN_DRAFTS.get(decoding.drafting, {}).items())
    return [Broken(name, *mistake) for name, mistake in mistakes if mistake is not None]


def broken_residual(decoding: Decoding, model: LoadedModel) -> list[Broken]:
    """Return the decoding's rule without its residual: the mistake that any way to draft can have."""
    rules = broken_rules(decoding, model, False) if decoding.drafts else {}
    return [Broken(name, accept) for name, accept in list(rules.items())[:1]]


def broken_rules(decoding: Decoding, model: LoadedModel, siblings: bool) -> dict[str, Accept]:
    """Return the broken variants of the decoding's rule, by what is wrong with each.

    `siblings` asks for mistakes with siblings, which are small unless few tokens are possible; else for the others.
    """
    rule = relaxation_of(decoding, model).accept or accept_children
    if siblings:
        branches = decoding.branches or not decoding.drafting_row.sampled
        name = "not renormalised after a rejected sibling"
        return {name: siblings_not_renormalised} if rule is accept_children and branches else {}
    found = {
        "residual left out": strict_without_residual if rule is accept_children else without_residual(rule),
        "a draft accepted once too often in 50": accepted_too_often(rule),
    }
    if rule is accept_traversal:
        found["share not updated after a rejection"] = partial(accept_traversal, update=lambda share, _left: share)
    if rule is accept_children and model.codebook is not None:
        k = min(100, len(model.codebook) // 4)
        found[f"relaxed: lambda {LAMBDA:g}, k {k}"] = relaxed(k, model.table(k))
    return found


def strict_without_residual(
    p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *_unused: object
) -> Acceptance:
    """The strict rule without its residual: every child and the bonus token use the p of the node.

    Arguments as of `accept_children`. Each draft is accepted with the right probability and only the distribution of
    the tokens is wrong, which makes it the mistake that a weak test misses.
    """
    accept = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for rank in range(tokens.shape[1]):
        x = tokens[:, rank, None]
        share = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = offered[:, rank, None] & (share > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / share).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Acceptance(accept, torch.zeros_like(accept), p, torch.zeros(len(p), dtype=torch.bool, device=p.device))


def without_residual(rule: Accept) -> Accept:
    """Return `rule` with the bonus token drawn from the node's own p also after a rejection."""

    def broken(p: Tensor, q: Tensor | None, *others: object) -> Acceptance:
        decided = rule(p.clone(), q, *others)  # type: ignore[arg-type]
        return Acceptance(decided.accept, decided.mass, p, torch.zeros_like(decided.exhausted))

    return broken


def accepted_too_often(rule: Accept) -> Accept:
    """Return `rule` with acceptance probabilities raised by `TOO_OFTEN`, to at most 1, of drafts that it can accept."""

    def broken(p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *others: object) -> Acceptance:
        decided = rule(p, q, tokens, offered, *others)  # type: ignore[arg-type]
        accept = torch.where(offered & (decided.accept > 0), (decided.accept + TOO_OFTEN).clamp(max=1.0), 0.0)
        return Acceptance(accept, decided.mass, decided.rest, decided.exhausted)

    return broken


def relaxed(neighbours: int, table: Tensor) -> Accept:
    """Return the multiplicative rule in place of the strict one, with the bound `LAMBDA`."""
    rule = Relaxation("multiplicative", neighbours, LAMBDA)

    def broken(p: Tensor, q: Tensor | None, tokens: Tensor, offered: Tensor, *_unused: object) -> Acceptance:
        return accept_children(p, q, tokens, offered, rule, table)

    return broken


class _NotRenormalised(Nodes):
    """The nodes' p (deterministic drafts) and q (sampled ones) keep the scale they had before a rejection."""

    def decide(self, x: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
        decided = super().decide(x, offered)
        self.p_mass.fill_(1.0)
        self.q_mass.fill_(1.0)
        return decided


def siblings_not_renormalised(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    active: Sequence[int] | None = None,
    *_unused: object,
) -> Acceptance:
    """The strict rule that takes a rejected sibling out of q (deterministic: of p) and does not renormalise."""
    return decide_each(_NotRenormalised(p, q, relaxation, table, ROOTS), tokens, offered, active)
