"""Emitted TV: how far the first token that a step commits is from the target, the real price of relaxation.

The bound of a rule holds for one given draft; over all drafts the excess adds up, and emitted TV measures the sum
(docs/algorithms.md, section 4). It is computed per set of children with the routine that verification uses, never from
token counts. It is not defined at temperature 0. `certify/relaxation.py` provides the distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.relaxation import STRICT, Place, Relaxation, chances, every_token, merge_prefix
from lantern_bench.decoding.acceptance.tree_acceptance import accept_children
from lantern_bench.decoding.sampling import draw_without_replacement


class Emission(NamedTuple):
    """The distribution [N, V] of a step's first token, given the root's children.

    moved: [N], m(x) of each child times the chance that the child is tried, summed. For deterministic drafts under
    `exact` the emitted TV is at most this. first: [N], the chance that the first child is accepted.
    """

    distribution: Tensor
    moved: Tensor
    first: Tensor


class SampledTV(NamedTuple):
    """Two estimates [N] of one emitted TV from the same draws; on average the truth lies between them.

    tv: half the L1 norm of the mean error; remaining noise makes it too large. crossed: the signs of one half of the
    draws on the errors of the other; flipped signs make it too small. More draws bring them together.
    """

    tv: Tensor
    crossed: Tensor


def total_variation(p: Tensor, other: Tensor) -> Tensor:
    """Return TV [...] between distributions [..., V]: half the L1 norm of their difference."""
    return 0.5 * (p - other).abs().sum(dim=-1)


def emitted(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    valid: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    position: Tensor | None = None,
) -> Emission:
    """Return the exact distribution of a step's first token, given the root's children; inputs stay unchanged.

    `p` [N, V]; `q` [N, V], or None for a deterministic draft; `tokens` int64 and `valid` bool [N, C]; `position` int64
    [N], the tokens of the image before the children.
    """
    rows, place = torch.arange(len(p), device=p.device), Place(None, position)
    held = None if q is None else q.clone()
    found = accept_children(p.clone(), held, tokens, valid, relaxation, table, None, 1, place)
    all_rejected = (1.0 - found.accept).cumprod(dim=1)
    reached = torch.cat([torch.ones_like(all_rejected[:, :1]), all_rejected[:, :-1]], dim=1)
    distribution = found.final(rows, p) * all_rejected[:, -1:]
    distribution.scatter_add_(1, tokens, reached * found.accept)
    return Emission(distribution, (reached * found.mass).sum(dim=1), found.accept[:, 0])


def emitted_tv_sampled(
    p: Tensor,
    q: Tensor,
    children: int,
    draws: int,
    rules: Sequence[tuple[Relaxation, Tensor | None]],
    exponential: Callable[[], Tensor],
    position: Tensor | None = None,
) -> list[SampledTV]:
    """Estimate the emitted TV of sampled drafts under several rules (with their tables of nearest codes) at once.

    `p`, `q` [N, V] at the root; `children` are drawn `draws` times (at least 2) from q with the noise that
    `exponential` gives, Exp(1) [N, V], the same for all rules. Each draw gives the exact emitted distributions of the
    relaxed and the strict rule, whose mean is p; the mean difference is the error. The part of the first child is
    computed exactly and not drawn. `position` as in `emitted`.
    """
    if draws < 2:
        raise ValueError(f"draws must be at least 2, not {draws}")
    drawn = p.new_zeros(len(rules), 2, *p.shape)
    for number in range(draws):
        tokens, valid = draw_without_replacement(q, children, exponential())
        strict = emitted(p, q, tokens, valid, STRICT, None)
        for place, (relaxation, table) in enumerate(rules):
            loose = emitted(p, q, tokens, valid, relaxation, table, position)
            error = loose.distribution - strict.distribution
            error.scatter_add_(1, tokens[:, :1], (strict.first - loose.first)[:, None])
            drawn[place, number % 2] += error
    found = []
    for (relaxation, table), errors in zip(rules, drawn, strict=True):
        known = _first_child(p, q, relaxation, table, position) - torch.minimum(p, q)
        first, second = known + errors[0] / ((draws + 1) // 2), known + errors[1] / (draws // 2)
        crossed = (first.sign() * second + second.sign() * first).sum(dim=-1) / 4.0
        found.append(SampledTV(0.5 * (known + errors.sum(dim=0) / draws).abs().sum(dim=-1), crossed))
    return found


def _first_child(p: Tensor, q: Tensor, relaxation: Relaxation, table: Tensor | None, position: Tensor | None) -> Tensor:
    """Return the exact chance [N, V] that each token is drawn as the first child and accepted."""
    if relaxation.chance is not None:
        return q * chances(every_token(p, None, q, relaxation, table, Place(None, position)))
    if not relaxation.merges:
        return torch.minimum(p, q)
    masses = []
    for row in range(len(p)):  # one at a time: [V, k] is large enough
        place = Place(None, None if position is None else position[row : row + 1])
        view = every_token(p[row : row + 1], None, q[row : row + 1], relaxation, table, place)
        masses.append(merge_prefix(view)[0])
    return torch.minimum(q, p + torch.cat(masses))
