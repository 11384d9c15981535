"""Emitted TV: how far the first token that a step commits is from the target, the real price of relaxation.

The bound of a rule holds for one given draft; over all drafts the excess adds up, and this is the number that says how
much (algorithms.md, section 4). Computed exactly per set of children with the same routine that verification uses,
never from token counts. Not defined at temperature 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.decode.judge import judge_children
from lantern_bench.decode.relax import STRICT, Relaxation
from lantern_bench.decode.sampling import draw_without_replacement

__all__ = ["emitted_first_token", "emitted_tv_dynamic", "emitted_tv_static", "total_variation"]


def total_variation(p: Tensor, other: Tensor) -> Tensor:
    """Return TV [...] between distributions [..., V]: half the L1 norm of their difference."""
    return 0.5 * (p - other).abs().sum(dim=-1)


def emitted_first_token(
    p: Tensor, q: Tensor | None, tokens: Tensor, valid: Tensor, relaxation: Relaxation, table: Tensor | None
) -> Tensor:
    """Return the exact distribution [N, V] of a step's first token, given the root's children.

    `p` [N, V]; `q` [N, V], or None for a deterministic draft; `tokens` int64 and `valid` bool [N, C]. The inputs are
    left as they are.
    """
    rows = torch.arange(len(p), device=p.device)
    judged = judge_children(p.clone(), None if q is None else q.clone(), tokens, valid, relaxation, table)
    all_rejected = (1.0 - judged.accept).cumprod(dim=1)
    reached = torch.cat([torch.ones_like(all_rejected[:, :1]), all_rejected[:, :-1]], dim=1)
    emitted = judged.final(rows, p) * all_rejected[:, -1:]
    return emitted.scatter_add_(1, tokens, reached * judged.accept)


def emitted_tv_dynamic(
    p: Tensor, tokens: Tensor, valid: Tensor, relaxation: Relaxation, table: Tensor | None
) -> Tensor:
    """Return the emitted TV [N] of deterministic drafts: exact.

    `p` [N, V] at the root, `tokens` int64 and `valid` bool [N, C] its children in the order of trial.
    """
    return total_variation(p, emitted_first_token(p, None, tokens, valid, relaxation, table))


def emitted_tv_static(
    p: Tensor,
    q: Tensor,
    children: int,
    draws: int,
    relaxation: Relaxation,
    table: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Return an estimate [N] of the emitted TV of sampled drafts.

    `p`, `q` [N, V] at the root; `children` are drawn `draws` times from q. For each draw the emitted distribution is
    computed exactly under the relaxed and under the strict rule (whose mean is p); the mean difference is the error,
    half its L1 norm the TV.
    """
    error = torch.zeros_like(p)
    for _ in range(draws):
        noise = torch.empty_like(p).exponential_(generator=generator)
        tokens, valid = draw_without_replacement(q, children, noise)
        error += emitted_first_token(p, q, tokens, valid, relaxation, table)
        error -= emitted_first_token(p, q, tokens, valid, STRICT, None)
    return 0.5 * (error / draws).abs().sum(dim=-1)
