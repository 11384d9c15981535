"""Accept a tree of sampled drafts from its leaves to its root: lossless, and more drafts are accepted than one by one.

Alone, a draft x counts for min(1, p(x) / q(x)), and what the ratio exceeds 1 by is lost. Here that surplus makes up for
ancestors whose ratio is below 1 (traversal verification, arXiv 2505.12398; docs/algorithms.md, section 8.5). On a chain
this is block verification (arXiv 2403.10444, algorithm 2; section 3.1), whose paper proves that no lossless rule
accepts more of one chain on average. Neither needs a further forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.relaxation import ROOTS, Place, Relaxation
from lantern_bench.decoding.acceptance.tree_acceptance import Acceptance
from lantern_bench.decoding.tree import Turn


def share_left(share: Tensor, left: Tensor) -> Tensor:
    """Return the share of nodes after a rejected child: `share` before it, `left` the residual's mass, both [n, B]."""
    spare = left + (1.0 - share)
    # Without any the share is 1, as at the root: where p is q, nothing is owed and nothing has fallen short.
    return torch.where(spare > 0, left / spare, 1.0)


def accept_traversal(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    offered: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,  # noqa: ARG001  # a lossless rule merges nothing
    active: Sequence[int] | None = None,  # noqa: ARG001  # the layout has it
    images: int = 1,
    place: Place = ROOTS,
    update: Callable[[Tensor, Tensor], Tensor] = share_left,
) -> Acceptance:
    """Accept the drafts of static trees; arguments as of `accept_children`, a child is offered after those before it.

    A visit of a node has a share: the probability that it ends there or below. It visits the children in order, and
    ends at the node itself with the share that is left. Here `accept` is the probability that the visit of child j
    ends inside, given that the visit ends there, in a later child or at the node: so the walk of all rules ends at each
    node with the right probability. A test of a broken rule replaces `update`.
    """
    layout = None if place.tree is None else place.tree.layout
    if q is None or layout is None or layout.children is None:
        raise ValueError(f"the rule {relaxation.rule} decides on fixed trees of sampled drafts, and this is none")
    count, ranks = layout.children.shape
    p, q, tokens, offered = (one.view(count, images, -1) for one in (p, q, tokens, offered))
    # The share of each node's visit, [M + 1, B]; missing children, -1, read the last row.
    share = p.new_zeros(len(layout.slots) + 1, images)
    share[0] = 1.0
    kept, mass = p.new_zeros(2, count, images).unbind()
    for turn in layout.turns:
        if len(turn.nodes) == count:  # as in a chain: nothing to copy
            p, kept, mass = _reject_children(turn, share, p, q, tokens, offered, update)
        else:
            at = turn.slots
            left = _reject_children(turn, share, p[at], q[at], tokens[at], offered[at], update)
            p[at], kept[at], mass[at] = left
    for _ in range(layout.levels):
        share[layout.nodes] = _ends_behind(kept, share[layout.children])[-1]
    inside = share[layout.children]  # now the probability that the visit ends inside
    behind = torch.stack(_ends_behind(kept, inside)[:0:-1], dim=1)
    accept = torch.where(behind > 0, inside / behind, 0.0).transpose(1, 2).reshape(-1, ranks)
    return Acceptance(accept, torch.zeros_like(accept), p.view(len(accept), -1), mass.flatten() <= 0)


def _reject_children(
    turn: Turn,
    share: Tensor,
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    offered: Tensor,
    update: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the shares of the children into `share`, and return what their rejection leaves.

    Returned are p [n, B, V], which stays multiplied by the share, the share, and the mass of p [n, B]. `p`, `q`
    [n, B, V], `tokens`, `offered` [n, B, C].
    """
    x = tokens[:, :, :1]
    drawn = q.gather(2, x)
    ratio = torch.where(offered[:, :, :1] & (drawn > 0), p.gather(2, x) / drawn, 0.0).squeeze(2)
    for _ in range(turn.levels):  # from one depth to the next
        share[turn.children[:, 0]] = (share[turn.nodes] * ratio).clamp(max=1.0)
    before = share[turn.nodes]
    rest = (before[:, :, None] * p - q).clamp_min_(0.0)
    mass = rest.sum(dim=2)
    kept = torch.where(offered[:, :, 0], update(before, mass), before)
    for rank, nodes in enumerate(turn.active[1:], 1):
        x, q = tokens[:nodes, :, rank, None], q[:nodes].scatter(2, tokens[:nodes, :, rank - 1, None], 0.0)
        scale = torch.where(mass[:nodes] > 0, mass[:nodes] / kept[:nodes], 1.0)
        owed, law = rest[:nodes] / scale[:, :, None], q / q.sum(dim=2, keepdim=True)
        drawn = law.gather(2, x)
        tried = offered[:nodes, :, rank, None] & (drawn > 0)
        chance = torch.where(tried, owed.gather(2, x) / drawn, 0.0).clamp(max=1.0)
        share[turn.children[:nodes, rank]] = chance.squeeze(2)
        rest[:nodes] = torch.where(tried, (owed - law).clamp_min_(0.0), rest[:nodes])
        mass[:nodes] = rest[:nodes].sum(dim=2)
        left = update(kept[:nodes], mass[:nodes])
        kept[:nodes] = torch.where(tried.squeeze(2), left, kept[:nodes])
    return rest, kept, mass


def _ends_behind(kept: Tensor, inside: Tensor) -> list[Tensor]:
    """Return the probability to end at the node, there or in its last child, and so on to the first, each [I, B].

    `kept` [I, B] is the share with which a visit ends at the node, `inside` [I, C, B] with which in each child.
    """
    behind = [kept]
    for child in reversed(inside.unbind(dim=1)):
        behind.append(child + (1.0 - child) * behind[-1])
    return behind
