"""Accept a chain of drafts as one block: more drafts are accepted, and the distribution stays the target's.

Alone, each draft x counts for min(1, p(x) / q(x)), and what the ratio exceeds 1 by is lost. In a block, that surplus
makes up for earlier drafts whose ratio is below 1 (block verification, Sun et al., arXiv 2403.10444, algorithm 2, which
proves that no lossless rule accepts more of one draft on average). It needs no further forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.relaxation import Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Acceptance


def accept_block(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    relaxation: Relaxation,  # noqa: ARG001  # a lossless rule has no parameters
    table: Tensor | None,  # noqa: ARG001
    active: Sequence[int] | None = None,  # noqa: ARG001
    images: int = 1,
) -> Acceptance:
    """Accept the drafts of `images` chains: row `level * images + image` is the node of that level, and its child.

    `p`, `q` [N, V]; `tokens` int64 and `offered` bool [N, 1]. The paper draws all levels i with probability h(i), and
    the block ends at the last hit. Here `accept` is the probability to get past i given that i is reached: the block
    ends at the same level with the same probability, and the walk of all rules applies.
    """
    if q is None or tokens.shape[1] > 1:
        raise ValueError("the rule block decides on chains of sampled drafts, and this tree is not one")
    levels = len(p) // images
    ratio = p.gather(1, tokens) / q.gather(1, tokens)
    ratio, reached = torch.where(offered, ratio, 0.0).view(levels, images), offered.view(levels, images)
    share = [torch.ones_like(ratio[0])]
    for level in range(levels):
        share.append((share[level] * ratio[level]).clamp(max=1.0))
    rest = (torch.cat(share[:-1])[:, None] * p - q).clamp_min_(0.0)
    left = rest.sum(dim=1).view(levels, images)
    accept = [share[levels]] * levels
    behind = share[levels]  # the chance to end at this level or behind it, from the last one up
    for level in range(levels - 1, -1, -1):
        # With a draft behind it, h is 1 at the root, and where p is q and nothing fell short.
        spare = left[level] + (1.0 - share[level])
        h = torch.where(reached[level], torch.where(spare > 0, left[level] / spare, 1.0), share[level])
        here = h + (1.0 - h) * behind
        accept[level] = torch.where(here > 0, behind / here, 0.0)
        behind = here
    return Acceptance(torch.cat(accept)[:, None], torch.zeros_like(p[:, :1]), rest, left.flatten() <= 0)
