"""Greedy verification: every child judged alone, the longest path of accepted drafts wins.

Temperature 0 has no residuals and no random numbers (algorithms.md, section 3, last paragraph), so it shares only the
tree and the relaxed rule with `verify.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_bench.decode.relax import Relaxation, relaxed
from lantern_bench.decode.sampling import greedy_probabilities
from lantern_bench.decode.tree import DraftTree, first_true
from lantern_bench.decode.verify import Verdict, committed_tokens, offered_children

__all__ = ["verify_greedy"]


def verify_greedy(
    tree: DraftTree,
    guided_logits: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
    depth_limit: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees at temperature 0 and return what each commits.

    `guided_logits` [B, M, V] float32, `table` and `depth_limit` as in `verify`. A child is accepted when it is the
    argmax of its parent's p (strict) or of p~; among the longest paths of accepted drafts the first in
    `tree.path_order` wins; one more token is the argmax of the unrelaxed p at its end. In the Verdict `mass_tried`
    counts the children of all nodes on the winning path. algorithms.md, section 3.
    """
    children = offered_children(tree, depth_limit)
    # The argmax of the logits is that of p, without the ties that rounding in the softmax makes.
    best = guided_logits.argmax(dim=-1)
    agreed, mass = _judge_alone(tree, children, guided_logits, best, relaxation, table)
    winner = _longest_path(tree, children, agreed)
    images = torch.arange(len(winner), device=winner.device)
    on_path = tree.attention[images, winner]
    path = _by_depth(tree, on_path, torch.arange(on_path.shape[1], device=winner.device).expand_as(on_path))
    accepted, tokens = committed_tokens(tree, path, best[images, winner])
    child_rank = _ranks_along(tree, children, on_path, path)
    return Verdict(
        path,
        accepted,
        tokens,
        child_rank,
        mass_accepted=_sum_taken(mass, path, child_rank),
        mass_tried=torch.where(on_path, mass.sum(dim=-1), 0.0).sum(dim=1),
        next_probs=greedy_probabilities(guided_logits[images, winner]),
    )


def _judge_alone(
    tree: DraftTree,
    children: Tensor,
    logits: Tensor,
    best: Tensor,
    relaxation: Relaxation,
    table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (agreed bool [B, M, C], m(x) float32 [B, M, C]), both empty where nothing is offered."""
    tokens = tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)
    agreed = tokens == best[:, :, None]
    mass = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    if relaxation.merges:
        rows = tree.rows(tokens)
        p = greedy_probabilities(tree.rows(logits))
        for rank, nodes in enumerate(tree.layout.active):
            held, x = tree.layout.nodes[:nodes], rows[: nodes * len(tokens), rank]
            tilde, lent = relaxed(p[: len(x)], x, table, relaxation)
            agreed[:, held, rank] |= (tilde.argmax(dim=-1) == x).view(nodes, -1).T
            mass[:, held, rank] = lent.view(nodes, -1).T
    return agreed & (children >= 0), torch.where(children >= 0, mass, 0.0)


def _longest_path(tree: DraftTree, children: Tensor, agreed: Tensor) -> Tensor:
    """Return the end node [B] of the winning path."""
    accepted = torch.zeros_like(tree.tokens, dtype=torch.bool)
    # Slots without an agreed child write to the root, which counts as accepted anyway.
    accepted.scatter_(1, torch.where(agreed, children, 0).flatten(1), True)
    accepted[:, 0] = True
    whole = ~(tree.attention & ~accepted[:, None, :]).any(dim=-1)
    length = torch.where(whole, tree.depths, -1)
    longest = length == length.amax(dim=1, keepdim=True)
    return torch.where(longest, tree.path_order, tree.path_order.amax() + 1).argmin(dim=1)


def _by_depth(tree: DraftTree, on_path: Tensor, values: Tensor) -> Tensor:
    """Return [B, D + 1]: the values [B, M] of the nodes on the path at their depths, -1 behind its end."""
    held = torch.full((len(values), tree.max_depth + 2), -1, dtype=torch.int64, device=values.device)
    return held.scatter_(1, torch.where(on_path, tree.depths, tree.max_depth + 1), values)[:, :-1]


def _ranks_along(tree: DraftTree, children: Tensor, on_path: Tensor, path: Tensor) -> Tensor:
    """Return child_rank [B, D] along the winning path, as in Verdict."""
    offered = (children >= 0).any(dim=-1)
    # -1 where a node of the path offers children, -2 elsewhere; then the rank where the path goes on.
    none_taken = _by_depth(tree, on_path, offered.long() - 2)[:, :-1]
    none_taken = torch.where(path[:, :-1] >= 0, none_taken, -2)
    parent_children = children.gather(1, path[:, :-1].clamp_min(0)[:, :, None].expand(-1, -1, children.shape[2]))
    goes_on = parent_children == path[:, 1:, None]
    return torch.where(path[:, 1:] >= 0, first_true(goes_on), none_taken)


def _sum_taken(mass: Tensor, path: Tensor, child_rank: Tensor) -> Tensor:
    """Return [B]: the masses [B, M, C] of the children that the path takes, summed."""
    at_node = mass.gather(1, path[:, :-1].clamp_min(0)[:, :, None].expand(-1, -1, mass.shape[2]))
    taken = at_node.gather(2, child_rank.clamp_min(0)[:, :, None]).squeeze(2)
    return torch.where(child_rank >= 0, taken, 0.0).sum(dim=1)
