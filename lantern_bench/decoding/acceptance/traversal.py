"""Accept a tree of sampled drafts from its leaves to its root: lossless, and more drafts are accepted than one by one.

Alone, a draft x counts for min(1, p(x) / q(x)), and what the ratio exceeds 1 by is lost. Here that surplus makes up for
ancestors whose ratio is below 1 (traversal verification, arXiv 2505.12398; docs/algorithms.md, section 8.5). On a chain
this is block verification (arXiv 2403.10444, algorithm 2; section 3.1), whose paper proves that no lossless rule
accepts more of one chain on average. Neither needs a further forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children
from lantern_bench.decoding.acceptance.rule import AcceptanceRule
from lantern_bench.decoding.tree import RankGroup


def visit_probability_after(probability: Tensor, residual_sum: Tensor) -> Tensor:
    """Return the visit probability [n, B] of nodes after a rejected child.

    Args:
        probability: That before the child.
        residual_sum: The sum of the residual that its rejection leaves.
    """
    spare = residual_sum + (1.0 - probability)
    # Without any it is 1, as at the root: where p is q, nothing is owed and nothing has fallen short.
    return torch.where(spare > 0, residual_sum / spare, 1.0)


def accept_traversal(
    children: Children,
    rule: AcceptanceRule,
    update: Callable[[Tensor, Tensor], Tensor] = visit_probability_after,
) -> Acceptance:
    """Accept the drafts of static trees, in which a child is offered after those before it.

    A visit of a node has a probability to end there or below. It visits the children in order, and ends at the node
    itself with the probability that remains. Here `accept` is the probability that the visit of child j ends inside,
    given that the visit ends there, in a later child or at the node: so the walk of all rules ends at each node with
    the right probability.

    Args:
        children: The drafts.
        rule: Named in errors.
        update: Replaces `visit_probability_after`, for a test of a broken rule.
    """
    layout = children.layout
    if children.q is None or layout is None or layout.children is None:
        raise ValueError(
            f"the rule {rule.name} decides on fixed trees of sampled drafts, and this is none"
        )
    count, ranks = layout.children.shape
    images = len(children.tokens) // count
    drafts = _Drafts(
        p=children.p.view(count, images, -1),
        q=children.q.view(count, images, -1),
        tokens=children.tokens.view(count, images, -1),
        offered=children.offered.view(count, images, -1),
    )
    # The probability of each node's visit, [M + 1, B]; missing children, -1, read the last row.
    visit = drafts.p.new_zeros(len(layout.slots) + 1, images)
    visit[0] = 1.0
    p = drafts.p
    ends_here = p.new_zeros(count, images)  # the probability of the visit after the last child
    residual_sum = p.new_zeros(count, images)
    for group in layout.groups:
        if len(group.nodes) == count:  # as in a chain: nothing to copy
            rejected = _reject_children(group=group, visit=visit, drafts=drafts, update=update)
            p = rejected.residual
            ends_here = rejected.visit
            residual_sum = rejected.residual_sum
        else:
            slots = group.slots
            rejected = _reject_children(
                group=group, visit=visit, drafts=drafts.at(slots), update=update
            )
            p[slots] = rejected.residual
            ends_here[slots] = rejected.visit
            residual_sum[slots] = rejected.residual_sum
    for _ in range(layout.levels):
        visit[layout.nodes] = _ends_behind(ends_here, visit[layout.children])[-1]
    inside = visit[layout.children]  # now the probability that the visit ends inside
    behind = torch.stack(_ends_behind(ends_here, inside)[:0:-1], dim=1)
    accept = torch.where(behind > 0, inside / behind, 0.0).transpose(1, 2).reshape(-1, ranks)
    return Acceptance(
        accept=accept,
        neighbour_mass=torch.zeros_like(accept),
        residual=p.view(len(accept), -1),
        exhausted=residual_sum.flatten() <= 0,
    )


class _Drafts(NamedTuple):
    """The drafts below n nodes of B images."""

    p: Tensor  # [n, B, V]
    q: Tensor  # [n, B, V]
    tokens: Tensor  # int64 [n, B, C]
    offered: Tensor  # bool [n, B, C]

    def at(self, slots: Tensor) -> _Drafts:
        """Return those below some of the nodes."""
        return _Drafts(
            p=self.p[slots], q=self.q[slots], tokens=self.tokens[slots], offered=self.offered[slots]
        )


class _Rejected(NamedTuple):
    """What is left at n nodes of B images after all their children."""

    residual: Tensor  # [n, B, V], p multiplied by the probability of the visit
    visit: Tensor  # [n, B], that probability
    residual_sum: Tensor  # [n, B]


def _reject_children(
    group: RankGroup, visit: Tensor, drafts: _Drafts, update: Callable[[Tensor, Tensor], Tensor]
) -> _Rejected:
    """Write the visit probabilities of the children into `visit`, and return what is left at their parents."""
    offered = drafts.offered
    x = drafts.tokens[:, :, :1]
    q_x = drafts.q.gather(2, x)
    ratio = torch.where(offered[:, :, :1] & (q_x > 0), drafts.p.gather(2, x) / q_x, 0.0).squeeze(2)
    for _ in range(group.levels):  # from one depth to the next
        visit[group.children[:, 0]] = (visit[group.nodes] * ratio).clamp(max=1.0)
    before = visit[group.nodes]
    residual = (before[:, :, None] * drafts.p - drafts.q).clamp_min_(0.0)
    residual_sum = residual.sum(dim=2)
    after = torch.where(offered[:, :, 0], update(before, residual_sum), before)
    q = drafts.q
    for rank, n in enumerate(group.nodes_per_rank[1:], 1):
        x = drafts.tokens[:n, :, rank, None]
        q = q[:n].scatter(2, drafts.tokens[:n, :, rank - 1, None], 0.0)
        normalised_q = q / q.sum(dim=2, keepdim=True)
        scale = torch.where(residual_sum[:n] > 0, residual_sum[:n] / after[:n], 1.0)
        owed = residual[:n] / scale[:, :, None]
        q_x = normalised_q.gather(2, x)
        tried = offered[:n, :, rank, None] & (q_x > 0)
        chance = torch.where(tried, owed.gather(2, x) / q_x, 0.0).clamp(max=1.0)
        visit[group.children[:n, rank]] = chance.squeeze(2)
        residual[:n] = torch.where(tried, (owed - normalised_q).clamp_min_(0.0), residual[:n])
        residual_sum[:n] = residual[:n].sum(dim=2)
        updated = update(after[:n], residual_sum[:n])
        after[:n] = torch.where(tried.squeeze(2), updated, after[:n])
    return _Rejected(residual=residual, visit=after, residual_sum=residual_sum)


def _ends_behind(ends_here: Tensor, inside: Tensor) -> list[Tensor]:
    """Return [C + 1] tensors [I, B]: entry i is the probability to end at the node or in one of its last i children.

    Args:
        ends_here: The probability [I, B] with which a visit ends at the node.
        inside: The probability [I, C, B] with which it ends in each child.
    """
    behind = [ends_here]
    for child in reversed(inside.unbind(dim=1)):
        behind.append(child + (1.0 - child) * behind[-1])
    return behind
