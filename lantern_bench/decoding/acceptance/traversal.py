"""Accept a tree of sampled drafts from its leaves to its root: lossless, and more drafts are accepted than one by one.

Alone, a draft x counts for min(1, p(x) / q(x)), and what the ratio exceeds 1 by is lost. Here that surplus makes up for
ancestors whose ratio is below 1 (traversal verification, arXiv 2505.12398; docs/algorithms.md, section 8.5). On a chain
this is block verification (arXiv 2403.10444, algorithm 2; section 3.1), whose paper proves that no lossless rule
accepts more of one chain on average. Neither needs a further forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.tree import RankGroup


def share_after(share: Tensor, residual_sum: Tensor) -> Tensor:
    """Return the share of nodes after a rejected child, from that before it and the sum of the residual, [n, B]."""
    spare = residual_sum + (1.0 - share)
    # Without any the share is 1, as at the root: where p is q, nothing is owed and nothing has fallen short.
    return torch.where(spare > 0, residual_sum / spare, 1.0)


def accept_traversal(
    children: Children, rule: AcceptanceRule, update: Callable[[Tensor, Tensor], Tensor] = share_after
) -> Acceptance:
    """Accept the drafts of static trees, in which a child is offered after those before it.

    A visit of a node has a share: the probability that it ends there or below. It visits the children in order, and
    ends at the node itself with the share that remains. Here `accept` is the probability that the visit of child j
    ends inside, given that the visit ends there, in a later child or at the node: so the walk of all rules ends at each
    node with the right probability. A test of a broken rule replaces `update`.
    """
    layout = children.layout
    if children.q is None or layout is None or layout.children is None:
        raise ValueError(f"the rule {rule.name} decides on fixed trees of sampled drafts, and this is none")
    count, ranks = layout.children.shape
    images = len(children.tokens) // count
    values = (children.p, children.q, children.tokens, children.offered)
    p, q, tokens, offered = (value.view(count, images, -1) for value in values)
    # The share of each node's visit, [M + 1, B]; missing children, -1, read the last row.
    share = p.new_zeros(len(layout.slots) + 1, images)
    share[0] = 1.0
    node_share, residual_sum = p.new_zeros(2, count, images).unbind()
    for group in layout.groups:
        if len(group.nodes) == count:  # as in a chain: nothing to copy
            p, node_share, residual_sum = _reject_children(group, share, p, q, tokens, offered, update)
        else:
            slots = group.slots
            rejected = _reject_children(group, share, p[slots], q[slots], tokens[slots], offered[slots], update)
            p[slots], node_share[slots], residual_sum[slots] = rejected
    for _ in range(layout.levels):
        share[layout.nodes] = _ends_behind(node_share, share[layout.children])[-1]
    inside = share[layout.children]  # now the probability that the visit ends inside
    behind = torch.stack(_ends_behind(node_share, inside)[:0:-1], dim=1)
    accept = torch.where(behind > 0, inside / behind, 0.0).transpose(1, 2).reshape(-1, ranks)
    return Acceptance(
        accept=accept,
        neighbour_mass=torch.zeros_like(accept),
        residual=p.view(len(accept), -1),
        exhausted=residual_sum.flatten() <= 0,
    )


def _reject_children(
    group: RankGroup,
    share: Tensor,
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    offered: Tensor,
    update: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the shares of the children into `share`, and return p, the nodes' shares and the sum of p afterwards.

    p [n, B, V] stays multiplied by the share; the others are [n, B]. `p`, `q` [n, B, V], `tokens`, `offered` [n, B, C].
    """
    x = tokens[:, :, :1]
    q_x = q.gather(2, x)
    ratio = torch.where(offered[:, :, :1] & (q_x > 0), p.gather(2, x) / q_x, 0.0).squeeze(2)
    for _ in range(group.levels):  # from one depth to the next
        share[group.children[:, 0]] = (share[group.nodes] * ratio).clamp(max=1.0)
    before = share[group.nodes]
    residual = (before[:, :, None] * p - q).clamp_min_(0.0)
    residual_sum = residual.sum(dim=2)
    node_share = torch.where(offered[:, :, 0], update(before, residual_sum), before)
    for rank, n in enumerate(group.nodes_per_rank[1:], 1):
        x, q = tokens[:n, :, rank, None], q[:n].scatter(2, tokens[:n, :, rank - 1, None], 0.0)
        scale = torch.where(residual_sum[:n] > 0, residual_sum[:n] / node_share[:n], 1.0)
        owed, normalised_q = residual[:n] / scale[:, :, None], q / q.sum(dim=2, keepdim=True)
        q_x = normalised_q.gather(2, x)
        tried = offered[:n, :, rank, None] & (q_x > 0)
        chance = torch.where(tried, owed.gather(2, x) / q_x, 0.0).clamp(max=1.0)
        share[group.children[:n, rank]] = chance.squeeze(2)
        residual[:n] = torch.where(tried, (owed - normalised_q).clamp_min_(0.0), residual[:n])
        residual_sum[:n] = residual[:n].sum(dim=2)
        updated = update(node_share[:n], residual_sum[:n])
        node_share[:n] = torch.where(tried.squeeze(2), updated, node_share[:n])
    return residual, node_share, residual_sum


def _ends_behind(node_share: Tensor, inside: Tensor) -> list[Tensor]:
    """Return [C + 1] tensors [I, B]: entry i is the probability to end at the node or in one of its last i children.

    `node_share` [I, B] is the share with which a visit ends at the node, `inside` [I, C, B] with which in each child.
    """
    behind = [node_share]
    for child in reversed(inside.unbind(dim=1)):
        behind.append(child + (1.0 - child) * behind[-1])
    return behind
