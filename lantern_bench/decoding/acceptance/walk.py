"""Verification: which path of a draft tree a step commits, by sampling or greedily (docs/algorithms.md, section 3).

`verify` accepts at most one child of each node, by random numbers; `verify_greedy` decides on every child by itself.
Both commit the longest path of accepted nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_bench.decoding.acceptance.children import Acceptance, Children, accept_children
from lantern_bench.decoding.acceptance.draft_view import DraftView, Weights
from lantern_bench.decoding.acceptance.rule import AcceptanceRule, NeighbourRule, TreeRule
from lantern_bench.decoding.sampling import greedy_probabilities, sample
from lantern_bench.decoding.tree import DraftTree, first_true


@dataclass(frozen=True)
class Verdict:
    """What one step commits, for each of B images and a tree of depth D."""

    path: Tensor  # int64 [B, D + 1], node numbers from the root to the last accepted node, then -1
    accepted: Tensor  # int64 [B], number of accepted drafts
    tokens: Tensor  # int64 [B, D + 1], the accepted drafts, then the bonus token, then 0
    child_rank: Tensor  # int64 [B, D], rank of the accepted child by depth; -1 all were rejected, -2 none was offered
    neighbour_mass: Tensor  # float32 [B], m(x) summed over accepted drafts
    neighbour_mass_tried: Tensor  # float32 [B], m(x) summed over all drafts tried
    next_probs: Tensor  # float32 [B, V], the distribution of the bonus token (greedy: p of the last accepted node)


def accept_tree(
    tree: DraftTree,
    target_probs: Tensor,
    rule: AcceptanceRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Acceptance]:
    """Return the offered children [B, M, C], and the acceptance of the children of all nodes in `tree.layout`.

    Arguments as of `verify`.
    """
    offered = offered_children(tree, depth_limit)
    depth = tree.rows(tree.depths) + 1
    children = Children(
        p=tree.rows(target_probs),
        q=None if tree.q is None else tree.rows(tree.q),
        tokens=tree.rows(_tokens_of(tree, offered)),
        offered=tree.rows(offered) >= 0,
        nodes_per_rank=[nodes * len(tree.tokens) for nodes in tree.layout.nodes_per_rank],
        depth=depth,
        position=_positions(position, depth),
        layout=tree.layout,
    )
    accept = rule.accept_tree if isinstance(rule, TreeRule) else accept_children
    return offered, accept(children, rule)


def _tokens_of(tree: DraftTree, children: Tensor) -> Tensor:
    return tree.tokens.gather(1, children.clamp_min(0).flatten(1)).view_as(children)


def _positions(start: Tensor | None, depth: Tensor) -> Tensor:
    """Return the positions in the image [N] of children at `depth` [N], `start` [B] that of the root's children."""
    return depth - 1 if start is None else start.repeat(len(depth) // len(start)) + depth - 1


def offered_children(tree: DraftTree, depth_limit: Tensor | None) -> Tensor:
    """Return the children [B, M, C] of `tree` with -1 for those deeper than `depth_limit` int64 [B]."""
    if depth_limit is None:
        return tree.children
    too_deep = tree.depths >= depth_limit[:, None]
    return tree.children.masked_fill(too_deep[:, :, None], -1)


def verify(
    tree: DraftTree,
    target_probs: Tensor,
    rule: AcceptanceRule,
    uniforms: Tensor,
    noise: Tensor,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees by sampling and return what each commits.

    `target_probs` float32 [B, M, V] is p at every node, `uniforms` [B, M, C] in [0, 1) decides on children, `noise`
    [B, V] ~ Exp(1) draws the bonus token. `depth_limit` int64 [B] is the depth drafted to (free positions - 1); 0 or
    less drafts nothing. `position` int64 [B], the tokens committed so far, is for rules that read it.
    """
    offered, acceptance = accept_tree(tree, target_probs, rule, depth_limit, position)
    hit = tree.rows(uniforms) < acceptance.accept
    rank, first = torch.arange(hit.shape[1], device=hit.device), first_true(hit)[:, None]
    end, path = longest_path(tree, offered, tree.by_node(hit & (rank == first)))
    next_probs = bonus_distribution(tree, offered, acceptance, target_probs, end)
    mass_tried = tree.by_node(torch.where(rank <= first, acceptance.neighbour_mass, 0.0))
    return verdict_of(tree, offered, path, mass_tried, next_probs, sample(next_probs, noise))


def longest_path(tree: DraftTree, children: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last node [B] and all nodes of the longest path of `taken` children; the first in `path_order` wins.

    `children` int64 and `taken` bool [B, M, C]; the path as in `Verdict`.
    """
    reached = torch.zeros_like(tree.tokens, dtype=torch.bool)
    # Slots without a child that is taken write to the root, which counts as accepted anyway.
    reached.scatter_(1, torch.where(taken, children, 0).flatten(1), True)
    reached[:, 0] = True
    connected = ~(tree.attention & ~reached[:, None, :]).any(dim=-1)
    length = torch.where(connected, tree.depths, -1)
    longest = length == length.amax(dim=1, keepdim=True)
    end = torch.where(longest, tree.path_order, tree.path_order.amax() + 1).argmin(dim=1)
    images, nodes = torch.arange(len(end), device=end.device), torch.arange(reached.shape[1], device=end.device)
    depth_on_path = torch.where(tree.attention[images, end], tree.depths, tree.max_depth + 1)
    path = torch.full((len(end), tree.max_depth + 2), -1, dtype=torch.int64, device=end.device)
    return end, path.scatter_(1, depth_on_path, nodes.expand_as(depth_on_path))[:, :-1]


def bonus_distribution(
    tree: DraftTree, offered: Tensor, acceptance: Acceptance, target_probs: Tensor, end: Tensor
) -> Tensor:
    """Return the residual [B, V] at the nodes `end` [B] where they offer children, else p."""
    images = torch.arange(len(end), device=end.device)
    p, rejected = target_probs[images, end], (offered[images, end] >= 0).any(dim=1)
    rows = tree.layout.slots[end].clamp_min(0) * len(end) + images
    return torch.where(rejected[:, None], acceptance.bonus_distribution(rows, p), p)


def verdict_of(
    tree: DraftTree, offered: Tensor, path: Tensor, mass_tried: Tensor, next_probs: Tensor, bonus: Tensor
) -> Verdict:
    """Return the verdict on a path [B, D + 1]; `mass_tried` [B, M, C] is m(x) of the children tried, `bonus` [B]."""
    parents, drafts = path[:, :-1], path[:, 1:]
    goes_on = drafts >= 0
    accepted = goes_on.sum(dim=1)
    tokens = torch.zeros_like(path)
    tokens[:, :-1] = torch.where(goes_on, tree.tokens.gather(1, drafts.clamp_min(0)), 0)
    rows = parents.clamp_min(0)[:, :, None].expand(-1, -1, offered.shape[2])
    children, mass = offered.gather(1, rows), torch.where(parents[:, :, None] >= 0, mass_tried.gather(1, rows), 0.0)
    ended = torch.where(parents >= 0, (children >= 0).any(dim=2).long() - 2, -2)
    rank = torch.where(goes_on, first_true(children == drafts[:, :, None]), ended)
    accepted_mass = torch.where(goes_on, mass.gather(2, rank.clamp_min(0)[:, :, None]).squeeze(2), 0.0)
    return Verdict(
        path=path,
        accepted=accepted,
        tokens=tokens.scatter_(1, accepted[:, None], bonus[:, None]),
        child_rank=rank,
        neighbour_mass=accepted_mass.sum(dim=1),
        neighbour_mass_tried=mass.sum(dim=(1, 2)),
        next_probs=next_probs,
    )


def verify_greedy(
    tree: DraftTree,
    guided_logits: Tensor,
    rule: AcceptanceRule,
    depth_limit: Tensor | None = None,
    position: Tensor | None = None,
) -> Verdict:
    """Verify B draft trees at temperature 0 and return what each commits.

    `guided_logits` [B, M, V] float32; the others as in `verify`. A child is accepted when it is the argmax of its
    parent's p (strict) or of p~; among the longest paths of accepted drafts the first in `tree.path_order` wins; the
    bonus token is the argmax of the unrelaxed p at its end.
    """
    offered = offered_children(tree, depth_limit)
    # The argmax of the logits is that of p, without the ties that rounding in the softmax makes.
    best = guided_logits.argmax(dim=-1)
    tokens = _tokens_of(tree, offered)
    taken = tokens == best[:, :, None]
    mass = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    if isinstance(rule, NeighbourRule):
        relaxed, mass = _relaxed_argmax(tree, tokens, guided_logits, rule, position)
        taken |= relaxed
    end, path = longest_path(tree, offered, taken & (offered >= 0))
    images = torch.arange(len(end), device=end.device)
    next_probs = greedy_probabilities(guided_logits[images, end])
    return verdict_of(tree, offered, path, torch.where(offered >= 0, mass, 0.0), next_probs, best[images, end])


def _relaxed_argmax(
    tree: DraftTree, tokens: Tensor, logits: Tensor, rule: NeighbourRule, position: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return which children `tokens` [B, M, C] are the argmax of their own p~, and their m(x); False and 0 for none."""
    rows = tree.rows(tokens)
    depth = tree.rows(tree.depths) + 1
    positions = _positions(position, depth)
    every_p = greedy_probabilities(tree.rows(logits))
    agreed = torch.zeros_like(rows, dtype=torch.bool)
    mass = torch.zeros_like(rows, dtype=torch.float32)
    for rank, nodes in enumerate(tree.layout.nodes_per_rank):
        n = nodes * len(tokens)
        x = rows[:n, rank]
        p = every_p[:n]
        draft = DraftView(
            rule=rule,
            token=x,
            p_x=p.gather(1, x[:, None]).squeeze(1),
            q_x=None,
            target=Weights(values=p, total=torch.ones_like(p[:, :1])),
            proposal=None,
            depth=depth[:n],
            position=positions[:n],
        )
        relaxed, mass[:n, rank] = rule.relaxed_distribution(draft)
        agreed[:n, rank] = relaxed.argmax(dim=-1) == x
    return tree.by_node(agreed), tree.by_node(mass)
