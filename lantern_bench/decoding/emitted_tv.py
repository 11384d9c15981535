"""Emitted TV: how far the first token that a step commits is from the target, the real price of relaxation.

The bound of a rule holds for one given draft; over all drafts the excess adds up, and emitted TV measures the sum, with
the routine that verification uses (docs/algorithms.md, section 4). It is not defined at temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Children, accept_children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, DraftView, acceptance_chance, neighbour_mass
from lantern_bench.decoding.sampling import draw_without_replacement


class Emission(NamedTuple):
    """The distribution of a step's first token, given the root's children."""

    distribution: Tensor  # [N, V]
    # [N], m(x) of each child times the chance that the child is tried, summed. For deterministic drafts with the exact
    # residual the emitted TV is at most this.
    neighbour_mass: Tensor
    first: Tensor  # [N], the chance that the first child is accepted


class SampledTV(NamedTuple):
    """Two estimates [N] of one emitted TV from the same draws; on average the truth lies between them."""

    tv: Tensor  # half the L1 norm of the mean error; remaining noise makes it too large
    crossed: Tensor  # signs of one half of the draws on the errors of the other; flipped signs make it too small


def total_variation(p: Tensor, other: Tensor) -> Tensor:
    """Return TV [...] between distributions [..., V]: half the L1 norm of their difference."""
    return 0.5 * (p - other).abs().sum(dim=-1)


def emitted(
    p: Tensor, q: Tensor | None, tokens: Tensor, valid: Tensor, rule: AcceptanceRule, position: Tensor
) -> Emission:
    """Return the exact distribution of a step's first token, given the root's children; inputs stay unchanged.

    `p` [N, V]; `q` [N, V], or None for a deterministic draft; `tokens`, `valid` [N, C]; `position` [N] in the image.
    """
    rows, copied_q = torch.arange(len(p), device=p.device), None if q is None else q.clone()
    depth, nodes_per_rank = torch.ones_like(rows), [len(p)] * tokens.shape[1]
    acceptance = accept_children(Children(p.clone(), copied_q, tokens, valid, nodes_per_rank, depth, position), rule)
    all_rejected = (1.0 - acceptance.accept).cumprod(dim=1)
    reached = torch.cat([torch.ones_like(all_rejected[:, :1]), all_rejected[:, :-1]], dim=1)
    distribution = acceptance.bonus_distribution(rows, p) * all_rejected[:, -1:]
    distribution.scatter_add_(1, tokens, reached * acceptance.accept)
    return Emission(distribution, (reached * acceptance.mass).sum(dim=1), acceptance.accept[:, 0])


def emitted_tv_sampled(
    p: Tensor,
    q: Tensor,
    children: int,
    draws: int,
    rules: Sequence[AcceptanceRule],
    exponential: Callable[[], Tensor],
    position: Tensor,
) -> list[SampledTV]:
    """Estimate the emitted TV of sampled drafts under several rules at once.

    `p`, `q` [N, V] and `position` [N] at the root; `children` are drawn `draws` times (at least 2) from q with the
    noise Exp(1) [N, V] that `exponential` gives. The mean difference of the exact emitted distributions of the relaxed
    and the strict rule, whose mean is p, is the error. The share of the first child is computed exactly and not drawn.
    """
    sums = p.new_zeros(len(rules), 2, *p.shape)
    for number in range(draws):
        tokens, valid = draw_without_replacement(q, children, exponential())
        strict = emitted(p, q, tokens, valid, AcceptanceRule(), position)
        for rule, halves in zip(rules, sums, strict=True):
            relaxed = emitted(p, q, tokens, valid, rule, position)
            error = relaxed.distribution - strict.distribution
            error.scatter_add_(1, tokens[:, :1], (strict.first - relaxed.first)[:, None])
            halves[number % 2] += error
    estimates = []
    for rule, errors in zip(rules, sums, strict=True):
        exact = _first_child(p, q, rule, position) - torch.minimum(p, q)
        first, second = exact + errors[0] / ((draws + 1) // 2), exact + errors[1] / (draws // 2)
        crossed = (first.sign() * second + second.sign() * first).sum(dim=-1) / 4.0
        estimates.append(SampledTV(0.5 * (exact + errors.sum(dim=0) / draws).abs().sum(dim=-1), crossed))
    return estimates


def _first_child(p: Tensor, q: Tensor, rule: AcceptanceRule, position: Tensor) -> Tensor:
    """Return the exact chance [N, V] that each token is drawn as the first child and accepted."""
    if rule.chance is not None:
        return q * acceptance_chance(_every_token(p, q, position, rule))
    if not rule.uses_neighbours:
        return torch.minimum(p, q)
    rows = [slice(row, row + 1) for row in range(len(p))]  # one at a time: [V, k] is large enough
    masses = [neighbour_mass(_every_token(p[row], q[row], position[row], rule))[0] for row in rows]
    return torch.minimum(q, p + torch.cat(masses))


def _every_token(p: Tensor, q: Tensor, position: Tensor, rule: AcceptanceRule) -> DraftView:
    vocabulary, position = torch.arange(p.shape[1], device=p.device), position[:, None]
    return DraftView(rule, vocabulary, p, q, p[:, None], 1.0, torch.ones_like(position), position)
