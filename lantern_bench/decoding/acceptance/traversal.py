"""Accept a tree of sampled drafts from its leaves to its root, which is lossless.

Alone, a draft x counts for min(1, p(x) / q(x)), and the ratio's surplus above 1 is lost. Here the
surplus makes up for ancestors whose ratio is below 1 (traversal verification, arXiv 2505.12398;
docs/algorithms.md, section 8.5). More drafts are accepted than one by one. On a chain this is block
verification (arXiv 2403.10444, algorithm 2; section 3.1), whose paper proves that no lossless rule
accepts more of one chain on average. Neither needs a further forward. `reference.py` has the
traversal of one tree, node by node.

Where a walk ends depends on the drafts below its end. `distribution_behind` is the distribution
that these drafts then have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children
from lantern_bench.decoding.acceptance.configured_rule import ConfiguredRule
from lantern_bench.decoding.tree import RankGroup


def visit_probability_after(probability: Tensor, residual_sum: Tensor) -> Tensor:
    """Return the visit probability [n, B] of nodes after a rejected child.

    Args:
        probability: The visit probability before the child.
        residual_sum: The sum of the residual that the child's rejection leaves.
    """
    spare = residual_sum + (1.0 - probability)
    # Without spare mass it is 1, as at the root: where p is q, nothing is owed.
    return torch.where(spare > 0, residual_sum / spare, 1.0)


def distribution_behind(p: Tensor, q: Tensor, visit_probability: Tensor) -> Tensor:
    """Return the distribution of drafts behind the end of a walk, given this end [..., V].

    It is normalize(max(q - w p, 0)): where w p is small, the walk more often ends before the draft
    (docs/algorithms.md, section 8.8).

    Args:
        p: The target's distributions at the parents of the drafts, [..., V].
        q: The distributions that the drafts were drawn from, [..., V].
        visit_probability: w of the parents, [...].
    """
    rest = (q - visit_probability.unsqueeze(-1) * p).clamp_min(0.0)
    rest_sum = rest.sum(dim=-1, keepdim=True)
    # Nothing is left only where w is 1 and p is q. No walk ends before the drafts there.
    return torch.where(rest_sum > 0, rest / rest_sum, q)


def accept_traversal(children: Children, rule: ConfiguredRule) -> Acceptance:
    """Accept the drafts of static trees, in which a child is offered after those before it.

    A visit of a node has a probability to end there or below. It visits the children in order, and
    ends at the node itself with the probability that remains. Here `accept` is the probability that
    the visit of child j ends inside, given that the visit ends there, in a later child or at the
    node. So the walk of all rules ends at each node with the right probability.

    Args:
        children: The drafts.
        rule: Named in errors.
    """
    layout = children.layout
    if children.q is None or layout is None or layout.children is None:
        raise ValueError(
            f"the rule {rule.name} decides on fixed trees of sampled drafts, and this is none"
        )
    count, ranks = layout.children.shape
    images = len(children.tokens) // count
    p = children.p.view(count, images, -1)
    q = children.q.view(count, images, -1)
    tokens = children.tokens.view(count, images, -1)
    offered = children.offered.view(count, images, -1)

    # 1. From the root down: the probability of each node's visit, [M + 1, B], and of the visit
    # after its last child, [I, B]. Missing children, -1, read the last row of `visit`.
    visit = p.new_zeros(len(layout.slots) + 1, images)
    visit[0] = 1.0
    ends_here = p.new_zeros(count, images)
    residual_sum = p.new_zeros(count, images)
    for group in layout.groups:
        # A chain is one group: slicing copies nothing.
        slots = slice(None) if len(group.nodes) == count else group.slots
        p[slots], ends_here[slots], residual_sum[slots] = _reject_children(
            group=group,
            visit=visit,
            p=p[slots],
            q=q[slots],
            tokens=tokens[slots],
            offered=offered[slots],
        )

    visit_probability = visit[layout.nodes].flatten()

    # 2. From the leaves up: the probability that the visit ends inside each child.
    if ranks == 1:
        visit[:-1] = _ends_in_chain(torch.cat([ends_here, visit[count : count + 1]]))
    else:
        for _ in range(layout.levels):
            visit[layout.nodes] = _ends_behind(ends_here, visit[layout.children])[-1]
    inside = visit[layout.children]

    # 3. As the walk needs it: given that the visit ends in no earlier child.
    behind = torch.stack(_ends_behind(ends_here, inside)[:0:-1], dim=1)
    accept = torch.where(behind > 0, inside / behind, 0.0).transpose(1, 2).reshape(-1, ranks)
    return Acceptance(
        accept=accept,
        neighbour_mass=torch.zeros_like(accept),
        residual=p.view(len(accept), -1),
        exhausted=residual_sum.flatten() <= 0,
        visit_probability=visit_probability,
    )


def _reject_children(
    *,
    group: RankGroup,
    visit: Tensor,
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    offered: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the visit probabilities of the children of a group's n nodes into `visit`.

    `p`, `q` are [n, B, V]; `tokens`, `offered` are [n, B, C].

    Returns:
        After all children: the residual [n, B, V], which is p times the probability of the visit;
        that probability [n, B]; and the sum of the residual [n, B].
    """
    x = tokens[:, :, :1]
    q_x = q.gather(2, x)
    ratio = torch.where(offered[:, :, :1] & (q_x > 0), p.gather(2, x) / q_x, 0.0).squeeze(2)
    if tokens.shape[2] == 1:
        visit[group.children[:, 0]] = _visits_of_chain(ratio)
    else:
        for _ in range(group.levels):  # from one depth to the next
            visit[group.children[:, 0]] = (visit[group.nodes] * ratio).clamp(max=1.0)
    before = visit[group.nodes]
    residual = (before.unsqueeze(2) * p - q).clamp_min_(0.0)
    residual_sum = residual.sum(dim=2)
    after = torch.where(offered[:, :, 0], visit_probability_after(before, residual_sum), before)

    for rank, n in enumerate(group.nodes_per_rank[1:], 1):
        # Draws are without replacement: the sibling before has left q.
        q = q[:n].scatter(2, tokens[:n, :, rank - 1, None], 0.0)
        normalised_q = q / q.sum(dim=2, keepdim=True)
        scale = torch.where(residual_sum[:n] > 0, residual_sum[:n] / after[:n], 1.0)
        owed = residual[:n] / scale.unsqueeze(2)

        x = tokens[:n, :, rank, None]
        q_x = normalised_q.gather(2, x)
        tried = offered[:n, :, rank, None] & (q_x > 0)
        probability = torch.where(tried, owed.gather(2, x) / q_x, 0.0).clamp(max=1.0)
        visit[group.children[:n, rank]] = probability.squeeze(2)

        residual[:n] = torch.where(tried, (owed - normalised_q).clamp_min_(0.0), residual[:n])
        residual_sum[:n] = residual[:n].sum(dim=2)
        updated = visit_probability_after(after[:n], residual_sum[:n])
        after[:n] = torch.where(tried.squeeze(2), updated, after[:n])
    return residual, after, residual_sum


def _ends_behind(ends_here: Tensor, inside: Tensor) -> list[Tensor]:
    """Return tensors [I, B]; entry i is the probability to end here or in the last i children.

    Args:
        ends_here: The probability [I, B] with which a visit ends at the node.
        inside: The probability [I, C, B] with which it ends in each child.
    """
    behind = [ends_here]
    for child in reversed(inside.unbind(dim=1)):
        behind.append(child + (1.0 - child) * behind[-1])
    return behind


def _visits_of_chain(ratio: Tensor) -> Tensor:
    """Return the visit probabilities w_1..w_L of a chain: w_i = min(1, w_(i-1) r_i), w_0 = 1.

    They need no loop over the drafts: log w is the sum of log r minus its largest value so far.

    Args:
        ratio: r = p(x) / q(x) of each draft x, [L, B].
    """
    # A tiny q(x) gives infinity, and infinity minus infinity is no number.
    finite = ratio.clamp(max=torch.finfo(ratio.dtype).max)
    total = finite.log().cumsum(dim=0)
    return (total - total.cummax(dim=0).values.clamp_min(0.0)).exp()


def _ends_in_chain(ends_here: Tensor) -> Tensor:
    """Return the probability [L + 1, B] that a visit of each node ends there or below.

    Args:
        ends_here: The probability [L + 1, B] that it ends at the node if it ends nowhere below.
    """
    passes = torch.log1p(-ends_here).flip(0).cumsum(dim=0).flip(0)
    return -torch.expm1(passes)
