"""Rules broken on purpose, to show that a check would see a wrong one at the sample size it was run with.

They stand in for `decode.judge.judge_children` and are used by nothing that makes pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_bench.decode.judge import Judgement
from lantern_bench.decode.relax import Relaxation

__all__ = ["judge_without_residual"]


def judge_without_residual(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    _relaxation: Relaxation,
    _table: Tensor | None,
    _active: Sequence[int] | None = None,
) -> Judgement:
    """The strict rule with its residual left out: every child, and the one more token, on the node's own p.

    Arguments as of `judge_children`. Leaving the residual out is the mistake that looks right: each draft is accepted
    with the right probability, and only the law of the tokens is wrong.
    """
    accept = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for rank in range(tokens.shape[1]):
        x = tokens[:, rank, None]
        share = p.new_ones(len(x), 1) if q is None else q.gather(1, x) / q.sum(dim=1, keepdim=True)
        tried = offered[:, rank, None] & (share > 0)
        accept[:, rank] = torch.where(tried, (p.gather(1, x) / share).clamp(max=1.0), 0.0).squeeze(1)
        if q is not None:
            q.scatter_(1, x, torch.where(tried, 0.0, q.gather(1, x)))
    return Judgement(accept, torch.zeros_like(accept), p, torch.zeros(len(p), dtype=torch.bool, device=p.device))
